"""What all ranks must decide alike, and at the same step: to stop, to save, to measure. One small message now
and then, sent while the next step is computed, so that nobody waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

AGREE_EVERY_S = 0.1
AGREE_EVERY_S_TOGETHER = 0.5  # a message costs the ranks about a millisecond where cores are few
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Decision:
    """The largest of what the ranks wished."""

    stop: int = 0
    save: bool = False
    bad: bool = False
    measure: bool = False


class Control:
    """After every optimizer step, on every rank: `answer`, then `ask` if it `is_due`."""

    def __init__(self, group: Any, rank: int, world: int) -> None:
        self.group, self._rank, self._world = group, rank, world
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._next_at = 0
        self._asked = 0

    def is_due(self, step: int) -> bool:
        """Whether this is a step after which all talk. Finding out what to wish for may cost more than a step."""
        return step >= self._next_at

    def ask(self, step: int, wish: Decision, step_s: float) -> Decision | None:
        """Say what this rank wishes; alone, that is what is decided."""
        every_s = AGREE_EVERY_S if self._world == 1 else AGREE_EVERY_S_TOGETHER
        self._asked += 1
        # Rarer by and by: a run of a few short steps is to hear a warning, too.
        rest = min(_MOST_STEPS, max(1, self._asked // 4), max(1, int(every_s / max(step_s, 1e-6))))
        if self._world == 1:
            self._next_at = step + rest
            return wish
        # Only rank 0 says when to talk next: clocks differ, steps do not.
        next_at = step + rest if self._rank == 0 else 0
        said = [wish.stop, int(wish.save), int(wish.bad), int(wish.measure), next_at]
        message = torch.tensor(said, dtype=torch.int64)
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._pending = (message, work)
        self._next_at = step + _MOST_STEPS  # until the answer says
        return None

    def answer(self) -> Decision | None:
        """What was decided since the last step: the same on every rank."""
        return self._take()

    def _take(self) -> Decision | None:
        if self._pending is None:
            return None
        message, work = self._pending
        self._pending = None
        work.wait()
        stop, save, bad, measure, self._next_at = (int(value) for value in message)
        return Decision(stop=stop, save=bool(save), bad=bool(bad), measure=bool(measure))

    def drain(self) -> None:
        """Before the group goes: nobody may be left with a message that the others do not wait for."""
        self._take()

    def all_agree(self, value: bool) -> bool:
        """Whether it is true on every rank; waits."""
        if self._world == 1:
            return value
        message = torch.tensor([int(value)])
        dist.all_reduce(message, op=dist.ReduceOp.MIN, group=self.group)
        return bool(message.item())

    def all_same(self, number: int) -> bool:
        """Whether it is the same on every rank; waits."""
        if self._world == 1:
            return True
        message = torch.tensor([number, -number])
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group)
        return bool(message[0] == -message[1])

    def mean(self, value: float) -> float:
        """Over the ranks; waits. Where all say the same it is that, to the last bit."""
        if self._world == 1:
            return value
        heard = [torch.zeros(1, dtype=torch.float64) for _ in range(self._world)]
        dist.all_gather(heard, torch.tensor([value], dtype=torch.float64), group=self.group)
        values = [float(one) for one in heard]
        return values[0] if len(set(values)) == 1 else sum(values) / len(values)
