"""Notices on both databases: each event makes each of its notices once, and each is sent until it arrived or was
given up, whatever is killed and however many servers there are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import InvalidInput, NotFound, RateLimited
from diamond.core.notices import Channel
from diamond.core.wire import Hello
from diamond.server.services import agents, audit, endpoints, notices, outbox
from diamond.server.services.context import Context
from diamond.server.store.acting import Actor, acting
from diamond.server.store.db import record_event
from diamond.server.store.identity_models import NoticeRow, NoticeRuleRow
from diamond.server.store.models import EndpointRow, Meta, TaskRow, UserRow
from testing.context import Clock

URL = "https://example.org/hook"


def add_rule(ctx: Context, user_id: str, *events: str, target: str = URL) -> str:
    return notices.create(ctx, user_id, Channel.WEBHOOK, target, events or ("all",)).id


def make_task(ctx: Context, user_id: str, number: int = 1, **more: Any) -> str:
    task_id = f"tsk_{number:09}"
    with ctx.db.write() as session:
        row = TaskRow(
            id=task_id, owner_id=user_id, name=f"train {number}", spec={}, state="PENDING", desired="run", detail="",
            attempt=1, priority=0, pending_reason="", failures=0, outputs=[], created_at=ctx.clock(), **more,
        )  # fmt: skip
        session.add(row)
    return task_id


def happen(ctx: Context, user_id: str, task_id: str, state: str, **data: Any) -> None:
    with ctx.db.write() as session:
        record_event(
            session, at=ctx.clock(), kind="task.state", owner_id=user_id, task_id=task_id, data={"state": state, **data}
        )


def match_all(ctx: Context) -> None:
    while outbox.match(ctx):
        pass


def made(ctx: Context) -> list[NoticeRow]:
    with ctx.db.read() as session:
        return list(session.scalars(sa.select(NoticeRow).order_by(NoticeRow.event_seq, NoticeRow.rule_id)))


def names(ctx: Context) -> list[str]:
    return [row.body["event"] for row in made(ctx)]


def test_a_rule_tells_of_what_its_user_chose_and_of_nothing_else(ctx: Context, user_id: str, other_id: str) -> None:
    task = make_task(ctx, user_id)
    happen(ctx, user_id, task, "FAILED", reason="EXIT_NONZERO", exit_code=3)  # before there was a rule
    chosen = add_rule(ctx, user_id, "task.failed", "task.succeeded")
    everything = add_rule(ctx, user_id)
    add_rule(ctx, other_id)
    happen(ctx, user_id, task, "RUNNING")
    happen(ctx, user_id, task, "FAILED", reason="EXIT_NONZERO", exit_code=3, detail="Traceback")
    match_all(ctx)
    match_all(ctx)
    rows = made(ctx)
    assert [(row.rule_id, row.body["event"]) for row in rows] == [
        (everything, "task.started"),
        (chosen, "task.failed"),
        (everything, "task.failed"),
    ]
    told = rows[-1].body
    assert told["title"] == rows[-1].subject == "Task train 1 failed"
    assert "exit code 3" in told["why"] and "Traceback" in told["why"]
    assert f"diamond logs {task}" in told["advice"]
    assert told["about"]["task_id"] == task


def test_which_changes_of_a_task_are_news(ctx: Context, user_id: str) -> None:
    add_rule(ctx, user_id)
    task = make_task(ctx, user_id)
    happen(ctx, user_id, task, "QUEUED")
    happen(ctx, user_id, task, "RUNNING")
    happen(ctx, user_id, task, "PENDING", reason="TIME_LIMIT", next="another job continues it")  # it goes on
    happen(ctx, user_id, task, "RUNNING")
    happen(ctx, user_id, task, "PENDING", reason="NODE_FAIL", next_attempt_at=ctx.clock() + 60)
    happen(ctx, user_id, task, "RUNNING")
    happen(ctx, user_id, task, "CANCELLED", reason="CANCELLED")
    build = make_task(ctx, user_id, 2, kind="build")
    happen(ctx, user_id, build, "FAILED", reason="EXIT_NONZERO")  # image.failed tells of that
    with ctx.db.write() as session:
        data = {"image_id": "img_000000001", "name": "climate", "endpoint": "hpc", "message": "no such package"}
        record_event(session, at=ctx.clock(), kind="image.failed", owner_id=user_id, task_id=build, data=data)
        record_event(session, at=ctx.clock(), kind="image.ready", owner_id=user_id, task_id=build, data=data)
        record_event(session, at=ctx.clock(), kind="quota.near", owner_id=user_id, data={"what": "GPU hours"})
        record_event(session, at=ctx.clock(), kind="something.new", owner_id=user_id, data={})
    match_all(ctx)
    assert names(ctx) == [
        "task.started", "task.retrying", "task.cancelled", "image.failed", "image.ready", "quota.near",
    ]  # fmt: skip


def test_an_agent_that_falls_silent_is_told_of_once(ctx: Context, user_id: str, clock: Clock) -> None:
    add_rule(ctx, user_id, "endpoint.offline")
    endpoint, _ = endpoints.create(ctx, user_id, "alpha")
    for _ in range(2):
        agents.hello(ctx, endpoint.id, Hello(facts=EndpointFacts(scheduler="local")))
        clock.advance(200)
        assert outbox.tell_silence(ctx) == 0
        clock.advance(200)
        assert [outbox.tell_silence(ctx), outbox.tell_silence(ctx)] == [1, 0]
    agents.hello(ctx, endpoint.id, Hello(facts=EndpointFacts(scheduler="local")))
    agents.goodbye(ctx, endpoint.id)
    clock.advance(400)
    assert outbox.tell_silence(ctx) == 0, "it said goodbye"
    match_all(ctx)
    assert names(ctx) == ["endpoint.offline"] * 3
    assert "6m 40s" in made(ctx)[0].body["why"]
    with ctx.db.write() as session:  # long before there were notices
        session.get_one(EndpointRow, endpoint.id).last_seen_at = clock.now - 100 * 86_400
        session.get_one(EndpointRow, endpoint.id).silence_told = None
    assert outbox.tell_silence(ctx) == 0


def test_without_rules_the_cursor_costs_no_write(ctx: Context, user_id: str) -> None:
    def cursor() -> str:
        with ctx.db.read() as session:
            return session.execute(sa.select(Meta.value).where(Meta.key == outbox.CURSOR)).scalar_one()

    task = make_task(ctx, user_id)
    before = cursor()
    for _ in range(5):
        happen(ctx, user_id, task, "RUNNING")
    assert outbox.match(ctx) == 0
    assert cursor() == before
    with ctx.db.write() as session:
        for _ in range(1001):
            record_event(session, at=1.0, kind="job.seen", owner_id=user_id, data={})
    outbox.match(ctx)
    assert cursor() != before, "it does not fall behind for ever"


def test_paused_rules_and_closed_accounts_are_left_alone(ctx: Context, user_id: str, other_id: str) -> None:
    paused, closed = add_rule(ctx, user_id), add_rule(ctx, other_id)
    notices.change(ctx, user_id, paused, paused=True)
    with ctx.db.write() as session:
        session.get_one(UserRow, other_id).disabled_at = 1.0
    for owner, number in ((user_id, 1), (other_id, 2)):
        happen(ctx, owner, make_task(ctx, owner, number), "SUCCEEDED")
    match_all(ctx)
    assert made(ctx) == []
    notices.change(ctx, user_id, paused, paused=False)
    match_all(ctx)
    assert made(ctx) == [], "what happened meanwhile is not told later"
    happen(ctx, user_id, "tsk_000000001", "FAILED", reason="LOST")
    match_all(ctx)
    assert [row.rule_id for row in made(ctx)] == [paused]
    assert closed


def test_one_that_does_not_arrive_is_tried_five_times_over_hours(ctx: Context, user_id: str, clock: Clock) -> None:
    rule = add_rule(ctx, user_id)
    happen(ctx, user_id, make_task(ctx, user_id), "SUCCEEDED")
    match_all(ctx)
    begun, tried = clock.now, 0
    while (due := outbox.next_due(ctx)) is not None:
        clock.now = due
        (parcel,) = outbox.claim(ctx, 4)
        assert outbox.claim(ctx, 4) == [], "nobody else gets it meanwhile"
        outbox.settle(ctx, parcel, "it refuses connections")
        tried += 1
        assert tried <= 5
    assert tried == 5
    assert 2 * 3600 < clock.now - begun < 6 * 3600
    (row,) = made(ctx)
    assert (row.attempts, row.delivered_at, row.error) == (5, None, "it refuses connections")
    (shown,) = notices.list_rules(ctx, user_id)
    assert (shown.id, shown.failures, shown.last_error, shown.waiting) == (rule, 5, "it refuses connections", 0)


def test_a_rule_that_never_works_is_paused_with_the_reason(ctx: Context, user_id: str, clock: Clock) -> None:
    add_rule(ctx, user_id)
    for number in range(30):
        happen(ctx, user_id, make_task(ctx, user_id, number), "SUCCEEDED")
    match_all(ctx)
    tried = 0
    while parcels := outbox.claim(ctx, 4):
        assert len(parcels) == 1, "one at a time for each receiver"
        outbox.settle(ctx, parcels[0], "it answered 500")
        tried += 1
        clock.advance(1)
    (shown,) = notices.list_rules(ctx, user_id)
    assert tried == outbox.MAX_FAILURES == shown.failures
    assert shown.paused_at is not None
    assert "it answered 500" in shown.last_error
    assert shown.waiting == 0
    again = notices.change(ctx, user_id, shown.id, paused=False)
    assert (again.paused_at, again.failures, again.last_error) == (None, 0, "")


def test_success_forgets_failures_and_hopeless_ones_are_not_repeated(ctx: Context, user_id: str, clock: Clock) -> None:
    add_rule(ctx, user_id)
    for number in range(2):
        happen(ctx, user_id, make_task(ctx, user_id, number), "SUCCEEDED")
    match_all(ctx)
    (first,) = outbox.claim(ctx, 4)
    outbox.settle(ctx, first, "it may not be sent there", hopeless=True)
    (second,) = outbox.claim(ctx, 4)
    outbox.settle(ctx, second)
    assert outbox.next_due(ctx) is None
    (shown,) = notices.list_rules(ctx, user_id)
    assert (shown.failures, shown.last_error, shown.delivered_at) == (0, "", clock.now)
    clock.advance(outbox.KEEP_S + 1)
    assert outbox.sweep(ctx) == 2


def test_a_process_that_died_while_sending_costs_a_delay_not_the_notice(
    ctx: Context, user_id: str, clock: Clock
) -> None:
    add_rule(ctx, user_id)
    happen(ctx, user_id, make_task(ctx, user_id), "SUCCEEDED")
    match_all(ctx)
    (first,) = outbox.claim(ctx, 4)  # and then it is killed
    clock.advance(outbox.DELAYS_S[0])
    (again,) = outbox.claim(ctx, 4)
    assert again.id == first.id
    for _ in range(10):
        clock.advance(10_000)
        outbox.claim(ctx, 4)
    assert outbox.next_due(ctx) is None, "not for ever"


def test_rules_are_their_users_own_and_their_keys_are_sealed(ctx: Context, user_id: str, other_id: str) -> None:
    rule = notices.create(ctx, user_id, Channel.WEBHOOK, URL, ("all",))
    assert rule.key.startswith("dmdw_")
    assert notices.get(ctx, user_id, rule.id).key == ""
    with ctx.db.read() as session:
        row = session.get_one(NoticeRuleRow, rule.id)
        assert rule.key not in row.sealed_key
        assert notices.key_of(ctx, row) == rule.key
    for attempt in (notices.get, notices.remove, notices.begin_test):
        with pytest.raises(NotFound):
            attempt(ctx, other_id, rule.id)
    with pytest.raises(NotFound):
        notices.change(ctx, other_id, rule.id, paused=True)
    assert notices.begin_test(ctx, user_id, rule.id)[1] == rule.key
    happen(ctx, user_id, make_task(ctx, user_id), "SUCCEEDED")
    match_all(ctx)
    (parcel,) = outbox.claim(ctx, 1)
    assert outbox.key_of(ctx, parcel) == rule.key
    notices.remove(ctx, user_id, rule.id)
    assert made(ctx) == []
    outbox.settle(ctx, parcel)  # it was on its way
    done = [entry.action for entry in audit.entries(ctx, action="notice_rule")[0]]
    assert done == ["notice_rule.removed", "notice_rule.tested", "notice_rule.created"]


def test_nobody_can_flood_others(ctx: Context, user_id: str, clock: Clock) -> None:
    rule = ""
    for _ in range(notices.MAX_RULES):
        rule = add_rule(ctx, user_id)
    with pytest.raises(InvalidInput):
        add_rule(ctx, user_id)
    with acting(Actor(user_id=user_id, name="alice")):
        for _ in range(notices.MAX_TESTS):
            notices.begin_test(ctx, user_id, rule)
        with pytest.raises(RateLimited):
            notices.begin_test(ctx, user_id, rule)
        clock.advance(notices.TESTS_WITHIN_S)
        notices.begin_test(ctx, user_id, rule)


def test_two_senders_at_once_share_the_work(ctx: Context, user_id: str) -> None:
    owners = [user_id]
    with ctx.db.write() as session:
        for number in range(7):
            row = UserRow(id=f"usr_0000000{number}", name=f"user{number}", created_at=1.0)
            session.add(row)
            owners.append(row.id)
    for number, owner in enumerate(owners):
        add_rule(ctx, owner)
        task = make_task(ctx, owner, number)
        for _ in range(3):
            happen(ctx, owner, task, "SUCCEEDED")
    match_all(ctx)
    claimed: list[outbox.Parcel] = []

    def send() -> None:
        while parcels := outbox.claim(ctx, 2):
            claimed.extend(parcels)
            for parcel in parcels:
                outbox.settle(ctx, parcel)

    senders = [threading.Thread(target=send) for _ in range(2)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    send()  # what one of them left because the other held it just then
    assert len(claimed) == len({parcel.id for parcel in claimed}) == 24
    assert all(row.delivered_at for row in made(ctx))
    assert outbox.claim(ctx, 2, frozenset(owners)) == []


PROCESS = """
import sys, time
from pathlib import Path
from diamond.server.services import outbox
from testing.context import make_context
ctx = make_context(sys.argv[1], Path(sys.argv[2]))
print("ready", flush=True)
deadline = time.monotonic() + float(sys.argv[3])
while time.monotonic() < deadline:
    if not outbox.match(ctx):
        time.sleep(0.01)
