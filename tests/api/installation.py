"""A whole server with accounts in this process, with one of everything in it, and the same again after every mess.

Requests go to the ASGI application itself. An answer that never ends (a live stream) is taken from its first line.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import sqlalchemy as sa

from diamond.core.accounts import ALL_SCOPES, Scope
from diamond.core.ids import new_id
from diamond.core.states import JobState
from diamond.core.wire import Report, StreamChunk
from diamond.server.app import create_app
from diamond.server.hub import Hub
from diamond.server.main import make_context, open_database
from diamond.server.services import accounts, agents, bootstrap, codes, endpoint_shares, sessions, tokens
from diamond.server.services.context import Context
from diamond.server.settings import Settings, load_settings
from diamond.server.store.identity_models import IdentityRow
from diamond.server.store.models import UserRow
from testing.image_agent import ImageAgent
from testing.people import PASSWORD, cheap_passwords

ROLES = ("anonymous", "user", "administrator", "agent")
RECIPE: dict[str, Any] = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"], "test": "true"}
BLOB = b"a file of the tests"
BLOB_DIGEST = "sha256:" + hashlib.sha256(BLOB).hexdigest()
MANIFEST = {"files": [{"path": "a.txt", "size_bytes": len(BLOB), "digest": BLOB_DIGEST}]}
_LONGEST_ANSWER_S = 30.0


@dataclass
class Answer:
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    error: BaseException | None = None  # what the application raised besides answering 500

    @property
    def media_type(self) -> str:
        return next((value.split(";")[0] for name, value in self.headers if name == "content-type"), "")

    def json(self) -> Any:
        return json.loads(self.body)


class Installation:
    """`tokens` are the roles' credentials; `names` what there is, by the name of a path parameter."""

    def __init__(self, settings: Settings, kept: Kept) -> None:
        self.settings, self._kept = settings, kept
        settings.home_dir.make()
        settings.home_dir.server.mkdir()
        self.db = open_database(settings)
        self.db.migrate()
        self.hub = Hub()
        began_at = time.time()  # and stays so: else an endpoint whose agent is silent goes offline under the tests
        self.ctx: Context = replace(make_context(settings, self.db, self.hub), clock=lambda: began_at)
        self.app = create_app(self.ctx, self.hub, settings)
        self._numbers = itertools.count(1)
        self._runner = asyncio.Runner()
        self._runner.run(self._start())
        self.tokens: dict[str, str] = {"anonymous": ""}
        self.names: dict[str, str] = {}
        self.codes: dict[str, str] = {}
        self._furnish()
        self.db.close()
        kept.save()

    async def _start(self) -> None:
        self.hub.start()

    def close(self) -> None:
        self._runner.close()
        self.db.close()

    def restore(self) -> None:
        """Everything as it was made, whatever has been deleted, handed over or disabled since."""
        self.db.close()
        self._kept.restore()
        self.app.state.runtime.authenticator.forget()

    def shell(self) -> str:
        """The id of an open shell in the running task: shells live in the server's memory alone."""
        made = self.ask("POST", f"/api/v1/tasks/{self.names['task_id']}/shells", {"argv": ["bash"]}, "user")
        return str(made["id"])

    def ask(self, method: str, path: str, body: Any = None, role: str = "user") -> Any:
        """A request that must succeed, for making what tests need."""
        raw = b"" if body is None else json.dumps(body).encode()
        answer = self.request(method, f"http://localhost{path}", {"Content-Type": "application/json"}, raw, role)
        assert 200 <= answer.status < 300, f"{method} {path}: {answer.status} {answer.body[:500]!r}"
        return answer.json() if answer.media_type == "application/json" else None

    def request(self, method: str, url: str, headers: dict[str, str], body: bytes, role: str) -> Answer:
        given = {name.lower(): value for name, value in headers.items()}
        given.setdefault("host", "localhost")
        given["content-length"] = str(len(body))
        if token := self.tokens[role]:
            given["authorization"] = f"Bearer {token}"
        # Each from an address of its own: one that was wrong too often would only ever be told to wait.
        address = str(ipaddress.ip_address(0x0A000000 + next(self._numbers)))
        return self._runner.run(_send(self.app, method, url, given, body, address))

    def _furnish(self) -> None:
        ctx = self.ctx
        carol = accounts.setup(ctx, bootstrap.prepare_multi_user(ctx), name="carol", password=PASSWORD)
        alice = accounts.create(ctx, name="alice", password=PASSWORD)
        accounts.create(ctx, name="bob", password=PASSWORD)
        self.tokens["administrator"] = accounts.first_token(ctx, carol, "tests")
        self.tokens["user"] = accounts.first_token(ctx, alice, "tests")
        agent = ImageAgent(ctx, alice.id, "alpha", takes_secrets=True, holds_pools=True)
        with ctx.db.write() as session:
            self.tokens["agent"] = tokens.issue(session, now=ctx.clock(), endpoint_id=agent.id)
            row = session.get_one(UserRow, alice.id)
            sessions.begin(ctx, session, row, method="password", address="127.0.0.1", browser="tests")
            self.codes["reset"] = codes.make(session, codes.RESET, now=ctx.clock(), lifetime_s=3600.0, user_id=row.id)
        names = self.names
        names["token_id"] = tokens.create(ctx, alice.id, "other", (Scope.READ,), None, held=ALL_SCOPES).id
        names["session_id"] = self.ask("GET", "/api/v1/me/sessions")["sessions"][0]["id"]
        names["identity_id"] = self._identity(alice.id)
        names |= {"endpoint": "alpha", "user": "bob", "project": "pde", "image": "env", "step": "base", "kind": "user"}
        self.ask("POST", "/api/v1/projects", {"name": "pde"})
        self.ask("PUT", "/api/v1/projects/pde/members/bob", {"role": "owner"})
        self.ask("PUT", "/api/v1/projects/pde/endpoints/alpha")
        self.ask("POST", "/api/v1/endpoints", {"name": "idle"})
        self.ask("PUT", "/api/v1/projects/pde/endpoints/idle")
        frank = accounts.create(ctx, name="frank", password=PASSWORD)
        self.ask("PUT", "/api/v1/projects/pde/members/frank", {"role": "member"})
        ImageAgent(ctx, frank.id, "offered")
        endpoint_shares.share(ctx, frank.id, "pde", "offered")
        self.codes["enrolment"] = self.ask("POST", "/api/v1/endpoints/idle/enrolment")["code"]
        invited = self.ask("POST", "/api/v1/invitations", {"name": "dave"}, "administrator")
        names["invitation_id"], self.codes["invitation"] = invited["id"], invited["code"]
        login = {"name": "tests", "token_sha256": hashlib.sha256(b"terminal").hexdigest()}
        started = self.ask("POST", "/api/v1/logins", login, "anonymous")
        names["user_code"], self.codes["device"] = started["user_code"], started["device_code"]
        rule = {"channel": "email", "target": "alice@example.org", "events": ["task.failed"]}
        names["rule_id"] = self.ask("POST", "/api/v1/notices/rules", rule)["id"]
        self.ask("PUT", "/api/v1/secrets/API_KEY", {"value": "planted"})
        self.ask("PUT", "/api/v1/quotas/user/alice", {"tasks": 50}, "administrator")
        kept = {"name": "kept", "spec": {"run": "true"}}
        names["template"] = self.ask("POST", "/api/v1/templates", kept)["id"]
        held = {"name": "held", "endpoint": "alpha", "slots": 4, "project": "pde"}
        names["ref"] = self.ask("POST", "/api/v1/pools", held)["id"]
        names["draft_id"] = self.ask("POST", "/api/v1/image-drafts", {"recipe": RECIPE})["id"]
        self._furnish_work(agent)

    def _identity(self, user_id: str) -> str:
        """Somebody a provider vouches for; how they come about is tested with real providers."""
        with self.ctx.db.write() as session:
            row = IdentityRow(
                id=new_id("idn"), user_id=user_id, issuer="https://issuer.example", subject="1", provider="site",
                label="alice@example.org", created_at=self.ctx.clock(),
            )  # fmt: skip
            session.add(row)
            return row.id

    def _furnish_work(self, agent: ImageAgent) -> None:
        names, ctx = self.names, self.ctx
        build = self.ask("POST", "/api/v1/images", {"recipe": RECIPE, "endpoint": "alpha", "project": "pde"})
        agent.finish(next(order for order in agent.orders() if order.task_id == build["task_id"]))
        self.ask("POST", "/api/v1/images/env/export", {})
        agent.finish()
        ended = self.ask(
            "POST", "/api/v1/tasks", {"spec": {"run": "true", "outputs": ["result.txt"], "project": "pde"}}
        )
        agent.plan()
        agent.end(agent.order(), agent.store({"result.txt": b"42"}))
        names["ended_task_id"] = ended["id"]
        self.request("PUT", f"http://localhost/api/v1/blobs/{BLOB_DIGEST}?total={len(BLOB)}&offset=0", {}, BLOB, "user")
        self.bundle = self.ask("POST", "/api/v1/bundles", MANIFEST)["digest"]
        names["digest"] = BLOB_DIGEST
        task = self.ask("POST", "/api/v1/tasks", {"spec": {"run": "true", "name": "t", "secrets": ["API_KEY"]}})
        agent.plan()
        names["task_id"] = task["id"]
        order = next(order for order in agent.orders() if order.task_id == task["id"])
        names["job_id"] = order.job_id
        agent.tell(order.job_id, JobState.RUNNING, log=b"hello\n" * 10)
        metrics = b'{"step": 1, "t": 1.0, "loss": 0.5}\n{"step": 2, "t": 2.0, "loss": null}\n'
        train = b'{"t": 2.0, "step": 2, "step_s": 1.5, "samples_per_s": 2, "slowest": {"rank": 0, "ratio": 2}}\n'
        chunks = (StreamChunk.of(order.job_id, "metrics", 0, metrics), StreamChunk.of(order.job_id, "train", 0, train))
        agents.report(ctx, agent.id, Report(epoch=ctx.epoch, streams=chunks), "agt_alpha")


