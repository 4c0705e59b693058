"""When a loop that is not ours saves and when it stops: the same answers on every rank, after the same step.

The callbacks ask after every optimizer step and do as they are told; how often is weighed from what their checkpoints
were measured to cost. Also writes what was measured, for the planner. Must not know the library that owns the loop.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diamond.train import measures, metrics
from diamond.train.adapters.whole import say
from diamond.train.ending import Ending, exit_code, job_ends_at
from diamond.train.errors import Continued, TrainError
from diamond.train.loop.control import Control, Decision
from diamond.train.rhythm import DEFAULT_MTBF_S, interval_s, percentile

_FIRST_SAVE_S = 60.0  # until it is known what saving costs
_FIRST_LINE_S, _LINE_S = 2.0, 10.0  # between two lines for the planner


class Plan(NamedTuple):
    """What the library was told to do, for the lines that the planner reads. 0: it is not known."""

    until: int
    per_rank: int
    accumulate: int
    parallel: str
    precision: str


class Keeper:
    """Of one call of the library's `fit` or `train`, between `begin` and `end`, both on every rank.

    Attributes:
        by_time: whether it says when to save, beside the end of the job.
        saved_at: the step of the newest checkpoint, -1 before the first.
    """

    def __init__(self, *, save_every_s: float | None, keep: int) -> None:
        if keep < 1:
            raise TrainError(f"keep={keep} would leave nothing to go on from", hint="keep at least 1; 2 is safer")
        self.keep, self.by_time, self.saved_at = keep, True, -1
        self.rank, self.world = 0, 1
        self._every_s = save_every_s
        self._ending = Ending()
        self._control = Control(None, 0, 1)
        self._group: Any = None
        self._plan = Plan(0, 0, 1, "none", "fp32")
        self._blocked_s: list[float] = []
        self._took_s: list[float] = []
        self._step_s = 0.0
        self._began_at, self._last_save, self._mark = time.time(), time.monotonic(), time.monotonic()
        self._line = _Line(0, 0.0, 0.0)
        self._next_line = 0.0
        self._memory = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def begin(self, step: int, plan: Plan, *, world: int, join_hint: str) -> None:
        """`world` is with how many ranks the library trains.

        Raises:
            TrainError: more were started, that do not know of each other; `join_hint` is how they would.
        """
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        started = max(self.world, metrics.context().world_size)
        if world != started:  # as many trainings of their own, into the same folder
            raise TrainError(
                f"{started} ranks were started, but the Trainer trains with {world}",
                hint=f"{join_hint}; or unset WORLD_SIZE, if they are not to train together",
            )
        self._group = dist.new_group(backend="gloo") if self.world > 1 else None
        self._control = Control(self._group, self.rank, self.world)
        self._plan, self._began_at, self.saved_at = plan, time.time(), step
        self._last_save = self._mark = time.monotonic()
        self._line, self._next_line = _Line(step, self._mark, sum(self._blocked_s)), self._mark + _FIRST_LINE_S
        self.hush()  # a training before it may have ended in an error
        if threading.current_thread() is threading.main_thread():  # Python hears signals nowhere else
            self._ending.listen()

    def end(self, step: int) -> None:
        """Training is over. Nothing happens where it did not begin."""
        self.hush()
        self._write_line(step)
        self._control.drain()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def hush(self) -> None:
        """Give the signals back: nobody acts on them here any more."""
        self._ending.leave_alone()

    def leave(self, number: int, step: int) -> Continued:
        """What to raise when the state is saved and this process is to end, to be started again."""
        self.barrier()
        self.end(step)
        if self.is_main:
            say(f"saved at step {step}, ending in time to be continued")
        return Continued(exit_code(number, is_main=self.is_main))

    # ---- together ----------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for the other ranks, without their GPUs."""
        self._control.all_agree(True)

    def gathered(self, mine: Any) -> list[Any]:
        """The same of every rank, by its number."""
        if self.world == 1 or self._group is None:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self._group)
        return found

    # ---- after every step --------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> Decision:
        now = time.monotonic()
        took, self._mark = now - self._mark, now
        self._step_s = took if not self._step_s else 0.9 * self._step_s + 0.1 * took
        if self.is_main and now >= self._next_line:
            self._write_line(step)
        decided = self._control.answer()
        if self._control.is_due(step) or (self._ending.heard and self.world == 1):
            wish = Decision(stop=self._wants_stop(), save=self._wants_save())
            decided = self._control.ask(step, wish, self._step_s) or decided
        return decided or Decision()

    def _wants_stop(self) -> int:
        if self._ending.is_final:
            return self._ending.heard
        needed = 1.5 * self._needed_s() + 3 * self._step_s
        return signal.SIGUSR1 if self.is_main and self._ending.is_near(needed) else 0

    def _wants_save(self) -> bool:
        if self.is_main and self._ending.is_news():
            return True
        return self.is_main and self.by_time and time.monotonic() - self._last_save >= self.interval_s()

    def interval_s(self) -> float:
        if self._every_s is not None:
            return self._every_s
        if not self._took_s:
            return self._first_s()
        return interval_s(percentile(self._blocked_s, 0.9), percentile(self._took_s, 0.9), DEFAULT_MTBF_S)

    def _needed_s(self) -> float:
        """How long saving takes at worst, from what was measured."""
        return percentile(self._took_s, 0.99) or self._first_s()

    def _first_s(self) -> float:
        """Until when the first checkpoint is made, which tells what one costs: early in a short job."""
        ends = job_ends_at()
        return _FIRST_SAVE_S if ends is None else min(_FIRST_SAVE_S, max(1.0, 0.1 * (ends - self._began_at)))

    def saved(self, step: int, began: float) -> None:
        """A checkpoint was written, and training stood still for it since `began`, on the monotonic clock."""
        now = time.monotonic()
        self.saved_at, self._last_save, self._mark = step, now, now
        self._blocked_s.append(now - began)
        self._memory = max(self.gathered(_memory_bytes()))

    def missed(self) -> None:
        """None could be written; it is tried again after the usual time."""
        self._last_save = self._mark = time.monotonic()

    def safe(self, took_s: float) -> None:
        """It is on the disk."""
        self._took_s.append(took_s)

    # ---- what was measured -------------------------------------------------------------------------------------------

    def _write_line(self, step: int) -> None:
        """What is not told apart here (computing, waiting for data and for other ranks) is `other_s`."""
        now, last, blocked_s = time.monotonic(), self._line, sum(self._blocked_s)
        self._next_line = now + _LINE_S
        steps, place, plan = step - last.step, metrics.context(), self._plan
        if not self.is_main or steps < 1 or not os.environ.get(measures.FILE):
            return
        self._line = _Line(step, now, blocked_s)
        step_s, save_s = (now - last.at) / steps, (blocked_s - last.blocked_s) / steps
        batch = plan.per_rank * plan.accumulate * self.world
        measures.write({
            "t": time.time(), "job": place.job_id or "", "step": step, "until": plan.until or None, "steps": steps,
            "world": self.world, "nodes": place.num_nodes, "device": _device(), "parallel": plan.parallel,
            "precision": plan.precision, "global_batch": batch or None, "per_rank": plan.per_rank or None,
            "accumulate": plan.accumulate, "step_s": step_s, "save_s": save_s, "other_s": step_s - save_s,
            "samples_per_s": batch / step_s if batch else None,
            "memory_peak_bytes": max(self._memory, _memory_bytes()),
            "saves": {
                "count": len(self._blocked_s), "blocked_s": _mean(self._blocked_s), "took_s": _mean(self._took_s),
                "interval_s": self.interval_s() if self.by_time else None,
            },
            "ends_at": job_ends_at(),
        })  # fmt: skip


class _Line(NamedTuple):
    """Where the last line for the planner was written; `at` is of the monotonic clock."""

    step: int
    at: float
    blocked_s: float


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _memory_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
