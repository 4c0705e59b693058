"""A server that speaks `diamond.core.wire` without a socket, and an agent that talks to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from diamond.agent.credentials import Credentials
from diamond.agent.link import Link
from diamond.agent.main import Agent
from diamond.agent.schedulers.local.scheduler import LocalScheduler
from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, NotFound
from diamond.core.states import Desired, job_advances
from diamond.core.tasks import TaskSpec
from diamond.core.wire import STREAMS, DesiredState, JobOrder, JobReport, Report, ReportAck, Welcome


def wait_until(condition: Callable[[], Any], what: str = "the condition holds", within_s: float = 20.0) -> Any:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if value := condition():
            return value
        time.sleep(0.005)
    raise AssertionError(f"not within {within_s:g} s: {what}")


class FakeServer:
    """Stands in for `Link`: every message passes through JSON, as on the wire."""

    where = "fake://server"

    def __init__(self) -> None:
        self.epoch = "epoch-1"
        self.revision = 0
        self.orders: dict[str, tuple[int, JobOrder]] = {}
        self.jobs: dict[str, JobReport] = {}
        self.streams: dict[str, dict[str, bytearray]] = {}
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, Manifest] = {}
        self.reports: list[Report] = []
        self.hellos: list[dict[str, Any]] = []
        self.finals: list[str] = []
        self.log_at_final: dict[str, bytes] = {}
        self.problem: dict[str, DiamondError] = {}  # by path: raised instead of an answer
        self.refuse_job: str = ""
        self.closed = False
        self._changed = threading.Condition()

    # The user's side

    def order(self, run: str, *, job_id: str | None = None, time_limit_s: int | None = None, **spec: Any) -> str:
        job_id = job_id or f"job_{len(self.orders):08d}"
        order = JobOrder(
            job_id=job_id,
            task_id="tsk_00000001",
            task_name="test",
            attempt=1,
            desired=Desired.RUN,
            spec=TaskSpec.parse({"run": run, **spec}),
            time_limit_s=time_limit_s,
        )
        self._put(order)
        return job_id

    def cancel(self, job_id: str) -> None:
        self._put(replace(self.orders[job_id][1], desired=Desired.CANCEL))

    def _put(self, order: JobOrder) -> None:
        with self._changed:
            self.revision += 1
            self.orders[order.job_id] = (self.revision, order)
            self._changed.notify_all()

    def bundle(self, files: dict[str, bytes], **options: Any) -> str:
        """Upload a folder; its reference."""
        for data in files.values():
            self.blobs[_digest(data)] = data
        entries = [BundleFile(path=p, size_bytes=len(d), digest=_digest(d)) for p, d in sorted(files.items())]
        manifest = Manifest(files=tuple(entries), **options)
        self.manifests[manifest.digest] = manifest
        return manifest.ref

    def result(self, job_id: str) -> JobReport:
        return wait_until(
            lambda: job_id in self.jobs and self.jobs[job_id].state.is_final and self.jobs[job_id],
            f"{job_id} is over; it is {self.jobs.get(job_id)}",
        )

    def log(self, job_id: str) -> str:
        return bytes(self.streams.get(job_id, {}).get("log", b"")).decode()

    # The agent's side

    def close(self) -> None:
        self.closed = True
        with self._changed:
            self._changed.notify_all()

    credentials = Credentials("a token without a file")

    def call(self, method: str, path: str, body: Any = None, *, query: Any = None, timeout_s: float = 0) -> Any:
        if path in self.problem:
            raise self.problem[path]
        body = json.loads(body if isinstance(body, bytes) else json.dumps(body))
        if path == "/agent/hello":
            self.hellos.append(body)
            return encode(Welcome(endpoint_id="end_00000001", endpoint_name="test", epoch=self.epoch))
        if path == "/agent/desired":
            return json.loads(json.dumps(encode(self._desired(query))))
        if path == "/agent/reports":
            return json.loads(json.dumps(encode(self._report(decode(Report, body)))))
        if path.startswith("/bundles/"):
            return encode(self.manifests[path.removeprefix("/bundles/")])
        if path == "/blobs/missing":
            missing = [one for one in body["digests"] if one not in self.blobs]
            return {"missing": [{"digest": one, "received": 0} for one in missing]}
        raise NotFound(path)

    def _desired(self, query: dict[str, Any]) -> DesiredState:
        until = time.monotonic() + query["wait_s"]
        with self._changed:
            while (
                query["epoch"] == self.epoch
                and self.revision <= query["since"]
                and not self.closed
                and time.monotonic() < until
            ):
                self._changed.wait(0.05)
            full = query["epoch"] != self.epoch or query["since"] == 0
            orders = [
                replace(order, received={name: len(data) for name, data in self.streams.get(job_id, {}).items()})
                for job_id, (revision, order) in self.orders.items()
                if (full or revision > query["since"]) and not self._is_final(job_id)
            ]
            return DesiredState(epoch=self.epoch, revision=self.revision, full=full, orders=tuple(orders))

    def _is_final(self, job_id: str) -> bool:
        return job_id in self.jobs and self.jobs[job_id].state.is_final

    def _report(self, report: Report) -> ReportAck:
        if self.refuse_job and any(one.job_id == self.refuse_job for one in report.jobs):
            raise NotFound("cannot digest that")
        if report.epoch != self.epoch:
            return ReportAck(epoch=self.epoch)
        self.reports.append(report)
        received: dict[str, dict[str, int]] = {}
        for chunk in report.streams:
            assert chunk.stream in STREAMS
            held = self.streams.setdefault(chunk.job_id, {}).setdefault(chunk.stream, bytearray())
            data = chunk.raw()
            if chunk.offset <= len(held):
                held += data[len(held) - chunk.offset :]
            received.setdefault(chunk.job_id, {})[chunk.stream] = len(held)
        for one in report.jobs:
            known = self.jobs.get(one.job_id)
            if known is None or job_advances(known.state, one.state):
                if one.state.is_final:
                    self.finals.append(one.job_id)
                    self.log_at_final[one.job_id] = self.log(one.job_id).encode()
                self.jobs[one.job_id] = one
        unknown = {one.job_id for one in [*report.jobs, *report.streams]} - set(self.orders)
        states = {one.job_id: self.jobs[one.job_id].state for one in report.jobs if one.job_id not in unknown}
        return ReportAck(epoch=self.epoch, states=states, received=received, unknown=tuple(unknown))

    def send_bytes(self, method: str, path: str, data: bytes, *, query: Any = None) -> Any:
        if path in self.problem:
            raise self.problem[path]
        if path == "/blobs/pack":
            while data:
                name, size = data[:64].decode(), int.from_bytes(data[64:72], "big")
                self.blobs[f"sha256:{name}"] = data[72 : 72 + size]
                data = data[72 + size :]
            return {"stored": 1}
        digest = path.removeprefix("/blobs/")
        partial = self.streams.setdefault("blobs", {}).setdefault(digest, bytearray())
        if query["offset"] == len(partial):
            partial += data
        complete = len(partial) == query["total"]
        if complete:
            assert _digest(bytes(partial)) == digest
            self.blobs[digest] = bytes(partial)
        return {"received": len(partial), "complete": complete}

    @contextlib.contextmanager
    def download(self, path: str, *, offset: int = 0) -> Iterator[tuple[int, Iterator[bytes]]]:
        if path in self.problem:
            raise self.problem[path]
        data = self.blobs[path.removeprefix("/blobs/")]
        yield offset, iter([data[offset : offset + 7], data[offset + 7 :]])


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Running:
    """An agent in a thread of this process."""

    def __init__(self, server: FakeServer, home: Path) -> None:
        server.closed = False
        home.mkdir(exist_ok=True)
        self.agent = Agent(
            link=cast(Link, server), home=home, scheduler=lambda jobs: LocalScheduler(jobs, cpus=2, grace_s=1.0)
        )
        self._thread = threading.Thread(target=self.agent.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.agent.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def start(server: FakeServer, home: Path) -> Iterator[Callable[[], Running]]:
    """Starts an agent (again)."""
    running: list[Running] = []

    def start_one() -> Running:
        if running:
            running[-1].stop()
        running.append(Running(server, home))
        return running[-1]

    yield start_one
    for job_id, (_, order) in list(server.orders.items()):
        if order.desired == Desired.RUN and job_id not in server.finals:
            server.cancel(job_id)
    server.problem.clear()
    server.refuse_job = ""
    if running:
        known = [job_id for job_id in server.orders if job_id in server.jobs]
        wait_until(lambda: all(server.jobs[job_id].state.is_final for job_id in known), "all jobs are over")
        running[-1].stop()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which everybody may work, also who is not root."""
    folder = Path(tempfile.mkdtemp(prefix="diamond-test-"))
    folder.chmod(0o777)
    yield folder
    subfolders = [folder]
    while subfolders:
        for entry in os.scandir(subfolders.pop()):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                subfolders.append(Path(entry.path))
    shutil.rmtree(folder)


def _as_nobody(action: Callable[[], Any]) -> Any:
    """Call in a child process whom permissions hold back, unlike root; its answer must be picklable."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        answer: tuple[bool, Any] = (False, "the child died")
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            answer = (True, action())
        except BaseException as error:
            answer = (False, repr(error))
        finally:
            os.write(sender, pickle.dumps(answer))
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    worked, value = pickle.loads(data)
    assert worked, value
    return value


@pytest.fixture
def as_nobody() -> Callable[[Callable[[], Any]], Any]:
    return _as_nobody


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until
