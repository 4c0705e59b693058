"""Uploads and downloads: whole, in pieces, packed, broken off."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.ids import new_id
from diamond.core.states import JobState
from diamond.core.tasks import Output
from diamond.server.api.blobs import MAX_FRAME_BYTES, read_frames
from diamond.server.services import quotas, tokens
from diamond.server.store.models import UserRow

from .conftest import World, launch


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def framed(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode() + len(data).to_bytes(8, "big") + data


def test_upload_in_pieces_with_a_gap_and_download(world: World) -> None:
    data = bytes(range(256)) * 20_000
    digest = digest_of(data)
    url = f"/api/v1/blobs/{digest}"

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await client.get(url)).status_code == 404
        total = {"total": len(data)}
        gap = await client.put(url, params={**total, "offset": 10}, content=data[10:20])
        assert gap.json() == {"received": 0, "complete": False}
        part = await client.put(url, params=total, content=data[:1000])
        assert part.json() == {"received": 1000, "complete": False}
        missing = (await client.post("/api/v1/blobs/missing", json={"digests": [digest, digest]})).json()
        assert missing == {"missing": [{"digest": digest, "received": 1000}]}
        rest = await client.put(url, params={**total, "offset": 500}, content=data[500:])
        assert rest.json() == {"received": len(data), "complete": True}
        again = await client.put(url, params=total, content=data)
        assert again.json()["complete"]
        assert (await client.get(url)).content == data
        ranged = await client.get(url, headers={"Range": "bytes=1000-"})
        assert (ranged.status_code, ranged.content) == (206, data[1000:])
        async with world.client(world.agent_token) as agent:
            assert (await agent.get(url)).status_code == 404, "no job of its needs it"
        assert (await client.post("/api/v1/blobs/missing", json={"digests": [digest]})).json() == {"missing": []}

    world.run(ask)


def test_wrong_uploads(world: World) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        digest = digest_of(b"right")
        wrong = await client.put(f"/api/v1/blobs/{digest}?total=5", content=b"wrong")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (422, "digest_mismatch")
        long = await client.put(f"/api/v1/blobs/{digest}?total=3", content=b"right")
        assert long.json()["error"]["code"] == "digest_mismatch"
        assert (await client.put(f"/api/v1/blobs/{digest}", content=b"right")).json()["error"]["field"] == "total"
        assert (await client.put(f"/api/v1/blobs/{digest}?total=-1", content=b"")).status_code == 422
        for name in ("sha256:xyz", "md5:00", "..%2f..%2fetc%2fpasswd", "sha256:" + "A" * 64):
            assert (await client.get(f"/api/v1/blobs/{name}")).status_code in (404, 422)
            assert (await client.put(f"/api/v1/blobs/{name}?total=1", content=b"x")).status_code in (404, 422)
        empty = await client.put(f"/api/v1/blobs/{digest_of(b'')}?total=0", content=b"")
        assert empty.json() == {"received": 0, "complete": True}
        bad = await client.post("/api/v1/blobs/missing", json={"digests": ["nope"]})
        assert bad.json()["error"]["field"] == "digests[0]"

    world.run(ask)


def test_what_arrived_before_a_broken_connection_is_kept(world: World) -> None:
    data = b"x" * 100_000
    digest = digest_of(data)
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": data[:60_000], "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "PUT",
        "path": f"/api/v1/blobs/{digest}",
        "raw_path": b"",
        "query_string": f"total={len(data)}".encode(),
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {world.user_token}".encode())],
    }
    asyncio.run(world.app(scope, receive, send))
    assert world.ctx.blobs.partial_size(digest, world.user_id) == 60_000


@pytest.mark.parametrize("step", [1, 7, 71, 72, 73, 1000, 10**6])
def test_frames_come_out_whole_however_they_are_cut(step: int) -> None:
    blobs = [b"", b"a", b"bc" * 500, b"\x00" * 71]
    body = b"".join(map(framed, blobs))

    async def collect() -> list[tuple[str, bytes]]:
        return [found async for found in read_frames(_cut(body, step))]

    assert asyncio.run(collect()) == [(digest_of(data), data) for data in blobs]


async def _cut(body: bytes, step: int) -> AsyncIterator[bytes]:
    for at in range(0, len(body), step):
        yield body[at : at + step]


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        (framed(b"ok") + b"0" * 10, InvalidInput, "middle of frame 1"),
        (framed(b"ok")[:-1], InvalidInput, "middle of frame 0"),
        (b"Z" * 72, InvalidInput, "frame 0 does not begin"),
        (b"\xff" * 72, InvalidInput, "frame 0 does not begin"),
        (b"0" * 64 + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"), TooLarge, "frame 0 announces"),
        (b"0" * 64 + b"\xff" * 8, TooLarge, "frame 0 announces"),
    ],
)
def test_faulty_frames(body: bytes, error: type[InvalidInput], says: str) -> None:
    async def collect() -> None:
        async for _ in read_frames(_cut(body, 50)):
            pass

    with pytest.raises(error, match=says):
        asyncio.run(collect())


def test_packs(world: World) -> None:
    blobs = [f"file {number}".encode() for number in range(600)]

    async def ask(client: httpx.AsyncClient) -> None:
        stored = await client.post("/api/v1/blobs/pack", content=b"".join(map(framed, blobs)))
        assert stored.json() == {"stored": 600}
        assert world.ctx.blobs.missing(map(digest_of, blobs)) == []
        cut = await client.post("/api/v1/blobs/pack", content=framed(b"kept") + framed(b"cut off")[:-1])
        assert cut.status_code == 422 and world.ctx.blobs.has(digest_of(b"kept"))
        lie = await client.post("/api/v1/blobs/pack", content=b"0" * 64 + (1).to_bytes(8, "big") + b"x")
        assert lie.json()["error"]["code"] == "digest_mismatch"
        assert (await client.post("/api/v1/blobs/pack", content=b"")).json() == {"stored": 0}

    world.run(ask)


def test_a_bundle_from_manifest_to_task(world: World) -> None:
    data = b"print('hi')\n"
    manifest = Manifest(files=(BundleFile(path="train.py", size_bytes=len(data), digest=digest_of(data)),))

    async def ask(client: httpx.AsyncClient) -> None:
        first = (await client.post("/api/v1/bundles", json=encode(manifest))).json()
        assert not first["complete"] and [item["digest"] for item in first["missing"]] == [digest_of(data)]
        early = await client.post("/api/v1/tasks", json={"spec": {"run": "x", "workdir": first["ref"]}})
        assert early.status_code == 422 and early.json()["error"]["field"] == "workdir"
        await client.post("/api/v1/blobs/pack", content=framed(data))
        second = (await client.post("/api/v1/bundles", json=encode(manifest))).json()
        assert second["complete"] and second["ref"] == manifest.ref
        wanted = [f"/api/v1/bundles/{manifest.digest}", f"/api/v1/blobs/{digest_of(data)}"]
        async with world.client(world.agent_token) as agent:
            assert [(await agent.get(url)).status_code for url in wanted] == [404, 404]
        assert (await client.get(f"/api/v1/bundles/{digest_of(b'none')}")).status_code == 404
        assert (await client.get(f"/api/v1/bundles/{digest_of(data)}")).status_code == 422
        task = await launch(client, workdir=second["ref"])
        async with world.client(world.agent_token) as agent:
            assert (await agent.get(wanted[0])).json() == encode(manifest)
            assert (await agent.get(wanted[1])).content == data
            world.report(task["jobs"][0]["id"], state=JobState.SUCCEEDED)
            assert [(await agent.get(url)).status_code for url in wanted] == [404, 404]
        escape = {"files": [{"path": "../x", "digest": digest_of(data), "size_bytes": 1}]}
        assert (await client.post("/api/v1/bundles", json=escape)).status_code == 422

    world.run(ask)


def second_user(world: World) -> str:
    """A token of somebody else's."""
    row = UserRow(id=new_id("usr"), name="bob", created_at=world.ctx.clock())
    with world.ctx.db.write() as session:
        session.add(row)
        session.flush()
        return tokens.issue(session, now=world.ctx.clock(), user_id=row.id)


