"""Endpoints shared with a project, on both databases: nothing of others goes there before an owner of the project has
approved, by any road, and nothing after the approval has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diamond.core.enrolment import NewAgent, new_token, token_hash
from diamond.core.errors import Conflict, DiamondError, Forbidden, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.notices import Channel
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.wire import Hello, JobReport, Report
from diamond.server.services import (
    agents,
    endpoint_shares,
    endpoints,
    enrolment,
    events,
    image_builds,
    image_copies,
    notices,
    outbox,
    overview,
    ownership,
    planning,
    pools,
    projects,
    reruns,
    secrets,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.services.ownership import Giver
from diamond.server.store.identity_models import AuditRow, NoticeRow
from diamond.server.store.models import UserRow
from testing.context import Clock
from testing.image_agent import FACTS, ImageAgent

VALUE = "planted-4be1"
RECIPE = {"name": "env", "base": "docker://python:3.13-slim", "pip": ["numpy"]}
NAMES = ("alice", "amy", "bob", "mallory", "victor")


@pytest.fixture
def who(ctx: Context) -> dict[str, str]:
    """alice and amy own project `lab`, bob and mallory are members, victor looks on."""
    ids = {name: new_id("usr") for name in NAMES}
    with ctx.db.write() as session:
        session.add_all(UserRow(id=ids[name], name=name, created_at=ctx.clock()) for name in NAMES)
    projects.create(ctx, ids["alice"], "lab")
    for name, role in (("amy", "owner"), ("bob", "member"), ("mallory", "member"), ("victor", "viewer")):
        projects.set_member(ctx, ids["alice"], "lab", name, role)
    return ids


@pytest.fixture
def trap(ctx: Context, who: dict[str, str]) -> ImageAgent:
    """mallory's endpoint, which claims to be large and to take everything, and waits to be shared with `lab`."""
    agent = ImageAgent(ctx, who["mallory"], "trap", cpus_per_node=512, takes_secrets=True, holds_pools=True)
    endpoint_shares.share(ctx, who["mallory"], "lab", "trap")
    return agent


def spec(**more: Any) -> dict[str, Any]:
    return {"run": "x", "project": "lab", **more}


def kinds(ctx: Context, user_id: str) -> list[str]:
    return [one.kind for one in events.since(ctx, user_id, 0) if one.kind.startswith("endpoint.share_")]


def entries(ctx: Context, action: str) -> list[dict[str, Any]]:
    with ctx.db.read() as session:
        return [row.data for row in session.query(AuditRow).where(AuditRow.action == action).order_by(AuditRow.seq)]


def told(ctx: Context) -> list[tuple[str, str]]:
    while outbox.match(ctx):
        pass
    with ctx.db.read() as session:
        return [(row.body["event"], row.subject) for row in session.query(NoticeRow).order_by(NoticeRow.event_seq)]


# ---- asking and deciding ---------------------------------------------------------------------------------------------


