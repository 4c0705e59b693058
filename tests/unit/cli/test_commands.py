"""Commands against a client that answers what a test wants."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import check, endpoints, enrolment, launch, logs, main, metrics, outputs, tasks
from diamond.core.endpoints import Endpoint, EndpointFacts, EndpointUsage
from diamond.core.errors import NotFound
from diamond.core.home import Home
from diamond.core.jobs import Job
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import Output, Task, TaskSpec
from diamond.sdk.downloads import Download
from diamond.sdk.metrics import Curve, Series

Given = Callable[..., None]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Sets what `client.tasks`, `client.endpoints` and the client's address are."""

    def give(task: Task | None = None, url: str = "http://127.0.0.1:7421", **answers: Any) -> None:
        def constant(value: Any) -> Callable[..., Any]:
            return value if callable(value) else lambda *args, **options: value

        group = SimpleNamespace(**{name: constant(value) for name, value in answers.items()})
        if "resolve" not in answers:
            group.resolve = lambda ref: task
        client = SimpleNamespace(tasks=group, endpoints=group, images=group, url=url)

        @contextmanager
        def connect(**options: object) -> Iterator[Any]:
            yield client

        for module in (endpoints, enrolment, logs, metrics, outputs, tasks, launch):
            monkeypatch.setattr(module, "connect", connect)

    return give


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    return int(caught.value.code or 0)


def job(**more: Any) -> Job:
    known: dict[str, Any] = {"id": "job_1", "task_id": "tsk_1", "attempt": 1, "endpoint": "hpc"}
    return Job(**{**known, "state": JobState.SUCCEEDED, "run_dir": "/scratch/job_1", **more})


def ended(**more: Any) -> Task:
    spec = TaskSpec(run="x", outputs=("a*", "nope*"), max_duration=600, workdir="bundle:sha256:b48c" + "0" * 60)
    known: dict[str, Any] = {"id": "tsk_1", "name": "train", "state": TaskState.SUCCEEDED, "spec": spec}
    return Task(**{**known, "jobs": (job(),), **more})


