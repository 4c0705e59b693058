"""Everything random in a process: seeded alike, kept in checkpoints, and undisturbed by what does not train."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def seed_all(*parts: int) -> None:
    mixed = hash(parts) & 0x7FFF_FFFF_FFFF_FFFF
    torch.manual_seed(mixed)
    random.seed(mixed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mixed & 0xFFFF_FFFF)


def state(device: torch.device) -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "random": random.getstate(),
        "numpy": numpy.random.get_state() if numpy is not None else None,
    }


def restore(kept: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(kept["torch"])
    random.setstate(kept["random"])
    if kept["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(kept["cuda"], device)
    if kept["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(kept["numpy"])


@contextmanager
def seeded(seed: int, epoch: int, place: int) -> Iterator[torch.Generator]:
    mixed = _seed(seed, epoch, place)
    generator = torch.Generator()
    generator.manual_seed(mixed)
    yield generator


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is drawn while loading does not change what the model draws."""
    before = _thrown()
    try:
        yield
    finally:
        _put_back(before)


class Apart:
    """Dice of their own for what is read little by little, such as a generator, whose body runs while it is read: they
    begin with a seed, go on where they were left, and leave those of the model alone."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._beginning = (seed, epoch, 0)
        self._thrown: _Thrown | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with undisturbed():
            if self._thrown is None:
                _seed(*self._beginning)
            else:
                _put_back(self._thrown)
            try:
                yield
            finally:
                self._thrown = _thrown()


def _seed(seed: int, epoch: int, place: int) -> int:
    mixed = hash((seed, epoch, place)) & 0x7FFF_FFFF_FFFF_FFFF
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mixed & 0xFFFF_FFFF)
    return mixed


_Thrown = tuple[torch.Tensor, Any, Any]


def _thrown() -> _Thrown:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    return torch.default_generator.get_state(), random.getstate(), drawn


def _put_back(before: _Thrown) -> None:
    torch.default_generator.set_state(before[0])
    random.setstate(before[1])
    if before[2] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(before[2])
