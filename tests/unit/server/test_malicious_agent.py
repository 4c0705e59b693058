"""An agent that lies, over the real application: it may say what it likes about its own jobs, and touch nothing else.

Bob's agent has a valid token of bob's endpoint. Alice has an endpoint, a running task, a secret, a shell and an image
of her own. After every attack all tables and files are as they were but for what is bob's, and no answer was a 5xx.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from diamond.core.shells import NewShell
from diamond.core.states import JobState
from diamond.core.wire import INSTANCE_HEADER, Report, StreamChunk
from diamond.server.app import create_app
from diamond.server.hub import Hub
from diamond.server.services import accounts, agents, image_builds, planning, secrets, shells, tasks, tokens
from diamond.server.services.context import Context
from diamond.server.settings import load_settings
from diamond.server.store.models import Base, ImageRow, JobRow, ReplicaRow, TokenRow
from testing.image_agent import ImageAgent

RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"], "test": "true"}
REPORTS, HELLO = "/api/v1/agent/reports", "/api/v1/agent/hello"
HUGE = 2**63 - 1
FACTS: dict[str, Any] = {"scheduler": "local", "cpus_per_node": 8, "mem_bytes_per_node": 2**33}


@dataclass
class Victim:
    """What is alice's."""

    agent: ImageAgent
    user_id: str
    task_id: str
    job_id: str
    image_id: str
    token: str
    shell: shells.LiveShell


@dataclass
class World:
    app: FastAPI
    ctx: Context
    alice: Victim
    agent: ImageAgent  # bob's
    bob_id: str
    token: str
    own: set[str] = field(default_factory=set)  # ids of rows that bob's agent may change

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {self.token}", INSTANCE_HEADER: f"agt_{self.agent.name}"}
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=60)

    def job(self) -> str:
        """A fresh job of bob's, at bob's endpoint."""
        task, _ = tasks.create(self.ctx, self.bob_id, {"run": "true", "resources": {"infra": self.agent.name}})
        order = next(order for order in self.agent.orders() if order.task_id == task.id)
        self.own |= {task.id, order.job_id}
        return order.job_id

    def rows(self) -> dict[tuple[str, ...], str]:
        """Everything in the database but what is bob's, by table and key."""
        found = {}
        with self.ctx.db.read() as session:
            for table in Base.metadata.sorted_tables:
                for row in session.execute(sa.select(table)).mappings():
                    if table.name in ("counters", "usage") or self._is_bobs(table.name, row):
                        continue
                    key = tuple(str(row[column.name]) for column in table.primary_key)
                    found[(table.name, *key)] = repr(dict(row))
        return found

    def _is_bobs(self, table: str, row: Any) -> bool:
        if table == "events":
            return row["owner_id"] == self.bob_id
        if table == "audit":
            return str(row["object"]) in self.own
        return str(row.get("id")) in self.own or row.get("owner_id") == self.bob_id

    def files(self) -> dict[str, int]:
        """Files of the server, but the bytes of bob's jobs."""
        root = self.ctx.home.server
        paths = [path for path in root.rglob("*") if path.is_file() and "diamond.db" not in path.name]
        return {
            str(path.relative_to(root)): path.stat().st_size
            for path in paths
            if not any(name in str(path) for name in self.own)
        }


