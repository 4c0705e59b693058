"""A planted secret, searched for everywhere: on this machine and on a real Slurm site, with and without an image.

The task prints it, in pieces and in base64, puts it into a metric, gives it to a child, names a file after it and dies
of an exception that holds it. Its value may be found in the job's own files while it runs, which only its account can
read, and nowhere else; afterwards nowhere at all.
"""

from __future__ import annotations

import base64
import os
import secrets as chance
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.home import ClientConfig
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.states import TaskState
from testing.cluster import BINDS, Cluster
from testing.images import BASE_INSIDE, image_binds
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.service import Service
from testing.waiting import eventually

PROGRAM = """\
import base64, json, os, subprocess, sys, time
token, path = os.environ["TOKEN"], os.environ["NETRC"]
print("plain", token, flush=True)
print("header", base64.b64encode(f"user:{token}".encode()).decode(), flush=True)
sys.stdout.write("pieces " + token[:9])
sys.stdout.flush()
time.sleep(1)
print(token[9:], flush=True)
with open(os.environ["DIAMOND_METRICS_FILE"], "a") as metrics:
    metrics.write(json.dumps({"step": 1, "t": time.time(), "loss": 0.5, token: 1.0}) + chr(10))
child = "import os; print('child', os.environ['TOKEN'], open(os.environ['NETRC']).read())"
subprocess.run([sys.executable, "-c", child])
print("mode", oct(os.stat(path).st_mode & 0o777), oct(os.stat(os.path.dirname(path)).st_mode & 0o777), flush=True)
open("out-" + token, "w").close()
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
raise RuntimeError(f"cannot sign in with {token}")
"""
SIF = "/home/user1/image.sif"


@dataclass
class Planted:
    """The values, and where they were seen."""

    token: str = field(default_factory=lambda: f"hf_{chance.token_hex(20)}")
    netrc: str = field(default_factory=lambda: f"machine h login u password {chance.token_hex(16)}\n")

    @property
    def needles(self) -> list[bytes]:
        header = base64.b64encode(f"user:{self.token}".encode())[8:-4]
        return [self.token.encode(), self.token[4:-4].encode(), self.netrc.split()[-1].encode(), header]

    def is_in(self, data: bytes) -> bool:
        return any(needle in data for needle in self.needles)

    def files(self, *folders: Path) -> set[Path]:
        """Files below these folders that hold it, also in their names."""
        found = set()
        for folder in folders:
            for path in folder.rglob("*"):
                try:
                    data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                except OSError:
                    data = b""
                if self.is_in(data) or (self.is_in(path.name.encode()) and "work" not in path.parts):
                    found.add(path)
        return found


class Watch:
    """Reads every command line of this machine (a site's nodes are on it), until told to stop."""

    def __init__(self, planted: Planted) -> None:
        self._planted = planted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[bytes] = []
        self.num_looks = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.num_looks += 1
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    argv = file.read_bytes()
                except OSError:
                    continue
                if self._planted.is_in(argv):
                    self.seen.append(argv)


def answers(service: Service, task_id: str) -> bytes:
    """All that the API says of a task and around it."""
    config = ClientConfig.load(service.home)
    assert config is not None
    said = []
    with httpx.Client(base_url=config.url, headers={"Authorization": f"Bearer {config.token}"}, timeout=30) as http:
        for path in (
            f"tasks/{task_id}", f"tasks/{task_id}/logs", f"tasks/{task_id}/logs?stream=metrics", "tasks", "queue",
            f"tasks/{task_id}/metrics", f"tasks/{task_id}/outputs", "events?limit=1000", "audit?limit=1000", "me/audit",
            "secrets", "endpoints", "info",
        ):  # fmt: skip
            answer = http.get(f"/api/v1/{path}")
            assert answer.status_code in (200, 404, 422), (path, answer.text)
            said.append(f"{path} {answer.status_code} ".encode() + answer.content)
    return b"\n".join(said)


