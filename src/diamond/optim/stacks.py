"""Blocks of one shape are preconditioned together: on a GPU, starting many small products takes longer than they do."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from diamond.optim.blocks import NORM, Block
from diamond.optim.lean import Rows
from diamond.optim.precondition import Eigen, Inverse

Pair = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Slot:
    """A block's place in a stack: views of its memory in the shapes of the block's weight (or rows of it) and bias."""

    block: Block
    gradients: Pair
    values: Pair


class Stack:
    """The gradients of some blocks, their inverses in one tensor each, and what these make of the gradients.

    Matrices lie beside each other along the first dimension. Of normalisations, which are vectors, all lie in one row.
    The memory stays from step to step, so that places in it are found once.
    """

    def __init__(self, blocks: list[Block], kept: dict[int, Inverse | Eigen]) -> None:
        self.blocks = blocks
        self._vector = blocks[0].kind == NORM
        first = blocks[0]
        device = kept[first.index].tensors()[0].device
        copies = sum(one.copies for one in blocks)
        shape = (1, 1, sum(one.a for one in blocks)) if self._vector else (copies, first.g, first.a)
        self.gradients, self.values = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.slots = [
            Slot(block, block.views(self._part(self.gradients, block)), block.views(self._part(self.values, block)))
            for block in blocks
        ]
        self.renew(kept)

    def renew(self, kept: dict[int, Inverse | Eigen]) -> None:
        """Take the inverses as they are now; those of several blocks become views of one tensor."""
        own = [kept[block.index] for block in self.blocks]
        self._operator = own[0] if len(own) == 1 else _joined(own, self._vector)
        if len(own) == 1:
            return
        for block, one in zip(self.blocks, own, strict=True):
            whole = self._operator
            one.a = self._part(whole.a, block)
            if one.g is not None and whole.g is not None:
                one.g = self._part(whole.g, block)
            if isinstance(one, Eigen) and isinstance(whole, Eigen):
                one.moments = self._part(whole.moments, block)

    def apply(self, rows: Rows | None = None) -> Tensor:
        """Turns the gradients into the values; returns the gradients' slope along them.

        Args:
            rows: what the gradient of a stack of one is the product of, where that is known.
        """
        if rows is None or not isinstance(self._operator, Inverse):
            self._operator.apply(self.gradients, self.values)
        else:
            self._operator.apply_to_rows(rows.inputs, rows.slopes, self.values)
        along = torch.dot(self.values.view(-1), self.gradients.view(-1))
        finite(self.values)
        return along

    def gradient_of(self, block: Block) -> Tensor:
        return self._part(self.gradients, block)

    def value_of(self, block: Block) -> Tensor:
        return self._part(self.values, block)

    def _part(self, whole: Tensor, block: Block) -> Tensor:
        before = self.blocks[: self.blocks.index(block)]
        if self._vector:
            first = sum(one.a for one in before)
            return whole[..., first : first + block.a]
        first = sum(one.copies for one in before)
        return whole[first : first + block.copies]


def _joined(own: list[Inverse | Eigen], vector: bool) -> Inverse | Eigen:
    a = torch.cat([one.a for one in own], dim=1 if vector else 0)
    g = None if vector else torch.cat([one.g for one in own if one.g is not None])
    first = own[0]
    if isinstance(first, Eigen):
        assert g is not None
        return Eigen(a, g, torch.cat([one.moments for one in own if isinstance(one, Eigen)]), first.damping)
    return Inverse(a, g)


def alike(blocks: Iterable[Block], kept: dict[int, Inverse | Eigen], alone: Container[int] = ()) -> list[list[Block]]:
    """Which can be in one stack; a block like no other, and those that shall be, are alone."""
    found: dict[Hashable, list[Block]] = {}
    for block in blocks:
        likeness = block.index if block.index in alone else _likeness(block, kept[block.index])
        found.setdefault(likeness, []).append(block)
    return list(found.values())


def _likeness(block: Block, kept: Inverse | Eigen) -> Hashable:
    if block.kind == NORM:
        return NORM
    if block.a_pieces > 1 or block.g_pieces > 1:
        return block.index
    if type(kept) is Eigen:
        return "eigen", block.g, block.a, kept.damping
    return (block.g, block.a) if type(kept) is Inverse and not block.a_diagonal else block.index


def finite(step: Tensor) -> Tensor:
    """A step that is not finite is not made; so that nothing of it stays, such numbers become zeros."""
    return torch.nan_to_num_(step, 0.0, 0.0, 0.0)
