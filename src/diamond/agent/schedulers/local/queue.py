"""Who goes next on one machine: the waiting line and the slots. Pure: no clock, no process, no file.

Order is priority (higher first), then whose user holds fewest cores now, then submission: users take turns, however
many jobs one of them has. A job may always pass a blocked one when it takes nothing that one
waits for. One that does may pass only among equals (same priority), and only while the blocked one has waited less than
`PATIENCE_S` at the head; from then on what becomes free is kept for it, so that a stream of small jobs cannot
starve it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Sequence

from diamond.agent.gpus import GpuSlot
from diamond.agent.schedulers.base import Submission

PATIENCE_S = 60.0
MOST_GUARDED = 10  # blocked jobs, from the head on, that those behind must not harm
LOOK_BEHIND = 500  # how many jobs behind a blocked one are considered: a dispatch stays cheap however long the line


class Slots:
    """Cores, memory and GPUs of one machine, and who has them. Not thread-safe; the scheduler's lock guards it."""

    def __init__(self, *, cpus: int, mem_bytes: int, gpus: Sequence[GpuSlot] = ()) -> None:
        self.cpus = cpus
        self.mem_bytes = mem_bytes
        self.gpus = {slot.index: slot for slot in gpus}
        self.free_cpus = cpus
        self.free_mem_bytes = mem_bytes
        self.free_gpus = set(self.gpus)
        self.held_cpus: dict[str, int] = {}  # by user

    def why_never(self, job: Submission) -> str:
        """Why this machine can never run the job, naming the number; empty when it can."""
        if job.num_nodes > 1:
            return f"the task asks for {job.num_nodes} nodes; this endpoint has 1"
        if job.cpus > self.cpus:
            return f"the task asks for {job.cpus} CPU cores; this machine has {self.cpus}"
        if job.mem_bytes > self.mem_bytes > 0:
            return f"the task asks for {_gib(job.mem_bytes)} of memory; this machine has {_gib(self.mem_bytes)}"
        have = self._matching(job, self.gpus)
        if job.gpus > len(have):
            kind = f"{job.gpu_type} GPUs" if job.gpu_type else "GPUs"
            models = sorted({slot.model for slot in self.gpus.values()})
            other = f" (it has {', '.join(models)})" if job.gpu_type and models else ""
            return f"the task asks for {job.gpus} {kind}; this machine has {len(have)}{other}"
        return ""

    def why_not_now(self, job: Submission) -> str:
        """What the job waits for; empty when it can start."""
        if job.cpus > self.free_cpus:
            return f"waiting for {job.cpus} CPU core{'s' * (job.cpus > 1)}; {self.free_cpus} of {self.cpus} free"
        if job.mem_bytes > self.free_mem_bytes and self.mem_bytes:
            return f"waiting for {_gib(job.mem_bytes)} of memory; {_gib(self.free_mem_bytes)} free"
        free = self._matching(job, self.free_gpus)
        if job.gpus > len(free):
            return f"waiting for {job.gpus} GPU{'s' * (job.gpus > 1)}; {len(free)} free"
        return ""

    def would_delay(self, job: Submission, blocked: Submission) -> bool:
        """Whether starting `job` now takes something from what `blocked` needs."""
        return (
            self.free_cpus - job.cpus < blocked.cpus
            or (job.mem_bytes > 0 and self.free_mem_bytes - job.mem_bytes < blocked.mem_bytes)
            or (job.gpus > 0 and blocked.gpus > 0)
        )

    def take(self, job: Submission, gpus: Sequence[int] | None = None) -> tuple[int, ...]:
        """Hand out what the job asks (or, when adopting, exactly the GPUs it has); returns the GPU indices."""
        chosen = tuple(self._matching(job, self.free_gpus)[: job.gpus] if gpus is None else gpus)
        self.free_cpus -= job.cpus
        self.held_cpus[job.user] = self.held_cpus.get(job.user, 0) + job.cpus
        self.free_mem_bytes -= job.mem_bytes
        self.free_gpus -= set(chosen)
        return chosen

    def give_back(self, job: Submission, gpus: Sequence[int]) -> None:
        self.free_cpus += job.cpus
        self.held_cpus[job.user] -= job.cpus
        if not self.held_cpus[job.user]:
            del self.held_cpus[job.user]
        self.free_mem_bytes += job.mem_bytes
        self.free_gpus |= set(gpus) & set(self.gpus)

    def _matching(self, job: Submission, among: set[int] | dict[int, GpuSlot]) -> list[int]:
        return sorted(index for index in among if self.gpus[index].is_type(job.gpu_type)) if job.gpus else []


class Line:
    """The waiting jobs in order. Not thread-safe."""

    def __init__(self) -> None:
        # By rank (the lower, the sooner) and user: order and name, sorted.
        self._lines: dict[int, dict[str, list[tuple[int, str]]]] = {}
        self._keys: dict[str, tuple[int, str, int]] = {}
        self._blocked_since: dict[str, float] = {}  # of those that have been at the head

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, name: str, *, priority: int, order: int, user: str = "") -> None:
        self._keys[name] = (-priority, user, order)
        bisect.insort(self._lines.setdefault(-priority, {}).setdefault(user, []), (order, name))

    def remove(self, name: str) -> None:
        key = self._keys.pop(name, None)
        self._blocked_since.pop(name, None)
        if key is None:
            return
        rank, user, order = key
        line = self._lines[rank][user]
        del line[bisect.bisect_left(line, (order, name))]
        if not line:
            del self._lines[rank][user]
            if not self._lines[rank]:
                del self._lines[rank]

    def _in_turn(self, held: dict[str, int], now_s: float) -> Iterator[tuple[int, str]]:
        """Rank and name of each job in the order of its turn; lazily, since a line may be long.

        Whoever has lost patience at the head stays there, though their user may hold more than others by now.
        """
        overdue = [name for name, since in self._blocked_since.items() if now_s - since > PATIENCE_S]
        first = sorted((*self._keys[name][::2], name) for name in overdue)
        for rank in sorted(self._lines):
            ahead = [name for above, _, name in first if above == rank]
            yield from ((rank, name) for name in ahead)
            users = sorted(self._lines[rank], key=lambda user: held.get(user, 0))
            for _, equals in itertools.groupby(users, key=lambda user: held.get(user, 0)):
                for _, name in heapq.merge(*(self._lines[rank][user] for user in equals)):
                    if name not in ahead:
                        yield rank, name

    def next(self, slots: Slots, jobs: dict[str, Submission], now_s: float) -> tuple[str | None, dict[str, str]]:
        """The job to start now (None: none), and what those it passes, or that head the line, wait for."""
        waiting: dict[str, str] = {}
        guarded: list[tuple[int, Submission]] = []
        lost_patience = False
        turns = itertools.islice(self._in_turn(slots.held_cpus, now_s), LOOK_BEHIND + 1)
        for position, (rank, name) in enumerate(turns):
            job = jobs[name]
            why = slots.why_not_now(job)
            if not why:
                harmed = (slots.would_delay(job, ahead) for above, ahead in guarded if lost_patience or above < rank)
                if not any(harmed):
                    return name, waiting
                why = "waiting for a job ahead of it"
            waiting[name] = why
            if position == 0:
                lost_patience = now_s - self._blocked_since.setdefault(name, now_s) > PATIENCE_S
            if len(guarded) < MOST_GUARDED:
                guarded.append((rank, job))
            if slots.free_cpus <= 0:  # every job takes a core
                break
        return None, waiting


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.4g} GiB"
