"""Secrets on every kind of database: who sets, uses and gets them; what the tables hold; changing keys."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import Conflict, Forbidden, InstallationProblem, InvalidInput, NotFound
from diamond.core.ids import new_id
from diamond.core.notices import Channel
from diamond.core.projects import Role
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.core.tasks import Task
from diamond.core.wire import Hello, JobReport, Report
from diamond.server.services import agents, endpoints, notices, projects, resealing, sealing, secrets, tasks
from diamond.server.services.context import Context
from diamond.server.store.identity_models import (
    AuditRow,
    EndpointShareRow,
    MemberRow,
    NoticeRuleRow,
    ProjectRow,
    SecretRow,
)
from diamond.server.store.models import Base, EndpointRow, EventRow, UserRow
from testing.context import Clock

VALUE = "planted-9f3a7c-value"


@dataclass(frozen=True)
class Place:
    """An endpoint of alice's, shared with project `lab`, in which bob is a member and carol a viewer."""

    alice: str
    bob: str
    carol: str
    project_id: str
    endpoint_id: str


@pytest.fixture
def place(ctx: Context, user_id: str) -> Place:
    now = ctx.clock()
    with ctx.db.write() as session:
        people = [UserRow(id=new_id("usr"), name=name, created_at=now) for name in ("bob", "carol")]
        session.add_all(people)
        project = ProjectRow(id=new_id("prj"), name="lab", created_at=now)
        session.add(project)
        session.flush()
        roles = zip((user_id, people[0].id, people[1].id), (Role.OWNER, Role.MEMBER, Role.VIEWER), strict=True)
        for member, role in roles:
            session.add(MemberRow(project_id=project.id, user_id=member, role=role.value, created_at=now))
        ids = [one.id for one in people]
        project_id = project.id
    endpoint, _ = endpoints.create(ctx, user_id, "cluster")
    facts = EndpointFacts(
        scheduler="local", cpus_per_node=8, mem_bytes_per_node=2**34, allows_others=True, takes_secrets=True
    )
    agents.hello(ctx, endpoint.id, Hello(facts=facts))
    with ctx.db.write() as session:
        share = EndpointShareRow(endpoint_id=endpoint.id, project_id=project_id, created_at=now, approved_at=now)
        session.add(share)
    return Place(user_id, *ids, project_id, endpoint.id)


def launch(ctx: Context, user_id: str, names: Any, **spec: Any) -> Task:
    raw = {"run": "x", "secrets": names, "resources": {"infra": "cluster"}, **spec}
    return tasks.create(ctx, user_id, raw)[0]


def job_of(ctx: Context, user_id: str, task: Task) -> str:
    return tasks.get(ctx, user_id, task.id).jobs[-1].id


def given(ctx: Context, place: Place, job_id: str) -> dict[str, str]:
    return {one.variable: one.value for one in secrets.deliver(ctx, place.endpoint_id, job_id).secrets}


def rows_of(ctx: Context) -> str:
    """Everything the database holds, as text."""
    with ctx.db.read() as session:
        tables = Base.metadata.sorted_tables
        return "\n".join(str(tuple(row)) for table in tables for row in session.execute(sa.select(table)))


def actions(ctx: Context) -> list[tuple[str, dict[str, Any]]]:
    with ctx.db.read() as session:
        rows = session.scalars(sa.select(AuditRow).where(AuditRow.action.like("secret.%")).order_by(AuditRow.seq)).all()
        return [(row.action, row.data) for row in rows]


