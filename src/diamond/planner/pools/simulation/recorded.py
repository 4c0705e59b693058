"""How the tasks of a recorded pool really go: how fast at each size, how much work, what starts and stops take.

Speeds are those of a task's own jobs, from their first step to the last one that they told of, else of the windows it
measured. Sizes it never had are filled in by a model of its step times, with tasks like it as the prior.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from diamond.core.pool_records import JobRecord, NodeRecord, PoolRecord, TaskRecord
from diamond.core.reasons import Reason
from diamond.planner.pools import trained
from diamond.planner.pools.pace import leave_s
from diamond.planner.pools.profiles import Profiles
from diamond.planner.pools.snapshot import Shape
from diamond.planner.pools.steptimes import StepTimes
from diamond.planner.pools.trained import AtOwnBatch, Window

SUCCEEDED = "SUCCEEDED"
_LOSSES = frozenset({Reason.NODE_FAIL, Reason.PREEMPTED, Reason.LOST})
_LONGEST_STOP_S = 3600.0
# A training tells of itself more often than that. The end of a node is noticed within so long, for all in it at once.
_TELLS_S = 15.0
_NOTICED_S = 30.0
_AT_ONCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds around the training itself.

    Attributes:
        queued_s: from being given slots to running there.
        starting_s: from there to the first step; what the pool calls the restart.
        telling_s: from the first step until the server hears of it.
        heeding_s: from being asked to stop to the last step that counts: it trains on until it has heard of it.
        stopping_s: from the last step that counts to the end of a job that was asked to stop.
        ending_s: the same of the last job.
    """

    queued_s: float = 0.0
    starting_s: float = 0.0
    telling_s: float = 0.0
    heeding_s: float = 0.0
    stopping_s: float = 0.0
    ending_s: float = 0.0


@dataclass(eq=False)
class Truth:
    """A task as it is; its work is counted in samples, or in seconds where it measured nothing.

    Attributes:
        measured: whether it tells of itself.
        total: work from start to end.
        saved_s: between two checkpoints: a lost node undoes half of that.
        batches: the global batch it had at each size, where Diamond or its ranks chose it; `global_batch` elsewhere.
    """

    record: TaskRecord
    measured: bool
    total: float
    global_batch: int
    costs: Costs
    saved_s: float
    kind: str
    model: AtOwnBatch | None = None
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    batches: dict[tuple[int, int], int] = field(default_factory=dict)

    def rate(self, nodes: int, slots: int) -> float:
        """Work a second on so many slots of so many nodes."""
        if not self.measured:
            return 1.0
        if (nodes, slots) not in self.rates:
            found = self.model.goodput(Shape(self.kind, nodes, slots)) if self.model is not None else 0.0
            # More slots than samples: whoever put it there learns that it is slow, and the replay goes on.
            self.rates[nodes, slots] = found or min(self.rates.values())
        return self.rates[nodes, slots]


@dataclass(frozen=True, kw_only=True)
class NodeTime:
    """A node from `began_at`; from `leaving_at` on nothing new is put there, at `lost_at` all in it is lost.

    From `silent_at` on nothing comes forward there, which nobody knows until it is lost.
    """

    name: str
    slots: int
    began_at: float
    leaving_at: float = math.inf
    lost_at: float = math.inf
    silent_at: float = math.inf


def truths(record: PoolRecord) -> list[Truth]:
    """Of all tasks that ever ran."""
    ran = [task for task in record.tasks if any(job.started_at is not None for job in task.jobs)]
    past = Profiles()
    windows = {task.id: _windows(task) for task in ran}
    for task in ran:
        past.learn(keys_of(task), trained.measurements(record.slot_kind, windows[task.id]))
    usual = _usual(ran, windows)
    return [_truth(record, task, windows[task.id], past, usual) for task in ran]


def keys_of(task: TaskRecord) -> list[str]:
    """What tasks like it are known by, the most specific first."""
    return [f"{level} {number}" for level, number in enumerate(task.like)] or [f"task {task.id}"]