def test_a_member_asks_and_an_owner_approves(ctx: Context, who: dict[str, str]) -> None:
    for name in ("alice", "bob", "mallory"):
        notices.create(ctx, who[name], Channel.WEBHOOK, "https://example.org/hook", ("all",))
    ImageAgent(ctx, who["mallory"], "trap")
    made = endpoint_shares.share(ctx, who["mallory"], "lab", "trap")
    (waits,) = made.shares
    assert (made.endpoints, waits.endpoint, waits.owner, waits.approved_at) == ((), "trap", "mallory", None)
    assert endpoint_shares.share(ctx, who["mallory"], "lab", "trap").shares == made.shares, "asked once"
    seen = {name: len(projects.get(ctx, user_id, "lab").shares) for name, user_id in who.items()}
    assert seen == {"alice": 1, "amy": 1, "mallory": 1, "bob": 0, "victor": 0}
    assert {name: kinds(ctx, user_id) for name, user_id in who.items()} == {
        "alice": ["endpoint.share_asked"], "amy": ["endpoint.share_asked"], "bob": [], "mallory": [], "victor": [],
    }  # fmt: skip
    concerns = {name: [one.title for one in overview.concerns(ctx, who[name], [], [])] for name in ("amy", "bob")}
    assert concerns == {"amy": ["waits to be shared with project lab"], "bob": []}
    for name, error in (("bob", Forbidden), ("mallory", Forbidden), ("victor", Forbidden)):
        for call in (endpoint_shares.approve, endpoint_shares.decline):
            with pytest.raises(error):
                call(ctx, who[name], "lab", "trap")
    done = endpoint_shares.approve(ctx, who["amy"], "lab", "trap", owner="mallory")
    assert (done.endpoints, done.shares[0].approved_by) == (("trap",), "amy")
    assert endpoint_shares.approve(ctx, who["alice"], "lab", "trap").shares == done.shares, "approved once"
    assert overview.concerns(ctx, who["amy"], [], []) == []
    for name, user_id in who.items():
        assert kinds(ctx, user_id).count("endpoint.share_approved") == 1, f"{name} was told"
        assert projects.get(ctx, user_id, "lab").endpoints == ("trap",)
    assert [event for event, _ in told(ctx)].count("endpoint.share_approved") == 3
    assert ("endpoint.share_asked", "mallory asks to share endpoint trap with project lab") in told(ctx)
    assert tasks.create(ctx, who["bob"], spec())[0].endpoint == "trap"
    (entry,) = entries(ctx, "endpoint.share_approved")
    assert (entry["endpoint"], entry["project"], entry["owner"]) == ("trap", "lab", "mallory")
    with pytest.raises(Conflict, match="shared with project lab already"):
        endpoint_shares.decline(ctx, who["alice"], "lab", "trap")


def test_what_an_owner_of_the_project_shares_is_approved(ctx: Context, who: dict[str, str]) -> None:
    ImageAgent(ctx, who["alice"], "hers")
    (share,) = endpoint_shares.share(ctx, who["alice"], "lab", "hers").shares
    assert (share.approved_by, share.approved_at) == ("alice", ctx.clock())
    assert kinds(ctx, who["bob"]) == ["endpoint.share_approved"] and "endpoint.share_asked" not in kinds(
        ctx, who["amy"]
    )


def test_a_request_is_declined_or_withdrawn(ctx: Context, who: dict[str, str], trap: ImageAgent) -> None:
    for name in ("bob", "victor"):
        with pytest.raises(NotFound):  # what others asked for does not exist for them
            endpoint_shares.unshare(ctx, who[name], "lab", "trap")
    assert endpoint_shares.decline(ctx, who["alice"], "lab", "trap").shares == ()
    assert kinds(ctx, who["mallory"]) == ["endpoint.share_declined"] and kinds(ctx, who["bob"]) == []
    assert entries(ctx, "endpoint.share_declined")[0]["owner"] == "mallory"
    for name in ("alice", "mallory"):
        with pytest.raises(NotFound, match="nobody asked"):
            endpoint_shares.unshare(ctx, who[name], "lab", "trap")
        endpoint_shares.share(ctx, who["mallory"], "lab", "trap")
        assert endpoint_shares.unshare(ctx, who[name], "lab", "trap").shares == ()
    with pytest.raises(NotFound, match="nobody asked"):
        endpoint_shares.approve(ctx, who["alice"], "lab", "trap")


def test_who_became_an_owner_since_approves_by_sharing_again(
    ctx: Context, who: dict[str, str], trap: ImageAgent
) -> None:
    projects.set_member(ctx, who["alice"], "lab", "mallory", "owner")
    assert endpoint_shares.share(ctx, who["mallory"], "lab", "trap").endpoints == ("trap",)


# ---- what waits takes nothing of others' -----------------------------------------------------------------------------


def _plan(ctx: Context, user: str, agent: ImageAgent) -> object:
    return tasks.plan(ctx, user, spec(resources={"infra": "trap"}))


def _launch(ctx: Context, user: str, agent: ImageAgent) -> object:
    return tasks.create(ctx, user, spec(resources={"infra": "trap"}))


def _batch(ctx: Context, user: str, agent: ImageAgent) -> object:
    return tasks.create_many(ctx, user, [spec(), spec(resources={"infra": "trap"})])