def test_a_digest_is_no_key(world: World) -> None:
    """Who knows the name of another's file learns nothing and gets nothing; who sends it has it, in pieces too."""
    data = bytes(range(256)) * 1000
    digest = digest_of(data)
    url, total = f"/api/v1/blobs/{digest}", {"total": len(data)}
    manifest = Manifest(files=(BundleFile(path="secret.bin", size_bytes=len(data), digest=digest),))
    token = second_user(world)

    async def ask(alice: httpx.AsyncClient) -> None:
        async with world.client(token) as bob:
            unknown = (await bob.post("/api/v1/blobs/missing", json={"digests": [digest]})).json()
            begun = await alice.put(url, params=total, content=data[:-1])
            assert begun.json()["received"] == len(data) - 1
            # Nobody finishes another's upload by its last byte.
            assert (await bob.put(url, params={**total, "offset": len(data) - 1}, content=data[-1:])).json() == {
                "received": 0,
                "complete": False,
            }
            assert (await alice.put(url, params={**total, "offset": len(data) - 1}, content=data[-1:])).json()[
                "complete"
            ]
            assert (await alice.post("/api/v1/bundles", json=encode(manifest))).json()["complete"]
            assert (await bob.post("/api/v1/blobs/missing", json={"digests": [digest]})).json() == unknown
            assert (await bob.get(url)).status_code == 404
            assert (await bob.get(f"/api/v1/bundles/{manifest.digest}")).status_code == 404
            assert (await bob.post("/api/v1/bundles", json=encode(manifest))).json()["missing"] == unknown["missing"]
            # The list is his when he writes it himself; the files in it are not.
            assert (await bob.post("/api/v1/blobs/pack", content=framed(manifest.canonical()))).json() == {"stored": 1}
            spec = {"run": "cat secret.bin", "workdir": manifest.ref}
            refused = await bob.post("/api/v1/tasks", json={"spec": spec})
            assert (refused.status_code, refused.json()["error"]["field"]) == (422, "workdir")
            assert "is not here" in refused.json()["error"]["message"]
            wrong = await bob.put(url, params=total, content=bytes(len(data)))
            assert wrong.json()["error"]["code"] == "digest_mismatch"
            assert (await bob.put(url, params=total, content=data[:1000])).json() == {
                "received": 1000,
                "complete": False,
            }
            assert (await bob.get(url)).status_code == 404
            proved = await bob.put(url, params={**total, "offset": 1000}, content=data[1000:])
            assert proved.json() == {"received": len(data), "complete": True}
            assert (await bob.get(url)).content == data
            assert (await bob.post("/api/v1/bundles", json=encode(manifest))).json()["complete"]
            assert (await bob.get(f"/api/v1/bundles/{manifest.digest}")).json() == encode(manifest)
        assert (await alice.get(url)).content == data

    world.run(ask)
    assert world.ctx.blobs.total_bytes() == len(data) + len(manifest.canonical()), "kept once"
    stored = {name: quotas.get(world.ctx, "user", name).used.storage_bytes for name in (user_name(world), "bob")}
    assert stored == {user_name(world): len(data), "bob": len(data) + len(manifest.canonical())}


def user_name(world: World) -> str:
    with world.ctx.db.read() as session:
        return session.get_one(UserRow, world.user_id).name


def test_an_agent_gets_nothing_by_calling_it_a_result(world: World) -> None:
    """An endpoint of one's own could report another's file as an output, and its owner download it."""
    data = b"somebody else's"
    world.ctx.blobs.put_bytes(digest_of(data), data)
    lie = Output(path="mine", size_bytes=len(data), sha256=digest_of(data).removeprefix("sha256:"), stored=True)

    async def ask(client: httpx.AsyncClient) -> None:
        task = await launch(client, outputs=["mine"])
        world.report(task["jobs"][0]["id"], state=JobState.SUCCEEDED, outputs=(lie,))
        shown = (await client.get(f"/api/v1/tasks/{task['id']}/outputs")).json()["outputs"]
        assert [item["stored"] for item in shown] == [False]
        refused = await client.get(f"/api/v1/tasks/{task['id']}/outputs/content", params={"path": "mine"})
        assert refused.status_code == 404

    world.run(ask)
