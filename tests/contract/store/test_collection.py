"""What is collected when tasks are removed, what stays because something needs it, and whom it counts for."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.core.wire import Report, StreamChunk
from diamond.server.services import (
    agents,
    bundles,
    collection,
    gallery,
    holdings,
    image_builds,
    image_drafts,
    removals,
    reruns,
    tasks,
    templates,
    uploads,
    usage,
)
from diamond.server.services.collection import Collected
from diamond.server.services.context import Context
from diamond.server.store import identity_models, models
from diamond.server.store.models import HoldingRow
from testing.context import Clock
from testing.image_agent import ImageAgent

DAY_S = 86_400.0
NOTHING = Collected(blobs=0, num_bytes=0, jobs=0)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class World:
    ctx: Context
    clock: Clock
    agent: ImageAgent
    user_id: str

    def folder(self, *contents: bytes, user_id: str = "") -> str:
        """A bundle of files that a user sends; its reference."""
        user_id = user_id or self.user_id
        uploads.keep(self.ctx, user_id, {digest_of(data): data for data in contents})
        files = tuple(
            BundleFile(path=f"{number}.txt", size_bytes=len(data), digest=digest_of(data))
            for number, data in enumerate(contents)
        )
        manifest = Manifest(files=files)
        assert bundles.register(self.ctx, encode(manifest), user_id)["complete"]
        return manifest.ref

    def launch(self, *, user_id: str = "", **spec: Any) -> str:
        return tasks.create(self.ctx, user_id or self.user_id, {"run": "true", **spec})[0].id

    def end(self, task_id: str, outputs: dict[str, bytes] | None = None) -> str:
        order = next(order for order in self.agent.orders() if order.task_id == task_id)
        self.agent.tell(order.job_id, JobState.RUNNING, started_at=self.clock(), log=b"hello\n")
        curve = StreamChunk.of(order.job_id, "metrics", 0, b'{"step": 1, "loss": 2.0}\n')
        agents.report(self.ctx, self.agent.id, Report(epoch=self.ctx.epoch, streams=(curve,)), f"agt_{self.agent.name}")
        made = self.agent.store(outputs or {})
        self.agent.tell(
            order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0, ended_at=self.clock(), outputs=made
        )
        return order.job_id

    def remove(self, task_id: str) -> None:
        removals.remove(self.ctx, self.user_id, task_id)

    def pass_days(self, days: float) -> None:
        """For rows and for files."""
        self.clock.advance(days * DAY_S)
        for path in (self.ctx.home.server / "blobs").rglob("*"):
            if path.is_file():
                then = path.stat().st_mtime - days * DAY_S
                os.utime(path, (then, then))

    def collect(self) -> Collected:
        return collection.collect(self.ctx, 7 * DAY_S)

    def has(self, *contents: bytes) -> list[bool]:
        return [self.ctx.blobs.has(digest_of(data)) for data in contents]

    def stored(self, user_id: str = "") -> int:
        with self.ctx.db.read() as session:
            return usage.stored(session, usage.of_user(user_id or self.user_id))

    def holders(self) -> int:
        with self.ctx.db.read() as session:
            return session.scalars(sa.select(sa.func.count()).select_from(HoldingRow)).one()


@pytest.fixture
def world(ctx: Context, user_id: str, agent: ImageAgent, clock: Clock) -> World:
    return World(ctx, clock, agent, user_id)


def test_a_removed_task_leaves_no_bytes(world: World) -> None:
    ref = world.folder(b"program", b"some data")
    task_id = world.launch(workdir=ref)
    job_id = world.end(task_id, {"model.bin": b"weights"})
    assert world.ctx.series.keys(job_id)
    usage.charge_ended(world.ctx)
    streams = world.ctx.streams.held_bytes(job_id)
    assert world.stored() == len(b"program" + b"some data" + b"weights") + streams
    world.pass_days(30)
    assert world.collect() == NOTHING, "its task is there"
    world.remove(task_id)
    assert world.ctx.streams.size(job_id, "log") == 0 and world.ctx.series.keys(job_id) == []
    assert world.collect() == NOTHING, "not at once"
    assert world.stored() == len(b"program" + b"some data" + b"weights"), "they still take room"
    world.pass_days(8)
    gone = world.collect()
    assert (gone.blobs, gone.jobs) == (4, 0), "two files, their list, and an output"
    assert world.has(b"program", b"some data", b"weights") == [False] * 3
    assert (world.stored(), world.holders(), world.ctx.blobs.total_bytes()) == (0, 0, 0)
    assert [path for path in (world.ctx.home.server / "blobs").rglob("*") if path.is_file()] == []
    assert world.collect() == NOTHING
    # And all of it may come again, and counts again.
    again = world.launch(workdir=world.folder(b"program", b"some data"))
    assert world.stored() == len(b"program" + b"some data")
    assert tasks.get(world.ctx, world.user_id, again).spec is not None


def test_what_others_need_stays(world: World, other_id: str, lab: Callable[..., None]) -> None:
    lab("alpha")
    shared, own = world.folder(b"shared", b"both"), world.folder(b"own", b"both")
    first, second = world.launch(workdir=shared, project="lab"), world.launch(file_mounts={"x": own}, project="lab")
    world.end(first, {"a": b"same output", "b": b"only here"})
    world.end(second, {"c": b"same output"})
    again = reruns.rerun(world.ctx, other_id, first).id
    world.end(again)
    world.remove(first)
    world.pass_days(8)
    assert world.collect().blobs == 1
    assert world.has(b"only here", b"same output", b"shared", b"both") == [False, True, True, True]
    with world.ctx.db.read() as session:
        assert holdings.may_use(session, other_id, shared.removeprefix("bundle:"))
    removals.remove(world.ctx, other_id, again)
    world.pass_days(8)
    world.collect()
    assert world.has(b"shared", b"both", b"own", b"same output") == [False, True, True, True]


@pytest.mark.parametrize("needs", ["template", "image", "draft", "task of an image", "output"])
def test_everything_that_can_name_a_file_keeps_it(world: World, needs: str) -> None:
    ref = world.folder(b"wanted")
    recipe = {"base": "docker://python:3.12-slim", "name": "env", "files": {"/opt/x": ref}}
    if needs == "template":
        templates.create(world.ctx, world.user_id, "mine", {"run": "true", "workdir": ref})
    elif needs == "image":
        image_builds.build(world.ctx, world.user_id, recipe)
    elif needs == "draft":
        draft = image_drafts.create(world.ctx, world.user_id)
        image_drafts.save(
            world.ctx, world.user_id, draft.id, "dependencies", {"files": {"/opt/x": ref}}, version=draft.version
        )
    elif needs == "task of an image":
        world.launch(image=recipe)
    else:
        world.end(world.launch(), {"wanted": b"wanted"})
    world.pass_days(100)
    world.collect()
    assert world.has(b"wanted") == [True]


def test_every_column_that_could_name_a_file_is_looked_through() -> None:
    """A new column of JSON has to be put on one of the two lists."""
    silent = {
        "endpoints.facts", "endpoints.usage", "tokens.scopes", "images.labels", "replicas.facts", "replicas.failure",
        "jobs.hosts", "jobs.image", "events.data", "jobs.place", "pools.spec", "pools.plan", "pools.profiles",
    }  # fmt: skip
    own = {
        f"{table.name}.{column.name}"
        for table in models.Base.metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, sa.JSON)
        and not any(
            table is model.__table__
            for model in vars(identity_models).values()
            if hasattr(model, "__table__") and model.__module__ == identity_models.__name__
        )
    }
    assert own == silent | {f"{column.class_.__tablename__}.{column.key}" for column in collection.REFERRING}


def test_what_is_named_again_is_not_collected_beneath_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the texts and the removal, somebody launches with files that they sent long ago."""
    ref = world.folder(b"old", b"files")
    world.pass_days(30)
    look = collection._needed

    def looks_then_launches(ctx: Context) -> Any:
        yield from look(ctx)
        world.launch(workdir=ref)

    monkeypatch.setattr(collection, "_needed", looks_then_launches)
    assert world.collect() == NOTHING
    assert world.has(b"old", b"files") == [True, True]