def _run_again(ctx: Context, user: str, agent: ImageAgent) -> object:
    theirs = tasks.create(ctx, agent_owner(ctx, agent), spec(resources={"infra": "trap"}))[0]
    return reruns.rerun(ctx, user, theirs.id)


def _pool(ctx: Context, user: str, agent: ImageAgent) -> object:
    return pools.create(ctx, user, {"name": "cores", "endpoint": "trap", "slots": 4, "project": "lab"})


def _their_pool(ctx: Context, user: str, agent: ImageAgent) -> object:
    held = {"name": "cores", "endpoint": "trap", "slots": 4, "project": "lab"}
    pools.create(ctx, agent_owner(ctx, agent), held)
    return tasks.create(ctx, user, spec(pool="cores"))


def _build(ctx: Context, user: str, agent: ImageAgent) -> object:
    return image_builds.build(ctx, user, RECIPE, endpoint="trap", project="lab")


def _build_anywhere(ctx: Context, user: str, agent: ImageAgent) -> object:
    return image_builds.build(ctx, user, RECIPE, project="lab")


def _plan_a_build(ctx: Context, user: str, agent: ImageAgent) -> object:
    return image_builds.plan(ctx, user, RECIPE, project="lab")


def _copy(ctx: Context, user: str, agent: ImageAgent) -> object:
    ImageAgent(ctx, user, "own")
    image_builds.build(ctx, user, RECIPE, endpoint="own")
    return image_copies.copy(ctx, user, "env", "trap")


def agent_owner(ctx: Context, agent: ImageAgent) -> str:
    with ctx.db.read() as session:
        return session.query(UserRow).where(UserRow.name == "mallory").one().id


ROADS = (
    _plan, _launch, _batch, _run_again, _pool, _their_pool, _build, _build_anywhere, _plan_a_build, _copy
)  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
def test_every_road_to_an_endpoint_that_waits_is_shut(
    ctx: Context, who: dict[str, str], trap: ImageAgent, road: Callable[..., object]
) -> None:
    with pytest.raises(InvalidInput):
        road(ctx, who["bob"], trap)
    assert [order for order in trap.orders() if order.user == "bob"] == []


@pytest.mark.parametrize("road", ROADS)
def test_and_open_once_it_is_approved(
    ctx: Context, who: dict[str, str], trap: ImageAgent, road: Callable[..., object]
) -> None:
    """The same calls: what refuses them above is the approval that is missing."""
    endpoint_shares.approve(ctx, who["alice"], "lab", "trap")
    road(ctx, who["bob"], trap)


def test_the_attack_that_was_reported(ctx: Context, who: dict[str, str], trap: ImageAgent) -> None:
    """A plain member shares an endpoint that claims 512 cores; another member's task has a secret of their own."""
    secrets.put(ctx, who["bob"], "mine", VALUE)
    wanted = spec(secrets={"TOKEN": "mine"})
    waits, _ = tasks.create(ctx, who["bob"], wanted)
    planning.run_due(ctx)
    assert (waits.state, trap.orders()) == (TaskState.PENDING, [])
    assert tasks.plan(ctx, who["bob"], wanted)["endpoint"] is None
    for call in (tasks.plan, tasks.create):
        with pytest.raises(InvalidInput) as caught:
            call(ctx, who["bob"], {**wanted, "resources": {"infra": "trap"}})
        assert "waits for one of its owners: diamond project approve lab trap" in (caught.value.hint or "")
    with pytest.raises(NotFound):
        endpoints.get(ctx, who["bob"], "trap")


def _unshared(ctx: Context, who: dict[str, str]) -> None:
    endpoint_shares.unshare(ctx, who["alice"], "lab", "trap")


def _left(ctx: Context, who: dict[str, str]) -> None:
    projects.remove_member(ctx, who["mallory"], "lab", "mallory")


