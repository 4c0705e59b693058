"""`diamond exec` into jobs of a real Slurm, new and old: a step that shares what the job has, and leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator

import pytest

from diamond.core.tasks import Task
from diamond.sdk.client import Client
from testing.cluster import BINDS, Cluster
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.terminals import Typing
from testing.waiting import eventually

ODD = "two\nlines 'quoted' \"twice\" $HOME `x` ünï\t end "
HOSTILE = ["", " ", "$(touch pwned)", "a\nb", "'\"\\", "-n", "*", "ünï ☃", "\t\r", "--", "%s", "%j", "; exit 1"]
BASH = ("bash", "--norc", "--noprofile", "-i")


@pytest.fixture(scope="module", params=["trixie", "bookworm"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require(request.param)
    folder = tmp_path_factory.mktemp("shells") / "home"
    with Site(f"shell-{request.param[:4]}", release=request.param, binds=BINDS) as site, Cluster(site, folder) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.service.client() as made:
        yield made


@pytest.fixture(scope="module")
def task(client: Client) -> Task:
    """A job on two nodes with two GPUs each."""
    made = client.tasks.create(
        {
            "name": "two nodes",
            "run": "echo $CUDA_VISIBLE_DEVICES > gpus-$SLURMD_NODENAME; exec sleep 300",
            "envs": {"ODD": ODD},
            "num_nodes": 2,
            "resources": {"accelerators": "a100:2", "cpus": 2},
            "slurm": {"partition": "gpu"},
        }
    )
    eventually(lambda: client.tasks.get(made.id).state == "RUNNING", within_s=60, what="the task runs")
    # It is known to run by its own word before Slurm says where.
    eventually(lambda: client.tasks.get(made.id).jobs[-1].hosts, within_s=30, what="its nodes are known")
    return made


def test_the_jobs_own_world(client: Client, task: Task) -> None:
    job = client.tasks.get(task.id).jobs[-1]
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
    for node, host in enumerate(job.hosts):
        done = client.tasks.exec(task.id, ["python3", "-c", show, *HOSTILE], node=node)
        assert done.exit_code == 0, done
        words, env, where = json.loads(done.stdout)
        assert words == HOSTILE
        assert (env["ODD"], env["DIAMOND_JOB_ID"], env["DIAMOND_RUN_DIR"]) == (ODD, job.id, job.run_dir)
        assert (env["SLURM_JOB_ID"], env["SLURMD_NODENAME"], env["CUDA_VISIBLE_DEVICES"]) == (
            job.scheduler_id,
            host,
            "0,1",
        )
        assert where == f"{job.run_dir}/work"
        assert not [name for name in env if "TOKEN" in name and name.startswith("DIAMOND")]
    # A job runs for Slurm before its first command has.
    eventually(lambda: b"gpus-" in client.tasks.exec(task.id, ["ls"]).stdout, what="the job's files are there")
    assert b"pwned" not in client.tasks.exec(task.id, ["find", job.run_dir]).stdout


def test_streams_and_statuses(client: Client, task: Task) -> None:
    done = client.tasks.exec(task.id, ["sh", "-c", "echo out; echo err >&2; exit 7"])
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    done = client.tasks.exec(task.id, ["sh", "-c", "echo said >&2; kill -9 $$"])
    assert (done.exit_code, done.stderr) == (137, b"said\n")
    done = client.tasks.exec(task.id, ["no-such-program"])
    assert done.exit_code == 127 and b"no-such-program" in done.stderr
    data = os.urandom(10_000_000)
    began = time.monotonic()
    done = client.tasks.exec(task.id, ["cat"], stdin=data)
    print(f"10 MB in and out of a Slurm step in {time.monotonic() - began:.2f} s")
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_a_person_at_a_terminal(cluster: Cluster, client: Client, task: Task) -> None:
    first = client.tasks.get(task.id).jobs[-1].hosts[0].encode()
    env = {**cluster.service.env, "TERM": "xterm"}
    argv = [sys.executable, "-m", "diamond.cli", "exec", task.id, "--", *BASH]
    with Typing(argv, env, rows=33, cols=101) as person:
        before = person.modes()
        person.expect(rb"[$#>] ")
        person.type(b"stty size; tty; echo $TERM $SLURMD_NODENAME\r")
        person.expect(rb"33 101\r\n/dev/pts/\d+\r\nxterm " + first + rb"\r\n")
        person.resize(44, 121)
        person.type(b"sleep 0.5; stty size\r")
        person.expect(rb"44 121\r\n")
        person.type(b"sleep 30; echo slept\r")
        person.expect(rb"slept\r?\n")
        time.sleep(0.5)
        person.type(b"\x03")
        person.expect(rb"[$#>] ")
        person.type(b"echo after $?\r")
        person.expect(rb"after 130\r\n")
        person.type(b"exit 5\r")
        assert person.wait() == 5
        assert person.modes() == before
        assert b"srun:" not in person.screen


def test_leaving_ends_the_step_and_only_it(cluster: Cluster, client: Client, task: Task) -> None:
    job = client.tasks.get(task.id).jobs[-1]

    def steps() -> str:
        return cluster.site.run(["squeue", "--steps", "-h", "-j", str(job.scheduler_id), "-o", "%i %j"]).stdout

    for tty in (False, True):
        with client.tasks.shell(task.id, ["sleep", "7171"], tty=tty):
            eventually(lambda: "diamond-shell" in steps(), what="the step runs")
        eventually(lambda: "diamond-shell" not in steps(), within_s=30, what="the step is gone")
    eventually(
        lambda: cluster.site.run(["pgrep", "-fx", "sleep 7171"], check=False).returncode == 1, what="so is sleep"
    )
    assert client.tasks.get(task.id).state == "RUNNING"


def test_the_job_ends_and_so_does_its_shell(client: Client, task: Task) -> None:
    with client.tasks.shell(task.id, ["sleep", "7272"], tty=True) as session:
        output = session.output()
        time.sleep(1)
        client.tasks.cancel(task.id)
        list(output)
        assert session.end.status >= 128 or "job has ended" in session.end.message
    assert client.tasks.wait(task.id, timeout_s=60).state == "CANCELLED"