async def _send(app: Any, method: str, url: str, headers: dict[str, str], body: bytes, address: str) -> Answer:
    """One request through ASGI. An event stream is cut off after its head: it would go on for ever."""
    parts = urlsplit(url)
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote(parts.path), "raw_path": parts.path.encode("ascii"), "query_string": parts.query.encode(),
        "root_path": "", "server": ("localhost", 80), "client": (address, 50000), "state": {},
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
    }  # fmt: skip
    answer, over = Answer(), asyncio.Event()
    to_come = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if to_come:
            return to_come.pop()
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = [
                (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in message["headers"]
            ]
            if answer.media_type == "text/event-stream":
                over.set()
        elif answer.media_type != "text/event-stream":
            answer.body += message.get("body", b"")
            if not message.get("more_body", False):
                over.set()

    async def work() -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:  # what the outermost middleware lets through after it has answered 500
            answer.error = error
        finally:
            over.set()

    running = asyncio.create_task(work())
    async with asyncio.timeout(_LONGEST_ANSWER_S):
        await over.wait()
        if answer.media_type == "text/event-stream":
            running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    return answer


class Kept(Protocol):
    """A database as it was at `save`."""

    def save(self) -> None: ...

    def restore(self) -> None: ...


class KeptFile(Kept):
    """SQLite: one file, once every connection to it is closed."""

    def __init__(self, path: Path) -> None:
        self._path, self._copy = path, path.with_suffix(".kept")

    def save(self) -> None:
        shutil.copyfile(self._path, self._copy)

    def restore(self) -> None:
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        shutil.copyfile(self._copy, self._path)


class KeptDatabase(Kept):
    """PostgreSQL: a second database, which the first is made from again."""

    def __init__(self, admin: sa.Engine, name: str) -> None:
        self._admin, self._name, self._copy = admin, name, f"{name}_kept"

    def save(self) -> None:
        self._run(f"CREATE DATABASE {self._copy} TEMPLATE {self._name}")

    def restore(self) -> None:
        self._run(f"DROP DATABASE {self._name} WITH (FORCE)", f"CREATE DATABASE {self._name} TEMPLATE {self._copy}")

    def _run(self, *statements: str) -> None:
        with self._admin.connect() as connection:
            for statement in statements:
                connection.execute(sa.text(statement))


@contextmanager
def installed(home: Path, kept: Kept, **settings: Any) -> Iterator[Installation]:
    chosen = load_settings(
        home=home, sqlite_synchronous="OFF", multi_user=True, public_url="http://localhost", max_json_bytes=64 * 1024,
        smtp_host="localhost", smtp_port=1, mail_from="diamond@example.org",
        shells_per_task=10**6, shells_per_user=10**6, shells_per_endpoint=10**6,
        **settings,
    )  # fmt: skip
    with cheap_passwords():
        made = Installation(chosen, kept)
    try:
        yield made
    finally:
        made.close()