@pytest.mark.parametrize("end", [_unshared, _left])
def test_an_approval_that_ended_takes_back_jobs_and_keeps_secrets(
    ctx: Context, who: dict[str, str], trap: ImageAgent, end: Callable[[Context, dict[str, str]], None]
) -> None:
    """Also those of a job that its agent was told of just before."""
    secrets.put(ctx, who["bob"], "mine", VALUE)
    endpoint_shares.approve(ctx, who["alice"], "lab", "trap")
    wanted = spec(secrets={"TOKEN": "mine"})
    first, _ = tasks.create(ctx, who["bob"], wanted)
    (order,) = trap.orders()
    assert secrets.deliver(ctx, trap.id, order.job_id, "agt_trap").secrets[0].value == VALUE, "while it is approved"
    second, _ = tasks.create(ctx, who["bob"], wanted)
    end(ctx, who)
    with pytest.raises(Forbidden, match="bob may not run tasks at endpoint trap"):
        secrets.deliver(ctx, trap.id, order.job_id, "agt_trap")
    assert [one.task_id for one in trap.orders()] == [first.id]
    waits = tasks.get(ctx, who["bob"], second.id)
    assert (waits.state, waits.endpoint) == (TaskState.PENDING, None)


# ---- when an approval ends by itself ---------------------------------------------------------------------------------


def test_another_agent_has_to_be_approved_anew(ctx: Context, who: dict[str, str]) -> None:
    made, code = endpoints.create_with_code(ctx, who["mallory"], "trap")
    endpoint_shares.share(ctx, who["mallory"], "lab", "trap")
    endpoint_shares.approve(ctx, who["alice"], "lab", "trap")

    def enrol(code: str, home: str) -> None:
        asked = NewAgent(code=code, token_sha256=token_hash(new_token()), instance=home, hostname="here")
        enrolment.exchange(ctx, asked)

    enrol(code.code, "agt_00000000a")
    assert projects.get(ctx, who["bob"], "lab").endpoints == ("trap",), "its first agent is the one that was meant"
    hello(ctx, made.id, "agt_00000000a")
    done(ctx, who["mallory"], made.id, "agt_00000000a")
    assert endpoints.get(ctx, who["mallory"], "trap").proven_at is not None
    before = kinds(ctx, who["alice"]).count("endpoint.share_asked")
    enrol(enrolment.renew_code(ctx, who["mallory"], "trap").code, "agt_00000000a")
    assert projects.get(ctx, who["bob"], "lab").endpoints == ()
    assert kinds(ctx, who["alice"]).count("endpoint.share_asked") == before + 1
    assert endpoints.get(ctx, who["mallory"], "trap").proven_at is None, (
        "what ran there was at another machine, perhaps"
    )
    (entry,) = entries(ctx, "endpoint.approval_ended")
    assert entry["why"] == "another agent speaks for it"
    endpoint_shares.approve(ctx, who["alice"], "lab", "trap")
    agents.hello(ctx, made.id, Hello(facts=FACTS, take_over=True), "agt_00000000b")
    assert projects.get(ctx, who["bob"], "lab").endpoints == (), "the same of a home that takes over with its token"


def test_another_owner_has_to_be_approved_anew(ctx: Context, who: dict[str, str]) -> None:
    ImageAgent(ctx, who["alice"], "site")
    endpoint_shares.share(ctx, who["alice"], "lab", "site")
    ownership.transfer_endpoint(ctx, Giver(user_id=who["alice"]), "site", "mallory")
    project = projects.get(ctx, who["amy"], "lab")
    assert (project.endpoints, project.shares[0].owner) == ((), "mallory")
    assert "endpoint.share_asked" in kinds(ctx, who["amy"])
    assert endpoints.get(ctx, who["mallory"], "site").proven_at is None
    with pytest.raises(Conflict, match="endpoint site is mallory's by now, not alice's"):
        endpoint_shares.approve(ctx, who["amy"], "lab", "site", owner="alice")
    ownership.transfer_endpoint(ctx, Giver(user_id=who["mallory"]), "site", "amy")
    endpoint_shares.approve(ctx, who["alice"], "lab", "site", owner="amy")
    ownership.transfer_endpoint(ctx, Giver(user_id=who["amy"]), "site", "alice")
    (share,) = projects.get(ctx, who["bob"], "lab").shares
    assert (share.owner, share.approved_by) == ("alice", "alice"), "as if its new owner had shared it"


