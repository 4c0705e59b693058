"""Forms that are one's own, filled in with what is somebody else's: ids and names that no page would have offered.

matrix.txt has every route with another's object in its path. Here the path is the stranger's own, and a field of the
form, or the text in it, names what belongs to `owner`. Nothing in the database may change.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import sqlalchemy as sa

from diamond.core.states import JobState
from diamond.server.services import image_builds, image_drafts, projects, secrets, tasks, templates
from testing.image_agent import ImageAgent
from testing.people import cheap_passwords
from tests.authorisation.test_matrix import _form_seed
from tests.authorisation.world import RECIPE, World, csrf_of, make_world, session_cookie

# What is noted of any request, granted or not.
_NOTED = {"audit", "sessions", "counters"}
Fields = Callable[[World], dict[str, str]]


@dataclass(frozen=True)
class Own:
    """Of the stranger's."""

    task: str
    template: str
    draft: str
    image: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with cheap_passwords():
        made = make_world(tmp_path_factory.mktemp("forms"))
        yield made
    made.ctx.db.close()


@pytest.fixture(scope="module")
def own(world: World) -> Own:
    ctx, stranger = world.ctx, world.ids["stranger"]
    projects.create(ctx, stranger, "theirs")
    agent = ImageAgent(ctx, stranger, "mine", takes_secrets=True, holds_pools=True)
    task, _ = tasks.create(ctx, stranger, {"run": "true", "resources": {"infra": "mine"}})
    secrets.put(ctx, stranger, "KEY", "the stranger's", None)
    made, _ = image_builds.build(ctx, stranger, {**RECIPE, "name": "theirs"}, endpoint="mine")
    for order in agent.orders():
        if order.task_id == made.task_id:
            agent.finish(order)
        else:
            agent.tell(order.job_id, JobState.RUNNING)
    found = Own(
        task=task.id,
        template=templates.create(ctx, stranger, "theirs", {"run": "true"}).id,
        draft=image_drafts.create(ctx, stranger, {**RECIPE, "name": "draft"}).id,
        image=made.image.id,
    )
    world.keep()
    return found


def _yaml(**lines: str) -> Fields:
    def fields(world: World) -> dict[str, str]:
        names = {f"private_{name}": value for name, value in world.private.items()} | world.names
        text = "".join(f"{name}: {value.format(**names)}\n" for name, value in lines.items())
        return {"do": "launch", "yaml": f"run: 'true'\n{text}"}

    return fields


def _fields(**fields: str) -> Fields:
    return lambda world: {
        name.format(**world.names): value.format(
            **world.names, **{f"private_{key}": text for key, text in world.private.items()}
        )
        for name, value in fields.items()
    }


_MINE = "resources: {{infra: mine"
FORMS: list[tuple[str, Fields]] = [
    ("/compose", _yaml(project="lab")),
    ("/compose", _yaml(resources="{{infra: cluster}}")),
    ("/compose", _yaml(resources="{{infra: own}}")),
    ("/compose", _yaml(pool="{ref}")),
    ("/compose", _yaml(pool="pool-at-cluster")),
    ("/compose", _yaml(resources="{{infra: mine, image_id: '{image}'}}")),
    ("/compose", _yaml(resources="{{infra: mine, image_id: 'owner/env'}}")),
    ("/compose", _yaml(resources="{{infra: mine, image_id: 'owner/mine'}}")),
    ("/compose", _yaml(resources="{{infra: mine}}", image="{private_image}")),
    ("/compose", _yaml(resources="{{infra: mine}}", workdir="bundle:{bundle}")),
    ("/compose", _yaml(resources="{{infra: mine}}", file_mounts="{{data: 'bundle:{bundle}'}}")),
    ("/compose", _fields(do="save", type="template", yaml="run: echo\n", template_name="x", template_project="lab",
                         project="lab", name="x")),
    ("/tasks/chosen", _fields(do="stop", sure="yes", **{"pick_{task_id}": "1"})),
    ("/tasks/chosen", _fields(do="remove", sure="yes", **{"pick_{done_id}": "1"})),
    ("/tasks/chosen", _fields(do="rerun", sure="yes", **{"pick_{done_id}": "1"})),
    ("/tasks/{own_task}/share", _fields(project="lab", visibility="project")),
    ("/templates/{own_template}", _fields(name="theirs", version="1", visibility="project", yaml="run: echo",
                                          project="lab")),
    ("/pools/new", _fields(name="p", endpoint="cluster", slots="1", most="1")),
    ("/pools/new", _fields(name="p", endpoint="own", slots="1", most="1")),
    ("/pools/new", _fields(name="p", endpoint="mine", slots="1", most="1", project="lab")),
    ("/endpoints/mine/share", _fields(project="lab")),
    ("/endpoints/mine/unshare", _fields(project="lab")),
    ("/settings/projects/theirs/endpoints", _fields(endpoint="cluster")),
    ("/settings/projects/theirs/endpoints", _fields(endpoint="own")),
    ("/settings/secrets", _fields(name="KEY", value="planted", project="lab")),
    ("/settings/secrets/KEY/remove", _fields(project="lab")),
    ("/invitations", _fields(name="", email="", project="lab", role="owner")),
    ("/image-builder", _fields(image="{private_image}")),
    ("/image-builder", _fields(image="{image}")),
    ("/image-builder/{own_draft}/start", _fields(version="1", base="image:owner/mine", go="stay", kind="image")),
    ("/images/{own_image}/share", _fields(project="lab", visibility="project")),
    ("/images/{own_image}/copy", _fields(target="cluster")),
    ("/images/{own_image}/copy", _fields(target="own")),
    ("/images/{own_image}/rebuild", _fields(endpoint="cluster")),
    ("/images/{own_image}/test", _fields(endpoint="own", command="true")),
]  # fmt: skip


