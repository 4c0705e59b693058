"""Blocks of one shape are preconditioned together: on a GPU, starting many small products takes longer than they do.

For the same reason all stacks of a device lie in one memory, so that what is done to every number is done at once.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from diamond.optim import products
from diamond.optim.blocks import NORM, Block
from diamond.optim.lean import Rows
from diamond.optim.precondition import Inverse

Pair = tuple[Tensor, Tensor | None]
_LINED_UP = 64  # numbers: where a stack begins in memory


@dataclass(frozen=True, eq=False)
class Slot:
    """A block's place in a stack: views of its memory in the shapes of the block's weight (or rows of it) and bias."""

    block: Block
    gradients: Pair
    values: Pair
    flat: tuple[Tensor | None, Tensor | None]  # the gradients as vectors, where they lie in one piece


class Stack:
    """The gradients of some blocks, their inverses in one tensor each, and what these make of the gradients.

    Matrices lie beside each other along the first dimension. Of normalisations, which are vectors, all lie in one row.
    The memory stays from step to step, so that places in it are found once. Where weights are kept as (a, g), it is
    laid out like them: to turn a large table round takes long.

    Args:
        gradients, values: memory of so many numbers as `room` says.
        split: whether products are made of half-precision ones; None for where that is faster.
    """

    def __init__(
        self,
        blocks: list[Block],
        kept: dict[int, Inverse],
        gradients: Tensor,
        values: Tensor,
        split: bool | None = None,
    ) -> None:
        self.blocks = blocks
        self._vector = blocks[0].kind == NORM
        first = blocks[0]
        self._copies = sum(one.copies for one in blocks)
        self._turned = first.columns_first and not self._vector
        self.gradients, self.values = self._shaped(gradients), self._shaped(values)
        self.slots = [self._slot(block) for block in blocks]
        self._may_split = split
        self.renew(kept)

    def renew(self, kept: dict[int, Inverse]) -> None:
        """Take the inverses as they are now; those of several blocks become views of one tensor."""
        own = [kept[block.index] for block in self.blocks]
        self._operator = own[0] if len(own) == 1 else _joined(own, self._vector)
        self._sides = self._split() if self._splits() else None
        if len(own) == 1:
            return
        for block, one in zip(self.blocks, own, strict=True):
            whole = self._operator
            one.a = self._part(whole.a, block)
            if one.g is not None and whole.g is not None:
                one.g = self._part(whole.g, block)

    def apply(self, rows: Rows | None = None) -> None:
        """Turns the gradients into the values.

        Args:
            rows: what the gradient of a stack of one is the product of, where that is known.
        """
        if self._sides is not None:
            self._apply_split(*self._sides)
        elif rows is not None:
            self._operator.apply_to_rows(rows.inputs, rows.slopes, self.values)
        else:
            self._operator.apply(self.gradients, self.values)

    def _slot(self, block: Block) -> Slot:
        gradients = block.views(self._part(self.gradients, block))
        weight, bias = (None if one is None or not one.is_contiguous() else one.view(-1) for one in gradients)
        return Slot(block, gradients, block.views(self._part(self.values, block)), (weight, bias))

    def _shaped(self, memory: Tensor) -> Tensor:
        first = self.blocks[0]
        if self._vector:
            return memory.view(1, 1, -1)
        if self._turned:
            return memory.view(self._copies, first.a, first.g).transpose(1, 2)
        return memory.view(self._copies, first.g, first.a)

    def _splits(self) -> bool:
        whole, first = self._operator, self.blocks[0]
        if whole.g is None or self._may_split is not None:
            return bool(self._may_split)
        a_side = 0 if first.a_diagonal else whole.a.shape[-1]
        return whole.g.is_cuda and bool(products.pays(self._copies, first.g, first.a, whole.g.shape[-1], a_side))

    def _split(self) -> tuple[products.Split | None, products.Split]:
        whole = self._operator
        assert whole.g is not None
        a = None if self.blocks[0].a_diagonal else products.Split(whole.a, self._copies)
        return a, products.Split(whole.g, self._copies)

    def _apply_split(self, a: products.Split | None, g: products.Split) -> None:
        diagonal = self._operator.a
        if self._turned:  # as (a, g) on both sides, so that rows lie as they are read
            seen, unit = g.right_of(self.gradients.transpose(1, 2))
            if a is None:
                unit = unit * diagonal[:, :, None]
            else:
                seen, more = a.left_of(seen)
                unit = unit * more
            torch.mul(seen, unit, out=self.values.transpose(1, 2))
            return
        if a is None:
            seen, unit = g.left_of(self.gradients * diagonal[:, None])
        else:
            seen, unit = a.right_of(self.gradients)
            seen, more = g.left_of(seen)
            unit = unit * more
        torch.mul(seen, unit, out=self.values)

    def gradient_of(self, block: Block) -> Tensor:
        return self._part(self.gradients, block)

    def value_of(self, block: Block) -> Tensor:
        return self._part(self.values, block)

    def _part(self, whole: Tensor, block: Block) -> Tensor:
        before = self.blocks[: self.blocks.index(block)]
        if self._vector:
            first = sum(one.a for one in before)
            return whole[..., first : first + block.a]
        each = len(whole) // self._copies  # pieces of a side, if this is one
        first = each * sum(one.copies for one in before)
        return whole[first : first + each * block.copies]


def room(blocks: list[Block]) -> int:
    """Numbers of a stack of these."""
    return sum(one.a if one.kind == NORM else one.numbers for one in blocks)


def lined_up(rooms: Iterable[int]) -> tuple[list[int], int]:
    """Where stacks of so many numbers begin in one memory, and how many numbers that has."""
    begins, end = [], 0
    for one in rooms:
        begins.append(end)
        end += -(-one // _LINED_UP) * _LINED_UP
    return begins, end


def _joined(own: list[Inverse], vector: bool) -> Inverse:
    a = torch.cat([one.a for one in own], dim=1 if vector else 0)
    g = None if vector else torch.cat([one.g for one in own if one.g is not None])
    return Inverse(a, g)


def alike(blocks: Iterable[Block], kept: dict[int, Inverse], alone: Container[int] = ()) -> list[list[Block]]:
    """Which can be in one stack; a block like no other, and those that shall be, are alone."""
    found: dict[Hashable, list[Block]] = {}
    for block in blocks:
        likeness = block.index if block.index in alone else _likeness(block)
        found.setdefault(likeness, []).append(block)
    return list(found.values())


def _likeness(block: Block) -> Hashable:
    if block.kind == NORM:
        return NORM
    shape = block.g, block.a, block.g_pieces, block.a_pieces, block.columns_first
    return block.index if block.a_diagonal else shape


def finite(step: Tensor) -> Tensor:
    """A step that is not finite is not made; so that nothing of it stays, such numbers become zeros."""
    return torch.nan_to_num_(step, 0.0, 0.0, 0.0)
