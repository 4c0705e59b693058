"""Launching, following and fetching against a small server in memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.bundles import Manifest
from diamond.core.codec import decode, encode
from diamond.core.errors import Conflict, DigestMismatch, InvalidInput, NotFound, ProtocolError
from diamond.core.jobs import Job
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.tasks import Output, Task
from diamond.sdk import bundles as sdk_bundles
from diamond.sdk import follow
from diamond.sdk.client import Client
from diamond.sdk.follow import AttemptEnded, LinkChange, LogChunk, MetricPoint, StateChange


class Server:
    """Just enough of the API, with failures that a test puts in."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.made: dict[str, str] = {}
        self.blobs: dict[str, bytes] = {}
        self.partial: dict[str, bytes] = {}
        self.logs: dict[int, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.bodies: list[Any] = []
        self.calls: list[str] = []
        self.fail: list[str] = []  # "METHOD path-part" to break once, after doing the work
        self.steps: list[Any] = []  # done before a log or event answer, one each
        self.chunk = 5

    def client(self) -> Client:
        return Client("http://d.test", "t", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1")
        call = f"{request.method} {path}"
        self.calls.append(call)
        content = request.read()
        response = self.route(request, path, content)
        for part in self.fail:
            if part in call:
                self.fail.remove(part)
                raise httpx.ReadError("connection lost")
        return response

    def route(self, request: httpx.Request, path: str, content: bytes) -> httpx.Response:
        query = request.url.params
        if path == "/bundles":
            manifest = decode(Manifest, json.loads(content))
            missing = sorted({f.digest for f in manifest.files if not f.link_to} - self.blobs.keys())
            entries = [{"digest": d, "received": len(self.partial.get(d, b""))} for d in missing]
            return ok({"ref": manifest.ref, "digest": manifest.digest, "missing": entries, "complete": not missing})
        if path == "/blobs/pack":
            while content:
                size = int.from_bytes(content[64:72], "big")
                self.store("sha256:" + content[:64].decode(), content[72 : 72 + size])
                content = content[72 + size :]
            return ok({"stored": 1})
        if path == "/blobs/missing":
            wanted = json.loads(content)["digests"]
            entries = [{"digest": d, "received": len(self.partial.get(d, b""))} for d in wanted if d not in self.blobs]
            return ok({"missing": entries})
        if path.startswith("/blobs/"):
            digest = path.removeprefix("/blobs/")
            have = self.partial.get(digest, b"")
            if int(query["offset"]) == len(have):
                have += content
                self.partial[digest] = have
            if len(have) == int(query["total"]):
                self.store(digest, have)
            return ok({"received": len(have), "complete": digest in self.blobs})
        if request.method == "POST" and path == "/tasks":
            self.bodies.append(json.loads(content)["spec"])
            key = request.headers["Idempotency-Key"]
            task_id = self.made.setdefault(key, f"tsk_{len(self.made):018d}")
            self.tasks.setdefault(task_id, Task(id=task_id, name="n", state=TaskState.PENDING))
            return ok(encode(self.tasks[task_id]), 201)
        if path == "/tasks":
            found = sorted(self.tasks.values(), key=lambda t: t.id, reverse=True)
            found = [t for t in found if query.get("name") in (None, t.name)]
            found = [t for t in found if t.id.startswith(query.get("id_prefix", ""))]
            return ok({"tasks": [encode(t) for t in found], "next_cursor": None, "total": len(found)})
        return self.task_route(request, path, query)

    def task_route(self, request: httpx.Request, path: str, query: Any) -> httpx.Response:
        _, _, task_id, *rest = path.split("/")
        if task_id not in self.tasks:
            return httpx.Response(404, json=NotFound(f"no task {task_id}").to_json())
        if rest in (["logs"], ["events"]) and self.steps:
            self.steps.pop(0)()
        task = self.tasks[task_id]
        if rest == ["logs"]:
            attempt = int(query.get("attempt", task.attempt))
            log = self.logs.get(attempt, b"")
            begin = len(log) - int(query["tail"]) if "tail" in query else int(query["offset"])
            data = log[begin : begin + self.chunk]
            final = any(job.attempt == attempt and job.state.is_final for job in task.jobs)
            headers = {
                "Diamond-Offset": str(begin),
                "Diamond-Next-Offset": str(begin + len(data)),
                "Diamond-Dropped": "0",
                "Diamond-Attempt": str(attempt),
                "Diamond-Eof": str(int(final and begin + len(data) >= len(log))),
                "Diamond-Task-State": task.state.value,
            }
            return httpx.Response(200, content=data, headers=headers)
        if rest == ["events"]:
            return ok({"events": [], "cursor": 0, "epoch": "e"})
        if rest == ["metrics"]:
            series = [{"key": "loss", "stream": "metrics", "count": 1, "last_step": 1, "last_t": 1, "last_value": None}]
            return ok({"attempt": 1, "series": series})
        if rest == ["outputs"]:
            return ok({"outputs": [encode(item) for item in task.outputs]})
        if rest == ["outputs", "content"]:
            data = self.files[query["path"]]
            begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
            return httpx.Response(206 if begin else 200, content=iter([data[begin:]]))
        return ok(encode(task))

    def store(self, digest: str, data: bytes) -> None:
        assert digest == "sha256:" + hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data


def ok(value: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=value)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    return Server()


def job(attempt: int, state: JobState) -> Job:
    return Job(id=f"job_{attempt:018d}", task_id="tsk_0", attempt=attempt, endpoint="local", state=state)


def test_create_uploads_replaces_paths_and_repeats_safely(server: Server, tmp_path: Path) -> None:
    (tmp_path / "w" / "sub").mkdir(parents=True)
    (tmp_path / "w" / "a.py").write_text("print(1)")
    (tmp_path / "w" / "sub" / "empty").write_text("")
    (tmp_path / "data.bin").write_bytes(b"d" * 300_000)
    server.fail = ["POST /tasks", "POST /blobs/pack"]
    seen: list[tuple[int, int, int]] = []
    with server.client() as client:
        task = client.tasks.create(
            {"run": "x", "workdir": "w", "file_mounts": {"d": "data.bin"}, "envs": {"A": "1"}},
            envs={"B": "2"},
            progress=lambda *args: seen.append(args),
        )
        assert len(server.made) == 1  # the answer was lost, the task was not made twice
        assert list(server.tasks) == [task.id]
        spec = server.bodies[-1]
        assert spec["workdir"].startswith("bundle:sha256:")
        assert spec["file_mounts"]["d"].startswith("bundle:sha256:")
        assert spec["envs"] == {"A": "1", "B": "2"}
        assert len(server.blobs) == 3
        assert seen[-1][:2] == (300_000, 300_000)
        before = len(server.calls)
        client.tasks.create({"run": "x", "workdir": "w"})
        assert [call for call in server.calls[before:] if "blobs" in call] == []


def test_upload_resumes_where_it_broke(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk_bundles, "PART_BYTES", 100_000)
    data = bytes(range(256)) * 2000
    (tmp_path / "big").write_bytes(data)
    server.fail = ["PUT /blobs", "PUT /blobs"]
    with server.client() as client:
        upload = client.bundles.upload(tmp_path / "big")
    assert list(server.blobs.values()) == [data]
    assert upload.sent_bytes == upload.total_bytes == len(data)
    assert sum(call.startswith("PUT") for call in server.calls) == 6  # every part once


def test_plan_uploads_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "f").write_text("x")
    with server.client() as client, pytest.raises(NotFound):
        client.tasks.plan({"run": "x", "workdir": "w"})  # this server knows no plans; what matters is what was sent
    assert [call for call in server.calls if "bundles" in call or "blobs" in call] == []


def test_bad_files_name_their_field(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with server.client() as client:
        with pytest.raises(InvalidInput) as caught:
            client.tasks.create({"run": "x", "file_mounts": {"d": "missing"}})
        assert caught.value.field == "file_mounts.d"
        with pytest.raises(InvalidInput, match="workdir is a folder"):
            client.tasks.create({"run": "x", "workdir": "f"})
        with pytest.raises(InvalidInput, match="unknown field"):
            client.tasks.create({"run": "x", "wrkdir": "f"})
    assert server.calls == []


def test_resolve(server: Server) -> None:
    for task_id, name in (
        ("tsk_00000000000000aa01", "a"),
        ("tsk_00000000000000aa02", "a"),
        ("tsk_0000000000000bb000", "b"),
    ):
        server.tasks[task_id] = Task(id=task_id, name=name, state=TaskState.RUNNING)
    with server.client() as client:
        assert client.tasks.resolve("tsk_00000000000000aa01").name == "a"
        assert client.tasks.resolve("tsk_0000000000000b").name == "b"
        assert client.tasks.resolve("a").id == "tsk_00000000000000aa02"
        assert client.tasks.resolve().id == "tsk_0000000000000bb000"
        with pytest.raises(Conflict, match="several tasks"):
            client.tasks.resolve("tsk_00000000000000aa")
        with pytest.raises(Conflict, match=r"'tsk_' is ambiguous.*tsk_0000000000000bb000 \(b\)"):
            client.tasks.resolve("tsk_")
        with pytest.raises(NotFound, match="no task 'c'"):
            client.tasks.resolve("c")


def test_follow_gives_every_byte_once_through_outages_and_retries(server: Server) -> None:
    def set_task(state: TaskState, attempt: int, *jobs: Job, log: bytes = b"") -> None:
        server.tasks["tsk_0"] = Task(id="tsk_0", name="n", state=state, attempt=attempt, jobs=jobs)
        server.logs[attempt] = server.logs.get(attempt, b"") + log

    set_task(TaskState.PENDING, 0)
    first, failed = job(1, JobState.RUNNING), job(1, JobState.FAILED)
    server.steps = [
        lambda: set_task(TaskState.RUNNING, 1, first, log=b"hello wor"),
        lambda: server.fail.append("/logs"),
        lambda: None,
        lambda: server.fail.extend(["/logs"] * 4),
        lambda: None,
        lambda: set_task(TaskState.PENDING, 1, failed, log=b"ld\n"),
        lambda: None,
        lambda: set_task(TaskState.RUNNING, 2, failed, job(2, JobState.RUNNING), log=b"second "),
        lambda: None,
        lambda: set_task(TaskState.SUCCEEDED, 2, failed, job(2, JobState.SUCCEEDED), log=b"try\n"),
    ]
    with server.client() as client:
        items = list(client.tasks.follow("tsk_0"))
    logs = [item for item in items if isinstance(item, LogChunk)]
    assert b"".join(item.data for item in logs if item.attempt == 1) == b"hello world\n"
    assert b"".join(item.data for item in logs if item.attempt == 2) == b"second try\n"
    assert [item.attempt for item in logs] == sorted(item.attempt for item in logs)
    states = [item.task.state for item in items if isinstance(item, StateChange)]
    assert states[0] is TaskState.PENDING
    assert states[-1] is TaskState.SUCCEEDED
    assert any(isinstance(item, MetricPoint) for item in items)


def test_follow_tells_of_attempts_between_their_logs(server: Server) -> None:
    failed = [job(1, JobState.FAILED), job(2, JobState.FAILED)]
    waits = Task(id="tsk_0", name="n", state=TaskState.PENDING, attempt=2, jobs=tuple(failed), next_attempt_at=99.0)
    done = Task(id="tsk_0", name="n", state=TaskState.SUCCEEDED, attempt=3, jobs=(*failed, job(3, JobState.SUCCEEDED)))
    server.tasks["tsk_0"] = waits
    server.logs = {1: b"one", 2: b"two", 3: b"three"}
    server.steps = [lambda: None] * 3 + [lambda: server.tasks.update(tsk_0=done)]
    with server.client() as client:
        items = [item for item in client.tasks.follow("tsk_0") if isinstance(item, LogChunk | AttemptEnded)]
    seen = [item.data if isinstance(item, LogChunk) else (item.attempt, item.next_attempt_at) for item in items]
    assert seen == [b"one", (1, None), b"two", (2, 99.0), b"three"]


def test_follow_notices_why_a_job_waits(server: Server) -> None:
    def waits(reason: str) -> None:
        server.tasks["tsk_0"] = Task(
            id="tsk_0",
            name="n",
            state=TaskState.QUEUED,
            attempt=1,
            pending_reason=reason,
            jobs=(job(1, JobState.QUEUED),),
        )

    def end() -> None:
        server.tasks["tsk_0"] = Task(
            id="tsk_0", name="n", state=TaskState.SUCCEEDED, attempt=1, jobs=(job(1, JobState.SUCCEEDED),)
        )

    waits("")
    server.steps = [
        lambda: waits("silent for 1m 03s"),
        lambda: waits("silent for 1m 05s"),
        lambda: waits("silent for 2m 05s"),
        lambda: waits("2 cores"),
        end,
    ]
    with server.client() as client:
        items = list(client.tasks.follow("tsk_0"))
    reasons = [item.task.pending_reason for item in items if isinstance(item, StateChange)]
    assert reasons == ["", "silent for 1m 03s", "silent for 2m 05s", "2 cores", ""]


def test_follow_says_when_the_server_is_away(server: Server) -> None:
    server.tasks["tsk_0"] = Task(id="tsk_0", name="n", state=TaskState.FAILED, reason=Reason.LOST, attempt=0)
    server.fail = ["GET /tasks/tsk_0"] * 5
    with server.client() as client:
        items = list(client.tasks.follow("tsk_0"))
    assert [item.connected for item in items if isinstance(item, LinkChange)] == [False, True]


def test_follow_from_now_on(server: Server) -> None:
    server.logs[1] = b"old"
    server.tasks["tsk_0"] = Task(
        id="tsk_0", name="n", state=TaskState.RUNNING, attempt=1, jobs=(job(1, JobState.RUNNING),)
    )

    def finish() -> None:
        server.logs[1] += b"new"
        server.tasks["tsk_0"] = Task(
            id="tsk_0", name="n", state=TaskState.SUCCEEDED, attempt=1, jobs=(job(1, JobState.SUCCEEDED),)
        )

    server.steps = [lambda: None, finish]
    with server.client() as client:
        items = list(client.tasks.follow("tsk_0", from_start=False))
    assert b"".join(item.data for item in items if isinstance(item, LogChunk)) == b"new"


def test_follow_of_an_unknown_task_raises(server: Server) -> None:
    with server.client() as client, pytest.raises(NotFound):
        list(client.tasks.follow("tsk_1"))


def test_logs_reads_to_the_end_of_one_attempt(server: Server) -> None:
    server.logs[2] = b"0123456789abc"
    server.tasks["tsk_0"] = Task(id="tsk_0", name="n", state=TaskState.RUNNING, attempt=2)
    with server.client() as client:
        assert b"".join(client.tasks.logs("tsk_0")) == b"0123456789abc"
        assert b"".join(client.tasks.logs("tsk_0", tail=4)) == b"9abc"


def with_output(server: Server, path: str, data: bytes, *, claimed: bytes | None = None, stored: bool = True) -> None:
    digest = hashlib.sha256(data if claimed is None else claimed).hexdigest()
    item = Output(path=path, size_bytes=len(data), sha256=digest, stored=stored)
    server.files[path] = data
    server.tasks["tsk_0"] = Task(id="tsk_0", name="n", state=TaskState.SUCCEEDED, outputs=(item,))


def test_download_verifies_skips_and_resumes(server: Server, tmp_path: Path) -> None:
    data = b"model" * 1000
    with_output(server, "out/m.pt", data)
    with server.client() as client:
        (got,) = client.tasks.download("tsk_0", tmp_path / "d")
        assert got.fetched
        assert (tmp_path / "d" / "out" / "m.pt").read_bytes() == data
        (again,) = client.tasks.download("tsk_0", tmp_path / "d")
        assert not again.fetched
        (tmp_path / "d" / "out" / "m.pt").unlink()
        part = tmp_path / "d" / "out" / f".m.pt.{hashlib.sha256(data).hexdigest()[:12]}.part"
        part.write_bytes(data[:2000])
        client.tasks.download("tsk_0", tmp_path / "d", paths=["out"])
    assert [p.name for p in (tmp_path / "d" / "out").iterdir()] == ["m.pt"]
    assert (tmp_path / "d" / "out" / "m.pt").read_bytes() == data


def test_download_of_other_bytes_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with_output(server, "m", b"abc", claimed=b"xyz")
    with server.client() as client, pytest.raises(DigestMismatch):
        client.tasks.download("tsk_0", tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []


def with_claims(server: Server, data: bytes, **claims: Any) -> None:
    server.files["m"] = data
    known: dict[str, Any] = {"path": "m", "size_bytes": len(data), "stored": True}
    item = Output(**{**known, **claims})
    server.tasks["tsk_0"] = Task(id="tsk_0", name="n", state=TaskState.SUCCEEDED, outputs=(item,))


@pytest.mark.parametrize("sha256", ["", hashlib.sha256(b"abc").hexdigest()])
def test_download_stops_at_the_size_that_was_told(server: Server, tmp_path: Path, sha256: str) -> None:
    with_claims(server, b"abc" * 1_000_000, size_bytes=3, sha256=sha256)
    with server.client() as client, pytest.raises(ProtocolError, match="more than the 3 bytes of 'm'"):
        client.tasks.download("tsk_0", tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []


def test_download_without_digest_checks_the_size(server: Server, tmp_path: Path) -> None:
    with_claims(server, b"abc", size_bytes=5)
    with server.client() as client, pytest.raises(ProtocolError, match="'m' arrived shorter than its 5 bytes"):
        client.tasks.download("tsk_0", tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []
    with_claims(server, b"abc")
    with server.client() as client:
        (got,) = client.tasks.download("tsk_0", tmp_path / "d")
    assert got.dest.read_bytes() == b"abc"


@pytest.mark.parametrize("sha256", ["../../../x", "abc", "g" * 64, "A" * 64, "0" * 63 + "\n"])
def test_download_refuses_impossible_checksums(server: Server, tmp_path: Path, sha256: str) -> None:
    with_claims(server, b"abc", sha256=sha256)
    with server.client() as client, pytest.raises(ProtocolError, match="impossible checksum"):
        client.tasks.download("tsk_0", tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil"])
def test_download_never_leaves_its_folder(server: Server, tmp_path: Path, path: str) -> None:
    with_output(server, path, b"abc")
    with server.client() as client, pytest.raises(InvalidInput):
        client.tasks.download("tsk_0", tmp_path / "d")


def test_download_names_what_is_not_there(server: Server, tmp_path: Path) -> None:
    with_output(server, "m", b"abc", stored=False)
    with server.client() as client:
        assert client.tasks.download("tsk_0", tmp_path) == []
        with pytest.raises(NotFound, match="kept on the endpoint"):
            client.tasks.download("tsk_0", tmp_path, paths=["m"])
        with pytest.raises(NotFound, match="no output 'x'"):
            client.tasks.download("tsk_0", tmp_path, paths=["x"])


def test_wait_times_out_without_touching_the_task(server: Server) -> None:
    server.tasks["tsk_0"] = Task(id="tsk_0", name="n", state=TaskState.RUNNING)
    with server.client() as client, pytest.raises(TimeoutError, match="still RUNNING"):
        client.tasks.wait("tsk_0", timeout_s=0)
    assert all(call.startswith("GET") for call in server.calls)


def test_a_saved_token_is_not_shown_to_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path))
    (tmp_path / "client.json").write_text('{"url": "http://mine", "token": "secret"}')
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return ok({})

    Client(transport=httpx.MockTransport(answer)).health()
    Client("http://other", transport=httpx.MockTransport(answer)).health()
    assert seen == ["Bearer secret", None]


def test_constants_fit_the_contract() -> None:
    assert sdk_bundles.PACK_BYTES <= 8 * 1024 * 1024
    assert sdk_bundles.SMALL_BYTES == 256 * 1024
    assert follow.CHUNK_BYTES <= 8 * 1024 * 1024