def test_outputs_name_what_matched_nothing(given: Given, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given(ended(), outputs=[], download=[])
    assert call("outputs") == 0
    err = capsys.readouterr().err
    assert err == "no file matched: a*, nope*\n"
    assert call("outputs", "--to", str(tmp_path)) == 1
    assert "no file matched: a*, nope*" in capsys.readouterr().err
    assert call("outputs", "--to", str(tmp_path), "--json") == 1
    assert json.loads(capsys.readouterr().out)["files"] == []


def test_outputs_of_which_some_matched(given: Given, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    got = Download(path="a1", dest=tmp_path / "a1", size_bytes=3, fetched=True)
    task = ended(detail="output 'nope*' matches no file")
    given(task, outputs=[Output(path="a1", size_bytes=3, stored=True)], download=[got])
    assert call("outputs", "--to", str(tmp_path)) == 0
    assert "no file matched: nope*" in capsys.readouterr().err
    given(ended(spec=TaskSpec(run="x")), outputs=[], download=[])
    assert call("outputs", "--to", str(tmp_path)) == 0
    assert "outputs: [model.pt" in capsys.readouterr().err


def test_outputs_that_stayed_behind(given: Given, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given(ended(), outputs=[Output(path="a1", size_bytes=3)], download=[])
    assert call("outputs", "--to", str(tmp_path)) == 1
    err = capsys.readouterr().err
    assert "1 file was kept on the endpoint (too large, or vanished): a1" in err
    assert "hpc:/scratch/job_1/work" in err


def test_show_has_notes_and_units(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(ended(detail="output 'nope*' matches no file"), metrics=[])
    assert call("show") == 0
    out = capsys.readouterr().out
    assert "  note: output 'nope*' matches no file\n" in out
    assert "  max_duration: 10m\n" in out
    assert "  workdir: uploaded, sha256:b48c…\n" in out


def test_show_says_cancelled_once_and_why_it_waits(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = (job(state=JobState.CANCELLED, reason=Reason.CANCELLED),)
    given(ended(state=TaskState.CANCELLED, reason=Reason.CANCELLED, jobs=jobs), metrics=[])
    assert call("show") == 0
    assert "CANCELLED CANCELLED" not in capsys.readouterr().out
    given(ended(state=TaskState.QUEUED, pending_reason="endpoint hpc is offline since 3m", jobs=()), metrics=[])
    assert call("show") == 0
    assert "  waiting: endpoint hpc is offline since 3m\n" in capsys.readouterr().out


def test_ps_says_why(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    soon = ended(state=TaskState.PENDING, reason=Reason.LOST, next_attempt_at=time.time() + 6.5, pending_reason="stale")
    offline = ended(state=TaskState.QUEUED, pending_reason="endpoint hpc is offline since 3m")
    given(page=([soon, offline], None, 2))
    assert call("ps") == 0
    out = capsys.readouterr().out
    assert re.search(r"LOST; next attempt in [1-7]s", out)
    assert "endpoint hpc is offline since 3m" in out


def test_ps_counts_builds_of_images(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(page=lambda **options: ([], None, 1 if options["kind"] == "build" else 0))
    assert call("ps") == 0
    assert "1 image is being built (diamond ps --images)" in capsys.readouterr().err
    assert call("ps", "--images") == 0
    assert "being built" not in capsys.readouterr().err


def test_stop_with_the_name_of_an_image(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    def unknown(ref: str) -> Task:
        raise NotFound(f"there is no task {ref!r}", hint="see diamond ps")

    def found(ref: str) -> str:
        if ref != "climate":
            raise NotFound("there is no image")
        return ref

    given(resolve=unknown, get=found)
    assert call("stop", "climate") == 1
    assert "diamond image stop climate" in capsys.readouterr().err
    assert call("stop", "other") == 1
    assert "see diamond ps" in capsys.readouterr().err


def test_launch_says_that_an_image_is_overridden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("run: 'true'\nimage: {base: host}\n")
    changes = launch.Changes(image_id="climate")
    assert launch.read(str(path), [], changes).resources.image_id == "climate"
    assert "--image climate is used instead of the file's `image:`" in capsys.readouterr().err
    path.write_text("run: 'true'\n")
    launch.read(str(path), [], changes)
    assert capsys.readouterr().err == ""


def test_stop_counts_in_good_english(
    given: Given, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tasks, "confirm", lambda question, *, yes: bool(asked.append(question)))
    given(list=[ended(state=TaskState.RUNNING)])
    assert call("stop", "--all") == 1
    assert asked == ["Stop 1 task?"]


def test_stop_names_a_live_task_of_the_same_name(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(ended(name="train"), list=[ended(id="tsk_0", name="train", state=TaskState.RUNNING)])
    assert call("stop", "train") == 0
    assert "has ended already: SUCCEEDED\n  one of the same name has not: diamond stop tsk_0" in capsys.readouterr().err
    assert call("stop", "tsk_1") == 0
    assert "tsk_0" not in capsys.readouterr().err


def test_show_has_what_squeue_calls_the_job(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(ended(jobs=(job(partition="gpu", scheduler_id="4711", hosts=("c1",)),)), metrics=[])
    assert call("show", "train") == 0
    assert "hpc c1  gpu 4711  job_1" in capsys.readouterr().out


def test_unknown_metric_points_to_a_command(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    def curve(*args: Any, **options: Any) -> Curve:
        raise NotFound("no metric", hint="GET /api/v1/tasks/x/metrics lists what there is")

    series = [Series(key="loss", stream="metrics", count=1, last_step=1, last_t=1, last_value=1)]
    given(ended(), curve=curve, metrics=series)
    assert call("metrics", "train", "los") == 1
    err = capsys.readouterr().err
    assert "did you mean 'loss'? `diamond metrics tsk_1` lists them" in err
    assert "GET" not in err
    assert call("metrics", "train", "sys/cpu") == 1
    assert "`diamond metrics --util tsk_1` lists them" in capsys.readouterr().err


def test_metrics_in_bytes_and_single_samples(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {"key": "sys/mem_bytes", "count": 1, "points": [[3, 2048, 2048, 2048, 2048]], "non_finite": 1}
    series = Series(key="sys/mem_bytes", stream="util", count=1, last_step=3, last_t=1, last_value=2048)
    given(ended(), curve=Curve.of(raw), metrics=[series], metric_notes=())
    assert call("metrics", "train", "sys/mem_bytes") == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "sys/mem_bytes  1 sample  last 2.0 KiB  min 2.0 KiB  max 2.0 KiB\n1 sample is NaN or infinite"
    )
    assert "3.0 KiB ┤" in out
    assert call("metrics", "train", "--util") == 0
    assert "2.0 KiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "text"),
    [(JobState.SUCCEEDED, "the task wrote nothing"), (JobState.RUNNING, "the log is empty so far")],
)
def test_an_empty_log_says_so_to_a_person(
    given: Given, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, state: JobState, text: str
) -> None:
    given(ended(jobs=(job(state=state),)), logs=[])
    assert call("logs") == 0
    assert capsys.readouterr().err == ""  # a pipe gets the bytes alone
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert call("logs") == 0
    assert capsys.readouterr().err == text + "\n"


PLAN = {
    "spec": {"name": "n", "run": "echo hi", "setup": "s", "workdir": "bundle:x", "max_duration": 600, "outputs": ["a"]},
    "endpoint": "local",
    "why": ["it is the only one"],
    "files": {"run.sh": "echo hi\n"},
    "envs": {"DIAMOND_JOB_ID": "JOB_ID"},
    "script": "#!/usr/bin/env bash\n",
}


def test_dry_run_shows_the_script_and_ends_with_where_and_why(
    given: Given, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("run: echo hi\nworkdir: .\n")
    given(plan=PLAN)
    assert call("launch", str(file), "--dry-run") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "Job script", "Environment", "run.sh", "Spec", "Where",
    ]  # fmt: skip
    assert f"  workdir: {tmp_path}" in lines
    assert "  max_duration: 10m" in lines
    assert "#!/usr/bin/env bash" in out
    assert "DIAMOND_JOB_ID" in out
    assert call("launch", str(file), "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == PLAN


def endpoint(**more: Any) -> Endpoint:
    facts = EndpointFacts(
        scheduler="local", scheduler_version="1", policy={"max_output_bytes": "9.313e-07 GiB", "cache_bytes": "20 GiB"}
    )
    usage = EndpointUsage(at=time.time() - 4.2, disk_free_bytes=1000, disk_total_bytes=2048)
    return Endpoint(**{"id": "end_1", "name": "hpc", "online": True, "facts": facts, "usage": usage, **more})


def test_endpoint_show_has_sizes_ages_and_no_stray_version(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(get=endpoint())
    assert call("endpoint", "show", "hpc") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {key: value.strip() for key, _, value in (line.strip().partition("  ") for line in lines[1:])}
    assert rows["scheduler"] == "Local"
    assert rows["max_output_bytes"] == "1000 B"
    assert rows["cache_bytes"] == "20 GiB"
    assert rows["disk free"] == "1000 B of 2.0 KiB"
    assert rows["as of"] == "4s ago"
    assert rows["size"] == "1 node with 1 core"


def test_endpoint_list_is_endpoint_ls(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(list=[endpoint()])
    assert call("endpoint", "ls") == 0
    listed = capsys.readouterr().out
    assert call("endpoint", "list") == 0
    assert capsys.readouterr().out == listed


def test_check_forgets_errors_that_passed(tmp_path: Path) -> None:
    log = tmp_path / "agents" / "local" / "agent.log"
    log.parent.mkdir(parents=True)
    lines = [
        {"at": time.time(), "level": "error", "message": "the server refuses this agent"},
        {"at": time.time(), "level": "info", "message": "connected to http://127.0.0.1:7421 as endpoint local"},
    ]
    log.write_text(json.dumps(lines[0]) + "\n")
    assert [found.detail for found in check._agent_log(Home(tmp_path))] == ["last error: the server refuses this agent"]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not list(check._agent_log(Home(tmp_path)))


def test_check_warns_of_endpoints(given: Given) -> None:
    broken = "policy.toml was changed but not accepted, the old rules hold: max_nodes"
    found = [
        endpoint(name="good"),
        endpoint(name="warned", usage=EndpointUsage(warnings=(broken,))),
        endpoint(name="away", online=False, last_seen_at=time.time() - 185),
        endpoint(name="new", online=False, last_seen_at=None),
        endpoint(name="local", online=False, last_seen_at=time.time() - 185),
    ]
    client = SimpleNamespace(endpoints=SimpleNamespace(list=lambda: found))
    good, warned, away, new, local = check._endpoints(client)  # type: ignore[arg-type]
    assert (good.status, good.detail) == ("ok", "online")
    assert warned.status == "warn"
    assert broken in warned.detail
    assert "policy.toml" in warned.mend
    assert (away.status, away.detail) == ("warn", "offline since 3m")
    assert (new.status, new.detail) == ("warn", "its agent never connected")
    assert (local.status, local.mend) == ("fail", "diamond up -d")
