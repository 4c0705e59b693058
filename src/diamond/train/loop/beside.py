"""What stands beside the training and comes through a restart with it: loaders that nothing is trained on, schedulers
that look at a metric, averages of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from diamond.train.loop import parallel
from diamond.train.loop.batches import moved
from diamond.train.loop.dice import Apart
from diamond.train.loop.owndice import OwnDice

_PASS = -1  # in place of an epoch: every pass throws the same dice


class HeldOut:
    """What `prepare` makes of a further loader, such as one for validation: to be gone through as often as one likes.

    Every rank goes through all that the DataLoader gives it, on its device, so that all come to the same metric and
    take part in the same collectives. A pass leaves the dice of the training alone, and is the same as the last one.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, device: torch.device) -> None:
        self._loader, self._seed, self._device = loader, seed, device
        self._own = [OwnDice(loader), OwnDice(loader.dataset)]
        self._first = [one.state() for one in self._own]

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        dice, before = Apart(self._seed, _PASS), [one.state() for one in self._own]
        self._load(self._first)
        try:
            with dice.in_use():
                batches = iter(self._loader)
            while True:
                with dice.in_use():
                    batch = next(batches, self)
                if batch is self:
                    return
                yield moved(batch, self._device)
        finally:
            self._load(before)

    def _load(self, states: list[dict[str, Any]]) -> None:
        for one, state in zip(self._own, states, strict=True):
            one.load(state)


def look_together(scheduler: ReduceLROnPlateau, mean: Callable[[float], float]) -> None:
    """Have it see the mean of what the ranks give it: each would lower its learning rate at another time."""
    kind = type(scheduler)

    def step(self: Any, metrics: Any, *more: Any, **named: Any) -> None:
        kind.step(self, mean(float(metrics)), *more, **named)

    # A class and no attribute: the scheduler's state is whatever attributes it has.
    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def is_model(thing: Any) -> bool:
    """Whether it is to be trained."""
    return isinstance(thing, nn.Module) and not isinstance(thing, AveragedModel)


def spread(average: AveragedModel, kind: str, device: torch.device, *, world: int, num_nodes: int) -> AveragedModel:
    """As the model is, whose parameters go into it one by one: in shards where those are, and else whole."""
    average.to(device)
    if world > 1 and kind in ("fsdp", "hybrid"):
        parallel.spread(average.module, kind, device, world=world, num_nodes=num_nodes, reshard=True)
    return average
