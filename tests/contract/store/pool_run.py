"""A pool that really runs, but for its machines: the server's own rounds over a clock that is moved from event to
event, and trainings that are as fast as they are told to be."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, Partition
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState
from diamond.core.wire import Hello, JobOrder, JobReport, Report, StreamChunk
from diamond.server.services import agents, planning, pool_rounds, pools, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow
from testing.context import Clock

BATCH = 64
QUEUE_S, RESTART_S, STOP_S, WINDOW_S = 1.0, 10.0, 2.0, 10.0
NODES, SLOTS = 4, 2
NOISE = 0.05


@dataclass
class Training:
    """What is true of a task: a step computes for `compute_s` on one slot, and synchronises for `sync_s` a doubling,
    twice that between nodes."""

    at: float
    steps: int
    compute_s: float
    sync_s: float
    spec: dict[str, Any]
    task_id: str = ""
    done: float = 0.0
    ended_at: float | None = None

    def step_s(self, nodes: int, slots: int) -> float:
        return self.compute_s / slots + self.sync_s * math.log2(slots) * (1 if nodes == 1 else 2)


@dataclass
class Running:
    order: JobOrder
    training: Training
    trains_from: float = math.inf
    at: float = 0.0
    sent: int = 0
    is_stopping: bool = False

    @property
    def size(self) -> tuple[int, int]:
        assert self.order.place is not None
        return len(self.order.place.nodes), self.order.place.slots


@dataclass
class Run:
    """`lose`: at these moments a node dies, with all that runs there."""

    ctx: Context
    user_id: str
    clock: Clock
    trainings: list[Training]
    lose: tuple[float, ...] = ()
    seed: int = 0
    _queue: list[tuple[float, int, str, str]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _jobs: dict[str, Running] = field(default_factory=dict)
    _pilots: dict[str, JobOrder] = field(default_factory=dict)

    def run(self) -> None:
        """Until all tasks are done."""
        self._began = self.clock()
        self._random = random.Random(self.seed)
        self._due = ""
        self._open()
        for number, training in enumerate(self.trainings):
            self._later(self._began + training.at, "launch", str(number))
        for moment in self.lose:
            self._later(self._began + moment, "lose", "")
        self._look()
        while any(training.ended_at is None for training in self.trainings):
            at, _, what, name = heapq.heappop(self._queue)
            self.clock.now = max(self.clock.now, at)
            getattr(self, f"_{what}")(name)

    def _open(self) -> None:
        with self.ctx.db.read() as session:
            self._endpoint, name = session.execute(sa.select(EndpointRow.id, EndpointRow.name)).one()
        gpus = (Gpu(model="A100", count=SLOTS),)
        group = NodeGroup(count=NODES, cpus=64, gpus=gpus)
        partition = Partition(name="gpu", max_walltime_s=360_000, groups=(group,))
        facts = EndpointFacts(
            scheduler="slurm", nodes=NODES, cpus_per_node=64, gpus_per_node=gpus, partitions=(partition,),
            holds_pools=True,
        )  # fmt: skip
        agents.hello(self.ctx, self._endpoint, Hello(facts=facts))
        spec = {"name": "p", "endpoint": name, "nodes": str(NODES), "accelerators": f"A100:{SLOTS}", "walltime": "48h"}
        pools.create(self.ctx, self.user_id, spec)

    def _later(self, at: float, what: str, name: str) -> None:
        heapq.heappush(self._queue, (at, next(self._numbers), what, name))

    # ---- the server --------------------------------------------------------------------------------------------------

    def _look(self, name: str = "") -> None:
        """A round, as the server has it whenever it is woken, and when it said that it would look again."""
        if name and name != self._due:
            return  # it was woken meanwhile
        planning.run_due(self.ctx)
        due = pool_rounds.run(self.ctx)
        self._due = str(next(self._numbers))
        self._later(due if due is not None else self.clock() + 60.0, "look", self._due)
        self._follow_orders()

    def _follow_orders(self) -> None:
        now = self.clock()
        by_task = {training.task_id: training for training in self.trainings if training.task_id}
        for order in agents.desired(self.ctx, self._endpoint, self.ctx.epoch, 0).orders:
            if order.pilot is not None:
                if order.job_id not in self._pilots:
                    self._pilots[order.job_id] = order
                    self._later(now + QUEUE_S, "hold", order.job_id)
            elif order.job_id not in self._jobs:
                self._jobs[order.job_id] = Running(order, by_task[order.task_id])
                self._later(now + QUEUE_S, "start", order.job_id)
            elif order.desired is Desired.YIELD and not self._jobs[order.job_id].is_stopping:
                self._move_on(order.job_id)
                self._jobs[order.job_id].is_stopping = True
                self._later(now + STOP_S, "stop", order.job_id)

    def _tell(self, job_id: str, state: JobState, **fields: Any) -> None:
        job = JobReport(job_id=job_id, state=state, **fields)
        agents.report(self.ctx, self._endpoint, Report(epoch=self.ctx.epoch, jobs=(job,)))

    # ---- what happens ------------------------------------------------------------------------------------------------

    def _launch(self, name: str) -> None:
        training = self.trainings[int(name)]
        training.task_id = tasks.create(self.ctx, self.user_id, {"pool": "p", **training.spec})[0].id
        self._look()

    def _hold(self, job_id: str) -> None:
        self._tell(job_id, JobState.RUNNING, started_at=self.clock(), hosts=(f"n{len(self._pilots)}",))
        self._look()

    def _start(self, job_id: str) -> None:
        if job_id not in self._jobs:
            return
        job = self._jobs[job_id]
        job.at = job.trains_from = self.clock() + RESTART_S
        self._tell(job_id, JobState.RUNNING, started_at=self.clock(), hosts=("n1",))
        self._later(job.trains_from + WINDOW_S, "window", job_id)
        self._plan_end(job)
        self._look()

    def _plan_end(self, job: Running) -> None:
        left = job.training.steps - job.training.done
        self._later(job.trains_from + left * job.training.step_s(*job.size), "finish", job.order.job_id)

    def _move_on(self, job_id: str) -> None:
        job = self._jobs[job_id]
        now = self.clock()
        if not job.is_stopping and now > job.at:
            job.training.done += (now - job.at) / job.training.step_s(*job.size)
            job.at = now

    def _window(self, job_id: str) -> None:
        """Streams wake nobody: what they say is read at the next look."""
        job = self._jobs.get(job_id)
        if job is None or job.is_stopping:
            return
        self._move_on(job_id)
        nodes, slots = job.size
        step_s = job.training.step_s(nodes, slots) * math.exp(self._random.gauss(0.0, NOISE))
        line = self.measured(job.training, nodes, slots, step_s)
        raw = json.dumps(line).encode() + b"\n"
        chunk = StreamChunk.of(job_id, "train", job.sent, raw)
        agents.report(self.ctx, self._endpoint, Report(epoch=self.ctx.epoch, streams=(chunk,)))
        job.sent += len(raw)
        self._later(self.clock() + WINDOW_S, "window", job_id)

    def measured(self, training: Training, nodes: int, slots: int, step_s: float) -> dict[str, Any]:
        """What it says of itself."""
        return {
            "t": self.clock(), "step": int(training.done), "until": training.steps,
            "steps": int(WINDOW_S / training.step_s(nodes, slots)), "step_s": step_s,
            "samples_per_s": BATCH / step_s, "world": slots, "nodes": nodes, "global_batch": BATCH,
        }  # fmt: skip

    def _stop(self, job_id: str) -> None:
        if self._jobs.pop(job_id, None) is not None:
            self._end(job_id, Reason.CONTINUED)

    def _finish(self, job_id: str) -> None:
        job = self._jobs.get(job_id)
        if job is None or job.is_stopping:
            return
        job.training.ended_at = self.clock()
        del self._jobs[job_id]
        self._end(job_id, Reason.COMPLETED)

    def _lose(self, _name: str) -> None:
        """The first node that holds something dies."""
        busy = [job.order.place.nodes[0].pilot for job in self._jobs.values() if job.order.place is not None]
        pilot = min(busy) if busy else min(self._pilots)
        for job_id, job in list(self._jobs.items()):
            if job.order.place is not None and any(node.pilot == pilot for node in job.order.place.nodes):
                self._move_on(job_id)
                del self._jobs[job_id]
                self._tell(job_id, JobState.FAILED, reason=Reason.NODE_FAIL, ended_at=self.clock())
        self._tell(pilot, JobState.FAILED, reason=Reason.NODE_FAIL, ended_at=self.clock())
        self._look()

    def _end(self, job_id: str, reason: Reason) -> None:
        self._tell(job_id, JobState.SUCCEEDED, reason=reason, ended_at=self.clock())
        self._look()


def workload(seed: int, tasks_: int = 12, every_s: float = 60.0) -> list[Training]:
    """Trainings of three programs: elastic ones, ones that say nothing, and a few that want just two slots."""
    rand = random.Random(seed)
    at = 0.0
    found = []
    for number in range(tasks_):
        program = rand.randrange(3)
        compute_s = (0.4, 0.8, 1.2)[program] * math.exp(rand.gauss(0.0, 0.1))
        spec: dict[str, Any] = {"run": f"python program{program}.py", "name": f"t{number}"}
        asked = rand.choice(["1..8", "1..4", None, "2"])
        if asked is not None:
            spec["resources"] = {"accelerators": f"A100:{asked}"}
        total_s = math.exp(rand.uniform(math.log(200.0), math.log(2000.0)))  # on one slot
        sync_s = compute_s * rand.uniform(0.01, 0.1)
        found.append(Training(at, max(10, int(total_s / compute_s)), compute_s, sync_s, spec))
        at += rand.expovariate(1.0 / every_s)
    return found
