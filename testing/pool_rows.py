"""A pool with a past, as rows: pilots that hold nodes, tasks of every kind inside, decisions and what was estimated.

For pages, which show it; no agent has ever run any of it, and no round may be run over it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from diamond.core.codec import encode
from diamond.core.ids import new_id
from diamond.core.pools import PoolNode, PoolPlace, PoolSpec
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import TaskSpec
from diamond.server.services.context import Context
from diamond.server.store.models import JobRow, TaskRow
from diamond.server.store.pool_models import PoolDecisionRow, PoolRow

MIN = 60.0


@dataclass
class Builder:
    """Writes one pool. Times are minutes before now."""

    ctx: Context
    owner_id: str
    endpoint_id: str
    spec: PoolSpec
    project_id: str | None = None
    made: float = 300.0
    id: str = field(default_factory=lambda: new_id("pol"))
    estimates: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.ctx.clock()

    def begin(self) -> None:
        row = PoolRow(
            id=self.id,
            owner_id=self.owner_id,
            project_id=self.project_id,
            endpoint_id=self.endpoint_id,
            name=self.spec.name,
            spec=encode(self.spec),
            created_at=self._at(self.made),
            plan={},
        )
        with self.ctx.db.write() as session:
            session.add(row)

    def finish(self, *, wanted_nodes: int = 1, closed: bool = False) -> None:
        """The newest decision, as services.pool_rounds keeps it."""
        with self.ctx.db.write() as session:
            row = session.get_one(PoolRow, self.id)
            row.plan = {
                "at": self.now - 20,
                "placed": {},
                "wanted_nodes": wanted_nodes,
                "reasons": self.reasons,
                "estimates": self.estimates,
            }
            row.closed_at = self.now if closed else None

    def pilot(self, host: str, start: float, *, end: float | None = None, waits: str = "") -> str:
        """The id of its job."""
        state = "QUEUED" if waits else "SUCCEEDED" if end is not None else "RUNNING"
        with self.ctx.db.write() as session:
            task = self._task(session, f"pilot of {self.spec.name}", state, start, end, kind="pilot")
            task.pending_reason = waits
            job = self._job(session, task, state, start, end)
            job.hosts = [host] if host else []
            job.time_limit_s = self.spec.walltime
            return job.id

    def task(
        self, name: str, state: str, submitted: float, *, run: dict[str, Any] | None = None, **more: Any
    ) -> str:  # fmt: skip
        """`more`: ended, reason, goodput, alone, left, owner_id, visibility."""
        spec = TaskSpec.parse({"run": "true", "pool": self.spec.name, **(run or {})})
        with self.ctx.db.write() as session:
            task = self._task(session, name, state, submitted, more.get("ended"), spec=spec)
            task.owner_id = more.get("owner_id", self.owner_id)
            task.visibility = more.get("visibility", "private")
            if state == "PENDING":
                task.pending_reason = more.get("reason", "")
            self.reasons[task.id] = more.get("reason", "")
            if "alone" in more:
                self.estimates[task.id] = {
                    "goodput": more.get("goodput"), "alone": more["alone"], "left": more.get("left"), "known": True,
                }  # fmt: skip
            return task.id

    def stay(
        self, task_id: str, where: dict[str, int], start: float, *, end: float | None = None, moving: bool = False
    ) -> str:  # fmt: skip
        """A job of the task with so many slots of each pilot, and the decision that it has them; the job's id."""
        nodes = tuple(PoolNode(pilot=pilot, slots=slots) for pilot, slots in where.items())
        place = PoolPlace(pool_id=self.id, nodes=nodes, has_gpus=self.spec.has_gpus)
        with self.ctx.db.write() as session:
            task = session.get_one(TaskRow, task_id)
            before = task.attempt
            job = self._job(session, task, "RUNNING" if end is None else "SUCCEEDED", start, end)
            job.place = encode(place)
            job.desired = Desired.YIELD.value if moving else Desired.RUN.value
            decision = PoolDecisionRow(
                id=new_id("pdc"),
                pool_id=self.id,
                task_id=task_id,
                at=self._at(start),
                slots=place.slots,
                before=0 if not before else max(1, place.slots // 2),
                reason=self.reasons.get(task_id, ""),
                goodput=None,
            )
            session.add(decision)
            return job.id

    def measure(self, job_id: str, *steps: int, until: int = 1000, world: int = 1, batch: int = 64) -> None:
        """What the training in a job said of itself."""
        lines = [
            json.dumps(
                {
                    "t": self.now, "job": job_id, "step": step, "until": until, "steps": 10, "world": world, "nodes": 1,
                    "global_batch": batch, "step_s": 0.5, "samples_per_s": 128.0,
                }
            )
            for step in steps
        ]  # fmt: skip
        self.ctx.streams.append(job_id, "train", 0, ("\n".join(lines) + "\n").encode())

    def _at(self, minutes: float) -> float:
        return self.now - minutes * MIN

    def _task(
        self, session: Session, name: str, state: str, start: float, end: float | None, **more: Any
    ) -> TaskRow:  # fmt: skip
        spec = more.get("spec") or TaskSpec.parse({"run": "true"})
        row = TaskRow(
            id=new_id("tsk"),
            owner_id=self.owner_id,
            name=name,
            spec=encode(spec),
            state=TaskState(state).value,
            desired=Desired.RUN.value,
            kind=more.get("kind", "command"),
            pool_id=self.id,
            priority=0,
            created_at=self._at(start),
            ended_at=None if end is None else self._at(end),
            attempt=0,
            failures=0,
            detail="",
            pending_reason="",
            outputs=[],
            project_id=self.project_id,
            visibility="private",
        )
        session.add(row)
        session.flush()
        return row

    def _job(self, session: Session, task: TaskRow, state: str, start: float, end: float | None) -> JobRow:
        task.attempt += 1
        row = JobRow(
            id=new_id("job"),
            task_id=task.id,
            endpoint_id=self.endpoint_id,
            attempt=task.attempt,
            state=JobState(state).value,
            desired=Desired.RUN.value,
            revision=1,
            created_at=self._at(start),
            started_at=None if state == "QUEUED" else self._at(start),
            ended_at=None if end is None else self._at(end),
        )
        session.add(row)
        session.flush()
        return row


def busy_pool(ctx: Context, owner_id: str, endpoint_id: str, other_id: str | None = None, **more: Any) -> str:
    """Three nodes of four slots and one that is asked for; tasks that grow, move, wait and ended. The pool's id."""
    spec = PoolSpec.parse({"name": "a100-pool", "endpoint": "here", "nodes": "2..4", "accelerators": "A100:4", **more})
    made = Builder(ctx, owner_id, endpoint_id, spec)
    made.begin()
    made.pilot("gpu07", 290, end=200)
    first, second, third = made.pilot("gpu01", 250), made.pilot("gpu02", 180), made.pilot("gpu03", 40)
    made.pilot("", 3, waits="the partition is full; others are before it")
    done = made.task("baseline-unet", "SUCCEEDED", 240, ended=120)
    made.stay(done, {first: 2}, 238, end=190)
    made.measure(made.stay(done, {first: 4}, 189, end=120), 900, 1000, world=4, batch=1000)
    grown = made.task(
        "burgers-fno", "RUNNING", 200, goodput=420.0, alone=260.0, left=4e6, run={"resources": {"slots": "1..8"}},
        reason="grows from 2 to 4 GPUs, 1.6 times as fast, worth a restart of a minute",
    )  # fmt: skip
    made.stay(grown, {second: 2}, 178, end=100)
    made.measure(made.stay(grown, {second: 4}, 99, end=None), 6200, until=14_000, world=4)
    moving = made.task(
        "lung-segmentation", "RUNNING", 118, goodput=80.0, alone=95.0, left=4e5,
        run={"resources": {"slots": "1..4"}},
        reason="shrinks from 3 to 2 GPUs; the others do more elsewhere",
    )  # fmt: skip
    made.measure(made.stay(moving, {first: 2}, 117, moving=True), 2400, until=4000, world=2)
    fixed = made.task("solver <b>64</b>", "RUNNING", 90, run={"resources": {"slots": 2}}, reason="it asks for 2 slots")
    made.stay(fixed, {first: 2}, 88)
    if other_id is not None:
        hidden = made.task("secret name", "RUNNING", 60, owner_id=other_id, reason="it has its fair share")
        made.stay(hidden, {third: 3}, 38)
    made.task(
        "waits-its-turn", "PENDING", 15, run={"resources": {"slots": "4..8"}},
        reason="it needs 4 slots at once; 1 is free, and no task may be made smaller",
    )  # fmt: skip
    made.task("stopped-early", "CANCELLED", 100, ended=95)
    made.finish(wanted_nodes=4)
    return made.id