def _truth(record: PoolRecord, task: TaskRecord, windows: Sequence[Window], past: Profiles, usual: Costs) -> Truth:
    rates = {(one.nodes, one.slots): one.global_batch / one.step_s for one in windows}
    measured = bool(windows)
    costs = _costs(task, rates, usual) if measured else Costs(queued_s=_middle(_queued(task), usual.queued_s))
    model = None
    if measured:
        own = trained.measurements(record.slot_kind, windows)
        prior = past.similar(keys_of(task))
        model = AtOwnBatch(StepTimes.fit(own, prior.times if prior is not None else None), windows[-1].global_batch)
    return Truth(
        record=task,
        measured=measured,
        total=max(_total(task, rates) if measured else _lasted_s(record, task), 1e-6),
        global_batch=windows[-1].global_batch if windows else 1,
        costs=costs,
        saved_s=task.saves_s or 0.0,
        kind=record.slot_kind,
        model=model,
        rates=rates,
        batches={(one.nodes, one.slots): one.global_batch for one in windows},
    )


def _windows(task: TaskRecord) -> list[Window]:
    """What it did at each size on average, where its jobs tell, else in the last window there."""
    sums: dict[tuple[int, int], tuple[float, float]] = {}
    for job in task.jobs:
        work, seconds = _trained(job)
        if work > 0.0 and seconds > 0.0:
            before = sums.get((job.nodes, job.slots), (0.0, 0.0))
            sums[job.nodes, job.slots] = (before[0] + work, before[1] + seconds)
    found = []
    for one in task.windows:
        work, seconds = sums.get((one.nodes, one.slots), (0.0, 0.0))
        step_s = one.global_batch * seconds / work if work > 0.0 else one.step_s
        if one.nodes <= one.slots and one.global_batch >= 1 and 0.0 < step_s < math.inf:
            found.append(Window(one.nodes, one.slots, one.global_batch, step_s))
    return found


def _trained(job: JobRecord) -> tuple[float, float]:
    """(samples, seconds) between the first step and the last that it told of."""
    if job.first_at is None or job.last_at is None or job.first_samples is None or job.last_samples is None:
        return 0.0, 0.0
    return job.last_samples - job.first_samples, job.last_at - job.first_at


def _total(task: TaskRecord, rates: dict[tuple[int, int], float]) -> float:
    """What it was to do, or, of one that ended otherwise or never said, what it did."""
    if task.total_samples and (task.state == SUCCEEDED or task.ended_at is None):
        return task.total_samples
    last = task.jobs[-1]
    if last.last_samples is None or last.last_at is None:
        return max((job.last_samples or 0.0 for job in task.jobs), default=0.0)
    after_s = max(0.0, (last.ended_at or last.last_at) - last.last_at)
    return last.last_samples + after_s * rates.get((last.nodes, last.slots), 0.0)


def _lasted_s(record: PoolRecord, task: TaskRecord) -> float:
    """Of one that measured nothing: its last job did all of it."""
    last = task.jobs[-1]
    if last.started_at is None:
        return 0.0
    return (last.ended_at if last.ended_at is not None else record.recorded_at) - last.started_at


# ---- what starts and stops take --------------------------------------------------------------------------------------


def _queued(task: TaskRecord) -> list[float]:
    return [job.started_at - job.asked_at for job in task.jobs if job.started_at is not None]


def _starting(task: TaskRecord) -> list[float]:
    return [
        job.first_at - job.started_at for job in task.jobs if job.started_at is not None and job.first_at is not None
    ]


def _telling(task: TaskRecord) -> list[float]:
    return [job.told_at - job.first_at for job in task.jobs if job.told_at is not None and job.first_at is not None]


def _stopping(task: TaskRecord, rates: dict[tuple[int, int], float]) -> list[float]:
    return [stopping_s for _, stopping_s in _stops(task, rates)]


def _heeding(task: TaskRecord, rates: dict[tuple[int, int], float]) -> list[float]:
    """Of jobs that trained when they were asked to stop."""
    return [
        min(max(0.0, job.ended_at - job.stop_asked_at - stopping_s), _LONGEST_STOP_S)
        for job, stopping_s in _stops(task, rates)
        if job.ended_at is not None and job.stop_asked_at is not None
        if job.first_at is not None and job.first_at <= job.stop_asked_at
    ]


def _stops(task: TaskRecord, rates: dict[tuple[int, int], float]) -> list[tuple[JobRecord, float]]:
    """Jobs that were stopped and gone on with: where that was at what was saved, and that was reached at some moment,
    the rest of a job's time was the stop."""
    return [
        (job, _after(job, then.first_samples, rates))
        for job, then in pairwise(task.jobs)
        if job.reason == Reason.CONTINUED and then.first_samples is not None and job.last_at is not None
    ]


def _ending(task: TaskRecord, rates: dict[tuple[int, int], float]) -> list[float]:
    last = task.jobs[-1]
    if task.state != SUCCEEDED or not task.total_samples or last.last_at is None:
        return []
    return [_after(last, task.total_samples, rates)]


