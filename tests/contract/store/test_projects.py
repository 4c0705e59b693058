"""Projects on both databases: who is in them, what they share, how things change hands, and their end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from diamond.core.endpoints import EndpointFacts, NodeGroup, Partition
from diamond.core.errors import Conflict, DiamondError, Forbidden, InvalidInput, NotFound
from diamond.core.projects import Role, Visibility
from diamond.core.reasons import Reason
from diamond.core.states import JobState, TaskState
from diamond.core.wire import Hello, JobReport, Report
from diamond.server.services import (
    agents,
    endpoint_shares,
    endpoints,
    enrolment,
    image_builds,
    image_copies,
    images,
    ownership,
    planning,
    projects,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.services.ownership import Giver
from diamond.server.store.identity_models import AuditRow, EndpointShareRow, MemberRow, ProjectRow, SecretRow
from diamond.server.store.models import ImageRow, TaskRow, UserRow
from testing.image_agent import ImageAgent
from testing.proven import prove


@pytest.fixture
def people(ctx: Context) -> dict[str, str]:
    with ctx.db.write() as session:
        for name in ("alice", "bob", "carol"):
            session.add(UserRow(id=f"usr_0000000{name}", name=name, created_at=ctx.clock()))
    return {name: f"usr_0000000{name}" for name in ("alice", "bob", "carol")}


@pytest.fixture
def alice(people: dict[str, str]) -> str:
    return people["alice"]


@pytest.fixture
def bob(people: dict[str, str]) -> str:
    return people["bob"]


def place(ctx: Context, owner: str, name: str, **facts: object) -> str:
    """An endpoint whose agent has spoken."""
    made = endpoints.create(ctx, owner, name)[0]
    known = EndpointFacts(scheduler="local", cpus_per_node=8, **facts)  # type: ignore[arg-type]
    agents.hello(ctx, made.id, Hello(facts=known), f"agt_{name}")
    prove(ctx, made.id)
    return made.id


def actions(ctx: Context) -> list[str]:
    with ctx.db.read() as session:
        return [row.action for row in session.query(AuditRow).order_by(AuditRow.seq)]


def launch(ctx: Context, user: str, **spec: object) -> str:
    return tasks.create(ctx, user, {"run": "x", **spec})[0].id


def test_everybody_has_a_project_of_their_own_made_once(ctx: Context, alice: str) -> None:
    ids: list[str] = []

    def ask() -> None:
        with ctx.db.write() as session:
            ids.append(projects.resolve(session, alice, None).id)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 4 and len(set(ids)) == 1
    (own,) = projects.list_projects(ctx, alice)
    assert (own.name, own.personal, own.role, own.num_members) == ("alice", True, Role.OWNER, 1)
    task = tasks.get(ctx, alice, launch(ctx, alice))
    assert (task.owner, task.project, task.visibility) == ("alice", "alice", Visibility.PRIVATE)
    for call in (
        lambda: projects.set_member(ctx, alice, "alice", "bob", "member"),
        lambda: projects.remove(ctx, alice, "alice"),
        lambda: projects.remove_member(ctx, alice, "alice", "alice"),
    ):
        with pytest.raises(InvalidInput, match="belongs to one person"):
            call()


def test_a_project_from_its_making_to_its_end(ctx: Context, alice: str, bob: str) -> None:
    made = projects.create(ctx, alice, "lab", "A title")
    assert (made.role, made.title, [one.user for one in made.members]) == (Role.OWNER, "A title", ["alice"])
    for name in ("lab", "bob"):
        with pytest.raises(Conflict, match="already"):
            projects.create(ctx, bob, name)
    with pytest.raises(InvalidInput):
        projects.create(ctx, alice, "La b")
    with pytest.raises(NotFound) as caught:
        projects.get(ctx, bob, "lab")
    assert "you are in no project 'lab'" in caught.value.message
    projects.set_member(ctx, alice, "lab", "bob", "viewer")
    assert projects.get(ctx, bob, "lab").role is Role.VIEWER
    with pytest.raises(NotFound) as caught:
        projects.get(ctx, bob, "lap")
    assert "did you mean lab?" in caught.value.hint
    with pytest.raises(Forbidden, match="you are a viewer of project lab, and this needs a member"):
        tasks.create(ctx, bob, {"run": "x", "project": "lab"})
    with pytest.raises(InvalidInput) as invalid:
        tasks.create(ctx, bob, {"run": "x", "project": "other"})
    assert invalid.value.field == "project"
    for call in (
        lambda: projects.set_member(ctx, bob, "lab", "carol", "member"),
        lambda: projects.change(ctx, bob, "lab", title="Mine"),
        lambda: projects.remove(ctx, bob, "lab"),
    ):
        with pytest.raises(Forbidden, match="this needs an owner"):
            call()
    assert projects.change(ctx, alice, "lab", title="Another").title == "Another"
    with pytest.raises(NotFound, match="no user 'nobody'"):
        projects.set_member(ctx, alice, "lab", "nobody", "member")
    projects.set_member(ctx, alice, "lab", "bob", "member")
    task_id = launch(ctx, bob, project="lab")
    assert tasks.get(ctx, alice, task_id).visibility is Visibility.PROJECT, "in a shared one it is shared"
    with pytest.raises(Conflict, match="1 live task"):
        projects.remove(ctx, alice, "lab")
    tasks.cancel(ctx, alice, task_id)
    with ctx.db.write() as session:
        lab = projects.resolve(session, alice, "lab")
        session.add(
            SecretRow(id="sec_00000000", kind="project", subject_id=lab.id, name="KEY", sealed="x", created_by=alice,
                      created_at=1.0, updated_at=1.0)
        )  # fmt: skip
    assert projects.remove(ctx, alice, "lab") == 1
    with pytest.raises(NotFound):
        projects.get(ctx, alice, "lab")
    home = tasks.get(ctx, bob, task_id)
    assert (home.project, home.visibility) == ("bob", Visibility.PRIVATE)
    with pytest.raises(NotFound):
        tasks.get(ctx, alice, task_id)
    with ctx.db.read() as session:
        assert session.get(SecretRow, "sec_00000000") is None
    assert projects.create(ctx, bob, "lab").members[0].user == "bob", "the name is free again"
    for action in ("project.created", "project.member", "project.changed", "project.removed"):
        assert action in actions(ctx)


def test_the_last_owner_stays_and_whoever_leaves_takes_endpoints_along(ctx: Context, people: dict[str, str]) -> None:
    alice, bob, carol = people.values()
    projects.create(ctx, alice, "lab")
    for call in (
        lambda: projects.set_member(ctx, alice, "lab", "alice", "member"),
        lambda: projects.remove_member(ctx, alice, "lab", "alice"),
    ):
        with pytest.raises(Conflict, match="only owner"):
            call()
    projects.set_member(ctx, alice, "lab", "bob", "owner")
    projects.set_member(ctx, alice, "lab", "carol", "member")
    place(ctx, carol, "site", allows_others=True)
    endpoint_shares.share(ctx, carol, "lab", "site")
    endpoint_shares.approve(ctx, bob, "lab", "site")
    task_id = launch(ctx, carol, project="lab", resources={"infra": "site"})
    assert [one.name for one in endpoints.list_endpoints(ctx, alice)] == ["site"]
    projects.remove_member(ctx, alice, "lab", "carol")
    assert endpoints.list_endpoints(ctx, alice) == []
    assert tasks.get(ctx, carol, task_id).project == "lab", "what they have in it stays in it"
    assert tasks.get(ctx, bob, task_id).owner == "carol"
    with pytest.raises(NotFound):
        projects.remove_member(ctx, alice, "lab", "carol")
    projects.remove_member(ctx, alice, "lab", "alice")
    assert [one.name for one in projects.list_projects(ctx, alice) if not one.personal] == []


def test_two_owners_who_leave_at_once_do_not_leave_it_without_any(ctx: Context, alice: str, bob: str) -> None:
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "bob", "owner")
    outcomes: list[str] = []

    def go(user: str, name: str) -> None:
        try:
            projects.remove_member(ctx, user, "lab", name)
            outcomes.append("left")
        except DiamondError as error:
            outcomes.append(error.code)

    threads = [threading.Thread(target=go, args=one) for one in ((alice, "alice"), (bob, "bob"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["conflict", "left"]
    with ctx.db.read() as session:
        assert session.query(MemberRow).join(ProjectRow).where(ProjectRow.name == "lab").count() == 1


def test_tasks_go_only_where_their_project_may(ctx: Context, people: dict[str, str]) -> None:
    alice, bob, _ = people.values()
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "bob", "member")
    site = place(ctx, alice, "site", allows_others=True)
    with pytest.raises(InvalidInput, match="there is no endpoint 'site'") as caught:
        launch(ctx, bob, project="lab", resources={"infra": "site"})
    assert "site" not in caught.value.hint
    waiting = launch(ctx, bob, project="lab")
    assert tasks.get(ctx, bob, waiting).state is TaskState.PENDING
    endpoint_shares.share(ctx, alice, "lab", "site")
    planning.run_due(ctx)
    assert tasks.get(ctx, bob, waiting).endpoint == "site", "shared since: what waited goes there"
    with pytest.raises(InvalidInput, match="there is no endpoint 'site'") as caught:
        launch(ctx, bob, resources={"infra": "site"})
    assert caught.value.hint == "site is shared with project lab: launch the task there"
    plan = tasks.plan(ctx, bob, {"run": "x", "project": "lab"})
    assert plan["endpoint"] == "site"
    private = launch(ctx, alice, project="lab", name="mine")
    ownership.change_task(ctx, alice, private, visibility="private")
    (order, *_) = agents.desired(ctx, site, ctx.epoch, 0, "agt_site").orders
    assert order.user == "bob"
    shown = endpoints.queue(ctx, bob, "site")
    assert [(one.task_name, one.owner, one.cpus) for one in shown] == [("x", "bob", 1), ("", "", 1)]
    theirs = endpoints.queue(ctx, alice, "site")
    assert [(one.task_name, one.owner) for one in theirs] == [("x", "bob"), ("mine", "alice")]
    ownership.change_task(ctx, bob, waiting, visibility="private")
    hidden = endpoints.queue(ctx, alice, "site")[0]
    assert (hidden.task_name, hidden.task_id, hidden.owner) == ("", "", "bob"), "whose it is, its agent knows anyway"
    endpoint_shares.unshare(ctx, alice, "lab", "site")
    with pytest.raises(InvalidInput, match="there is no endpoint"):
        launch(ctx, bob, project="lab", resources={"infra": "site"})
    assert tasks.get(ctx, bob, waiting).state is TaskState.QUEUED, "what is there stays there"


@pytest.mark.parametrize(
    ("facts", "runs"),
    [
        ({}, False),
        ({"allows_others": True}, True),
        ({"allowed_users": ("bo*",)}, True),
        ({"allowed_users": ("carol",), "allows_others": True}, False),
    ],
)
def test_the_server_explains_what_an_endpoints_policy_refuses(
    ctx: Context, alice: str, bob: str, facts: dict[str, object], runs: bool
) -> None:
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "bob", "member")
    place(ctx, alice, "site", **facts)
    endpoint_shares.share(ctx, alice, "lab", "site")
    if runs:
        assert tasks.get(ctx, bob, launch(ctx, bob, project="lab")).endpoint == "site"
        return
    for resources in ({"infra": "site"}, {}):
        with pytest.raises(InvalidInput, match="its policy file lets only alice run tasks there") as refused:
            launch(ctx, bob, project="lab", resources=resources)
        assert refused.value.field == "resources.infra"
    assert tasks.get(ctx, alice, launch(ctx, alice)).endpoint == "site", "its owner's run there all the same"


def test_lists_of_a_project_and_of_somebody(ctx: Context, people: dict[str, str]) -> None:
    alice, bob, carol = people.values()
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "bob", "member")
    mine, theirs = launch(ctx, alice, project="lab"), launch(ctx, bob, project="lab")
    launch(ctx, bob)
    ids = lambda user, **query: {task.id for task in tasks.list_tasks(ctx, user, **query)[0]}  # noqa: E731
    assert ids(alice) == {mine}
    assert ids(alice, project="lab") == {mine, theirs}
    assert ids(alice, owner="bob") == {theirs}
    assert ids(alice, project="lab", owner="nobody") == set()
    assert ids(carol, owner="bob") == set()
    with pytest.raises(NotFound):
        ids(carol, project="lab")
    ownership.change_task(ctx, bob, theirs, visibility="public")
    assert ids(carol, owner="bob") == {theirs}


def test_a_task_moves_between_projects_once_it_has_ended(ctx: Context, alice: str, bob: str) -> None:
    projects.create(ctx, alice, "lab")
    task_id = launch(ctx, alice)
    with pytest.raises(InvalidInput, match="nobody would see it") as caught:
        ownership.change_task(ctx, alice, task_id, visibility="project")
    assert "lab" in caught.value.hint
    with pytest.raises(Conflict, match="counts as its project's"):
        ownership.change_task(ctx, alice, task_id, project="lab")
    tasks.cancel(ctx, alice, task_id)
    moved = ownership.change_task(ctx, alice, task_id, visibility="project", project="lab")
    assert (moved.project, moved.visibility) == ("lab", Visibility.PROJECT)
    back = ownership.change_task(ctx, alice, task_id, project="alice")
    assert (back.project, back.visibility) == ("alice", Visibility.PRIVATE), "there, nobody else could see it"
    with pytest.raises(NotFound):
        ownership.change_task(ctx, bob, task_id, visibility="public")
    assert "task.shared" in actions(ctx)


def test_things_change_hands_among_those_who_work_together(ctx: Context, people: dict[str, str]) -> None:
    alice, bob, carol = people.values()
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "bob", "member")
    mine = Giver(user_id=alice)
    task_id = launch(ctx, alice, project="lab")
    with pytest.raises(Conflict, match="runs in its owner's name"):
        ownership.transfer_task(ctx, mine, task_id, "bob")
    tasks.cancel(ctx, alice, task_id)
    with pytest.raises(InvalidInput, match="carol is not a member of its project lab"):
        ownership.transfer_task(ctx, mine, task_id, "carol")
    assert ownership.transfer_task(ctx, mine, task_id, "bob") == "bob"
    assert tasks.get(ctx, alice, task_id).owner == "bob"
    with pytest.raises(Forbidden):
        ownership.transfer_task(ctx, mine, task_id, "bob")
    assert ownership.transfer_task(ctx, Giver(user_id=carol, is_admin=True), task_id, "carol") == "carol"
    ownership.transfer_project(ctx, mine, "lab", "bob")
    roles = {one.user: one.role for one in projects.get(ctx, bob, "lab").members}
    assert roles == {"alice": Role.MEMBER, "bob": Role.OWNER}
    site = place(ctx, alice, "site")
    endpoint_shares.share(ctx, alice, "lab", "site")
    endpoint_shares.approve(ctx, bob, "lab", "site")
    with pytest.raises(InvalidInput, match="carol is not a member of any project of yours"):
        ownership.transfer_endpoint(ctx, mine, "site", "carol")
    job = launch(ctx, alice, project="lab")
    with pytest.raises(Conflict, match="1 live job"):
        ownership.transfer_endpoint(ctx, mine, "site", "bob")
    agents.desired(ctx, site, ctx.epoch, 0, "agt_site")
    (order,) = agents.desired(ctx, site, ctx.epoch, 0, "agt_site").orders
    report = Report(epoch=ctx.epoch, jobs=(JobReport(job_id=order.job_id, state=JobState.SUCCEEDED),))
    agents.report(ctx, site, report, "agt_site")
    assert tasks.get(ctx, alice, job).state is TaskState.SUCCEEDED
    ownership.transfer_endpoint(ctx, mine, "site", "bob")
    found = endpoints.get(ctx, alice, "site")
    assert (found.owner, found.is_mine, found.shared_with) == ("bob", False, ("lab",))
    assert endpoints.get(ctx, bob, "site").access == "revoked", "its agent must be enrolled for its new owner"
    for action in ("task.transferred", "project.transferred", "endpoint.transferred"):
        assert action in actions(ctx)


def test_what_somebody_who_leaves_has_goes_to_another(ctx: Context, people: dict[str, str]) -> None:
    alice, bob, _ = people.values()
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "carol", "viewer")
    agent = ImageAgent(ctx, alice, "site")
    endpoint_shares.share(ctx, alice, "lab", "site")
    shared, own = launch(ctx, alice, project="lab"), launch(ctx, alice)
    with ctx.db.write() as session:
        home = session.get_one(TaskRow, own).project_id
        session.add(
            ImageRow(id="img_00000001", owner_id=alice, name="env", recipe={"base": "host"}, recipe_digest="sha256:x",
                     visibility="private", labels={}, created_at=1.0, project_id=home)
        )  # fmt: skip
    with pytest.raises(Conflict, match="2 live tasks"):
        ownership.hand_over(ctx, "alice", "bob")
    for order in agent.orders():
        agent.tell(order.job_id, JobState.SUCCEEDED)
    given = ownership.hand_over(ctx, "alice", "bob")
    assert given == {"tasks": 2, "images": 1, "templates": 0, "endpoints": 1, "projects": 1}
    assert {task.id: task.project for task in tasks.list_tasks(ctx, bob)[0]} == {shared: "lab", own: "bob"}
    assert images.get(ctx, bob, "env").project == "bob"
    assert projects.get(ctx, bob, "lab").role is Role.OWNER
    assert [one.user for one in projects.get(ctx, bob, "lab").members] == ["bob", "carol"]
    assert endpoints.get(ctx, bob, "site").is_mine
    assert tasks.list_tasks(ctx, alice)[2] == 0 and endpoints.list_endpoints(ctx, alice) == []
    with ctx.db.read() as session:
        assert session.query(EndpointShareRow).count() == 1, "its new owner is in that project"
    with pytest.raises(InvalidInput, match="same user"):
        ownership.hand_over(ctx, "bob", "bob")
    assert "user.handed_over" in actions(ctx)


def test_an_agent_is_told_whose_endpoint_it_is(ctx: Context, alice: str) -> None:
    made = endpoints.create(ctx, alice, "site")[0]
    welcome = agents.hello(ctx, made.id, Hello(facts=EndpointFacts(scheduler="local")), "agt_site")
    assert welcome.owner == "alice"


def test_only_its_owner_speaks_for_an_endpoint(ctx: Context, alice: str, bob: str) -> None:
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "bob", "owner")
    place(ctx, alice, "site")
    calls: list[Callable[[], object]] = [
        lambda: enrolment.renew_code(ctx, bob, "site"),
        lambda: enrolment.revoke(ctx, bob, "site"),
        lambda: endpoints.remove(ctx, bob, "site"),
        lambda: endpoint_shares.share(ctx, bob, "lab", "site"),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            call()
    endpoint_shares.share(ctx, alice, "lab", "site")
    for call in calls:
        with pytest.raises(Forbidden):
            call()
    endpoint_shares.unshare(ctx, bob, "lab", "site")  # an owner of the project says what it uses
    assert projects.get(ctx, alice, "lab").endpoints == ()
    with ctx.db.read() as session:
        assert session.query(EndpointShareRow).count() == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_chain_does_not_go_on_where_it_is_shared_no_more(ctx: Context, alice: str, bob: str, shared: bool) -> None:
    projects.create(ctx, alice, "lab")
    projects.set_member(ctx, alice, "lab", "bob", "member")
    partition = Partition(name="gpu", max_walltime_s=3600, groups=(NodeGroup(count=4, cpus=8),))
    site = place(ctx, alice, "site", allows_others=True, queues_ahead=True, partitions=(partition,))
    endpoint_shares.share(ctx, alice, "lab", "site")
    task_id = launch(ctx, bob, project="lab", max_duration="10h")
    (order,) = agents.desired(ctx, site, ctx.epoch, 0, "agt_site").orders

    def tell(state: JobState, **fields: object) -> None:
        job = JobReport(job_id=order.job_id, state=state, **fields)  # type: ignore[arg-type]
        agents.report(ctx, site, Report(epoch=ctx.epoch, jobs=(job,)), "agt_site")

    if not shared:
        endpoint_shares.unshare(ctx, alice, "lab", "site")
    tell(JobState.RUNNING, started_at=ctx.clock())
    assert len(tasks.get(ctx, bob, task_id).jobs) == (2 if shared else 1), (
        "the next one waits behind it, or there is none"
    )
    tell(JobState.FAILED, reason=Reason.TIME_LIMIT, started_at=ctx.clock(), ended_at=ctx.clock())
    planning.run_due(ctx)
    ended = tasks.get(ctx, bob, task_id)
    if shared:
        assert (ended.state, ended.attempt) == (TaskState.QUEUED, 2)
    else:
        assert ended.state is TaskState.FAILED and "no longer shared with its project" in ended.detail


def test_a_shared_image_is_handed_out_by_its_owner(ctx: Context, alice: str, bob: str) -> None:
    """bob may use it and have it at his own endpoint, and runs nothing at alice's, which he does not see."""
    hers, his = ImageAgent(ctx, alice, "hers"), ImageAgent(ctx, bob, "his")
    image_builds.build(ctx, alice, {"name": "env", "base": "docker://docker.io/library/debian:13"}, endpoint="hers")
    hers.finish()
    images.share(ctx, alice, "env", "public")
    image_copies.copy(ctx, bob, "alice/env", "his")
    export = hers.order()
    assert export.work is not None and (export.work.action, export.user) == ("export", "alice")
    hers.finish(export)
    his.plan()
    order = his.order()
    assert order.work is not None and (order.work.action, order.user) == ("import", "bob")
    his.finish(order)
    seen = {replica.endpoint: replica.state for replica in images.get(ctx, bob, "alice/env").replicas}
    assert seen == {"(elsewhere)": "READY", "his": "READY"}
    with pytest.raises(NotFound):
        image_copies.at_endpoint(ctx, bob, "hers")
    with pytest.raises(NotFound):
        image_copies.prune(ctx, bob, "hers")
    with pytest.raises(InvalidInput, match="no endpoint 'hers'"):
        image_copies.copy(ctx, bob, "alice/env", "hers")