def test_set_listed_replaced_and_removed(ctx: Context, user_id: str, clock: Clock) -> None:
    made, is_new = secrets.put(ctx, user_id, "HF_TOKEN", VALUE)
    assert is_new and (made.name, made.project, made.used_at) == ("HF_TOKEN", "", None)
    clock.advance(5)
    again, is_new = secrets.put(ctx, user_id, "HF_TOKEN", "other")
    assert not is_new and again.updated_at == made.updated_at + 5 and again.created_at == made.created_at
    assert [one.name for one in secrets.list_secrets(ctx, user_id)] == ["HF_TOKEN"]
    assert VALUE not in rows_of(ctx) and "other" not in str(secrets.list_secrets(ctx, user_id))
    secrets.remove(ctx, user_id, "HF_TOKEN")
    assert secrets.list_secrets(ctx, user_id) == []
    with pytest.raises(NotFound, match="HF_TOKEN"):
        secrets.remove(ctx, user_id, "HF_TOKEN")
    with pytest.raises(NotFound):
        secrets.remove(ctx, user_id, "a\0b")
    assert [action for action, _ in actions(ctx)] == ["secret.set", "secret.set", "secret.removed"]


def test_of_many_at_once_one_row_stays(ctx: Context, user_id: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: secrets.put(ctx, user_id, "X", f"value-{number}")[1], range(8)))
    assert sum(made) == 1
    assert len(secrets.list_secrets(ctx, user_id)) == 1


def test_roles_in_a_project(ctx: Context, place: Place) -> None:
    secrets.put(ctx, place.alice, "LAB_KEY", VALUE, "lab")
    with pytest.raises(Forbidden, match="owner"):
        secrets.put(ctx, place.bob, "LAB_KEY", "mine", "lab")
    with pytest.raises(Forbidden):
        secrets.remove(ctx, place.carol, "LAB_KEY", "lab")
    with pytest.raises(NotFound):
        secrets.put(ctx, place.bob, "X", "value", "no-such-project")
    seen = {who: [one.name for one in secrets.list_secrets(ctx, who)] for who in (place.alice, place.bob, place.carol)}
    assert seen == {place.alice: ["LAB_KEY"], place.bob: ["LAB_KEY"], place.carol: []}
    secrets.put(ctx, place.bob, "LAB_KEY", "bob's own")  # of his own, which comes first
    task = launch(ctx, place.bob, ["LAB_KEY"], project="lab")
    assert given(ctx, place, job_of(ctx, place.bob, task)) == {"LAB_KEY": "bob's own"}
    secrets.remove(ctx, place.bob, "LAB_KEY")
    task = launch(ctx, place.bob, ["LAB_KEY"], project="lab")
    assert given(ctx, place, job_of(ctx, place.bob, task)) == {"LAB_KEY": VALUE}


def test_ones_own_project_is_oneself(ctx: Context, user_id: str) -> None:
    with ctx.db.write() as session:
        name = projects.resolve(session, user_id, None).name
    secrets.put(ctx, user_id, "X", VALUE, name)
    assert [(one.name, one.project) for one in secrets.list_secrets(ctx, user_id)] == [("X", "")]


def test_a_task_that_names_what_is_not_there_is_refused(ctx: Context, place: Place) -> None:
    secrets.put(ctx, place.alice, "MINE", VALUE)
    secrets.put(ctx, place.alice, "LAB_KEY", VALUE, "lab")
    for who, asked in ((place.alice, {"A": "nope"}), (place.alice, ["LAB_KEY"]), (place.bob, {"A": "MINE"})):
        with pytest.raises(InvalidInput, match="there is no secret") as caught:
            launch(ctx, who, asked, **({"project": "lab"} if who == place.bob else {}))
        assert caught.value.field.startswith("secrets.") and VALUE not in str(caught.value)
        with pytest.raises(InvalidInput, match="there is no secret"):
            tasks.plan(ctx, who, {"run": "x", "secrets": asked})


def test_a_dry_run_says_who_else_could_read_them(ctx: Context, place: Place) -> None:
    secrets.put(ctx, place.alice, "LAB_KEY", VALUE, "lab")
    raw = {"run": "x", "secrets": ["LAB_KEY"], "project": "lab", "resources": {"infra": "cluster"}}
    said = tasks.plan(ctx, place.bob, raw)
    assert any("will be able to read its secrets (LAB_KEY)" in warning for warning in said["warnings"])
    assert "$DIAMOND_RUN_DIR/secrets" in said["script"] and VALUE not in str(said)
    assert not any("secrets" in warning for warning in tasks.plan(ctx, place.alice, raw)["warnings"])


