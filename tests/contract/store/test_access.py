"""Who may do what with what: one table for each kind of object, tried cell by cell on both databases.

A cell names who may; whoever may not is told that it is not theirs if they see it, and that there is none if they do
not. Letters: o its owner, p an owner of its project, m a member, v a viewer, s somebody else with an account, a an
administrator who is in no project.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.recipes import Recipe
from diamond.core.shells import NewShell
from diamond.core.states import JobState
from diamond.core.wire import Hello, JobReport, Report
from diamond.server.services import (
    agents,
    endpoint_shares,
    endpoints,
    enrolment,
    events,
    image_copies,
    image_placing,
    images,
    ownership,
    projects,
    shells,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.services.ownership import Giver
from diamond.server.store.acting import Actor, acting
from diamond.server.store.models import UserRow

WHO = {"o": "alice", "p": "bob", "m": "carol", "v": "victor", "s": "sam", "a": "root"}

TASKS = """
          see     list    events  cancel  share  give  shell
private   o       o       o       o       o      o     o
project   opmv    opmv    opmv    op      o      o     o
public    opmvsa  opmv    opmvsa  op      o      o     o
"""
IMAGES = """
          see     list    use     share  move  give  remove
private   o       o       o       o      o     o     o
project   opmv    opmv    opmv    op     o     o     op
public    opmvsa  opmvsa  opmvsa  op     o     o     op
"""
ENDPOINTS = """
          see   list  queue  run  rotate  revoke  share  give
unshared  o     o     o      o    o       o       o      o
asked     o     o     o      o    o       o       o      o
shared    opmv  opmv  opmv   opm  o       o       o      o
"""


def table(text: str) -> dict[tuple[str, str], str]:
    """By row and column."""
    head, *rows = [line.split() for line in text.strip().splitlines()]
    return {(row[0], column): cell for row in rows for column, cell in zip(head, row[1:], strict=True)}


class World:
    """A project of alice (who owns what is tried), bob, carol and victor; and two who are not in it."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.ids: dict[str, str] = {}
        with ctx.db.write() as session:
            for letter, name in WHO.items():
                self.ids[letter] = new_id("usr")
                row = UserRow(id=self.ids[letter], name=name, created_at=ctx.clock(), is_admin=letter == "a")
                session.add(row)
        projects.create(ctx, self.ids["p"], "lab")
        for name, role in (("alice", "member"), ("carol", "member"), ("victor", "viewer")):
            projects.set_member(ctx, self.ids["p"], "lab", name, role)

    @property
    def alice(self) -> str:
        return self.ids["o"]

    def task(self, visibility: str) -> str:
        made, _ = tasks.create(self.ctx, self.alice, {"run": "x", "project": "lab"})
        return ownership.change_task(self.ctx, self.alice, made.id, visibility=visibility).id

    def ended_task(self, visibility: str) -> str:
        task_id = self.task(visibility)
        tasks.cancel(self.ctx, self.alice, task_id)
        return task_id

    def image(self, visibility: str) -> str:
        recipe = {"base": "docker://docker.io/library/debian:13", "name": new_id("env").replace("_", "-")}
        with self.ctx.db.write() as session:
            home = projects.resolve(session, self.alice, "lab")
            row = image_placing.new_image(self.ctx, self.alice, Recipe.parse(recipe), home)
            session.add(row)
        return images.share(self.ctx, self.alice, row.id, visibility).id

    def endpoint(self, state: str) -> str:
        name = new_id("end").replace("_", "-")
        endpoint_id = endpoints.create(self.ctx, self.alice, name)[0].id
        facts = EndpointFacts(scheduler="local", cpus_per_node=8, allows_others=True)
        agents.hello(self.ctx, endpoint_id, Hello(facts=facts), f"agt_{name}")
        if state != "unshared":
            endpoint_shares.share(self.ctx, self.alice, "lab", name)
        if state == "shared":
            endpoint_shares.approve(self.ctx, self.ids["p"], "lab", name)
        return name


@pytest.fixture
def world(ctx: Context) -> World:
    return World(ctx)


Try = Callable[[str, str], object]


def outcome(attempt: Try, user: str, obj: str) -> str:
    try:
        done = attempt(user, obj)
    except NotFound:
        return "none"
    except InvalidInput as error:  # of a field of what was asked: it names nothing that there is
        return "none" if error.message.startswith("there is no") else f"refused: {error}"
    except Forbidden:
        return "no"
    except Conflict:
        return "yes"  # may, but not just now: nothing runs
    return "none" if done is False else "yes"


def check(world: World, text: str, make: dict[str, Callable[[str], str]], tries: dict[str, Try]) -> None:
    """Try every verb in every state as everybody, each on an object of its own, and show the table as it is."""
    expected = table(text)
    assert {verb for _, verb in expected} == set(tries)
    for (state, verb), allowed in expected.items():
        seen = expected[state, "see"]
        for letter, user_id in world.ids.items():
            obj = make.get(verb, make["*"])(state)
            got = outcome(tries[verb], user_id, obj)
            if letter in allowed:
                want = "yes"
            elif verb in ("list", "run") or letter not in seen:
                want = "none"
            else:
                want = "no"
            assert got == want, f"{WHO[letter]} ({letter}) {verb} of a {state} one: {got}, not {want}"


