"""An installation with somebody of every role and one object of every kind, and a way to put it back as it was.

The people are called what they are: `stranger` has an account and nothing to do with the rest, `viewer`, `member` and
`owner` are in the project `lab`, and `admin` administers the installation without being in it. Everything there is
belongs to `owner`. The endpoint `cluster` is shared with the project, `own` is not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import FastAPI

from diamond.core.accounts import Scope
from diamond.core.codec import encode
from diamond.core.images import Image
from diamond.core.logins import NewLogin
from diamond.core.notices import Channel
from diamond.core.reasons import Reason
from diamond.core.shells import NewShell
from diamond.core.states import JobState
from diamond.core.wire import INSTANCE_HEADER, Report, StreamChunk
from diamond.server.app import create_app
from diamond.server.auth import COOKIE
from diamond.server.hub import Hub
from diamond.server.identity_file import IdentityConfig
from diamond.server.identity_providers import IdentityProviders
from diamond.server.main import make_context, open_database
from diamond.server.services import (
    accounts,
    agents,
    bundles,
    codes,
    endpoint_shares,
    endpoints,
    image_builds,
    image_copies,
    image_drafts,
    invitations,
    logins,
    notices,
    ownership,
    pools,
    projects,
    secrets,
    sessions,
    shells,
    tasks,
    templates,
    tokens,
    users,
)
from diamond.server.services.context import Context
from diamond.server.settings import load_settings
from diamond.server.store.identity_models import IdentityRow
from diamond.server.store.models import UserRow
from testing import schema
from testing.context import Clock
from testing.image_agent import ImageAgent
from testing.people import PASSWORD
from testing.uploads import upload

PEOPLE = ("stranger", "viewer", "member", "owner", "admin")
RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"], "test": "true"}
HOST = "http://localhost"
RUNNER = "runner-of-the-matrix"
METRIC = b'{"step": 1, "t": 1.0, "loss": 0.5}\n'
BLOB = b"the contents of a file"
OUTPUT = "result.txt"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def words(self) -> str:
        return self.body[:300].decode(errors="replace")


@dataclass
class World:
    """`names` has the path parameters of shared objects, `private` those of the same kind that only `owner` sees."""

    app: FastAPI
    ctx: Context
    tokens: dict[str, str]
    cookies: dict[str, str]
    names: dict[str, str] = field(default_factory=dict)
    private: dict[str, str] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    place: shells.Place | None = None
    kept: bytes = b""
    seed: tuple[str, str] = ("", "")

    @property
    def database(self) -> Path:
        return Path(str(self.ctx.db.url.database))

    def keep(self) -> None:
        """What `restore` goes back to."""
        with self.ctx.db.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        self.ctx.db.close()
        self.kept = self.database.read_bytes()

    def restore(self) -> None:
        """Everything as it was, and nothing remembered of who was wrong how often."""
        self.ctx.db.close()
        for name in ("-wal", "-shm"):
            self.database.with_name(self.database.name + name).unlink(missing_ok=True)
        self.database.write_bytes(self.kept)
        runtime = self.app.state.runtime
        runtime.authenticator.forget()
        self.forgive()
        for shell in runtime.shells.live():
            runtime.shells.drop(shell)
        assert self.place is not None
        self.names["shell_id"] = runtime.shells.add(self.place, NewShell(argv=("bash",))).id

    def forgive(self) -> None:
        self.ctx.throttle._at.clear()
        self.app.state.runtime.failures._at.clear()

    async def ask(
        self,
        method: str,
        path: str,
        *,
        token: str = "",
        cookies: dict[str, str] | None = None,
        query: dict[str, str] | None = None,
        body: Any = None,
        form: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One request, straight to the application. A stream is left once it has begun."""
        sent = {"host": "localhost", **(headers or {})}
        if token:
            sent["authorization"] = f"Bearer {token}"
        if cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
        data = b""
        if form is not None:
            data = urlencode(form).encode()
            sent |= {"content-type": "application/x-www-form-urlencoded", "origin": HOST}
        elif isinstance(body, bytes):
            data = body
            sent["content-type"] = "application/octet-stream"
        elif body is not None:
            data = json.dumps(body).encode()
            sent["content-type"] = "application/json"
        sent["content-length"] = str(len(data))
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": quote(path).encode(), "query_string": urlencode(query or {}).encode(),
            "root_path": "", "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 40000), "server": ("localhost", 80),
        }  # fmt: skip
        return await _call(self.app, scope, data)