def plant(service: Service, planted: Planted) -> None:
    told = service.diamond("secret", "set", "hf-token", stdin=planted.token + "\n")
    assert told.returncode == 0 and not planted.is_in((told.stdout + told.stderr).encode()), told.stderr
    file = service.home.path.parent / f"netrc-{chance.token_hex(4)}"
    file.write_text(planted.netrc)
    told = service.diamond("secret", "set", "netrc", "--file", str(file), "--json")
    assert told.returncode == 0, told.stderr
    file.unlink()


def launch(service: Service, program: Path, **more: Any) -> str:
    program.mkdir(exist_ok=True)
    (program / "program.py").write_text(PROGRAM)
    spec = {
        "name": "planted",
        "workdir": str(program),
        "run": "exec python3 program.py",
        "secrets": {"TOKEN": "hf-token", "NETRC": {"secret": "netrc", "file": True}},
        "outputs": ["out-*"],
        "envs": {"PLAIN": "x"},
        **more,
    }
    with service.client() as client:
        return client.tasks.create(spec).id


def log_of(service: Service, task_id: str) -> str:
    with service.client() as client:
        return b"".join(client.tasks.logs(task_id)).decode()


def run_dir_of(service: Service, task_id: str) -> str:
    with service.client() as client:
        return client.tasks.get(task_id).jobs[-1].run_dir


def search(service: Service, planted: Planted, task_id: str, jobs: Path, *folders: Path, image: bool) -> None:
    """The whole search; `jobs` is the folder of run directories, as this machine sees it."""
    eventually(lambda: "ready" in log_of(service, task_id), within_s=90, what="it runs")
    job = RunDir(jobs / Path(run_dir_of(service, task_id)).name)
    allowed = {job.secrets, job.secret_files / "NETRC"} | ({job.secrets_script} if image else set())
    eventually(lambda: planted.files(*folders) == allowed, within_s=15, what=f"only {allowed} hold it")
    for path in allowed:
        assert path.stat().st_mode & 0o777 == 0o600
    shell = service.diamond("exec", task_id, "--", "sh", "-c", 'printf %s "$TOKEN"; cat "$NETRC"')
    assert shell.stdout == planted.token + planted.netrc, "its owner's shell is part of the job"
    (job.work / "go").touch()
    with service.client() as client:
        done = client.tasks.wait(task_id, timeout_s=90)
    log = log_of(service, task_id)
    assert (done.state, done.reason) == (TaskState.FAILED, Reason.EXIT_NONZERO), log
    for line in ("plain ***", "pieces ***", "child ***", "mode 0o600 0o700", "RuntimeError: cannot sign in with ***"):
        assert line in log, log
    assert f"plain {'*' * len(planted.token)}\n" in log, "byte for byte"
    said = answers(service, task_id)
    assert b"loss" in said and not planted.is_in(said)
    assert [output.path for output in done.outputs] == [f"out-{'*' * len(planted.token)}"]
    eventually(lambda: not planted.files(*folders), within_s=15, what="no file holds it")
    assert not job.secrets.exists() and not job.secrets_script.exists() and not job.secret_files.exists()


def test_on_this_machine(service: Service, tmp_path: Path) -> None:
    planted = Planted()
    plant(service, planted)
    with Watch(planted) as watch:
        task_id = launch(service, tmp_path / "program")
        search(service, planted, task_id, service.home.agent("local") / "jobs", service.home.path, image=False)
    assert watch.num_looks > 10 and not watch.seen
    with service.client() as client:
        assert any(secret.used_at for secret in client.secrets.list())


def test_a_job_that_ends_while_the_agent_is_dead(service: Service, tmp_path: Path) -> None:
    """The job's script has removed its secrets; what it printed meanwhile is hidden all the same."""
    planted = Planted()
    plant(service, planted)
    task_id = launch(service, tmp_path / "program", outputs=[])
    eventually(lambda: "ready" in log_of(service, task_id), within_s=60, what="it runs")
    job = RunDir(Path(run_dir_of(service, task_id)))
    assert service.agent is not None
    service.agent.kill()
    service.agent.wait(20)
    (job.work / "go").touch()
    eventually(job.exit.exists, within_s=30, what="the job is over")
    eventually(lambda: not job.secrets.exists(), within_s=10, what="its script removed them")
    assert planted.is_in(job.stream("log").read_bytes()), "nobody was there to hide it"
    service.start_agent()
    with service.client() as client:
        client.tasks.wait(task_id, timeout_s=60)
    assert f"cannot sign in with {'*' * len(planted.token)}\n" in log_of(service, task_id)
    eventually(lambda: not planted.files(service.home.path), within_s=15, what="no file holds it")