def test_who_asks_whether_it_is_here_has_time_to_use_it(world: World) -> None:
    ref = world.folder(b"old", b"files")
    world.pass_days(30)
    assert bundles.missing_blobs(world.ctx, world.user_id, [digest_of(b"old")]) == []
    assert world.collect().blobs == 2, "the list, and the file nobody asked for"
    with pytest.raises(InvalidInput, match="is not here"):
        world.launch(workdir=ref)
    world.launch(workdir=world.folder(b"old", b"files"))


def test_an_output_waits_for_the_report_of_its_job(world: World) -> None:
    task_id = world.launch()
    order = world.agent.order()
    world.clock.advance(60)
    made = world.agent.store({"late.bin": b"late"})
    world.pass_days(30)
    assert world.collect() == NOTHING, "the server was away, or the agent"
    world.agent.tell(order.job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, outputs=made)
    assert [item.stored for item in tasks.get(world.ctx, world.user_id, task_id).outputs] == [True]
    world.agent.store({"never.bin": b"never told of"})
    world.pass_days(30)
    assert world.collect().blobs == 1
    assert world.has(b"late", b"never told of") == [True, False]


def test_each_who_brought_it_gets_their_room_back(world: World, other_id: str) -> None:
    world.folder(b"the same")
    world.folder(b"the same", b"and more", user_id=other_id)
    assert (world.stored(), world.stored(other_id)) == (8, 16)
    world.pass_days(8)
    world.collect()
    assert (world.stored(), world.stored(other_id)) == (0, 0)