async def _call(app: FastAPI, scope: dict[str, Any], data: bytes) -> Answer:
    begun = asyncio.Event()
    answer = Answer(0, {}, b"")
    unread = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if unread:
            return unread.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            begun.set()
        else:
            answer.body += message.get("body", b"")

    work = asyncio.ensure_future(app(scope, receive, send))
    if scope["path"].endswith(("/stream", "/live")):
        first = asyncio.ensure_future(begun.wait())
        await asyncio.wait({work, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            work.cancel()
            await asyncio.wait({work})
            return answer
    await work
    return answer


def make_world(folder: Path) -> World:
    settings = load_settings(home=folder / "home", sqlite_synchronous="OFF", multi_user=True, smtp_host="")
    settings.home_dir.make()
    settings.home_dir.server.mkdir()
    database = open_database(settings)
    schema.give(database)
    hub = Hub()
    # Time stands still, so that an agent which was heard of at the beginning is online to the end.
    # Owners of projects may invite here: the looser of the two ways an installation can be.
    invites = IdentityProviders(IdentityConfig(owners_invite=True))
    ctx = dataclasses.replace(make_context(settings, database, hub), clock=Clock(), identity=invites)
    world = World(app=create_app(ctx, hub, settings), ctx=ctx, tokens={}, cookies={})
    _people(world)
    _objects(world)
    world.keep()
    return world


def _people(world: World) -> None:
    ctx, now = world.ctx, world.ctx.clock()
    for name in PEOPLE:
        account = "chief" if name == "admin" else name  # nobody may be called "admin"
        world.ids[name] = accounts.create(ctx, name=account, password=PASSWORD, is_admin=name == "admin").id
    owner, admin = world.ids["owner"], world.ids["admin"]
    with ctx.db.write() as session:
        for name in PEOPLE:
            world.tokens[name] = tokens.issue(session, now=now, user_id=world.ids[name])
            row = session.get_one(UserRow, world.ids[name])
            world.cookies[name] = sessions.begin(ctx, session, row, method="password", address="", browser="")
        world.tokens["expired"] = tokens.issue(session, now=now, user_id=owner, expires_at=now - 1)
        world.cookies["expired"] = world.cookies["owner"][::-1]  # nobody's
        for lacking in Scope:  # the most that a token can have without the scope a route asks for
            for name, user_id in (("owner", owner), ("admin", admin)):
                held = tuple(scope for scope in Scope if scope is not Scope.ADMIN and not _implies(scope, lacking))
                world.tokens[f"{name} without {lacking}"] = tokens.issue(
                    session, now=now, user_id=user_id, scopes=held or (Scope.AGENT,)
                )
    with ctx.db.write() as session:
        second = session.get_one(UserRow, owner)
        sessions.begin(ctx, session, second, method="password", address="", browser="second")
        session.add(
            IdentityRow(
                id="idn_00000001",
                user_id=owner,
                issuer="https://example.org",
                subject="1",
                provider="site",
                label="o",
                created_at=now,
            )
        )
        world.codes["setup"] = codes.make(session, codes.SETUP, now=now, lifetime_s=3600, short=True)
    world.names["token_id"] = tokens.create(
        ctx, owner, "to be revoked", (Scope.READ,), None, held=frozenset(Scope)
    ).id  # fmt: skip
    world.names["session_id"] = sessions.list_sessions(ctx, owner)[0].id
    world.names["identity_id"] = "idn_00000001"


def _implies(scope: Scope, other: Scope) -> bool:
    return scope is other or (scope is Scope.LAUNCH and other is Scope.READ)


def _objects(world: World) -> None:
    ctx, owner = world.ctx, world.ids["owner"]
    projects.create(ctx, owner, "lab")
    projects.set_member(ctx, owner, "lab", "viewer", "viewer")
    projects.set_member(ctx, owner, "lab", "member", "member")
    cluster = ImageAgent(ctx, owner, "cluster", takes_secrets=True, holds_pools=True)
    ImageAgent(ctx, owner, "own", holds_pools=True)
    endpoint_shares.share(ctx, owner, "lab", "cluster")
    ImageAgent(ctx, world.ids["member"], "offered")
    endpoint_shares.share(ctx, world.ids["member"], "lab", "offered")
    with ctx.db.write() as session:
        world.tokens["agent"] = tokens.issue(session, now=ctx.clock(), endpoint_id=cluster.id)
    secrets.put(ctx, owner, "KEY", "a value", "lab")
    world.names |= {"project": "lab", "endpoint": "cluster", "offered": "offered", "user": "viewer", "kind": "user"}
    world.private |= {"endpoint": "own"}
    digest = upload(ctx, owner, BLOB)
    manifest = {"files": [{"path": "data", "digest": digest, "size_bytes": len(BLOB)}], "is_file": False}
    world.names["digest"] = digest
    world.names["bundle"] = str(encode(bundles.register(ctx, manifest, owner))["ref"]).removeprefix("bundle:")
    _tasks(world, cluster)
    _images(world, cluster)
    for into, visibility in ((world.names, "project"), (world.private, "private")):
        kept = templates.create(ctx, owner, visibility, {"run": "true"}, visibility=visibility, project="lab")
        into |= {"template": kept.id, "template_id": kept.id}
    for into, place, project in ((world.names, "cluster", "lab"), (world.private, "own", None)):
        held = {"name": f"pool-at-{place}", "endpoint": place, "slots": 4, "project": project}
        into["ref"] = pools.create(ctx, owner, held).id
    draft = image_drafts.create(ctx, owner, {**RECIPE, "name": "draft"})
    rule = notices.create(ctx, owner, Channel.EMAIL, "owner@example.org", ("task.failed",))
    invitation = invitations.invite(ctx, owner, project="lab")
    login = logins.begin(
        ctx, NewLogin(name="terminal", token_sha256="0" * 64), lifetime_s=60.0, address="192.0.2.1", url=HOST
    )
    world.names |= {
        "draft_id": draft.id, "rule_id": rule.id, "invitation_id": invitation.id, "user_code": login.user_code
    }  # fmt: skip
    world.codes |= {
        "invitation": invitation.code,
        "reset": users.reset(ctx, world.ids["admin"], "viewer")[0],
        "device": login.device_code,
        "enrolment": endpoints.create_with_code(ctx, owner, "fresh")[1].code,
    }


def _tasks(world: World, cluster: ImageAgent) -> None:
    """Of each kind one that runs and one that has ended, seen by the project and by its owner alone."""
    ctx, owner = world.ctx, world.ids["owner"]
    spec = {"run": "true", "project": "lab", "secrets": {"KEY": "KEY"}, "resources": {"infra": "cluster"}}
    holding = {**spec, "workdir": f"bundle:{world.names['bundle']}"}
    for into, visibility in ((world.names, "project"), (world.private, "private")):
        for key, ends in (("task_id", False), ("done_id", True)):
            task, _ = tasks.create(ctx, owner, holding if visibility == "project" else spec)
            order = next(order for order in cluster.orders() if order.task_id == task.id)
            cluster.tell(order.job_id, JobState.RUNNING, log=b"hello\n")
            chunk = StreamChunk.of(order.job_id, "metrics", 0, METRIC)
            agents.report(ctx, cluster.id, Report(epoch=ctx.epoch, streams=(chunk,)), "agt_cluster")
            if ends:
                outputs = cluster.store({OUTPUT: b"42"})
                cluster.tell(order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0, outputs=outputs)
            elif visibility == "project":
                world.names["job_id"] = order.job_id
                world.place = shells.Place(
                    task_id=task.id, job_id=order.job_id, owner_id=owner, owner="owner", endpoint_id=cluster.id,
                    endpoint="cluster",
                )  # fmt: skip
            ownership.change_task(ctx, owner, task.id, visibility=visibility)
            into[key] = task.id


def _images(world: World, cluster: ImageAgent) -> None:
    ctx, owner = world.ctx, world.ids["owner"]

    def build(name: str, visibility: str) -> Image:
        recipe = {**RECIPE, "name": name, "pip": [name]}
        made, _ = image_builds.build(
            ctx, owner, recipe, endpoint="cluster", visibility=visibility, project="lab"
        )  # fmt: skip
        _finish(cluster, [made.task_id])
        export = image_copies.export(ctx, owner, made.image.id)
        _finish(cluster, [export.id])
        return made.image

    world.names["image"] = build("env", "project").id
    world.private["image"] = build("mine", "private").id


def _finish(agent: ImageAgent, task_ids: Iterable[str]) -> None:
    for order in agent.orders():
        if order.task_id in task_ids:
            agent.finish(order)


def instance_header() -> dict[str, str]:
    return {INSTANCE_HEADER: "agt_cluster"}


def session_cookie(world: World, name: str) -> dict[str, str]:
    return {COOKIE: world.cookies[name]}


def csrf_of(world: World, name: str) -> str:
    return sessions.csrf_of(world.cookies[name])
