"""Dice that a user's object brings along: found among its attributes, kept, and brought back.

What is drawn from the process's own dice is the same after a restart, as those are seeded. What an object draws from a
generator of its own is not, unless somebody knows of it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

_DEEPEST, _MOST = 4, 1000  # how far to look: through wrappers, but not through data
_NOT_INTO = (str, bytes, int, float, complex, bool, type(None), type, torch.Tensor, nn.Module)


class OwnDice:
    """Of one object, and of what it is made of; of a sampler without the data that it is given."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def state(self) -> dict[str, Any]:
        return {name: _read(one) for name, one in _reached(self._owner)}

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave; dice that are no longer there, or new, are passed over."""
        for name, one in _reached(self._owner):
            if name in state:
                _write(one, state[name])

    def seeder(self) -> Callable[[int], None]:
        """Seeds them all; what there is is looked for only now."""
        dice = [one for _, one in _reached(self._owner)]

        def seed(number: int) -> None:
            for at, one in enumerate(dice):
                _reseed(one, hash((number, at)) & 0x7FFF_FFFF_FFFF_FFFF)

        return seed


def _reached(owner: Any) -> list[tuple[str, Any]]:
    """Every one once, by how it is reached."""
    skipped = _NOT_INTO if isinstance(owner, Dataset) else (*_NOT_INTO, Dataset)
    seen, dice = {id(owner)}, []
    left: list[tuple[str, Any, int]] = [("", owner, 0)]
    while left and len(seen) < _MOST:
        name, thing, depth = left.pop(0)
        if isinstance(thing, _kinds()):
            dice.append((name, thing))
            continue
        if depth == _DEEPEST:
            continue
        for key, part in _parts(thing):
            if id(part) not in seen and not isinstance(part, skipped):
                seen.add(id(part))
                left.append((f"{name}.{key}", part, depth + 1))
    return dice


def _parts(thing: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(thing, list | tuple):
        yield from enumerate(thing[:_MOST])
    elif isinstance(thing, dict):
        yield from list(thing.items())[:_MOST]
    elif not callable(thing) or not hasattr(thing, "__code__"):
        yield from list(getattr(thing, "__dict__", {}).items())


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    more = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return (torch.Generator, random.Random, *more)


def _read(dice: Any) -> Any:
    if isinstance(dice, random.Random):
        return dice.getstate()
    return dice.bit_generator.state if hasattr(dice, "bit_generator") else dice.get_state()


def _write(dice: Any, state: Any) -> None:
    if isinstance(dice, random.Random):
        dice.setstate(state)
    elif hasattr(dice, "bit_generator"):
        dice.bit_generator.state = state
    else:
        dice.set_state(state)


def _reseed(dice: Any, number: int) -> None:
    if isinstance(dice, torch.Generator):
        dice.manual_seed(number)
    elif isinstance(dice, random.Random):
        dice.seed(number)
    elif hasattr(dice, "bit_generator"):
        dice.bit_generator.state = type(dice.bit_generator)(number).state
    else:
        dice.seed(number & 0xFFFF_FFFF)
