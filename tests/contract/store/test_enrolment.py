"""Codes and tokens of agents, on every kind of database: what is exchanged once, replaced, revoked and removed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts
from diamond.core.enrolment import CODE_VALID_S, NewAgent, new_token, plain_code, token_hash
from diamond.core.errors import Conflict, InvalidInput, NotFound, Unauthenticated
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.wire import Hello, JobReport, Report
from diamond.server.services import agents, bootstrap, endpoints, enrolment, tasks, tokens
from diamond.server.services.context import Context
from diamond.server.store.models import EnrolmentRow, TokenRow
from testing.context import Clock

HOME, OTHER = "agt_00000000a", "agt_00000000b"


def asked(code: str, token: str, instance: str = HOME, **more: bool) -> NewAgent:
    return NewAgent(code=code, token_sha256=token_hash(token), instance=instance, hostname="login1", **more)


def holder(ctx: Context, token: str) -> str | None:
    return tokens.authenticate(ctx, token).endpoint_id


def hello(ctx: Context, endpoint_id: str, instance: str = HOME) -> None:
    facts = EndpointFacts(scheduler="local", hostname="login1", cpus_per_node=8, mem_bytes_per_node=2**34)
    agents.hello(ctx, endpoint_id, Hello(facts=facts), instance)


def test_a_code_is_exchanged_once_and_the_exchange_may_be_repeated(ctx: Context, user_id: str) -> None:
    endpoint, code = endpoints.create_with_code(ctx, user_id, "cluster")
    assert endpoint.access == "code"
    token = new_token()
    look = enrolment.exchange(ctx, asked(code.code, token, look=True))
    assert (look.endpoint_id, look.endpoint_name) == (endpoint.id, "cluster")
    with pytest.raises(Unauthenticated):
        holder(ctx, token)  # looking gives nothing away
    for spelled in (code.code, code.code.lower(), code.code.replace("-", " "), plain_code(code.code)):
        assert enrolment.exchange(ctx, asked(spelled, token)).endpoint_id == endpoint.id
    assert holder(ctx, token) == endpoint.id
    assert endpoints.get(ctx, user_id, "cluster").access == "enrolled"
    with pytest.raises(Unauthenticated, match="used already"):
        enrolment.exchange(ctx, asked(code.code, new_token()))


def test_of_two_agents_with_one_code_at_the_same_moment_one_wins(ctx: Context, user_id: str) -> None:
    for round_number in range(5):
        endpoint, code = endpoints.create_with_code(ctx, user_id, f"cluster{round_number}")
        agents_tokens = [new_token() for _ in range(4)]

        def exchange(token: str, code: str = code.code) -> str:
            try:
                return enrolment.exchange(ctx, asked(code, token, f"agt_{token_hash(token)[:12]}")).endpoint_id
            except Unauthenticated:
                return ""

        with ThreadPoolExecutor(len(agents_tokens)) as pool:
            answers = list(pool.map(exchange, agents_tokens))
        assert sorted(answers) == ["", "", "", endpoint.id]
        (winner,) = [token for token, answer in zip(agents_tokens, answers, strict=True) if answer]
        for token in agents_tokens:
            if token == winner:
                assert holder(ctx, token) == endpoint.id
            else:
                with pytest.raises(Unauthenticated):
                    holder(ctx, token)


def test_codes_expire_and_a_new_one_voids_the_old(ctx: Context, user_id: str, clock: Clock) -> None:
    _, first = endpoints.create_with_code(ctx, user_id, "cluster")
    second = enrolment.renew_code(ctx, user_id, "cluster")
    with pytest.raises(Unauthenticated, match="expired"):
        enrolment.exchange(ctx, asked(first.code, new_token()))
    clock.advance(CODE_VALID_S + 1)
    with pytest.raises(Unauthenticated, match="expired"):
        enrolment.exchange(ctx, asked(second.code, new_token()))
    assert endpoints.get(ctx, user_id, "cluster").access == "none"


@pytest.mark.parametrize("code", ["", "0000-0000-0000", "x" * 5000, "ÄÖÜ0-0000-0000", "'; DROP TABLE tokens; --"])
def test_codes_that_are_none(ctx: Context, user_id: str, code: str) -> None:
    endpoints.create_with_code(ctx, user_id, "cluster")
    with pytest.raises(Unauthenticated, match="not valid"):
        enrolment.exchange(ctx, asked(code, new_token()))


def test_what_an_agent_says_of_itself_is_checked(ctx: Context, user_id: str) -> None:
    _, code = endpoints.create_with_code(ctx, user_id, "cluster")
    with pytest.raises(InvalidInput):
        enrolment.exchange(ctx, NewAgent(code=code.code, token_sha256="F" * 64, instance=HOME))
    with pytest.raises(InvalidInput):
        enrolment.exchange(ctx, asked(code.code, new_token(), instance="../../etc"))
    stolen = new_token()
    with ctx.db.write() as session:
        theirs = tokens.issue(session, now=1.0, user_id=user_id)
    with pytest.raises(Conflict):
        enrolment.exchange(ctx, asked(code.code, theirs))  # somebody's token cannot become an agent's
    assert enrolment.exchange(ctx, asked(code.code, stolen)).endpoint_name == "cluster"


def test_nothing_secret_is_stored(ctx: Context, user_id: str) -> None:
    _, code = endpoints.create_with_code(ctx, user_id, "cluster")
    token = new_token()
    enrolment.exchange(ctx, asked(code.code, token))
    with ctx.db.read() as session:
        rows = [vars(row) for row in session.scalars(sa.select(EnrolmentRow))]
        rows += [vars(row) for row in session.scalars(sa.select(TokenRow))]
    stored = repr(rows)
    assert plain_code(code.code) not in stored
    assert token not in stored


def test_enrolling_anew_kills_the_old_token_and_guards_the_old_home(ctx: Context, user_id: str, clock: Clock) -> None:
    endpoint, code = endpoints.create_with_code(ctx, user_id, "cluster")
    old, new = new_token(), new_token()
    enrolment.exchange(ctx, asked(code.code, old))
    hello(ctx, endpoint.id)
    again = enrolment.renew_code(ctx, user_id, "cluster")
    assert holder(ctx, old) == endpoint.id
    with pytest.raises(Conflict, match="another agent already speaks"):
        enrolment.exchange(ctx, asked(again.code, new, instance=OTHER))
    assert holder(ctx, old) == endpoint.id, "a refused exchange changes nothing"
    enrolment.exchange(ctx, asked(again.code, new))
    assert holder(ctx, new) == endpoint.id
    with pytest.raises(Unauthenticated, match="revoked"):
        holder(ctx, old)


def test_a_lost_home_is_taken_over_and_its_jobs_given_up(ctx: Context, user_id: str) -> None:
    endpoint, code = endpoints.create_with_code(ctx, user_id, "cluster")
    enrolment.exchange(ctx, asked(code.code, new_token()))
    hello(ctx, endpoint.id)
    task, _ = tasks.create(ctx, user_id, {"run": "true", "resources": {"infra": "cluster"}})
    assert agents.desired(ctx, endpoint.id, "", 0, HOME).orders
    again = enrolment.renew_code(ctx, user_id, "cluster")
    enrolment.exchange(ctx, asked(again.code, new_token(), instance=OTHER, take_over=True))
    hello(ctx, endpoint.id, OTHER)
    assert tasks.get(ctx, user_id, task.id).reason is Reason.LOST


def test_rotation_leaves_a_working_token_at_every_step(ctx: Context, user_id: str) -> None:
    endpoint, code = endpoints.create_with_code(ctx, user_id, "cluster")
    old, new = new_token(), new_token()
    enrolment.exchange(ctx, asked(code.code, old))
    hello(ctx, endpoint.id)
    assert enrolment.rotate(ctx, user_id, "cluster") == (endpoint.id, True)
    assert enrolment.wants_rotation(ctx, endpoint.id)
    for _ in range(2):
        enrolment.accept_token(ctx, endpoint.id, token_hash(new))
        assert holder(ctx, old) == holder(ctx, new) == endpoint.id
    for _ in range(2):
        enrolment.confirm_token(ctx, endpoint.id, new)
        assert holder(ctx, new) == endpoint.id
        with pytest.raises(Unauthenticated):
            holder(ctx, old)
    assert not enrolment.wants_rotation(ctx, endpoint.id)
    with pytest.raises(Conflict):
        enrolment.accept_token(ctx, endpoint.id, token_hash(old))  # the dead do not rise


def test_tokens_expire_unless_the_agent_renews_them(ctx: Context, user_id: str, clock: Clock) -> None:
    endpoint, code = endpoints.create_with_code(ctx, user_id, "cluster")
    first, second = new_token(), new_token()
    enrolment.exchange(ctx, asked(code.code, first))
    hello(ctx, endpoint.id)
    shown = endpoints.get(ctx, user_id, "cluster")
    assert shown.token_expires_at == clock() + ctx.agent_token_s
    assert not enrolment.wants_new_token(ctx, endpoint.id)

    clock.advance(ctx.agent_token_s / 2 + 1)
    assert enrolment.wants_new_token(ctx, endpoint.id)
    enrolment.accept_token(ctx, endpoint.id, token_hash(second))
    # Until the new token has been used, the agent may have been killed with the old one in hand.
    assert enrolment.wants_new_token(ctx, endpoint.id)
    enrolment.confirm_token(ctx, endpoint.id, second)
    assert not enrolment.wants_new_token(ctx, endpoint.id)

    clock.advance(ctx.agent_token_s - 1)
    assert holder(ctx, second) == endpoint.id
    clock.advance(1)
    with pytest.raises(Unauthenticated, match="has expired") as refused:
        holder(ctx, second)
    assert "endpoint enroll" in refused.value.hint
    assert endpoints.get(ctx, user_id, "cluster").access == "expired"

    third = new_token()
    again = enrolment.renew_code(ctx, user_id, "cluster")
    assert endpoints.get(ctx, user_id, "cluster").access == "code"
    enrolment.exchange(ctx, asked(again.code, third))
    assert holder(ctx, third) == endpoint.id
    assert endpoints.get(ctx, user_id, "cluster").access == "enrolled"


def test_a_token_handed_out_expires_too(ctx: Context, user_id: str, clock: Clock) -> None:
    endpoint, token = endpoints.create(ctx, user_id, "cluster")
    clock.advance(ctx.agent_token_s - 1)
    assert holder(ctx, token) == endpoint.id
    clock.advance(1)
    with pytest.raises(Unauthenticated, match="has expired"):
        holder(ctx, token)


def test_the_embedded_agent_outlives_a_long_holiday(ctx: Context, user_id: str, clock: Clock) -> None:
    first = bootstrap.prepare(ctx, embedded="holiday").agent_token_file
    assert first is not None
    old = first.read_text()
    endpoint_id = holder(ctx, old)
    assert endpoint_id is not None
    hello(ctx, endpoint_id)
    task, _ = tasks.create(ctx, user_id, {"run": "true", "resources": {"infra": "holiday"}})
    assert agents.desired(ctx, endpoint_id, "", 0, HOME).orders
    clock.advance(ctx.agent_token_s + 1)
    bootstrap.prepare(ctx, embedded="holiday")
    assert first.read_text() != old
    assert holder(ctx, first.read_text()) == endpoint_id
    assert not tasks.get(ctx, user_id, task.id).state.is_final  # its job may still run there


def test_revoking_is_final_and_repeatable(ctx: Context, user_id: str) -> None:
    endpoint, code = endpoints.create_with_code(ctx, user_id, "cluster")
    token = new_token()
    enrolment.exchange(ctx, asked(code.code, token))
    hello(ctx, endpoint.id)
    pending = enrolment.renew_code(ctx, user_id, "cluster")
    assert (enrolment.revoke(ctx, user_id, "cluster"), enrolment.revoke(ctx, user_id, "cluster")) == (1, 0)
    found = endpoints.get(ctx, user_id, "cluster")
    assert (found.access, found.online) == ("revoked", False)
    with pytest.raises(Unauthenticated):
        holder(ctx, token)
    with pytest.raises(Unauthenticated):
        enrolment.exchange(ctx, asked(pending.code, new_token()))
    with pytest.raises(Unauthenticated):
        enrolment.exchange(ctx, asked(code.code, token))
    with pytest.raises(Conflict, match="no agent token"):
        enrolment.rotate(ctx, user_id, "cluster")
    with pytest.raises(NotFound):
        enrolment.revoke(ctx, user_id, "nowhere")


def test_removing_keeps_records_frees_the_name_and_spares_live_jobs(ctx: Context, user_id: str) -> None:
    endpoint, token = endpoints.create(ctx, user_id, "cluster")
    hello(ctx, endpoint.id)
    spec = {"run": "true", "resources": {"infra": "cluster"}}
    done, _ = tasks.create(ctx, user_id, spec)
    (order,) = agents.desired(ctx, endpoint.id, "", 0, HOME).orders
    ended = JobReport(job_id=order.job_id, state=JobState.SUCCEEDED, exit_code=0)
    agents.report(ctx, endpoint.id, Report(epoch=ctx.epoch, jobs=(ended,)), HOME)
    live, _ = tasks.create(ctx, user_id, spec)
    with pytest.raises(Conflict, match="1 live job"):
        endpoints.remove(ctx, user_id, "cluster")
    assert endpoints.remove(ctx, user_id, "cluster", force=True) == 1
    assert tasks.get(ctx, user_id, live.id).reason is Reason.LOST
    kept = tasks.get(ctx, user_id, done.id)
    assert (kept.state, kept.endpoint) == (TaskState.SUCCEEDED, "cluster (removed)")
    with pytest.raises(Unauthenticated, match="was removed"):
        holder(ctx, token)
    with pytest.raises(NotFound):
        endpoints.get(ctx, user_id, "cluster")
    assert "cluster" not in {each.name for each in endpoints.list_endpoints(ctx, user_id)}
    endpoints.create(ctx, user_id, "cluster")
    assert endpoints.remove(ctx, user_id, "cluster") == 0
    waiting, _ = tasks.create(ctx, user_id, {"run": "true"})
    assert "cluster" not in tasks.get(ctx, user_id, waiting.id).pending_reason


@pytest.mark.parametrize(
    "name", ["", "a b'$(x)", "../up", "Ünïcode", "-dash", "x" * 64, "a/b", "cluster (removed)", "a\n"]
)
def test_names_that_are_none(ctx: Context, user_id: str, name: str) -> None:
    with pytest.raises(InvalidInput, match="not an endpoint name"):
        endpoints.create_with_code(ctx, user_id, name)
