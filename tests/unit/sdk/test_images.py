"""Building, waiting for, exporting and importing images against a small server in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.bundles import Manifest
from diamond.core.codec import decode, encode
from diamond.core.errors import Conflict, DigestMismatch, InvalidInput, NotFound, ServerUnreachable
from diamond.core.image_views import Build, BuildProgress, EndpointImages, ImageDraft, ImagePlan
from diamond.core.images import Image, ImageFacts, Lock, Package, Replica, ReplicaState
from diamond.core.recipes import Recipe
from diamond.core.states import TaskState
from diamond.core.tasks import Output, Task
from diamond.sdk import imagefile
from diamond.sdk.client import Client
from diamond.sdk.images import replica_at

PAYLOAD = bytes(range(256)) * 4000
LOCK = Lock(packages=(Package(kind="pip", name="six", version="1.17.0"),))
BUILD_TASK, EXPORT_TASK = "tsk_000000001", "tsk_000000002"
IMAGE = "img_000000001"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server:
    """One image at endpoint hpc, whose build has ended, and a blob store."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, Manifest] = {}
        self.outputs: dict[str, dict[str, bytes]] = {BUILD_TASK: {"lock.json": json.dumps(encode(LOCK)).encode()}}
        self.recipe = Recipe.parse({"name": "climate", "base": "host", "pip": ["six"]})
        self.state = ReplicaState.READY
        self.export_state = TaskState.SUCCEEDED
        self.calls: list[tuple[str, Any]] = []
        self.log = b"diamond: stage 1/2 base: base image\ndiamond: stage base done in 1.5 s\n"
        self.on_task: list[Callable[[], None]] = []
        self.began_at: list[int] = []
        self.cut_at = 0  # a blob's answer breaks there, once

    def client(self) -> Client:
        return Client("http://d.test", "t", transport=httpx.MockTransport(self.answer), retries=0)

    def put(self, data: bytes) -> str:
        self.blobs[f"sha256:{sha256(data)}"] = data
        return sha256(data)

    @property
    def image(self) -> Image:
        facts = ImageFacts(
            image_id=IMAGE, recipe_digest=self.recipe.digest, builder="venv", architecture="x86_64",
            digest="sha256:" + "a" * 64, size_bytes=5, built_at=1.7e9,
        )  # fmt: skip
        ready = self.state is ReplicaState.READY
        replica = Replica(endpoint="hpc", state=self.state, task_id=BUILD_TASK, facts=facts if ready else None)
        return Image(id=IMAGE, name="climate", owner="ana", replicas=(replica,), recipe=self.recipe)

    def build(self) -> Build:
        return Build(image=self.image, replica=self.image.replicas[0], task_id=BUILD_TASK)

    def task(self, task_id: str) -> Task:
        if self.on_task and task_id == BUILD_TASK:
            self.on_task.pop(0)()
        building = task_id == BUILD_TASK and self.state is ReplicaState.BUILDING
        state = TaskState.RUNNING if building else self.export_state
        return Task(
            id=task_id, name="n", state=state, attempt=1, detail="the disk is full" if state == "FAILED" else ""
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.removeprefix("/api/v1")
        content = request.read()
        is_json = request.headers.get("Content-Type") == "application/json"
        self.calls.append((f"{request.method} {path}", json.loads(content) if is_json else dict(request.url.params)))
        if path.startswith(("/bundles", "/blobs")):
            return self.store(request, path, content)
        if path.startswith("/tasks/"):
            return self.task_route(request, path)
        if path.startswith(f"/images/{IMAGE}/files/"):
            name = path.rpartition("/")[2]
            kept = self.outputs[BUILD_TASK].get(name)
            missing = NotFound(f"no {name}").to_json()
            return httpx.Response(404, json=missing) if kept is None else httpx.Response(200, content=kept)
        answers: dict[str, Any] = {
            "POST /images": self.build(),
            "POST /images/import": self.build(),
            "POST /images/plan": ImagePlan(recipe=self.recipe, recipe_digest="", endpoint="hpc", definition="x"),
            "GET /images": {"images": [encode(self.image)], "next_cursor": None, "total": 1},
            "GET /images/bases": {"bases": [{"key": "python"}]},
            "GET /images/find": self.image if request.url.params.get("ref") != "none" else None,
            "POST /images/climate/share": self.image,
            "POST /images/climate/copy": self.build(),
            "POST /images/climate/test": self.task(EXPORT_TASK),
            "DELETE /images/climate": {"removed": ["hpc"]},
            "GET /images/climate/progress": BuildProgress(image_id=IMAGE, endpoint="hpc", state=self.state),
            f"POST /images/{IMAGE}/export": self.task(EXPORT_TASK),
            "GET /endpoints/hpc/images": EndpointImages(endpoint="hpc", layer_bytes=3),
            "POST /endpoints/hpc/images/prune": self.task(EXPORT_TASK),
            "POST /image-drafts": ImageDraft(id="dra_000000001", version=1, steps=()),
            "GET /image-drafts": {"drafts": [encode(ImageDraft(id="dra_000000001", version=1, steps=()))]},
            "GET /image-drafts/dra_000000001": ImageDraft(id="dra_000000001", version=1, steps=()),
            "PUT /image-drafts/dra_000000001/base": ImageDraft(id="dra_000000001", version=2, steps=()),
            "POST /image-drafts/dra_000000001/submit": self.build(),
            "DELETE /image-drafts/dra_000000001": {},
        }
        found = answers.get(f"{request.method} {path}")
        if found is None:
            return httpx.Response(404, json=NotFound(f"nothing at {path}").to_json())
        return httpx.Response(200, json=encode(found))

    def store(self, request: httpx.Request, path: str, content: bytes) -> httpx.Response:
        if request.method == "GET" and path.startswith("/bundles/"):
            return httpx.Response(200, json=encode(self.manifests[path.removeprefix("/bundles/")]))
        if path == "/bundles":
            manifest = decode(Manifest, json.loads(content))
            self.manifests[manifest.digest] = manifest
            missing = [{"digest": f.digest, "received": 0} for f in manifest.files if f.digest not in self.blobs]
            return httpx.Response(200, json={"ref": manifest.ref, "missing": missing, "complete": not missing})
        if path == "/blobs/pack":
            while content:
                size = int.from_bytes(content[64:72], "big")
                assert self.put(content[72 : 72 + size]) == content[:64].decode()
                content = content[72 + size :]
            return httpx.Response(200, json={"stored": 1})
        digest = path.removeprefix("/blobs/")
        if request.method == "PUT":
            assert f"sha256:{self.put(content)}" == digest
            return httpx.Response(200, json={"received": len(content), "complete": True})
        begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.began_at.append(begin)
        data = self.blobs[digest][begin:]
        if self.cut_at and len(data) > self.cut_at:
            cut, self.cut_at = self.cut_at, 0
            return httpx.Response(206 if begin else 200, content=broken(data[:cut]))
        return httpx.Response(206 if begin else 200, content=iter([data]))

    def task_route(self, request: httpx.Request, path: str) -> httpx.Response:
        _, _, task_id, *rest = path.split("/")
        kept = self.outputs.get(task_id, {})
        if rest == ["outputs"]:
            items = [Output(path=k, size_bytes=len(v), sha256=sha256(v), stored=True) for k, v in kept.items()]
            return httpx.Response(200, json={"outputs": encode(items)})
        if rest == ["outputs", "content"]:
            return httpx.Response(200, content=kept[request.url.params["path"]])
        if rest == ["events"]:
            return httpx.Response(200, json={"events": [], "cursor": 0, "epoch": "e"})
        if rest == ["logs"]:
            begin = int(request.url.params["offset"])
            headers = {"Diamond-Offset": str(begin), "Diamond-Next-Offset": str(len(self.log)), "Diamond-Attempt": "1"}
            return httpx.Response(200, content=self.log[begin:], headers=headers)
        return httpx.Response(200, json=encode(self.task(task_id)))

    def sent(self, call: str) -> Any:
        return next(body for name, body in reversed(self.calls) if name == call)


def broken(data: bytes) -> Any:
    yield data
    raise httpx.ReadError("connection lost")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    return Server()


def test_build_sends_files_and_names_fields(server: Server, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("print(1)")
    (tmp_path / "requirements.txt").write_text("six\n")
    recipe = {"base": "host", "requirements": "requirements.txt", "files": {"/opt/tool.py": "tool.py"}}
    with server.client() as client:
        found = client.images.build(recipe, endpoint="hpc", fresh=True)
        assert found.task_id == BUILD_TASK
        body = server.sent("POST /images")
        assert body["recipe"]["pip"] == ["six"]
        assert body["recipe"]["files"]["/opt/tool.py"].startswith("bundle:sha256:")
        assert (body["endpoint"], body["fresh"]) == ("hpc", True)
        assert list(server.blobs.values()) == [b"print(1)"]
        (tmp_path / "image.yaml").write_text("base: host\nfiles: {/opt/x: none}\n")
        with pytest.raises(InvalidInput) as caught:
            client.images.build("image.yaml")
        assert caught.value.field == "files./opt/x"
        with pytest.raises(InvalidInput, match="a recipe is"):
            client.images.build(5)  # type: ignore[arg-type]


def test_plan_uploads_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with server.client() as client:
        assert client.images.plan({"base": "host", "files": {"/opt/f": "f"}}).definition == "x"
    assert not [call for call, _ in server.calls if "bundles" in call or "blobs" in call]


def test_files_of_an_image_in_a_task_are_sent(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with server.client() as client, pytest.raises(NotFound):  # this server makes no tasks
        client.tasks.create({"run": "x", "image": {"base": "host", "files": {"/opt/f": "f"}}})
    assert server.sent("POST /tasks")["spec"]["image"]["files"]["/opt/f"].startswith("bundle:sha256:")
    with server.client() as client, pytest.raises(InvalidInput) as caught:
        client.tasks.create({"run": "x", "image": {"base": "host", "files": {"/opt/f": "none"}}})
    assert caught.value.field == "image.files./opt/f"


def test_the_plain_routes(server: Server) -> None:
    with server.client() as client:
        assert [each.name for each in client.images.list(endpoint="hpc", everything=True)] == ["climate"]
        assert server.sent("GET /images")["endpoint"] == "hpc"
        assert client.images.get("ana/climate").id == IMAGE
        client.images.share("climate", "public")
        assert server.sent("POST /images/climate/share") == {"visibility": "public"}
        assert client.images.copy("climate", "other").how == "built"
        assert client.images.test("climate", "python -V").id == EXPORT_TASK
        assert client.images.remove("climate", force=True) == {"removed": ["hpc"]}
        assert client.images.progress("climate").endpoint == "hpc"
        assert client.images.at("hpc").layer_bytes == 3
        assert client.images.prune("hpc").id == EXPORT_TASK
        assert client.images.bases() == [{"key": "python"}]
        with pytest.raises(NotFound):
            client.images.get("none")
        drafts = client.images.drafts
        assert drafts.create().version == 1
        assert [each.id for each in drafts.list()] == [drafts.get("dra_000000001").id]
        assert drafts.save("dra_000000001", "base", {"base": "host"}, version=1).version == 2
        assert server.sent("PUT /image-drafts/dra_000000001/base") == {"version": 1, "contents": {"base": "host"}}
        assert drafts.submit("dra_000000001", version=2).task_id == BUILD_TASK
        drafts.remove("dra_000000001")


def test_wait_until_it_is_no_longer_made(server: Server) -> None:
    server.state = ReplicaState.BUILDING

    def ends() -> None:
        server.state = ReplicaState.READY

    server.on_task = [lambda: None, ends]
    with server.client() as client:
        assert client.images.wait("climate", endpoint="hpc").state is ReplicaState.READY
        server.state = ReplicaState.BUILDING
        with pytest.raises(TimeoutError):
            client.images.wait("climate", timeout_s=0.0)
        assert client.images.wait("climate", endpoint="elsewhere").state is ReplicaState.BUILDING


def test_logs_and_stages(server: Server) -> None:
    server.state = ReplicaState.BUILDING
    with server.client() as client:
        assert b"".join(client.images.logs("climate")) == server.log
        (stage,) = client.images.stages("climate")
        assert (stage.name, stage.seconds, stage.state) == ("base", 1.5, "done")
        with pytest.raises(NotFound, match="at elsewhere"):
            client.images.task_id("climate", endpoint="elsewhere")


def test_the_best_result_is_a_ready_one() -> None:
    def at(endpoint: str, state: ReplicaState, created_at: float) -> Replica:
        return Replica(endpoint=endpoint, state=state, created_at=created_at)

    found = Image(
        id=IMAGE, name="n", owner="o",
        replicas=(at("a", ReplicaState.FAILED, 9), at("b", ReplicaState.READY, 1), at("c", ReplicaState.READY, 2)),
    )  # fmt: skip
    assert replica_at(found, None) == found.replicas[2]
    assert replica_at(found, "a") == found.replicas[0]
    assert replica_at(found, "x") is None
    assert replica_at(replace(found, replicas=()), None) is None


def exported(server: Server, client: Client, path: Path) -> imagefile.ImageFile:
    server.outputs[EXPORT_TASK] = {"image.payload": PAYLOAD}
    server.put(PAYLOAD)
    return client.images.export("climate", path)


def test_export_and_import_elsewhere(server: Server, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("print(1)")
    with server.client() as client:
        ref = client.bundles.upload(tmp_path / "tool.py").ref
        server.recipe = Recipe.parse({"base": "host", "pip": ["six"], "files": {"/opt/tool.py": ref}})
        server.cut_at = 300_000
        found = exported(server, client, tmp_path / "climate.diamond")
    assert found.contents.payload.name == "image.tar"
    assert found.lock == LOCK
    asked = [name for name, _ in server.calls if name.endswith(sha256(PAYLOAD))]
    assert len(asked) == 2  # once, and once more from where it broke
    other = Server()
    with other.client() as client:
        client.images.import_(tmp_path / "climate.diamond", name="theirs", endpoint="there")
    body = other.sent("POST /images/import")
    assert (body["name"], body["endpoint"]) == ("theirs", "there")
    assert body["recipe"]["files"] == {"/opt/tool.py": ref}
    assert body["lock"] == encode(LOCK)
    assert body["facts"]["builder"] == "venv"
    assert set(other.blobs.values()) == {PAYLOAD, b"print(1)"}
    manifest = other.manifests[body["payload"].removeprefix("bundle:")]
    assert manifest.is_file and manifest.files[0].digest == f"sha256:{sha256(PAYLOAD)}"


def test_a_broken_export_leaves_nothing_and_goes_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "x.diamond"
    monkeypatch.setattr("diamond.sdk.downloads._OUTAGES", -1)
    monkeypatch.setattr("diamond.sdk.downloads._CHUNK", 65536)
    with server.client() as client:
        server.cut_at = 400_000
        with pytest.raises(ServerUnreachable):
            exported(server, client, target)
        assert not target.exists()
        exported(server, client, target)
    assert server.began_at == [0, 400_000 // 65536 * 65536]
    imagefile.verify(imagefile.read(target))


def test_exports_that_cannot_be(server: Server, tmp_path: Path) -> None:
    with server.client() as client:
        with pytest.raises(NotFound, match="kept on the endpoint"):
            client.images.export("climate", tmp_path / "x")
        server.export_state = TaskState.FAILED
        with pytest.raises(Conflict, match="the disk is full"):
            client.images.export("climate", tmp_path / "x")
        with pytest.raises(NotFound, match="is not ready at elsewhere"):
            client.images.export("climate", tmp_path / "x", endpoint="elsewhere")
        server.state = ReplicaState.FAILED
        with pytest.raises(NotFound, match="is not ready"):
            client.images.export("climate", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_nothing_is_sent_of_a_damaged_file(server: Server, tmp_path: Path) -> None:
    with server.client() as client:
        exported(server, client, tmp_path / "x")
        data = bytearray((tmp_path / "x").read_bytes())
        data[-5000] ^= 1
        (tmp_path / "x").write_bytes(data)
        other = Server()
        with other.client() as there, pytest.raises(DigestMismatch):
            there.images.import_(tmp_path / "x")
    assert other.calls == []


def test_a_server_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path / "home"))
    client = Client("http://d.test", "t", transport=httpx.MockTransport(gone), retries=0)
    with client, pytest.raises(ServerUnreachable):
        client.images.get("climate")