def test_a_stopped_job_leaves_none(service: Service, tmp_path: Path) -> None:
    planted = Planted()
    plant(service, planted)
    task_id = launch(service, tmp_path / "program")
    eventually(lambda: "ready" in log_of(service, task_id), within_s=60, what="it runs")
    with service.client() as client:
        client.tasks.cancel(task_id)
        assert client.tasks.wait(task_id, timeout_s=60).state == TaskState.CANCELLED
    eventually(lambda: not planted.files(service.home.path), within_s=15, what="no file holds it")


def test_one_removed_before_its_job_began_fails_it_by_name(service: Service, tmp_path: Path) -> None:
    plant(service, Planted())
    assert service.agent is not None
    service.agent.kill()
    service.agent.wait(20)
    task_id = launch(service, tmp_path / "program")
    with service.client() as client:
        client.secrets.remove("hf-token")
        service.start_agent()
        done = client.tasks.wait(task_id, timeout_s=60)
    assert (done.state, done.reason) == (TaskState.FAILED, Reason.SECRET_MISSING)
    assert "hf-token" in done.detail


# Each job of the chain says what it was given, and asks to go on before its time is up.
CHAINED = """\
n=$(cat place 2>/dev/null || echo 0)
echo "job $n has $TOKEN and ${NETRC_TEXT:=$(cat "$NETRC")}"
printf '%s' "$TOKEN$NETRC_TEXT" | sha256sum | cut -c1-64 >> given
trap 'echo $((n + 1)) > place; exit 85' USR1
[ "$n" -ge 2 ] && { touch last; while [ ! -e go ]; do sleep 0.1; done; exit 0; }
while :; do sleep 0.1; done
"""


def test_every_job_of_a_chain_has_them_and_the_last_leaves_none(tmp_path: Path) -> None:
    planted = Planted()
    own = Service(tmp_path / "home")
    own.home.agent("local").mkdir(parents=True)
    (own.home.agent("local") / "policy.toml").write_text('max_walltime = "4s"\n')
    with own, own.client() as client, Watch(planted) as watch:
        plant(own, planted)
        task = client.tasks.create(
            {
                "run": CHAINED,
                "max_duration": "120s",
                "slurm": {"warning": "2s"},
                "outputs": ["given"],
                "secrets": {"TOKEN": "hf-token", "NETRC": {"secret": "netrc", "file": True}},
            }
        )
        eventually(lambda: client.tasks.get(task.id).attempt >= 2, within_s=30, what="the second job")
        # Changed under way: the jobs that begin from now on have the new value, and it is hidden as the old one was.
        first, planted.token = planted.token, f"hf_{chance.token_hex(20)}"
        plant(own, planted)
        eventually(lambda: any(own.home.path.rglob("work/last")), within_s=40, what="the last job")
        jobs = [RunDir(Path(job.run_dir)) for job in client.tasks.get(task.id).jobs]
        for job in jobs[:-1]:
            assert not job.secrets.exists() and not job.secret_files.exists(), "each takes its own away"
        next(own.home.path.rglob("work/last")).with_name("go").touch()
        done = client.tasks.wait(task.id, timeout_s=60)
        assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), done
        assert {job.reason for job in done.jobs[:-1]} == {Reason.CONTINUED} and len(done.jobs) >= 3
        client.tasks.download(task.id, tmp_path / "results")
        given = (tmp_path / "results" / "given").read_text().split()
        digests = [
            sha256((token + planted.netrc.rstrip("\n")).encode()).hexdigest() for token in (first, planted.token)
        ]
        assert len(given) == len(done.jobs) and given[0] == digests[0] and given[-1] == digests[1]
        assert set(given) == set(digests), "every job was given both"
        old = Planted(token=first, netrc=planted.netrc)
        for number in range(len(done.jobs)):
            log = b"".join(client.tasks.logs(task.id, attempt=number + 1)).decode()
            assert f"job {number} has {'*' * len(first)} and ***" in log, log
        for one in (old, planted):
            assert not one.is_in(answers(own, task.id))
            eventually(lambda one=one: not one.files(own.home.path), within_s=15, what="no file holds it")
    assert watch.num_looks > 10 and not watch.seen


