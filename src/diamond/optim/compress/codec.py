"""What every way to compress works on and is: a flat buffer of several tensors, randomness, and the Protocols.

All of it is pure tensor code. A codec says what is sent and what is rebuilt; an exchange says in which rounds, by
yielding what it would send and being given what came back. Who carries it is no concern of theirs.

Every tensor of a buffer is coded by itself, with randomness of its own. DDP forms its buckets anew after the first
step, and again in a run that resumes: what is sent of a parameter must not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch

_MASK = (1 << 64) - 1
How = Literal["sum", "gather", "scatter"]


@dataclass(frozen=True)
class Layout:
    """The tensors that lie one after the other in a flat buffer. `keys` are their numbers in the model."""

    names: tuple[str, ...]
    keys: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(flat, list(self.sizes))


class Dice:
    """Random numbers that depend on seed, step, tensor and rank alone: never on what was drawn before."""

    def __init__(self, seed: int, *, step: int = 0, rank: int = 0, device: torch.device | str = "cpu") -> None:
        self.seed, self.step, self.rank = seed, step, rank
        self._generator = torch.Generator(device=device)
        self.device = torch.device(device)

    def uniform(self, key: int, count: int, *, purpose: int = 0, shared: bool = False) -> torch.Tensor:
        """`count` numbers in [0, 1); `shared` ones are the same on all ranks."""
        self._begin(key, purpose, shared, step=self.step)
        return torch.rand(count, generator=self._generator, device=self.device)

    def normal(self, key: int, rows: int, columns: int, *, purpose: int = 0) -> torch.Tensor:
        """The same on all ranks and in all steps."""
        self._begin(key, purpose, True, step=0)
        return torch.randn(rows, columns, generator=self._generator, device=self.device)

    def _begin(self, key: int, purpose: int, shared: bool, *, step: int) -> None:
        mixed = 0
        for part in (self.seed, step, key, purpose, -1 if shared else self.rank):
            mixed = _mix(mixed ^ (part & _MASK))
        self._generator.manual_seed(mixed >> 1)


def _mix(value: int) -> int:
    """A bijection of 64 bits without visible pattern (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class Codec(Protocol):
    """Turns a flat buffer into what is sent, and that into the buffer again.

    `summable` ones may be added on the wire: the sum of what is sent is what would be sent of the sum. The length of
    what is sent depends on the layout alone.
    """

    summable: bool

    def encode(self, flat: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor: ...

    def decode(self, sent: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor: ...


class Send(NamedTuple):
    """One round. "sum": comes back summed over the ranks; "gather": as one row a rank; "scatter": row i goes to rank i,
    and a row of every rank comes back."""

    how: How
    tensor: torch.Tensor


class Rebuilt(NamedTuple):
    """What comes of an exchange: the average over the ranks, and what of it stands for this rank's own values.

    To be used before the next exchange of the same tensors begins, which may write into the same memory.
    """

    average: torch.Tensor
    own: torch.Tensor


Rounds = Generator[Send, torch.Tensor, Rebuilt]


class Exchange(Protocol):
    """All rounds of one buffer. `reduce` averages it over `world` ranks; `scatter` takes a row for each rank and gives
    this rank the average of its own row alone."""

    def reduce(self, flat: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds: ...

    def scatter(self, rows: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds: ...


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Copied: a tensor of one value passes for contiguous whatever its stride, and cannot be viewed as bytes."""
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_bytes(sent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as numbers again. Copied: a piece of a message need not begin where such a number may."""
    return sent.clone(memory_format=torch.contiguous_format).view(dtype)
