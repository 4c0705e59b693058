"""A run's batch and learning rate while the number of ranks changes: what `scaling` computes, done to the real ones.

The optimizer's own learning rate is never changed for longer than a step: schedulers and checkpoints see what the user
set, and a run that goes on with its first batch again goes on as if nothing had been.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from diamond.train.loop.batches import Batches
from diamond.train.scaling import BatchSize, End, Growth, wished


class Growing:
    """Of one run. `noise` gives the gradient's noise scale in samples, the same on every rank, or None."""

    def __init__(
        self, size: BatchSize, rule: str | None, warmup: int | None, *, noise: Callable[[], float | None],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        size.check()
        self.size = size
        # Whoever names the batch keeps the learning rate that goes with it, unless they say otherwise.
        self._growth = Growth(rule if rule is not None or size.grows else "none", warmup=warmup)
        self._noise, self._say = noise, say

    def wish(self, world: int) -> int | None:
        """The planner's batch, where it may have one: rank 0's, as a step must be the same for all."""
        if not self.size.grows:
            return None
        wish, problem = wished(os.environ)
        if problem:
            self._say(problem)
        if world > 1:
            told = torch.tensor([wish or 0])
            dist.broadcast(told, 0)
            wish = int(told.item()) or None
        return wish

    def begin(self, batches: Batches | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._growth.adaptive = not isinstance(optimizer, torch.optim.SGD)
        if batches is not None:
            # The learning rate belongs to the script's own batch, also where a run begins with the planner's.
            self._growth.begin(batches.own_batch if self.size.grows else batches.global_batch)
            self._growth.change(batches.global_batch, step=0)

    def go_on(self, batches: Batches, position: Mapping[str, float], step: int) -> None:
        """From a checkpoint; `batches` is where it was already."""
        self._growth.load(position)
        before, now = self._growth.batch, batches.global_batch
        if now != before:
            self._growth.change(now, step=step)
            self._say(f"a step takes {now} samples from here on, not {before} (the run began with {self._growth.base})")

    def plan(self, end: End, batches: Batches) -> None:
        """How far the run is to go."""
        self._growth.plan(end.total_steps(batches.global_batch))

    def step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        """The optimizer's step after `number` others, with the learning rate that belongs to the batch."""
        scale = self._growth.scale(number, self._noise())
        if scale == 1.0:
            optimizer.step()
            return
        set_by_user = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, set_by_user, strict=True):
            group["lr"] = rate * scale
        try:
            optimizer.step()
        finally:
            for group, rate in zip(optimizer.param_groups, set_by_user, strict=True):
                group["lr"] = rate

    @property
    def lr_scale(self) -> float:
        """What the last step's learning rate was multiplied by."""
        return self._growth.last

    def told(self) -> dict[str, Any]:
        """For the planner: whether it may choose the batch, and which the learning rate belongs to."""
        return {
            "lr_scale": self.lr_scale,
            "grows": self.size.grows,
            "first_batch": self._growth.base,
            "max_batch": self.size.most,
        }

    def position(self) -> dict[str, float]:
        return self._growth.state()