def test_an_endpoint_that_takes_none_is_not_chosen(ctx: Context, place: Place) -> None:
    secrets.put(ctx, place.alice, "mine", VALUE)
    facts = EndpointFacts(scheduler="local", cpus_per_node=8, mem_bytes_per_node=2**34)
    agents.hello(ctx, place.endpoint_id, Hello(facts=facts))
    with pytest.raises(InvalidInput, match="allow_secrets"):
        launch(ctx, place.alice, ["mine"])
    launch(ctx, place.alice, {})


def test_delivery_is_for_a_live_job_of_the_endpoint_that_names_secrets(ctx: Context, place: Place) -> None:
    secrets.put(ctx, place.alice, "hf", VALUE)
    task = launch(ctx, place.alice, {"TOKEN": "hf", "KEY": {"secret": "hf", "file": True}})
    plain = launch(ctx, place.alice, {})
    job_id = job_of(ctx, place.alice, task)
    found = secrets.deliver(ctx, place.endpoint_id, job_id)
    assert [(one.variable, one.value, one.file) for one in found.secrets] == [
        ("TOKEN", VALUE, False),
        ("KEY", VALUE, True),
    ]
    assert secrets.list_secrets(ctx, place.alice)[0].used_at == ctx.clock()
    assert actions(ctx)[-1][0] == "secret.delivered"
    assert actions(ctx)[-1][1]["names"] == ["hf"] and actions(ctx)[-1][1]["task"] == task.id
    other, _ = endpoints.create(ctx, place.alice, "other")
    for endpoint_id, wrong in (
        (other.id, job_id),  # an agent that asks for another's job
        (place.endpoint_id, job_of(ctx, place.alice, plain)),
        (place.endpoint_id, new_id("job")),
        (place.endpoint_id, "job_' OR 1=1"),
    ):
        with pytest.raises(NotFound):
            secrets.deliver(ctx, endpoint_id, wrong)
    agents.hello(ctx, place.endpoint_id, Hello(facts=EndpointFacts(scheduler="local")), "agt_one")
    with pytest.raises(Conflict):
        secrets.deliver(ctx, place.endpoint_id, job_id, "agt_two")
    ended = JobReport(job_id=job_id, state=JobState.SUCCEEDED, reason=Reason.COMPLETED)
    agents.report(ctx, place.endpoint_id, Report(epoch=ctx.epoch, jobs=(ended,)), "agt_one")
    with pytest.raises(NotFound):
        secrets.deliver(ctx, place.endpoint_id, job_id, "agt_one")
    assert VALUE not in rows_of(ctx)
    with ctx.db.read() as session:
        assert VALUE not in str([row.data for row in session.scalars(sa.select(EventRow))])


def test_who_may_use_it_is_asked_again_when_the_job_begins(ctx: Context, place: Place) -> None:
    secrets.put(ctx, place.alice, "LAB_KEY", VALUE, "lab")
    job_id = job_of(ctx, place.bob, launch(ctx, place.bob, ["LAB_KEY"], project="lab"))
    assert given(ctx, place, job_id) == {"LAB_KEY": VALUE}
    membership = sa.update(MemberRow).where(MemberRow.user_id == place.bob, MemberRow.project_id == place.project_id)
    with ctx.db.write() as session:
        session.execute(membership.values(role=Role.VIEWER.value))
    with pytest.raises((InvalidInput, Forbidden)):
        given(ctx, place, job_id)
    with ctx.db.write() as session:
        session.execute(membership.values(role=Role.MEMBER.value))
        session.execute(sa.update(UserRow).where(UserRow.id == place.bob).values(disabled_at=ctx.clock()))
    with pytest.raises(Forbidden, match="bob"):
        given(ctx, place, job_id)
    with ctx.db.write() as session:
        session.execute(sa.update(UserRow).where(UserRow.id == place.bob).values(disabled_at=None))
    secrets.remove(ctx, place.alice, "LAB_KEY", "lab")
    with pytest.raises(InvalidInput, match="LAB_KEY") as caught:
        given(ctx, place, job_id)
    assert caught.value.field == "secrets.LAB_KEY"


