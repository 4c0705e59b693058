"""Endpoints, GPUs and the queue in a terminal: complete, narrow and wide, and safe whatever an agent says."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import endpoint_page, endpoints, main, render
from diamond.core import sites
from diamond.core.codec import encode
from diamond.core.endpoints import (
    Endpoint,
    EndpointFacts,
    EndpointUsage,
    FileSystem,
    Gpu,
    NodeGroup,
    NodeUse,
    Partition,
    QueueEntry,
)

NASTY = "x\x1b[2J\x1b]0;title\x07\u202ey\n\tz"
A100 = NodeGroup(
    count=100, cpus=64, mem_bytes=256 << 30, gpus=(Gpu(model="a100", count=4),), features=("a100", "nvlink"),
    unusable=3, nodes="gpua[001-100]",
)  # fmt: skip
CPU = NodeGroup(count=4, cpus=128, mem_bytes=2048 << 30, nodes="cn[1-4]")
FACTS = EndpointFacts(
    scheduler="slurm",
    scheduler_version="24.11.5",
    hostname="dt-login01",
    os_user="user1",
    agent_version="0.2.0",
    python="3.10.4",
    nodes=104,
    cpus_per_node=128,
    mem_bytes_per_node=2048 << 30,
    gpus_per_node=(Gpu(model="a100", count=4),),
    runtimes=("apptainer 1.4.5", "podman 4.9.4"),
    run_root="/u/user1/agent/jobs",
    policy={"max_nodes": "4"},
    partitions=(
        Partition(
            name="gpuA100x4", is_default=True, max_walltime_s=172800, default_walltime_s=1800, groups=(A100,),
            allow_accounts=("abcd-delta-gpu",),
        ),
        Partition(name="gpuA100x4-preempt", is_preemptible=True, max_walltime_s=172800, groups=(A100,)),
        Partition(
            name="all", max_nodes=8, min_nodes=2, allow_groups=("staff",), allow_qos=("high",), groups=(A100, CPU),
        ),
        Partition(name="small", groups=(replace(A100, count=2, unusable=0, nodes="gpua[001-002]"),)),
        Partition(name="broken", is_up=False),
        Partition(name="secret", is_hidden=True, groups=(CPU,)),
    ),
    accounts=("abcd-delta-cpu", "abcd-delta-gpu"),
    default_account="abcd-delta-gpu",
    qos=("normal", "high"),
    filesystems=(
        FileSystem(path="/u/user1", role="home", kind="lustre", total_bytes=10 << 40, free_bytes=1 << 40,
                   quota_bytes=100 << 30, quota_used_bytes=95 << 30),
        FileSystem(path="/work/hdd/abcd", role="scratch", kind="lustre", total_bytes=6 << 50, free_bytes=3 << 50),
        FileSystem(path="/taiga", role="project", kind="lustre"),
    ),
    site="delta",
    site_name="Delta, National Center for Supercomputing Applications (NCSA)",
    allows_shells=False,
)  # fmt: skip
USAGE = EndpointUsage(
    at=time.time(), cpus_used=1000, gpus_used={"a100": 380}, jobs_running=2, jobs_queued=5, warnings=("slow squeue",),
    nodes=(
        NodeUse(gpus=("a100",), partitions=("all", "gpuA100x4"), nodes=60, free=2, down=3, gpus_total=240, gpus_free=9),
        NodeUse(gpus=("a100",), partitions=("all",), nodes=40, free=1, gpus_total=160, gpus_free=8),
        NodeUse(gpus=("h200",), partitions=("denied",), nodes=7, free=7, gpus_total=56, gpus_free=56),
        NodeUse(partitions=("all",), nodes=4, free=4),
    ),
    nodes_at=time.time() - 61,
)  # fmt: skip


def cluster(**more: Any) -> Endpoint:
    known = {"id": "end_1", "name": "delta", "online": True, "last_seen_at": time.time() - 3, "access": "enrolled"}
    return Endpoint(**{**known, "facts": FACTS, "usage": USAGE, **more})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the server answers."""

    def give(**answers: Any) -> None:
        calls = {name: lambda *args, value=value: value for name, value in answers.items()}

        @contextmanager
        def connect(**options: object) -> Iterator[Any]:
            yield SimpleNamespace(endpoints=SimpleNamespace(**calls))

        monkeypatch.setattr(endpoints, "connect", connect)

    return give


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a command in a terminal of some width; gives back its lines."""

    def run(width: int, *arguments: str) -> list[str]:
        shown = Terminal()
        monkeypatch.setattr("sys.stdout", shown)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("shutil.get_terminal_size", lambda *a, **k: os.terminal_size((width, 50)))
        call(*arguments)
        return re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue()).splitlines()

    return run


def call(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    assert int(caught.value.code or 0) == 0


def rows_of(out: str, head: str) -> dict[str, str]:
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip().startswith(head))
    table = lines[start + 1 :]
    end = next((index for index, line in enumerate(table) if not line.strip()), len(table))
    return {line.split()[0]: line for line in table[:end]}


def test_show_is_complete(given: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    given(get=cluster())
    call("endpoint", "show", "delta")
    out = capsys.readouterr().out
    for part in (
        "delta  online  end_1",
        "Delta, National Center for Supercomputing Applications (NCSA)",
        "Slurm 24.11.5",
        "user1@dt-login01",
        "0.2.0, Python 3.10.4, heard of ",
        "104 nodes, 3 down; 6912 cores; the largest with 128 cores and 2 TiB",
        "400 × a100",
        "abcd-delta-cpu, abcd-delta-gpu (default)",
        "normal, high",
        "apptainer 1.4.5, podman 4.9.4",
        "shells      not allowed",
        "1000 of 6912",
        "380 of 400 a100",
        "free nodes  a100: 3 of 100 nodes free, 3 down; 17 of 400 GPUs free (",
        "without GPUs: 4 of 4 nodes free",
        "2 running, 5 queued",
        "max_nodes  4",
        "warning: slow squeue",
    ):
        assert part in out, part
    partitions = rows_of(out, "NAME")
    assert "gpuA100x4*" in partitions
    first = partitions["gpuA100x4*"].split()
    assert first[1:3] == ["up", "97/100"]
    assert "400 × a100" in partitions["gpuA100x4*"]
    assert partitions["gpuA100x4*"].split()[-1] == "a100,nvlink"
    assert "2d" in first
    assert "30m" in first
    assert "accounts abcd-delta-gpu" in partitions["gpuA100x4*"]
    assert "preemptible" in partitions["gpuA100x4-preempt"]
    assert "≥ 2 nodes; ≤ 8 nodes; groups staff; qos high" in partitions["all"]
    assert "64-128" in partitions["all"]
    assert "no limit" in partitions["all"]
    assert partitions["broken"].split()[1:3] == ["down", "0/0"]
    assert "hidden" in partitions["secret"]
    places = rows_of(out, "FOR")
    assert "█████████░" in places["home"]
    assert "1.0 TiB" in places["home"]
    assert "10 %" in places["home"]
    assert "95.0 GiB of 100 GiB (95 %)" in places["home"]
    assert "3.0 PiB" in places["scratch"]
    assert "no answer" in places["project"]


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_it_fits(given: Callable[..., None], terminal: Callable[..., list[str]], width: int) -> None:
    entry = QueueEntry(
        job_id="job_" + "1" * 18, task_id="tsk_" + "1" * 18, task_name="openfold" * 5, endpoint="delta", state="QUEUED",
        partition="gpuA100x4", scheduler_id="12345678", cpus=4, gpus=4, created_at=time.time() - 60,
        pending_reason="waiting for nodes: other jobs have a higher priority", expected_start_at=time.time() + 720,
    )  # fmt: skip
    given(get=cluster(), list=[cluster(), cluster(name="x" * 60)], queue=[entry])
    tables = [terminal(width, *words) for words in (("endpoint", "ls"), ("gpus",), ("queue",))]
    shown = terminal(width, "endpoint", "show", "delta")
    tables.append([line for line in shown if "/100" in line or line.strip().startswith(("home", "scratch"))])
    for lines in tables:
        assert lines
        assert max(map(len, lines)) <= width, max(lines, key=len)
    assert any("gpuA100x4*" in line and "97/100" in line for line in shown)
    left_out = [line for line in shown if "a wider terminal" in line]
    assert bool(left_out) == (width < 200)
    # What a job waits for is never cut, however narrow the terminal is.
    said = " ".join(line.strip() for line in tables[2] if line.startswith("  "))
    assert said.startswith("↳ waiting for nodes: other jobs have a higher priority; starts about ")
    assert said.endswith(", in 12 min (Slurm's estimate)")


def test_json_is_complete(given: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    given(get=cluster(), list=[cluster()])
    call("endpoint", "show", "delta", "--json")
    assert json.loads(capsys.readouterr().out) == encode(cluster(**{"last_seen_at": None})) | {
        "last_seen_at": pytest.approx(time.time() - 3, abs=5)
    }
    call("gpus", "--json")
    entries = json.loads(capsys.readouterr().out)["gpus"]
    assert {entry["partition"] for entry in entries} == {"gpuA100x4", "gpuA100x4-preempt", "all", "small"}
    assert entries[0] == {
        "endpoint": "delta", "online": True, "partition": "gpuA100x4", "model": "a100", "per_node": 4, "total": 400,
        "usable": 388, "free": 8, "free_is_exact": True, "mem_bytes": 0,
    }  # fmt: skip
    assert (entries[3]["total"], entries[3]["free"], entries[3]["free_is_exact"]) == (8, 8, False)


def test_gpus_of_a_part_of_a_cluster_are_at_most_so_many(
    given: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    local = Endpoint(
        id="end_2", name="here", online=False, usage=EndpointUsage(gpus_used={"H100": 1}),
        facts=EndpointFacts(scheduler="local", gpus_per_node=(Gpu(model="H100", count=2, mem_bytes=80 << 30),)),
    )  # fmt: skip
    given(list=[cluster(), local])
    call("gpus")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["delta", "online", "gpuA100x4", "a100", "8", "388", "400", "4"] in lines
    assert ["delta", "online", "small", "a100", "≤", "8", "8", "8", "4"] in lines
    assert ["here", "offline", "H100", "1", "2", "2", "2", "80.0", "GiB"] in lines


def test_ls_is_one_line_each(given: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    given(list=[cluster(), Endpoint(id="end_2", name="new", access="code")])
    call("endpoint", "ls")
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "STATE", "SCHEDULER", "CPUS", "GPUS", "RUNNING", "QUEUED", "SEEN", "SITE"]
    assert first.split("  ")[0] == "delta"
    for part in ("slurm 24.11.5", "1000/6912", "380/400 a100", "Delta"):
        assert part in first
    assert second.split() == ["new", "offline", "never"]


def test_queue_in_a_pipe_has_everything_in_columns(
    given: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    waiting = QueueEntry(
        job_id="job_2", task_id="tsk_2", task_name="b", endpoint="delta", state="QUEUED", partition="cpu",
        scheduler_id="4712", created_at=now - 60, pending_reason="held", expected_start_at=now - 5,
    )  # fmt: skip
    running = replace(
        waiting, job_id="job_1", task_id="tsk_1", state="RUNNING", scheduler_id="4711", started_at=now - 9
    )
    given(queue=[running, waiting], list=[cluster()])
    call("queue")
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[-1] == "job_1"
    for part in (
        "tsk_2",
        "delta",
        "cpu",
        "QUEUED",
        "4712",
        "job_2",
        "held; should start any moment (Slurm's estimate)",
    ):
        assert part in second
    assert "waiting" not in first


def test_hostile_facts_are_harmless(given: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    def spoil(value: Any) -> Any:
        if isinstance(value, str):
            return NASTY
        if isinstance(value, tuple):
            return tuple(map(spoil, value))
        if isinstance(value, dict):
            return {NASTY if isinstance(key, str) else key: spoil(item) for key, item in value.items()}
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{name: spoil(getattr(value, name)) for name in value.__dataclass_fields__})
        return value

    bad = spoil(cluster())
    entry = QueueEntry(
        job_id="job_1", task_id="tsk_1", task_name=NASTY, endpoint=NASTY, state=NASTY, scheduler_id=NASTY,
        partition=NASTY, pending_reason=NASTY, expected_start_at=time.time() + 99,
    )  # fmt: skip
    given(get=bad, list=[bad], queue=[entry])
    for words in (("endpoint", "show", "x"), ("endpoint", "ls"), ("gpus",), ("queue",)):
        call(*words)
        out = capsys.readouterr().out
        assert "y" in out
        assert not set(out) & set("\x1b\x07\u202e\t"), words
        assert all(line.isprintable() for line in out.splitlines())


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        (Endpoint(id="end_1", name="new", access="code"), ["no agent has ever connected", "has not enrolled yet"]),
        (Endpoint(id="end_1", name="old", access="revoked", last_seen_at=1.0), ["last heard of", "withdrawn"]),
        (Endpoint(id="end_1", name="new", waits_for=("lab",)), ["an owner of project lab, who has to approve"]),
        (Endpoint(id="end_1", name="new", shared_with=("lab",)), ["nothing has run here yet", "--infra"]),
    ],
)
def test_an_endpoint_without_facts(endpoint: Endpoint, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    endpoint_page.print_page(endpoint)
    out = capsys.readouterr().out
    assert all(part in out for part in said)


def test_why_a_runtime_that_is_there_makes_no_images(capsys: pytest.CaptureFixture[str]) -> None:
    problems = {"charliecloud": "it is not installed", "podman": "no ranges in /etc/subuid", "docker": "not installed"}

    def rows(facts: EndpointFacts) -> list[str]:
        endpoint_page.print_page(Endpoint(id="ep_00000001", name="here", online=True, facts=facts))
        return capsys.readouterr().out.splitlines()

    facts = replace(FACTS, builders=("apptainer",), builds="any", builder_problems=problems)
    shown = rows(facts)
    assert [re.sub(" +", " ", line) for line in shown if "not with" in line] == [
        " not with podman no ranges in /etc/subuid"
    ]
    assert not any("charliecloud" in line for line in shown), "what is not there needs no excuse"
    without = [re.sub(" +", " ", line) for line in rows(replace(facts, builders=(), builds=""))]
    assert " not with charliecloud it is not installed" in without
    assert not any("subuid" in line for line in rows(replace(facts, builders=(), builds="off"))), "a rule says so"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-1, "should start any moment (Slurm's estimate)"),
        (30, "starts about 12:00, in 1 min (Slurm's estimate)"),
        (720, "starts about 12:12, in 12 min (Slurm's estimate)"),
        (3 * 3600, "starts about 15:00, in 3h 00m (Slurm's estimate)"),
        (86400, "starts about Mon 12:00, in 1d 00h (Slurm's estimate)"),
        (10 * 86400, "starts about 2026-11-25 12:00, in 10d 00h (Slurm's estimate)"),
    ],
)
def test_expected_start(seconds: int, said: str) -> None:
    noon = time.mktime((2026, 11, 15, 12, 0, 0, 0, 0, -1))
    assert render.expected(noon + seconds, noon, "Slurm") == said


@pytest.mark.parametrize(
    ("fraction", "bar"),
    [(0, "░░░░"), (0.001, "█░░░"), (0.5, "██░░"), (0.999, "███░"), (1, "████"), (7, "████"), (-1, "░░░░")],
)
def test_gauge(fraction: float, bar: str) -> None:
    assert render.gauge(fraction, 4) == bar


def test_sites(capsys: pytest.CaptureFixture[str]) -> None:
    call("endpoint", "sites")
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 + len(sites.catalogue())
    assert "4 × A100 40 GB, 4 × A40 48 GB" in out
    assert "PBS cannot be driven yet" in err
    for site in sites.catalogue():
        call("endpoint", "sites", site.key)
        shown = capsys.readouterr().out
        assert site.organisation in shown
        assert all(source.url in shown for source in site.sources.values())
        call("endpoint", "sites", site.key, "--json")
        assert json.loads(capsys.readouterr().out) == encode(site)
    call("endpoint", "sites", "--json")
    assert len(json.loads(capsys.readouterr().out)["sites"]) == len(sites.catalogue())


def test_a_site_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["endpoint", "sites", "perlmuter"])
    assert caught.value.code
    assert "did you mean perlmutter?" in capsys.readouterr().err