def test_tasks(world: World) -> None:
    ctx = world.ctx

    def listed(user: str, task_id: str) -> bool:
        try:
            found, _, _ = tasks.list_tasks(ctx, user, project="lab")
        except NotFound:
            return False
        return task_id in {task.id for task in found}

    def give(user: str, task_id: str) -> object:
        return ownership.transfer_task(ctx, Giver(user_id=user), task_id, "carol")

    check(
        world,
        TASKS,
        {"*": world.task, "give": world.ended_task},
        {
            "see": lambda user, task_id: tasks.get(ctx, user, task_id),
            "list": listed,
            "events": lambda user, task_id: events.since(ctx, user, 0, task_id=task_id),
            "cancel": lambda user, task_id: tasks.cancel(ctx, user, task_id),
            "share": lambda user, task_id: ownership.change_task(ctx, user, task_id, visibility="private"),
            "give": give,
            "shell": lambda user, task_id: shells.find_place(ctx, user, task_id, NewShell(argv=("sh",))),
        },
    )


def test_images(world: World) -> None:
    ctx = world.ctx

    def give(user: str, image_id: str) -> object:
        return ownership.transfer_image(ctx, Giver(user_id=user), image_id, "carol")

    def use(user: str, image_id: str) -> object:
        return tasks.create(ctx, user, {"run": "x", "resources": {"image_id": image_id}})

    check(
        world,
        IMAGES,
        {"*": world.image},
        {
            "see": lambda user, image_id: images.get(ctx, user, image_id),
            "list": lambda user, image_id: image_id in {one.id for one in images.list_images(ctx, user, limit=1000)[0]},
            "use": use,
            "share": lambda user, image_id: images.share(ctx, user, image_id, "private"),
            "move": lambda user, image_id: images.share(ctx, user, image_id, "private", project=_own(ctx, user)),
            "give": give,
            "remove": lambda user, image_id: image_copies.remove(ctx, user, image_id),
        },
    )


def _own(ctx: Context, user_id: str) -> str:
    with ctx.db.write() as session:
        return projects.resolve(session, user_id, None).name


def test_endpoints(world: World) -> None:
    ctx = world.ctx

    def run(user: str, name: str) -> object:
        project = "lab" if user in {world.ids[letter] for letter in "opm"} else None
        return tasks.create(ctx, user, {"run": "x", "project": project, "resources": {"infra": name}})

    def share(user: str, name: str) -> object:
        if user in (world.ids["s"], world.ids["a"], world.ids["v"]):  # with a project of theirs, where they may
            theirs = new_id("prj").replace("_", "-")
            projects.create(ctx, user, theirs)
            return endpoint_shares.share(ctx, user, theirs, name)
        return endpoint_shares.share(ctx, user, "lab", name)

    check(
        world,
        ENDPOINTS,
        {"*": world.endpoint},
        {
            "see": lambda user, name: endpoints.get(ctx, user, name),
            "list": lambda user, name: name in {one.name for one in endpoints.list_endpoints(ctx, user)},
            "queue": lambda user, name: endpoints.queue(ctx, user, name),
            "run": run,
            "rotate": lambda user, name: enrolment.rotate(ctx, user, name),
            "revoke": lambda user, name: enrolment.revoke(ctx, user, name),
            "share": share,
            "give": lambda user, name: ownership.transfer_endpoint(ctx, Giver(user_id=user), name, "carol"),
        },
    )


def test_an_administrator_stops_anything_and_sees_no_words(world: World) -> None:
    ctx = world.ctx
    made, _ = tasks.create(ctx, world.alice, {"run": "x", "name": "very private"})
    (listed,) = [task for task in ownership.live_tasks(ctx) if task.id == made.id]
    assert (listed.owner, listed.name, listed.spec, listed.pending_reason) == ("alice", "", None, "")
    with acting(Actor(user_id=world.ids["a"], name="root", via="tok_1", address="192.0.2.77")):
        stopped = ownership.stop_any(ctx, made.id)
    assert (stopped.state, stopped.name) == ("CANCELLED", "")
    told = tasks.get(ctx, world.alice, made.id)
    assert (told.state, told.detail) == ("CANCELLED", "stopped by root, an administrator")
    assert "192.0.2.77" not in repr(events.since(ctx, world.alice, 0, task_id=made.id))
    with pytest.raises(NotFound):
        ownership.stop_any(ctx, "tsk_00000000000000000")


def test_whose_task_an_owner_of_the_project_stops_is_told_by_whom(world: World) -> None:
    """Also when the job has to be asked, and says something of its own; one's own stop needs no words."""
    ctx = world.ctx
    name = world.endpoint("shared")
    endpoint_id = endpoints.get(ctx, world.alice, name).id
    spec = {"run": "x", "project": "lab", "resources": {"infra": name}}
    for user, detail in (
        ("p", "stopped by bob, an owner of its project; ended by a signal"),
        ("o", "ended by a signal"),
    ):
        task_id = tasks.create(ctx, world.alice, spec)[0].id
        (order,) = agents.desired(ctx, endpoint_id, ctx.epoch, 0, f"agt_{name}").orders
        stopping = tasks.cancel(ctx, world.ids[user], task_id)
        assert not stopping.state.is_final
        ended = JobReport(job_id=order.job_id, state=JobState.CANCELLED, detail="ended by a signal")
        agents.report(ctx, endpoint_id, Report(epoch=ctx.epoch, jobs=(ended,)), f"agt_{name}")
        assert tasks.get(ctx, world.alice, task_id).detail == detail
    asked = [one.data for one in events.since(ctx, world.alice, 0) if one.kind == "task.cancel_requested"]
    assert asked == [{"by": "bob, an owner of its project"}, {}]
