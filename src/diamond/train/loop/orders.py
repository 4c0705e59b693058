"""In which order a loader's samples come, epoch by epoch: the same on every rank, and after every restart.

Of the samplers that come with torch the order is reckoned. Any other is asked for its samples when an epoch begins,
with the process's dice seeded and with its own as they were then.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from diamond.train.errors import TrainError
from diamond.train.loop.dice import seeded, undisturbed
from diamond.train.loop.owndice import OwnDice
from diamond.train.order import Shuffle

HOW = (
    "let it draw when it is iterated, from torch's, random's or numpy's dice or from generators that are its "
    "attributes, or give it set_epoch, or state_dict and load_state_dict"
)


class Order:
    """Of a loader with a sampler. `same` says whether all ranks call it with the same number; all must call it then.

    Attributes:
        length: samples of an epoch.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, same: Callable[[int], bool]) -> None:
        self._sampler, self._seed, self._same = loader.sampler, seed, same
        self._is_shuffled, self._is_sequence = _kind(self._sampler)
        self._own = OwnDice(self._sampler)
        self._tells = hasattr(self._sampler, "state_dict") and hasattr(self._sampler, "load_state_dict")
        self._epoch = -1  # whose order was drawn last, with what its dice were before
        self._before: dict[str, Any] = {}
        self._drawn: Sequence[int] = ()
        if isinstance(self._sampler, DistributedSampler) and not self._is_drawn:
            self.length = _length(self._sampler.dataset)  # ranks are dealt their parts here
        else:
            self.length = _length(self._sampler)

    @property
    def name(self) -> str:
        return type(self._sampler).__name__

    @property
    def _is_drawn(self) -> bool:
        return not (self._is_shuffled or self._is_sequence)

    def of(self, epoch: int) -> Sequence[int] | Shuffle:
        """
        Raises:
            TrainError: the sampler gives other samples on other ranks.
        """
        if not self._is_drawn:
            return Shuffle(self.length, seed=self._seed, epoch=epoch) if self._is_shuffled else range(self.length)
        if epoch != self._epoch:
            self._draw(epoch)
        return self._drawn

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint: what it takes to draw the epoch's order again."""
        if not self._is_drawn or self._epoch < 0:
            return None
        return {"epoch": self._epoch, "check": _check(self._drawn), **self._before}

    def load(self, state: Mapping[str, Any] | None, epoch: int) -> bool:
        """Draw the order of the epoch that a run goes on in the midst of; whether it is the order of then."""
        if not self._is_drawn or state is None:  # checkpoints of earlier versions have none
            return True
        self._own.load(state["dice"])
        self._draw(epoch)
        if state["check"] != _check(self._drawn) and state["own"] is not None and self._tells:
            # What it says of itself may be its place, which is the end of an epoch where another is about to begin.
            self._own.load(state["dice"])
            self._sampler.load_state_dict(state["own"])  # type: ignore[attr-defined]
            self._draw(epoch)
        return bool(state["epoch"] != epoch or state["check"] == _check(self._drawn))

    def _draw(self, epoch: int) -> None:
        own = self._sampler.state_dict() if self._tells else None  # type: ignore[attr-defined]
        self._before = {"dice": self._own.state(), "own": own}
        with undisturbed(), seeded(self._seed, epoch, 0) as generator:
            for set_epoch in setters(self._sampler):
                set_epoch(epoch)
            given = getattr(self._sampler, "generator", 0)
            if given is None or isinstance(given, torch.Generator):
                self._sampler.generator = generator  # type: ignore[attr-defined]
            self._drawn = [int(each) for each in self._sampler]
        self._epoch, self.length = epoch, len(self._drawn)
        if not self._same(_check(self._drawn)):
            raise TrainError(
                f"the sampler ({self.name}) gives other samples on other ranks",
                hint="each rank is dealt its part of them by Diamond, so let the sampler give all samples on every "
                f"rank, in the same order: seed its generators alike, or {HOW}",
            )


def setters(thing: Any) -> Iterator[Callable[[int], Any]]:
    """`set_epoch` of an object and of those that it wraps (a sampler of a sampler, a subset of a data set)."""
    left: list[Any] = [thing]
    seen: set[int] = set()
    while left and len(seen) < 100:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if callable(found := getattr(one, "set_epoch", None)):
            yield found
        left += [getattr(one, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        left += [*several] if isinstance(several := getattr(one, "datasets", None), list | tuple) else []


def _kind(sampler: Any) -> tuple[bool, bool]:
    """Whether it is a shuffle, and whether it is one after the other. Classes made from torch's may do anything."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source), False
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle), not sampler.shuffle
    return False, type(sampler) is SequentialSampler


def _length(thing: Any) -> int:
    try:
        return len(thing)
    except TypeError:
        raise TrainError(f"a loader's {type(thing).__name__} has no length", hint="give it a method __len__") from None


def _check(numbers: Sequence[int]) -> int:
    return zlib.crc32(array("q", numbers).tobytes())
