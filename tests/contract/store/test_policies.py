"""What the server keeps of the rules agents obey: bounded, and on record when it changes."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts
from diamond.core.wire import Hello
from diamond.server.services import agents, endpoints
from diamond.server.services.context import Context
from diamond.server.services.policies import CHANGED, MAX_CHARS, MAX_RULES, MOST_AN_HOUR
from diamond.server.store.identity_models import AuditRow
from diamond.server.store.models import EventRow
from testing.context import Clock


def say(ctx: Context, endpoint_id: str, **facts: Any) -> None:
    agents.hello(ctx, endpoint_id, Hello(facts=EndpointFacts(scheduler="local", **facts)))


def noted(ctx: Context) -> list[dict[str, Any]]:
    with ctx.db.read() as session:
        return list(session.scalars(sa.select(EventRow.data).where(EventRow.kind == CHANGED).order_by(EventRow.seq)))


def kept(ctx: Context, user_id: str) -> EndpointFacts:
    facts = endpoints.get(ctx, user_id, "alpha").facts
    assert facts is not None
    return facts


def test_other_rules_are_an_event_and_in_the_audit_log(ctx: Context, user_id: str, clock: Clock) -> None:
    made, _ = endpoints.create(ctx, user_id, "alpha")
    file = "/etc/diamond/policy.toml"
    at = ctx.clock()
    say(ctx, made.id, policy={"max_nodes": "4", "builds": "any"}, policy_files=(file,), policy_changed_at=at)
    assert noted(ctx) == [], "the first that is said is no change"
    say(ctx, made.id, policy={"max_nodes": "4", "builds": "any"}, policy_files=(file,), policy_changed_at=at)
    assert noted(ctx) == []
    say(ctx, made.id, policy={"max_nodes": "8", "allow_others": "true"}, policy_files=(file,), policy_changed_at=at)
    assert noted(ctx) == [
        {"name": "alpha", "rules": "allow_others = true, no builds, max_nodes = 8", "files": file},
    ]
    with ctx.db.read() as session:
        entry = session.scalars(sa.select(AuditRow).where(AuditRow.action == CHANGED)).one()
    assert (entry.object, entry.data["rules"]) == (made.id, "allow_others = true, no builds, max_nodes = 8")
    known = kept(ctx, user_id)
    assert (known.policy_files, known.policy_changed_at) == ((file,), at)


def test_an_agent_cannot_say_more_than_people_can_read(ctx: Context, user_id: str) -> None:
    made, _ = endpoints.create(ctx, user_id, "alpha")
    say(ctx, made.id, policy={})
    long = "x\x1b[2J\n" * 10_000
    rules = {f"{number}{long}": long for number in range(1000)}
    say(
        ctx, made.id, policy=rules, policy_files=(long,) * 1000, policy_changed_at=ctx.clock() + 1e6,
        others_problem=long,
    )  # fmt: skip
    known = kept(ctx, user_id)
    assert len(known.policy) <= MAX_RULES and max(map(len, [*known.policy, *known.policy.values()])) <= MAX_CHARS
    assert len(known.policy_files) <= 4 and len(known.others_problem) <= MAX_CHARS
    assert known.policy_changed_at == 0.0, "what is yet to come has not happened"
    shown = "".join([*known.policy, *known.policy.values(), *known.policy_files, known.others_problem])
    assert shown.isprintable()
    (entry,) = noted(ctx)
    assert (len(entry["rules"]) <= MAX_CHARS and "and 80 more" in entry["rules"]) or len(entry["rules"]) == MAX_CHARS


def test_nor_fill_the_log_with_changes(ctx: Context, user_id: str, clock: Clock) -> None:
    made, _ = endpoints.create(ctx, user_id, "alpha")
    for number in range(MOST_AN_HOUR + 20):
        say(ctx, made.id, policy={"max_nodes": str(number)})
    assert len(noted(ctx)) == MOST_AN_HOUR
    assert kept(ctx, user_id).policy == {"max_nodes": str(MOST_AN_HOUR + 19)}, "what holds is known all the same"
    clock.advance(3700)
    say(ctx, made.id, policy={"max_nodes": "0"})
    assert len(noted(ctx)) == MOST_AN_HOUR + 1