def _contents(world: World) -> dict[str, str]:
    """Every table but those that note requests, as digests."""
    found = {}
    with world.ctx.db.engine.connect() as connection:
        for table in sa.inspect(connection).get_table_names():
            if table not in _NOTED:
                rows = connection.exec_driver_sql(f'SELECT * FROM "{table}"').all()
                found[table] = hashlib.sha256(repr(sorted(map(repr, rows))).encode()).hexdigest()
    return found


@pytest.mark.parametrize("number", range(len(FORMS)), ids=[f"{n} {path}" for n, (path, _) in enumerate(FORMS)])
def test_a_form_of_ones_own_reaches_nothing_of_others(world: World, own: Own, number: int) -> None:
    path, fields = FORMS[number]
    path = path.format(own_task=own.task, own_template=own.template, own_draft=own.draft, own_image=own.image)

    async def whole() -> None:
        world.restore()
        world.seed = await _form_seed(world)
        before = _contents(world)
        form = {**fields(world), "csrf": csrf_of(world, "stranger")}
        cookies = session_cookie(world, "stranger") | {"diamond_form": world.seed[0]}
        answer = await world.ask("POST", path, cookies=cookies, form=form)
        changed = [name for name, digest in _contents(world).items() if before[name] != digest]
        assert not changed, (answer.status, changed, answer.headers.get("location"), answer.words)
        assert answer.status in (303, 400, 403, 404, 409, 422), answer.words
        if path != "/tasks/chosen":  # it says how many of those chosen there are: none
            assert answer.status != 303, answer.headers["location"]

    asyncio.run(whole())


def test_the_same_forms_do_something_for_those_who_may(world: World, own: Own) -> None:
    """Or the test above would hold for forms that are simply wrong."""

    async def done(path: str, who: str, form: dict[str, str]) -> bool:
        world.restore()
        before = _contents(world)
        form = {**form, "csrf": csrf_of(world, who)}
        cookies = session_cookie(world, who) | {"diamond_form": world.seed[0]}
        await world.ask("POST", path, cookies=cookies, form=form)
        return _contents(world) != before

    async def whole() -> None:
        world.seed = await _form_seed(world)
        task, image = world.names["task_id"], world.names["image"]
        assert await done("/compose", "owner", _yaml(resources="{{infra: cluster}}", project="lab")(world))
        assert await done("/compose", "owner", _yaml(pool="{ref}", project="lab")(world))
        workdir = _yaml(resources="{{infra: cluster}}", project="lab", workdir="bundle:{bundle}")
        assert await done("/compose", "owner", workdir(world))
        assert await done("/tasks/chosen", "owner", {"do": "stop", "sure": "yes", f"pick_{task}": "1"})
        assert await done("/pools/new", "owner", {"name": "p", "endpoint": "own", "slots": "1", "most": "1"})
        assert await done("/endpoints/own/share", "owner", {"project": "lab"})
        assert await done("/settings/secrets", "owner", {"name": "K", "value": "planted", "project": "lab"})
        assert await done("/settings/secrets/KEY/remove", "owner", {"project": "lab"})
        assert await done("/image-builder", "owner", {"image": image})
        assert await done(f"/images/{image}/copy", "owner", {"target": "own"})
        assert await done("/invitations", "admin", {"name": "", "email": "", "project": "", "role": ""})
        assert await done("/settings/projects/theirs/endpoints", "stranger", {"endpoint": "mine"})

    asyncio.run(whole())