@pytest.fixture
def world(ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    for name in ("DIAMOND_URL", "DIAMOND_TOKEN", "DIAMOND_HOME"):
        monkeypatch.delenv(name, raising=False)
    hub = Hub()
    ctx = dataclasses.replace(ctx, hub=hub)
    settings = load_settings(home=tmp_path / "home", multi_user=True)
    app = create_app(ctx, hub, settings)
    alice_id, bob_id = (accounts.create(ctx, name=name).id for name in ("alice", "bob"))
    alice = _victim(ctx, app, alice_id)
    agent = ImageAgent(ctx, bob_id, "bobs")
    with ctx.db.write() as session:
        token = tokens.issue(session, now=ctx.clock(), endpoint_id=agent.id)
    with ctx.db.read() as session:
        token_ids = session.scalars(sa.select(TokenRow.id).where(TokenRow.endpoint_id == agent.id)).all()
    return World(
        app=app, ctx=ctx, alice=alice, agent=agent, bob_id=bob_id, token=token, own={agent.id, *token_ids}
    )  # fmt: skip


def _victim(ctx: Context, app: FastAPI, user_id: str) -> Victim:
    agent = ImageAgent(ctx, user_id, "hers", takes_secrets=True)
    secrets.put(ctx, user_id, "KEY", "alice's own value")
    spec = {"run": "true", "resources": {"infra": "hers"}, "secrets": {"KEY": "KEY"}}
    task, _ = tasks.create(ctx, user_id, spec)
    order = agent.order()
    agent.tell(order.job_id, JobState.RUNNING, log=b"alice's log\n")
    made, _ = image_builds.build(ctx, user_id, RECIPE, endpoint="hers")
    agent.finish(next(one for one in agent.orders() if one.task_id == made.task_id))
    with ctx.db.write() as session:
        token = tokens.issue(session, now=ctx.clock(), endpoint_id=agent.id)
    place = shells.Place(
        task_id=task.id, job_id=order.job_id, owner_id=user_id, owner="alice", endpoint_id=agent.id, endpoint="hers"
    )
    shell = app.state.runtime.shells.add(place, NewShell(argv=("bash",)))
    return Victim(
        agent=agent, user_id=user_id, task_id=task.id, job_id=order.job_id, image_id=made.image.id, token=token,
        shell=shell,
    )  # fmt: skip


async def harmless(world: World, attacks: list[tuple[str, str, str, dict[str, Any]]]) -> list[httpx.Response]:
    """Send each; nothing that is not bob's has changed after it, and the server has not stumbled."""
    answers = []
    async with world.client() as client:
        rows, files = world.rows(), world.files()
        for name, method, path, sent in attacks:
            answer = await client.request(method, path, **sent)
            assert answer.status_code < 500, f"{name}: {answer.status_code} {answer.text[:500]}"
            now = world.rows()
            assert now == rows, f"{name}: {[(key, rows.get(key), now.get(key)) for key in _differ(rows, now)]}"
            assert world.files() == files, name
            answers.append(answer)
    assert world.alice.shell.end is None and not world.alice.shell.runner
    # The others' work goes on.
    while (await asyncio.to_thread(planning.run_due, world.ctx) or world.ctx.clock() + 1) <= world.ctx.clock():
        pass
    return answers


def _differ(one: dict[tuple[str, ...], str], other: dict[tuple[str, ...], str]) -> list[tuple[str, ...]]:
    return [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]


def run(world: World, *attacks: tuple[str, str, str, dict[str, Any]]) -> list[httpx.Response]:
    return asyncio.run(harmless(world, list(attacks)))


def report(world: World, name: str, **fields: Any) -> tuple[str, str, str, dict[str, Any]]:
    return name, "POST", REPORTS, {"json": {"epoch": world.ctx.epoch, **fields}}


def raw_report(name: str, body: bytes) -> tuple[str, str, str, dict[str, Any]]:
    return name, "POST", REPORTS, {"content": body}


def chunk(job_id: str, stream: str = "log", offset: int = 0, data: bytes = b"x") -> dict[str, Any]:
    return {"job_id": job_id, "stream": stream, "offset": offset, "data": base64.b64encode(data).decode()}


def test_jobs_of_others_are_unknown_to_it(world: World) -> None:
    hers, mine = world.alice.job_id, world.job()
    ends = [{"job_id": hers, "state": state.value} for state in JobState if state.is_final]
    answers = run(
        world,
        *(report(world, f"end hers: {end['state']}", jobs=[end]) for end in ends),
        report(world, "write to her log", streams=[chunk(hers, offset=12)]),
        report(world, "her log anew", streams=[chunk(hers, offset=0, data=b"another line\n")]),
        report(world, "hers among mine", jobs=[{"job_id": mine, "state": "RUNNING"}, *ends], streams=[chunk(hers)]),
        report(world, "her task", jobs=[{"job_id": world.alice.task_id, "state": "FAILED"}]),
        report(world, "her metrics", streams=[chunk(hers, "metrics", data=b'{"loss": 0}\n')]),
    )
    for answer in answers:
        assert answer.status_code == 200
        assert hers not in answer.json()["states"] and hers not in answer.json()["received"]
    assert answers[3 + 2].json()["unknown"] == [hers]
    assert asyncio.run(_log_of(world)) == b"alice's log\n"


async def _log_of(world: World) -> bytes:
    return world.ctx.streams.read(world.alice.job_id, "log", 0, 1000).data


def test_secrets_shells_and_tokens_of_others(world: World) -> None:
    shell = f"/api/v1/agent/shells/{world.alice.shell.id}"
    query = {"runner": "bobs-agent", "offset": 0, "wait_s": 0}
    theirs = tokens.hash_token(world.alice.token)
    answers = run(
        world,
        ("her secrets", "GET", f"/api/v1/agent/jobs/{world.alice.job_id}/secrets", {}),
        ("traversal", "GET", f"/api/v1/agent/jobs/..%2F{world.alice.job_id}/secrets", {}),
        ("her shell's input", "GET", f"{shell}/input", {"params": query}),
        ("her shell's output", "POST", f"{shell}/output", {"params": query, "content": b"o\0\0\0\1x"}),
        ("end her shell", "POST", f"{shell}/end", {"params": query, "json": {"exit_code": 0}}),
        ("her orders", "GET", "/api/v1/agent/desired", {"headers": {INSTANCE_HEADER: "agt_hers"}}),
        ("her name", "POST", "/api/v1/agent/goodbye", {"headers": {INSTANCE_HEADER: "agt_hers"}}),
        ("her token", "PUT", "/api/v1/agent/token", {"json": {"sha256": theirs}}),
        ("all tokens", "POST", "/api/v1/agent/token/confirm", {}),
    )
    assert [answer.status_code for answer in answers[:7]] == [404, 404, 404, 404, 204, 409, 409]
    assert answers[7].status_code in (409, 422)
    assert tokens.authenticate(world.ctx, world.alice.token).endpoint_id == world.alice.agent.id
    assert world.alice.agent.orders(), "her own agent still hears of her job"


def test_reports_without_measure(world: World) -> None:
    mine = world.job()
    deep = b'{"epoch": "x", "jobs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    many = [{"job_id": f"job_{number:08d}", "state": "RUNNING"} for number in range(20_000)]
    million = b'{"epoch":"x","jobs":[' + b'{"job_id":"j","state":"RUNNING"},' * 10**6 + b"]}"
    answers = run(
        world,
        raw_report("more than a report may have", b'{"epoch": "' + b"x" * (17 * 2**20) + b'"}'),
        raw_report("a million jobs", million),
        report(world, "too many jobs", jobs=many),
        raw_report("deep", deep),
        report(world, "a long story", jobs=[{"job_id": mine, "state": "RUNNING", "detail": "x" * 10**6}]),
        report(world, "hosts", jobs=[{"job_id": mine, "state": "RUNNING", "hosts": ["n" * 1000] * 2000}]),
    )
    assert [answer.status_code for answer in answers] == [413, 413, 413, 422, 200, 200]


def test_offsets_and_numbers_that_no_stream_has(world: World) -> None:
    mine = world.job()
    numbers = (-1, -HUGE, HUGE, 2**31, 2**62)
    run(
        world,
        *(report(world, f"offset {at}", streams=[chunk(mine, offset=at)]) for at in numbers),
        raw_report("beyond 64 bits", json.dumps({"epoch": "x", "streams": [chunk(mine, offset=2**63)]}).encode()),
        *(
            report(world, f"{name} {at}", jobs=[{"job_id": mine, "state": state, name: at}])
            for at in numbers
            for name, state in (
                ("exit_code", "RUNNING"), ("signal", "RUNNING"), ("started_at", "RUNNING"), ("queued_at", "QUEUED"),
                ("expected_start_at", "QUEUED"),
            )
        ),
        *(raw_report(text, b'{"epoch": %s}' % text.encode()) for text in ("NaN", "Infinity", "-Infinity", "1e999")),
        report(world, "times", jobs=[{"job_id": mine, "state": "RUNNING", "started_at": 1e308}]),
        *(
            report(world, f"end with {at}", jobs=[{"job_id": job, "state": "FAILED", "exit_code": at, "signal": at}])
            for at in numbers
            for job in (world.job(),)
        ),
        report(world, "use", usage={"cpus_used": HUGE, "gpus_used": -HUGE, "disk_free_bytes": HUGE, "at": -1e300}),
    )  # fmt: skip
    assert world.ctx.streams.size(mine, "log") == 0


def test_words_that_are_none(world: World) -> None:
    mine = world.job()
    text = "\x00\u202e\x1b[2J" + "é" * 10
    job = {"job_id": mine, "state": "RUNNING", "detail": text, "hosts": [text], "run_dir": text, "scheduler_id": text}
    body = json.dumps({"epoch": world.ctx.epoch, "jobs": [job]})
    run(
        world,
        report(world, "NUL", jobs=[job, {**job, "state": "QUEUED", "pending_reason": text, "partition": text}]),
        raw_report("half a pair", body.replace("u0000", "ud800").encode()),
        raw_report("not UTF-8", body.encode().replace(b"u0000", b"\xff\xfe")),
        report(world, "NUL as a job", jobs=[{"job_id": "job_\x00", "state": "FAILED"}], streams=[chunk("\x00")]),
        report(world, "no state", jobs=[{"job_id": mine, "state": "EXPLODED"}]),
        report(world, "not base64", streams=[{**chunk(mine), "data": "%%%"}]),
        raw_report("a list", b"[]"),
        raw_report("nothing", b""),
        *(
            report(world, f"stream {name!r}", streams=[chunk(mine, name)])
            for name in ("../log", "/etc/passwd", "log/../../x", "", "log\x00", "metrics/..", "x" * 10_000)
        ),
        *(
            ("facts", "POST", HELLO, {"json": {"facts": facts}})
            for facts in (
                {**FACTS, "hostname": text, "os_user": text, "run_root": text, "site": text},
                {**FACTS, "policy": {text: text}, "qos": [text], "accounts": [text], "default_account": text},
                {**FACTS, "partitions": [{"name": text, "nodes": -1}] * 100},
                {**FACTS, "cpus_per_node": -HUGE, "mem_bytes_per_node": HUGE, "nodes": HUGE},
                {**FACTS, "builders": [text, "apptainer"], "builds": text, "image_root": "../..", "image_bytes": -1},
                {**FACTS, "gpus": [{"model": text, "count": HUGE}], "max_walltime_s": -HUGE},
                {"scheduler": text},
            )
        ),
    )


def test_outputs_that_lead_elsewhere(world: World) -> None:
    mine = world.job()
    digest = "a" * 64
    paths = ("../../etc/passwd", "/etc/passwd", "a/../../b", "a\x00b", "", ".", "..", "a//b", "x" * 5000, "ok")
    outputs = [{"path": path, "size_bytes": 2**49, "sha256": digest, "stored": True} for path in paths]
    outputs += [{"path": f"n{number}", "size_bytes": 2**59, "sha256": digest, "stored": True} for number in range(64)]
    outputs += [
        {"path": "minus", "size_bytes": -1, "sha256": digest},
        {"path": "odd", "size_bytes": 1, "sha256": "../"},
    ]
    (answer, *_) = run(
        world,
        report(world, "outputs", jobs=[{"job_id": mine, "state": "SUCCEEDED", "outputs": outputs}]),
        ("a blob's name", "PUT", "/api/v1/blobs/..%2F..%2Fx", {"content": b"x", "params": {"total": 1}}),
        ("another's bytes", "PUT", f"/api/v1/blobs/sha256:{digest}", {"content": b"x", "params": {"total": 1}}),
        ("no end", "PUT", f"/api/v1/blobs/sha256:{digest}", {"content": b"x", "params": {"total": HUGE}}),
    )
    assert answer.status_code == 200
    with world.ctx.db.read() as session:
        task_id = session.scalars(sa.select(JobRow.task_id).where(JobRow.id == mine)).one()
    kept = {output.path for output in tasks.get(world.ctx, world.bob_id, task_id).outputs}
    assert "ok" in kept and not kept & {path for path in paths if path != "ok"}


def test_old_epochs_and_states_that_go_back(world: World) -> None:
    mine = world.job()
    ended = {"job_id": mine, "state": "SUCCEEDED", "exit_code": 0}
    answers = run(
        world,
        ("another life", "POST", REPORTS, {"json": {"epoch": "older", "jobs": [ended], "streams": [chunk(mine)]}}),
        report(world, "the end", jobs=[ended]),
        report(world, "back", jobs=[{"job_id": mine, "state": "RUNNING"}]),
        report(world, "another end", jobs=[{"job_id": mine, "state": "FAILED", "exit_code": 1}]),
        report(world, "an end twice", jobs=[ended, {**ended, "state": "CANCELLED"}]),
        ("an old revision", "GET", "/api/v1/agent/desired", {"params": {"since": HUGE, "epoch": world.ctx.epoch}}),
    )
    assert answers[0].json() == {**answers[0].json(), "epoch": world.ctx.epoch, "states": {}, "received": {}}
    assert [answer.json()["states"] for answer in answers[1:5]] == [{mine: "SUCCEEDED"}] * 4
    assert answers[5].json()["orders"] == []


def test_whatever_the_order_and_however_often(world: World) -> None:
    rng = random.Random(5)
    mine = world.job()
    log = rng.randbytes(5000)
    messages = [Report(epoch=world.ctx.epoch, streams=(StreamChunk.of(mine, "log", at, log[at : at + 100]),))
                for at in range(0, len(log), 100)]  # fmt: skip
    sent = [({"epoch": one.epoch, "streams": [dataclasses.asdict(one.streams[0])]}) for one in messages]
    attacks = [("some of it", "POST", REPORTS, {"json": one}) for _ in range(4) for one in rng.sample(sent, len(sent))]
    states = [{"job_id": mine, "state": state} for state in ("RUNNING", "SUBMITTED", "QUEUED", "RUNNING")]
    attacks += [report(world, "a state", jobs=[state]) for state in states]
    run(world, *rng.sample(attacks, len(attacks)))
    held = world.ctx.streams.read(mine, "log", 0, len(log)).data
    assert log.startswith(held)
    whole = Report(epoch=world.ctx.epoch, streams=tuple(one.streams[0] for one in messages))
    agents.report(world.ctx, world.agent.id, whole, f"agt_{world.agent.name}")
    assert world.ctx.streams.read(mine, "log", 0, len(log)).data == log


def test_what_it_says_of_images_stays_with_its_own(world: World) -> None:
    """It builds an image of bob's and says that it is alice's, with another digest."""

    def hers() -> list[str]:
        with world.ctx.db.read() as session:
            replicas = session.scalars(sa.select(ReplicaRow).where(ReplicaRow.image_id == world.alice.image_id))
            image = session.get_one(ImageRow, world.alice.image_id)
            return [repr({**row.__dict__, "_sa_instance_state": None}) for row in (*replicas, image)]

    before = hers()
    made, _ = image_builds.build(world.ctx, world.bob_id, {**RECIPE, "pip": ["scipy"]}, endpoint="bobs")
    order = next(order for order in world.agent.orders() if order.task_id == made.task_id)
    world.agent.finish(order, image_id=world.alice.image_id, path="/elsewhere/image.sif", digest="sha256:" + "f" * 64)
    assert hers() == before