def swap(ctx: Context, **changes: Any) -> None:
    with ctx.db.write() as session:
        session.execute(sa.update(SecretRow).where(SecretRow.name == "mine").values(**changes))


def test_a_sealed_text_opens_only_in_its_own_row(ctx: Context, place: Place) -> None:
    """Whoever can write to the database cannot make somebody's task get another's secret."""
    secrets.put(ctx, place.alice, "mine", VALUE)
    secrets.put(ctx, place.bob, "target", "bob's value")
    with ctx.db.read() as session:
        sealed = {row.name: row.sealed for row in session.scalars(sa.select(SecretRow))}
    job_id = job_of(ctx, place.alice, launch(ctx, place.alice, {"A": "mine"}))
    assert given(ctx, place, job_id) == {"A": VALUE}
    broken = sealed["mine"][:-6] + ("A" if sealed["mine"][-6] != "A" else "B") + sealed["mine"][-5:]
    for text in (sealed["target"], broken, "", "v1:x:y", "v1::", sealed["mine"].replace("v1:", "v2:")):
        swap(ctx, sealed=text)
        with pytest.raises(InstallationProblem) as caught:
            given(ctx, place, job_id)
        assert VALUE not in str(caught.value) and "bob" not in str(caught.value)
    swap(ctx, sealed=sealed["mine"])
    assert given(ctx, place, job_id) == {"A": VALUE}


def test_without_the_key_nothing_opens(ctx: Context, place: Place) -> None:
    secrets.put(ctx, place.alice, "mine", VALUE)
    job_id = job_of(ctx, place.alice, launch(ctx, place.alice, {"A": "mine"}))
    file = ctx.keys.file
    assert file.stat().st_mode & 0o777 == 0o600
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(InstallationProblem, match="does not have"):
        given(ctx, place, job_id)
    secrets.put(ctx, place.alice, "new", "another")  # with a new key, made now
    with pytest.raises(InstallationProblem, match="does not have"):
        given(ctx, place, job_id)
    file.write_bytes(kept)
    assert given(ctx, place, job_id) == {"A": VALUE}


def test_changing_the_key_while_others_write(ctx: Context, place: Place) -> None:
    for number in range(120):
        secrets.put(ctx, place.alice, f"s{number}", f"{VALUE}-{number}")
    # Another server process over the same database and key file.
    other = replace(ctx, secret_keys=sealing.Keys(ctx.keys.file))
    before = ctx.keys.all()[0].id
    with ThreadPoolExecutor(4) as pool:
        writing = [
            pool.submit(secrets.put, server, place.alice, f"w{number}", f"{VALUE}-w{number}")
            for number in range(20)
            for server in (ctx, other)
        ]
        done = pool.submit(resealing.rotate, other).result()
        for one in writing:
            one.result()
    assert done.key != before and done.resealed >= 120 and not done.unopened and done.kept == (before,)
    waits: list[float] = []
    pruned = resealing.prune(ctx, pause=waits.append)
    assert [0 < wait_s <= resealing.SETTLE_S for wait_s in waits] == [True]  # a request may still use the one before
    assert (pruned.dropped, pruned.kept) == ((before,), ())
    assert [key.id for key in other.keys.all()] == [done.key]
    with ctx.db.read() as session:
        rows = session.scalars(sa.select(SecretRow)).all()
        assert len(rows) == 140
        assert {sealing.key_id_of(row.sealed) for row in rows} == {done.key}
        for row in rows:
            assert sealing.unseal(other, row.sealed, *secrets.about(row)).decode().startswith(VALUE)


