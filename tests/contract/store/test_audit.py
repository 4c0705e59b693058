"""The audit log on both databases: whole under many writers, unchangeable by the server, and honest after tampering."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import exc

from diamond.core.audit import FIRST, AuditEntry, AuditHead, parse_head, verify_export
from diamond.core.errors import InvalidInput, NotFound
from diamond.server.services import audit, endpoints, enrolment, image_builds, image_copies, images, tasks
from diamond.server.services.context import Context
from diamond.server.store.acting import Actor, acting
from testing.context import Clock, make_context
from testing.image_agent import ImageAgent

ALICE = Actor(user_id="usr_00000000alice", name="alice", via="tok_000000001", address="192.0.2.7")


def write(ctx: Context, count: int, action: str = "thing.done", **data: object) -> None:
    for number in range(count):
        with ctx.db.write() as session:
            audit.record(session, ctx.clock(), action, f"obj_{number:08}", **data)


def raw(ctx: Context, *statements: str) -> None:
    """What somebody does who holds the database itself, and does not want it refused."""
    drop = (
        ("DROP TRIGGER IF EXISTS audit_no_update", "DROP TRIGGER IF EXISTS audit_no_delete")
        if ctx.db.is_sqlite
        else ("DROP TRIGGER IF EXISTS audit_no_change ON audit",)
    )
    with ctx.db.engine.execution_options(diamond_write=True).begin() as connection:
        for statement in (*drop, *statements):
            connection.exec_driver_sql(statement)


def test_an_entry_says_who_did_what_from_where(ctx: Context, clock: Clock) -> None:
    with acting(ALICE):
        write(ctx, 1, name="x")
    (entry,), more = audit.entries(ctx)
    assert more is None
    assert entry == AuditEntry(
        seq=1, at=clock.now, action="thing.done", user_id=ALICE.user_id, user="alice", via="tok_000000001",
        address="192.0.2.7", object="obj_00000000", data={"name": "x"}, previous=FIRST, hash=entry.hash,
    )  # fmt: skip
    assert audit.head(ctx) == AuditHead(seq=1, hash=entry.hash, at=clock.now)
    verdict = audit.verify(ctx)
    assert (verdict.ok, verdict.entries, verdict.seq, verdict.hash) == (True, 1, 1, entry.hash)


def test_the_chain_holds_under_eight_writers_at_once(ctx: Context) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with acting(Actor(name=f"user{number}")):
                for turn in range(15):
                    with ctx.db.write() as session:
                        for step in range(turn % 3 + 1):
                            audit.record(session, ctx.clock() + turn / 7, "thing.done", turn=turn, step=step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    verdict = audit.verify(ctx)
    assert verdict.ok, verdict.problem
    assert verdict.entries == 8 * 5 * (1 + 2 + 3)


def test_what_fails_leaves_no_entry(ctx: Context) -> None:
    write(ctx, 1)

    def fail() -> None:
        with ctx.db.write() as session:
            audit.record(session, ctx.clock(), "thing.done")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert audit.head(ctx).seq == 1
    write(ctx, 1)
    assert audit.verify(ctx).ok


def test_every_value_hashes_the_same_after_the_database_had_it(ctx: Context, clock: Clock) -> None:
    for at in (0, 1, 1_800_000_000, 0.1 + 0.2, 1_762_999_999.123456789, 1e15 / 3):
        clock.now = at
        odd = {
            "nan": float("nan"), "big": 2**70, "minus": -0.0, "third": 1 / 3, "whole": 5.0, "tiny": 5e-324,
            "text": "naïve \u2028 \x00 \ud800 \U0001f48e", "list": [1, 2.5, None, True, {"a\x00": {3, 1, 2}}],
            "long": "x" * 10_000, "nothing": None,
        }  # fmt: skip
        write(ctx, 1, **odd)
    verdict = audit.verify(ctx)
    assert verdict.ok, verdict.problem
    exported = b"".join(audit.export(ctx)).splitlines()
    assert verify_export(exported).ok


@pytest.mark.parametrize("statement", ["UPDATE audit SET action = 'x'", "DELETE FROM audit"])
def test_the_database_refuses_to_change_it(ctx: Context, statement: str) -> None:
    write(ctx, 2)
    with (
        pytest.raises(exc.DBAPIError, match="never changed"),
        ctx.db.engine.execution_options(diamond_write=True).begin() as connection,
    ):
        connection.execute(sa.text(statement))
    assert audit.verify(ctx).ok


@pytest.mark.parametrize(
    ("statement", "broken", "says"),
    [
        ("UPDATE audit SET \"user\" = 'mallory' WHERE seq = 3", 3, "changed"),
        ("UPDATE audit SET data = '{\"a\":2}' WHERE seq = 3", 3, "changed"),
        ("UPDATE audit SET at = at + 0.001 WHERE seq = 3", 3, "changed"),
        ("UPDATE audit SET address = '' WHERE seq = 5", 5, "changed"),
        ("DELETE FROM audit WHERE seq = 3", 3, "missing"),
        ("DELETE FROM audit WHERE seq = 1", 1, "missing"),
        ("DELETE FROM audit WHERE seq = 5", 5, "cut off"),
        ("DELETE FROM audit", 1, "cut off"),
        ("UPDATE audit SET seq = 6 WHERE seq = 5", 5, "missing"),
    ],
)
def test_tampering_in_the_database_is_found(ctx: Context, statement: str, broken: int, says: str) -> None:
    with acting(ALICE):
        write(ctx, 5, a=1)
    raw(ctx, statement)
    verdict = audit.verify(ctx)
    assert not verdict.ok
    assert verdict.broken == broken
    assert says in verdict.problem


def test_what_the_chain_alone_cannot_show_a_head_kept_elsewhere_does(ctx: Context) -> None:
    write(ctx, 5)
    kept = parse_head(str(audit.head(ctx)))
    raw(ctx, "DELETE FROM audit WHERE seq > 3", "UPDATE counters SET value = 3 WHERE name = 'audit'")
    assert audit.verify(ctx).ok  # an honest, shorter log, as far as it can tell
    cut = audit.verify(ctx, kept)
    assert (cut.ok, cut.broken) == (False, 4)
    write(ctx, 4, action="other.thing")
    rewritten = audit.verify(ctx, kept)
    assert (rewritten.ok, rewritten.broken) == (False, 5)
    assert "written anew" in rewritten.problem
    assert audit.verify(ctx).ok


def test_a_head_stays_part_of_a_log_that_grows(ctx: Context) -> None:
    assert audit.verify(ctx, audit.head(ctx)).ok  # of an empty log
    write(ctx, 3)
    kept = audit.head(ctx)
    write(ctx, 3)
    assert audit.verify(ctx, kept).ok
    with pytest.raises(InvalidInput):
        parse_head("3:abc")


def exported(ctx: Context, after: int = 0) -> list[bytes]:
    return b"".join(audit.export(ctx, after)).splitlines(keepends=True)


def test_an_export_is_checked_without_a_server(ctx: Context) -> None:
    write(ctx, 4)
    kept = audit.head(ctx)
    lines = exported(ctx)
    assert len(lines) == 1 + 5 + 1  # that it was exported is an entry too
    assert json.loads(lines[-2])["action"] == "audit.exported"
    assert verify_export(lines, kept).ok
    later = exported(ctx, 4)
    assert verify_export(later).entries == 2
    assert verify_export(later, kept).ok
    assert not verify_export(later, AuditHead(seq=4, hash="0" * 64)).ok
    assert not verify_export(later, AuditHead(seq=2, hash="0" * 64)).ok, "what it does not hold, it cannot show"
    with pytest.raises(NotFound):
        audit.export(ctx, 99)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda lines: lines[:-1], "cut off"),
        (lambda lines: lines[:-2] + lines[-1:], "cut off"),
        (lambda lines: lines[:2] + lines[3:], "missing"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "missing"),
        (lambda lines: [line.replace(b"thing.done", b"thing.gone", 1) for line in lines], "changed"),
        (lambda lines: [lines[0], *[line.replace(b'"previous":"0', b'"previous":"1') for line in lines[1:]]], "follow"),
    ],
)
def test_a_changed_export_is_found(ctx: Context, spoil: Callable[[list[bytes]], list[bytes]], says: str) -> None:
    write(ctx, 4)
    verdict = verify_export(spoil(exported(ctx)))
    assert not verdict.ok
    assert says in verdict.problem


@pytest.mark.parametrize("lines", [[], [b"{}"], [b"not json"], [b'{"kind":"diamond-audit","format":2}']])
def test_what_is_no_export_is_said_to_be_none(lines: list[bytes]) -> None:
    with pytest.raises(InvalidInput):
        verify_export(lines)


def test_entries_are_found_by_who_what_and_when(ctx: Context, clock: Clock, user_id: str) -> None:
    before = audit.head(ctx).seq
    with acting(ALICE):
        write(ctx, 3, action="task.created")
        clock.advance(100)
        write(ctx, 2, action="tasks.other")
    write(ctx, 2, action="task.removed")

    def seqs(**query: object) -> list[int]:
        return [entry.seq - before for entry in audit.entries(ctx, **query)[0]]  # type: ignore[arg-type]

    assert seqs(user="alice") == [5, 4, 3, 2, 1] == seqs(user=ALICE.user_id) == seqs(user_id=ALICE.user_id)
    assert seqs(action="task") == [7, 6, 3, 2, 1]
    assert seqs(action="task.created") == [3, 2, 1]
    assert seqs(obj="obj_00000001") == [7, 5, 2]
    assert seqs(since=clock.now, action="tasks") == [5, 4]
    assert seqs(until=clock.now, user="alice") == [3, 2, 1]
    assert seqs(user="nobody") == []
    first, cursor = audit.entries(ctx, user="alice", limit=2)
    second, cursor = audit.entries(ctx, user="alice", limit=2, cursor=cursor)
    third, end = audit.entries(ctx, user="alice", limit=2, cursor=cursor)
    assert [entry.seq - before for entry in (*first, *second, *third)] == [5, 4, 3, 2, 1]
    assert end is None
    with pytest.raises(InvalidInput):
        audit.entries(ctx, action="%' OR 1=1")


def test_refusals_are_noted_but_cannot_fill_the_log(ctx: Context, clock: Clock) -> None:
    with acting(ALICE):
        noted = [audit.refuse(ctx, "access.refused", path="/x") for _ in range(120)]
    assert noted == [True] * audit.MOST_REFUSED_BY_ONE + [False] * 20
    found, _ = audit.entries(ctx, action="access")
    assert "left out" in found[0].data["more"]
    for number in range(120):
        with acting(Actor(name="", address=f"198.51.100.{number}")):
            audit.refuse(ctx, "session.refused")
    assert len(audit.entries(ctx, limit=1000)[0]) == audit.MOST_REFUSED
    clock.advance(61)
    assert audit.refuse(ctx, "session.refused")


def test_what_people_do_to_endpoints_and_tasks_is_in_it(ctx: Context, user_id: str) -> None:
    with acting(Actor(user_id=user_id, name="alice", address="192.0.2.1")):
        endpoint, _ = endpoints.create(ctx, user_id, "alpha")
        enrolment.renew_code(ctx, user_id, "alpha")
        enrolment.rotate(ctx, user_id, "alpha")
        enrolment.revoke(ctx, user_id, "alpha")
        task, _ = tasks.create(ctx, user_id, {"run": "true", "name": "first"})
        tasks.cancel(ctx, user_id, task.id)
        endpoints.remove(ctx, user_id, "alpha", force=True)
    found = [(entry.action, entry.object) for entry in reversed(audit.entries(ctx, user="alice")[0])]
    assert found == [
        ("endpoint.created", endpoint.id),
        ("endpoint.code_made", endpoint.id),
        ("endpoint.rotation_asked", endpoint.id),
        ("endpoint.revoked", endpoint.id),
        ("task.created", task.id),
        ("task.cancel_requested", task.id),
        ("endpoint.removed", endpoint.id),
    ]


def test_a_second_start_finds_the_chain_as_it_was(ctx: Context, database_url: str, tmp_path: Path) -> None:
    write(ctx, 3)
    kept = audit.head(ctx)
    again = make_context(database_url, tmp_path / "again")
    write(again, 2)
    assert audit.verify(again, kept).ok
    again.db.close()


def test_what_people_do_to_images_is_in_it(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    with acting(Actor(user_id=user_id, name="alice", address="192.0.2.1")):
        made, _ = image_builds.build(ctx, user_id, {"name": "env", "base": "docker://x:1"}, endpoint="alpha")
        agent.finish()
        images.share(ctx, user_id, made.image.id, "public")
        image_copies.copy(ctx, user_id, made.image.id, "beta")
        image_copies.export(ctx, user_id, made.image.id, endpoint="alpha")
        image_copies.remove(ctx, user_id, made.image.id, force=True)
        image_copies.prune(ctx, user_id, "alpha")
    assert beta
    found = list(reversed(audit.entries(ctx, user="alice")[0]))
    about = [entry for entry in found if entry.object == made.image.id]
    assert [entry.action for entry in about] == ["image.building", "image.shared", "image.building", "image.removed"]
    assert [entry.data.get("endpoint") for entry in about[:3:2]] == ["alpha", "beta"]
    work = [entry.data["work"] for entry in found if entry.action == "task.created"]
    assert work[0] == "build" and "export" in work and "remove" in work and work[-1] == "prune"
    assert audit.verify(ctx).ok