def _after(job: JobRecord, reached: float, rates: dict[tuple[int, int], float]) -> float:
    """Seconds of a job after it had done so much."""
    rate = rates.get((job.nodes, job.slots), 0.0)
    if rate <= 0.0 or job.ended_at is None or job.last_at is None or job.last_samples is None:
        return 0.0
    at = job.last_at + (reached - job.last_samples) / rate
    return min(max(0.0, job.ended_at - at), _LONGEST_STOP_S)


def _costs(task: TaskRecord, rates: dict[tuple[int, int], float], usual: Costs) -> Costs:
    return Costs(
        queued_s=_middle(_queued(task), usual.queued_s),
        starting_s=_middle(_starting(task), usual.starting_s),
        telling_s=_middle(_telling(task), usual.telling_s),
        heeding_s=_middle(_heeding(task, rates), usual.heeding_s),
        stopping_s=_middle(_stopping(task, rates), usual.stopping_s),
        ending_s=_middle(_ending(task, rates), usual.ending_s),
    )


def _usual(tasks: Iterable[TaskRecord], windows: dict[int, list[Window]]) -> Costs:
    """Of the pool: for tasks that have not met something themselves."""
    pairs = [
        (task, {(one.nodes, one.slots): one.global_batch / one.step_s for one in windows[task.id]}) for task in tasks
    ]

    def middle(found: Callable[[TaskRecord, dict[tuple[int, int], float]], list[float]]) -> float:
        return _middle([seconds for task, rates in pairs for seconds in found(task, rates)], 0.0)

    return Costs(
        queued_s=middle(lambda task, _: _queued(task)),
        starting_s=middle(lambda task, _: _starting(task)),
        telling_s=middle(lambda task, _: _telling(task)),
        heeding_s=middle(_heeding),
        stopping_s=middle(_stopping),
        ending_s=middle(_ending),
    )


def _middle(values: Sequence[float], otherwise: float) -> float:
    return max(0.0, statistics.median(values)) if values else otherwise


# ---- nodes -----------------------------------------------------------------------------------------------------------


def node_times(record: PoolRecord) -> list[NodeTime]:
    """Nodes as they came and went. Those that were there when the last task ended stay: a replay may take longer."""
    last = max((task.ended_at or record.recorded_at for task in record.tasks), default=0.0)
    ends = [math.inf if node.ended_at is None else node.ended_at for node in record.nodes]
    stays_from = min(last, max(ends, default=0.0))
    return [
        _node_time(number, node, record, stays=end >= stays_from)
        for number, (node, end) in enumerate(zip(record.nodes, ends, strict=True), start=1)
    ]


def _node_time(number: int, node: NodeRecord, record: PoolRecord, *, stays: bool) -> NodeTime:
    ended_at = math.inf if stays or node.ended_at is None else node.ended_at
    silent_at = lost_at = math.inf
    if node.reason in _LOSSES and ended_at < math.inf:
        ended_at, silent_at = _lost(record, node.began_at, ended_at)
        lost_at = ended_at
    leaving_at = ended_at
    if node.walltime_s is not None and node.ended_at is not None and not stays:
        leaving_at = min(leaving_at, node.began_at + node.walltime_s - leave_s(node.walltime_s))
    return NodeTime(
        name=f"n{number:04}",
        slots=node.slots,
        began_at=node.began_at,
        leaving_at=leaving_at,
        lost_at=lost_at,
        silent_at=silent_at,
    )


def _lost(record: PoolRecord, began_at: float, ended_at: float) -> tuple[float, float]:
    """When the pool heard that a node was lost, and when it had really gone.

    A scheduler takes a while to notice, and dates the end to when it did; the pool hears of it with the jobs in it. The
    last that was heard of these is when the node was there; of one that never said anything, its start.
    """
    jobs = [
        (job.ended_at, job.started_at if job.last_at is None else job.last_at)
        for task in record.tasks
        for job in task.jobs
        if job.reason in _LOSSES and job.started_at is not None and began_at <= job.started_at < ended_at
        if job.ended_at is not None and abs(job.ended_at - ended_at) < _NOTICED_S
    ]
    if not jobs:
        return ended_at, ended_at
    heard_at = min((end for end, _ in jobs), key=lambda end: abs(end - ended_at))
    last = max(last for end, last in jobs if abs(end - heard_at) < _AT_ONCE_S)
    return heard_at, last if heard_at - last > _TELLS_S else heard_at
