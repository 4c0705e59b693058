"""The routes of the audit log and of notices, and who may use them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from diamond.core.accounts import Scope
from diamond.core.audit import verify_export
from diamond.core.ids import new_id
from diamond.core.states import JobState
from diamond.server.app import create_app
from diamond.server.hub import Hub
from diamond.server.services import audit, tokens
from diamond.server.store.models import UserRow

from .conftest import World, launch


def somebody(world: World, name: str, *scopes: Scope) -> str:
    """A token of a user who is no administrator."""
    with world.ctx.db.write() as session:
        row = UserRow(id=new_id("usr"), name=name, created_at=world.ctx.clock())
        session.add(row)
        session.flush()
        return tokens.issue(session, now=world.ctx.clock(), user_id=row.id, scopes=scopes or (Scope.ADMIN,))


def test_an_administrator_reads_exports_and_checks_it(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        page = (await client.get("/api/v1/audit", params={"action": "task", "user": "nobody"})).json()
        assert page == {"entries": [], "next_cursor": None}
        page = (await client.get("/api/v1/audit", params={"object": task["id"]})).json()
        (entry,) = page["entries"]
        assert (entry["action"], entry["user_id"]) == ("task.created", world.user_id)
        assert entry["via"].startswith("tok_")
        assert entry["address"]
        head = (await client.get("/api/v1/audit/head")).json()
        kept = f"{head['seq']}:{head['hash']}"
        exported = await client.get("/api/v1/audit/export")
        assert exported.headers["content-type"].startswith("application/jsonl")
        assert "attachment" in exported.headers["content-disposition"]
        assert verify_export(exported.content.splitlines()).ok
        verdict = (await client.get("/api/v1/audit/verify", params={"head": kept})).json()
        assert verdict["ok"] is True
        assert (await client.get("/api/v1/audit/verify", params={"head": f"1:{'0' * 64}"})).json()["ok"] is False
        for path, params in (
            ("/api/v1/audit/verify", {"head": "x"}),
            ("/api/v1/audit", {"action": "a b"}),
            ("/api/v1/audit", {"since": "nan"}),
            ("/api/v1/audit", {"limit": "0"}),
            ("/api/v1/audit/export", {"after": str(2**64)}),
        ):
            answer = await client.get(path, params=params)
            assert answer.status_code == 422, (path, params, answer.text)
        assert (await client.get("/api/v1/audit/export", params={"after": 10_000})).status_code == 404

    world.run(test)


def test_others_see_their_own_entries_and_their_attempts_are_noted(world: World) -> None:
    bob = somebody(world, "bob")

    async def test(client: httpx.AsyncClient) -> None:
        await launch(client)
        async with world.client(bob) as theirs:
            for path in ("", "/head", "/verify", "/export"):
                assert (await theirs.get(f"/api/v1/audit{path}")).status_code == 403
            mine = (await theirs.get("/api/v1/me/audit")).json()["entries"]
            assert {entry["user"] for entry in mine} == {"bob"}
            assert {entry["action"] for entry in mine} == {"access.refused"}
            for _ in range(120):
                await theirs.get("/api/v1/audit")
            mine = (await theirs.get("/api/v1/me/audit", params={"limit": 500})).json()["entries"]
            assert len(mine) == audit.MOST_REFUSED_BY_ONE
        seen = (await client.get("/api/v1/audit", params={"user": "bob"})).json()["entries"]
        assert seen[-1]["data"]["path"] == "/api/v1/audit"

    world.run(test)


def test_rules_are_made_changed_tried_and_removed(world: World) -> None:
    bob, reader = somebody(world, "bob"), somebody(world, "carol", Scope.READ)
    rules = "/api/v1/notices/rules"

    async def test(client: httpx.AsyncClient) -> None:
        new: dict[str, Any] = {"channel": "webhook", "target": "https://example.org/x", "events": ["task.failed"]}
        answer = await client.post(rules, json=new)
        assert answer.status_code == 201, answer.text
        rule = answer.json()
        assert rule["key"].startswith("dmdw_")
        where = answer.headers["location"]
        assert (await client.get(where)).json() == {**rule, "key": ""}
        changed = await client.patch(where, json={"events": ["all"], "paused": True})
        assert (changed.json()["events"], changed.json()["paused_at"] is not None) == (["all"], True)
        assert (await client.patch(where, json={"paused": False})).json()["paused_at"] is None
        for wrong in (
            {**new, "channel": "pigeon"}, {**new, "target": "https://127.0.0.1/"}, {**new, "events": ["x"]},
            {**new, "events": []}, {**new, "more": 1}, {"channel": "webhook"}, {**new, "channel": "email"},
        ):  # fmt: skip
            refused = await client.post(rules, json=wrong)
            assert refused.status_code == 422, wrong
            assert refused.json()["error"]["field"]
        for body in ({"paused": "yes"}, {"target": "https://example.org"}, {"events": "x"}):
            assert (await client.patch(where, json=body)).status_code == 422
        async with world.client(bob) as theirs, world.client(reader) as reading:
            assert (await theirs.get(rules)).json() == {"rules": []}
            assert (await theirs.get(where)).status_code == 404
            assert (await theirs.patch(where, json={})).status_code == 404
            assert (await theirs.delete(where)).status_code == 404
            assert (await theirs.post(f"{where}/test")).status_code == 404
            assert (await reading.get(rules)).status_code == 200
            assert (await reading.post(rules, json=new)).status_code == 403, "a token that reads sets up no spies"
        assert (await client.delete(where)).status_code == 204
        assert (await client.delete(where)).status_code == 404

    world.run(test)


def test_mails_are_refused_where_there_is_no_mail_server(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"channel": "email", "target": "alice@example.org", "events": ["all"]}
        answer = await client.post("/api/v1/notices/rules", json=body)
        assert answer.status_code == 422
        assert "DIAMOND_SMTP_HOST" in answer.json()["error"]["hint"]

    world.run(test)


def test_whoever_opens_a_shell_is_written_down(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        task = await launch(client)
        world.report(task["jobs"][0]["id"], state=JobState.RUNNING, hosts=("c1",))
        made = await client.post(f"/api/v1/tasks/{task['id']}/shells", json={"argv": ["bash", "-c", "secret"]})
        assert made.status_code == 201, made.text
        (entry,) = (await client.get("/api/v1/audit", params={"action": "shell.opened"})).json()["entries"]
        assert (entry["object"], entry["user_id"]) == (task["id"], world.user_id)
        assert entry["data"]["program"] == "bash" and "secret" not in str(entry)
        assert entry["via"] and entry["address"]

    world.run(test)


def test_an_agent_that_enrols_or_fails_to_is_written_down_with_its_address(world: World) -> None:
    async def test(client: httpx.AsyncClient) -> None:
        made = (await client.post("/api/v1/endpoints", json={"name": "alpha", "token": False})).json()
        new = {"code": made["enrolment"]["code"], "token_sha256": "ab" * 32, "instance": "agt_00000001"}
        async with world.client("") as anybody:
            wrong = await anybody.post("/api/v1/enrolment", json={**new, "code": "AAAA-AAAA-AAAA-AAAA"})
            assert wrong.status_code == 401
            assert (await anybody.post("/api/v1/enrolment", json=new)).status_code == 200
        found = (await client.get("/api/v1/audit", params={"user": "an enrolment code"})).json()["entries"]
        assert [entry["action"] for entry in found] == ["endpoint.enrolled", "enrolment.refused"]
        assert all(entry["address"] for entry in found)
        assert new["code"] not in str(found)

    world.run(test)


def test_the_head_is_written_to_the_servers_log_where_the_operator_wants_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def heads(wanted: bool) -> list[str]:
        settings = world.settings.model_copy(update={"audit_head_log": wanted})
        caplog.clear()

        async def run() -> None:
            app = create_app(world.ctx, Hub(), settings)
            async with app.router.lifespan_context(app):
                await asyncio.sleep(0.3)

        with caplog.at_level(logging.INFO, "diamond.server"):
            asyncio.run(run())
        return [text for text in caplog.messages if "audit log ends at" in text]

    assert heads(False) == []
    assert heads(True) == [f"the audit log ends at {audit.head(world.ctx)}"]