def test_old_keys_go_once_nobody_can_be_using_them(ctx: Context, user_id: str) -> None:
    secrets.put(ctx, user_id, "a", VALUE)
    waits: list[float] = []
    assert resealing.prune(ctx, pause=waits.append).dropped == () and waits == []  # there is but one
    before = resealing.rotate(ctx).kept

    def pause(wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) == 1:  # somebody else changes them meanwhile: the wait begins anew
            resealing.rotate(ctx)

    done = resealing.prune(ctx, pause=pause)
    assert len(waits) == 2 and [key.id for key in ctx.keys.all()] == [done.key] != list(before)
    resealing.rotate(ctx)
    os.utime(ctx.keys.file, (0, time.time() - resealing.SETTLE_S - 1))
    waits.clear()
    assert len(resealing.prune(ctx, pause=waits.append).dropped) == 1 and waits == [0.0]


def test_keys_of_the_environment(ctx: Context, user_id: str, tmp_path: Path) -> None:
    old, new = sealing.new_key(), sealing.new_key()
    first = replace(ctx, secret_keys=sealing.Keys(tmp_path / "none", old.text))
    secrets.put(first, user_id, "X", VALUE)
    second = replace(ctx, secret_keys=sealing.Keys(tmp_path / "none", f"{new.text},{old.text}"))
    assert resealing.rotate(second).resealed == 1
    third = replace(ctx, secret_keys=sealing.Keys(tmp_path / "none", new.text))
    with ctx.db.read() as session:
        row = session.scalars(sa.select(SecretRow)).one()
        assert sealing.unseal(third, row.sealed, *secrets.about(row)).decode() == VALUE
    assert not (tmp_path / "none").exists()
    with pytest.raises(InstallationProblem, match="DIAMOND_SECRET_KEY"):
        sealing.Keys(tmp_path / "none", "short")
    with pytest.raises(InstallationProblem, match="only you can change"):
        third.keys.replace((old,))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_that_others_can_read_is_refused(ctx: Context, user_id: str, mode: int) -> None:
    secrets.put(ctx, user_id, "X", VALUE)
    os.chmod(ctx.keys.file, mode)
    with pytest.raises(InstallationProblem, match="others can read"):
        secrets.put(ctx, user_id, "X", VALUE)
    os.chmod(ctx.keys.file, 0o600)
    secrets.put(ctx, user_id, "X", VALUE)
    ctx.keys.file.write_text("# nothing\n")
    with pytest.raises(InstallationProblem, match="holds no key"):
        secrets.put(ctx, user_id, "X", VALUE)


def test_one_that_cannot_be_opened_does_not_hold_up_the_others(ctx: Context, user_id: str) -> None:
    for name in ("a", "mine", "z"):
        secrets.put(ctx, user_id, name, VALUE)
    swap(ctx, sealed="v1:0123456789ab:AAAA")
    done = resealing.rotate(ctx)
    assert (done.resealed, len(done.unopened)) == (2, 1)


def test_keys_of_webhooks_change_along(ctx: Context, user_id: str) -> None:
    rule = notices.create(ctx, user_id, Channel.WEBHOOK, "https://example.org/hook", ("task.failed",))
    assert resealing.rotate(ctx).resealed == 1
    resealing.prune(ctx, pause=lambda _wait_s: None)
    with ctx.db.read() as session:
        row = session.scalars(sa.select(NoticeRuleRow)).one()
        assert notices.key_of(ctx, row) == rule.key


def test_jobs_of_builds_get_none(ctx: Context, place: Place) -> None:
    with ctx.db.read() as session:
        assert session.get(EndpointRow, place.endpoint_id) is not None
    task = launch(ctx, place.alice, {})
    with ctx.db.write() as session:
        from diamond.server.store.models import TaskRow

        row = session.get_one(TaskRow, task.id, options=[sa.orm.undefer(TaskRow.spec)])
        row.kind, row.spec = "build", {**row.spec, "secrets": {"A": {"secret": "mine"}}}
    secrets.put(ctx, place.alice, "mine", VALUE)
    with pytest.raises(NotFound):
        secrets.deliver(ctx, place.endpoint_id, job_of(ctx, place.alice, task))