"""


def start(database_url: str, folder: Path, seconds: float, fault: str = "") -> subprocess.Popen[bytes]:
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", **({"DIAMOND_FAULT": fault} if fault else {})}
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, database_url, str(folder), str(seconds)], env=env, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_two_processes_make_each_notice_once_even_when_one_is_killed(
    ctx: Context, user_id: str, database_url: str, tmp_path: Path
) -> None:
    rules = [add_rule(ctx, user_id), add_rule(ctx, user_id, "task.succeeded")]
    tasks = [make_task(ctx, user_id, number) for number in range(5)]
    processes = [
        start(database_url, tmp_path / "one", 60, fault="server.notices_made:3"),
        start(database_url, tmp_path / "two", 60),
    ]
    try:
        turns = 0
        while turns < 120 or (processes[0].poll() is None and turns < 5000):  # until it had its three turns
            happen(ctx, user_id, tasks[turns % 5], "SUCCEEDED", turn=turns)
            turns += 1
        assert processes[0].wait(30) == -signal.SIGKILL
        while outbox.match(ctx):
            pass
        for _ in range(1000):
            match_all(ctx)
            if len(made(ctx)) >= 2 * turns:
                break
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    rows = made(ctx)
    assert len(rows) == 2 * turns
    assert {(row.rule_id, row.event_seq) for row in rows} == {
        (rule, seq) for rule in rules for seq in {row.event_seq for row in rows}
    }
    assert len({row.event_seq for row in rows}) == turns
