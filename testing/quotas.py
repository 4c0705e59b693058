"""What tests of quotas and of use share: people with limits, and an agent that runs what they launch."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, Partition
from diamond.core.errors import QuotaExceeded
from diamond.core.ids import new_id
from diamond.core.projects import Role
from diamond.core.quotas import Limits, Use
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.core.tasks import Task
from diamond.core.wire import Hello, JobReport, Report
from diamond.server.services import agents, quotas, tasks
from diamond.server.services.context import Context
from diamond.server.store.identity_models import EndpointShareRow, MemberRow, ProjectRow
from diamond.server.store.models import EndpointRow, TaskRow, UserRow
from testing.context import Clock
from testing.proven import prove

HOUR = 3600.0
NOVEMBER_15 = datetime.datetime(2026, 11, 15, 12, tzinfo=datetime.UTC).timestamp()
DECEMBER = datetime.datetime(2026, 12, 1, tzinfo=datetime.UTC).timestamp()


class World:
    """A cluster of eight nodes with four GPUs each, whose agent is this test; a project `pde` of alice and bob."""

    def __init__(self, ctx: Context, clock: Clock, owner_id: str) -> None:
        self.ctx, self.clock = ctx, clock
        clock.now = NOVEMBER_15
        gpus = (Gpu(model="H100", count=4),)
        group = NodeGroup(count=8, cpus=8, gpus=gpus)
        facts = EndpointFacts(
            scheduler="slurm",
            nodes=8,
            cpus_per_node=8,
            gpus_per_node=gpus,
            partitions=(Partition(name="gpu", max_walltime_s=int(HOUR), groups=(group,)),),
            queues_ahead=True,
            allows_others=True,
        )
        with ctx.db.write() as session:
            self.endpoint = session.scalars(sa.select(EndpointRow.id)).one()
            self.users = {name: self._user(session, name) for name in ("alice", "bob", "carol")}
            self.project = new_id("prj")
            session.add(ProjectRow(id=self.project, name="pde", title="", created_at=clock()))
            session.flush()
            everybody = {owner_id: Role.OWNER, self.users["alice"]: Role.MEMBER, self.users["bob"]: Role.MEMBER}
            for user, role in everybody.items():
                session.add(MemberRow(project_id=self.project, user_id=user, role=role.value, created_at=clock()))
            session.flush()
            at = clock()
            share = EndpointShareRow(endpoint_id=self.endpoint, project_id=self.project, created_at=at, approved_at=at)
            session.add(share)
        prove(ctx, self.endpoint)
        agents.hello(ctx, self.endpoint, Hello(facts=facts))
        self.owner = owner_id

    def _user(self, session: Any, name: str) -> str:
        row = UserRow(id=new_id("usr"), name=name, created_at=self.clock())
        session.add(row)
        session.flush()
        return row.id

    def launch(self, user: str = "alice", **fields: Any) -> Task:
        spec = {"run": "true", "project": "pde", **fields}
        return tasks.create(self.ctx, self.users.get(user, self.owner), spec)[0]

    def task(self, task: Task) -> Task:
        with self.ctx.db.read() as session:
            owner = session.get_one(TaskRow, task.id).owner_id
        return tasks.get(self.ctx, owner, task.id)

    def tell(self, task: Task, state: JobState, **fields: Any) -> None:
        job = self.task(task).jobs[-1].id
        agents.desired(self.ctx, self.endpoint, self.ctx.epoch, 0)
        report = Report(epoch=self.ctx.epoch, jobs=(JobReport(job_id=job, state=state, **fields),))
        agents.report(self.ctx, self.endpoint, report)

    def run(self, task: Task) -> None:
        self.tell(task, JobState.RUNNING, started_at=self.clock())

    def end(self, task: Task, reason: Reason = Reason.COMPLETED, **fields: Any) -> None:
        state = JobState.SUCCEEDED if reason in (Reason.COMPLETED, Reason.CONTINUED) else JobState.FAILED
        self.tell(task, state, reason=reason, ended_at=self.clock(), **fields)

    def limit(self, kind: str = "project", name: str = "pde", **limits: Any) -> None:
        quotas.set_limits(self.ctx, kind, name, Limits(**limits))

    def used(self, kind: str = "project", name: str = "pde") -> Use:
        return quotas.get(self.ctx, kind, name).used

    def refused(self, launch: Callable[[], object]) -> QuotaExceeded:
        with pytest.raises(QuotaExceeded) as caught:
            launch()
        return caught.value


def gpu_tasks(nodes: int = 1, gpus: int = 4, **fields: Any) -> dict[str, Any]:
    return {"num_nodes": nodes, "resources": {"accelerators": f"gpu:{gpus}"}, **fields}


def at_once(actions: list[Callable[[], Any]]) -> list[Any]:
    """What each action answered, or raised, when all begin together."""
    answers: list[Any] = [None] * len(actions)
    barrier = threading.Barrier(len(actions))

    def act(number: int) -> None:
        barrier.wait()
        try:
            answers[number] = actions[number]()
        except Exception as error:
            answers[number] = error

    threads = [threading.Thread(target=act, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