def test_a_form_that_takes_over_files_counts_them(world: World, other_id: str, lab: Callable[..., None]) -> None:
    lab("alpha")
    ref = world.folder(b"from the first")
    world.end(world.launch(workdir=ref, project="lab"))
    task_id = world.launch(workdir=ref, project="lab")
    world.end(task_id)
    assert uploads.change(world.ctx, other_id, ref, {"more.txt": b"12"})
    assert world.stored(other_id) == len(b"from the first") + 2
    world.pass_days(8)
    world.collect()
    assert world.stored(other_id) == len(b"from the first"), "another's task needs it, and it is theirs as well"


def test_outputs_in_a_project_count_for_their_owner_once_removed(world: World, lab: Callable[..., None]) -> None:
    lab("alpha")
    task_id = world.launch(project="lab")
    job_id = world.end(task_id, {"a": b"12345"})
    streams = world.ctx.streams.held_bytes(job_id)
    usage.charge_ended(world.ctx)
    with world.ctx.db.read() as session:
        project_id = session.scalars(sa.select(models.TaskRow.project_id)).one()
        assert project_id and usage.stored(session, usage.of_project(project_id)) == 5 + streams > 5
    world.remove(task_id)
    with world.ctx.db.read() as session:
        assert usage.stored(session, usage.of_project(project_id)) == 0
    assert world.stored() == 5
    world.pass_days(8)
    world.collect()
    assert world.stored() == 0


def test_logs_and_curves_left_by_a_crash_go_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    task_id, kept = world.launch(), world.launch()
    job_id, other = world.end(task_id), world.end(kept)
    assert world.ctx.series.keys(job_id) and world.ctx.series.keys(other)

    def killed(_job_id: str) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(world.ctx.streams, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            world.remove(task_id)
    assert world.ctx.streams.size(job_id, "log") == 6
    assert world.collect().jobs == 1
    assert world.ctx.streams.size(job_id, "log") == 0 and world.ctx.series.keys(job_id) == []
    assert world.ctx.streams.size(other, "log") == 6 and world.ctx.series.keys(other)
    assert world.collect().jobs == 0


def test_killed_between_the_file_and_the_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.folder(b"going")
    world.pass_days(8)

    def killed(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(collection, "_let_go", killed)
        with pytest.raises(KeyboardInterrupt):
            world.collect()
    assert world.has(b"going") == [False]
    assert world.stored() == 5
    assert world.collect().blobs == 2
    assert (world.stored(), world.holders()) == (0, 0)
    assert [path for path in (world.ctx.home.server / "blobs").rglob("*") if path.is_file()] == []


def test_ours_and_what_is_unknown_here_stay(world: World) -> None:
    built_in = next(each for each in gallery.all_of_them().values() if each.manifest)
    gallery.put_in_place(world.ctx, built_in)
    holdings.give(world.ctx, world.user_id, list(built_in.files))
    world.ctx.blobs.put_bytes(digest_of(b"of another database"), b"of another database")
    world.pass_days(100)
    assert world.collect() == NOTHING
    assert world.has(b"of another database", *built_in.files.values()) == [True] * (1 + len(built_in.files))


def test_a_blob_that_is_claimed_while_it_is_set_aside_comes_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = digest_of(b"claimed")
    world.folder(b"claimed")
    world.pass_days(8)
    rename = os.rename

    def claims_then_renames(source: str, target: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        assert world.ctx.blobs.claim([digest]) == []
        rename(source, target)

    monkeypatch.setattr(os, "rename", claims_then_renames)
    assert world.ctx.blobs.set_aside(digest, time.time() - DAY_S) is None
    assert world.has(b"claimed") == [True]