def test_who_approves_while_it_changes_hands_approves_of_nobody_else(ctx: Context, who: dict[str, str]) -> None:
    """Whichever comes first: the new owner, a plain member, was not the one who was seen."""
    for number in range(4):
        name = f"site{number}"
        endpoints.create(ctx, who["mallory"], name)
        endpoint_shares.share(ctx, who["mallory"], "lab", name)
        start = threading.Barrier(2)

        def approve(name: str = name, start: threading.Barrier = start) -> None:
            start.wait()
            with contextlib.suppress(Conflict):
                endpoint_shares.approve(ctx, who["alice"], "lab", name, owner="mallory")

        def give(name: str = name, start: threading.Barrier = start) -> None:
            start.wait()
            ownership.transfer_endpoint(ctx, Giver(user_id=who["mallory"]), name, "bob")

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(approve), pool.submit(give)]:
                done.result()
        assert name not in projects.get(ctx, who["amy"], "lab").endpoints


def _member(ctx: Context, who: dict[str, str]) -> None:
    projects.set_member(ctx, who["amy"], "lab", "alice", "member")


def _given(ctx: Context, who: dict[str, str]) -> None:
    ownership.transfer_project(ctx, Giver(user_id=who["alice"]), "lab", "bob")


@pytest.mark.parametrize("demote", [_member, _given])
def test_who_owns_the_project_no_more_has_not_approved_of_themselves(
    ctx: Context, who: dict[str, str], trap: ImageAgent, demote: Callable[[Context, dict[str, str]], None]
) -> None:
    ImageAgent(ctx, who["alice"], "hers")
    endpoint_shares.share(ctx, who["alice"], "lab", "hers")
    endpoint_shares.approve(ctx, who["alice"], "lab", "trap")
    demote(ctx, who)
    assert projects.get(ctx, who["amy"], "lab").endpoints == ("trap",), "of others they did: that was for the project"
    assert endpoint_shares.approve(ctx, who["amy"], "lab", "hers").endpoints == ("hers", "trap")


def hello(ctx: Context, endpoint_id: str, home: str) -> None:
    agents.hello(ctx, endpoint_id, Hello(facts=FACTS), home)


def done(ctx: Context, user_id: str, endpoint_id: str, home: str) -> None:
    """A task of the owner's, run well."""
    tasks.create(ctx, user_id, {"run": "x"})
    (order,) = agents.desired(ctx, endpoint_id, ctx.epoch, 0, home).orders
    at = ctx.clock()
    job = JobReport(
        job_id=order.job_id, state=JobState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0, hosts=("here",),
        started_at=at, ended_at=at,
    )  # fmt: skip
    agents.report(ctx, endpoint_id, Report(epoch=ctx.epoch, jobs=(job,)), home)


def test_a_task_moves_nowhere_it_may_not_go(ctx: Context, who: dict[str, str], clock: Clock, trap: ImageAgent) -> None:
    """The endpoint it waited at went silent before its agent was told; the next one waits to be approved."""
    ImageAgent(ctx, who["alice"], "site", takes_secrets=True)
    endpoint_shares.share(ctx, who["alice"], "lab", "site")
    secrets.put(ctx, who["bob"], "mine", VALUE)
    task, _ = tasks.create(ctx, who["bob"], spec(secrets=["mine"]))
    assert task.endpoint == "site"
    clock.advance(3600)
    trap.hello()
    planning.run_due(ctx)
    assert tasks.get(ctx, who["bob"], task.id).endpoint == "site" and trap.orders() == []
    endpoint_shares.approve(ctx, who["alice"], "lab", "trap")
    planning.run_due(ctx)
    assert tasks.get(ctx, who["bob"], task.id).endpoint == "trap"


def test_errors_are_those_of_the_service(ctx: Context, who: dict[str, str]) -> None:
    for name in ("nowhere", "a\0b", ""):
        for call in (endpoint_shares.share, endpoint_shares.approve, endpoint_shares.decline, endpoint_shares.unshare):
            with pytest.raises(DiamondError) as caught:
                call(ctx, who["alice"], "lab", name)
            assert isinstance(caught.value, NotFound)