def test_keys_change_while_the_server_runs(service: Service, tmp_path: Path) -> None:
    planted = Planted()
    plant(service, planted)
    for arguments in (("rotate-key", "--json"), ("rotate-key", "--prune")):
        told = service.diamond("secret", *arguments)
        assert told.returncode == 0, told.stderr
        # As if the minute had passed in which requests may still use the key before.
        os.utime(service.home.server / "secret.keys", (0, time.time() - 90))
    task_id = launch(service, tmp_path / "program")
    eventually(lambda: "ready" in log_of(service, task_id), within_s=60, what="it was given what the new key opens")
    with service.client() as client:
        client.tasks.cancel(task_id)
        client.tasks.wait(task_id, timeout_s=60)
    saved = service.diamond("backup", str(tmp_path / "backup.tar"))
    assert saved.returncode == 0 and "secret.keys" in saved.stderr
    key = (service.home.server / "secret.keys").read_text().splitlines()[-1].encode()
    data = (tmp_path / "backup.tar").read_bytes()
    assert not planted.is_in(data) and key not in data


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("trixie")
    definition = f"Bootstrap: localimage\nFrom: {BASE_INSIDE}\n"
    with Site("planted", binds={**BINDS, **image_binds()}) as site:
        site.write("/home/user1/image.def", definition, user="user1")
        site.run(["apptainer", "--quiet", "build", SIF, "image.def"], timeout=300)
        with Cluster(site, tmp_path_factory.mktemp("secrets") / "home") as made:
            yield made


@pytest.mark.parametrize("image", [False, True], ids=["plain", "in an image"])
def test_on_a_cluster(cluster: Cluster, tmp_path: Path, image: bool) -> None:
    planted = Planted()
    service = cluster.service
    plant(service, planted)
    resources = {"infra": "cluster", "cpus": 1} | ({"image_id": SIF} if image else {})
    jobs = cluster.site.path(f"{cluster.home_inside}/jobs")
    folders = (cluster.site.path(cluster.home_inside), service.home.path, *_logs(cluster.site))
    with Watch(planted) as watch:
        task_id = launch(service, tmp_path / "program", resources=resources)
        search(service, planted, task_id, jobs, *folders, image=image)
    assert watch.num_looks > 10 and not watch.seen


def _logs(site: Site) -> list[Path]:
    """Where Slurm keeps its own files: spooled scripts and logs of its daemons."""
    return [folder for name in ("/var/spool", "/var/log") if (folder := site.path(name)).is_dir()]


def test_ranks_on_two_nodes_have_them(cluster: Cluster) -> None:
    planted = Planted()
    plant(cluster.service, planted)
    spec = {
        "run": 'sleep 1; [[ $TOKEN == hf_* && -r $NETRC ]] && echo "rank $RANK has $TOKEN"',
        "secrets": {"TOKEN": "hf-token", "NETRC": {"secret": "netrc", "file": True}},
        "num_nodes": 2,
        "ranks_per_node": 2,
        "resources": {"infra": "cluster", "cpus": 1},
    }
    with Watch(planted) as watch, cluster.service.client() as client:
        done = client.tasks.wait(client.tasks.create(spec).id, timeout_s=90)
    log = log_of(cluster.service, done.id)
    assert done.state == TaskState.SUCCEEDED, log
    assert log.count(f"has {'*' * len(planted.token)}\n") == 4 and not planted.is_in(log.encode())
    assert not watch.seen
    time.sleep(1)
    assert not planted.files(cluster.site.path(cluster.home_inside), cluster.service.home.path)
