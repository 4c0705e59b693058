"""Blocks of one shape are preconditioned together: on a GPU, starting many small products takes longer than they do."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from diamond.optim.blocks import NORM, Block
from diamond.optim.precondition import Eigen, Inverse

Pairs = tuple[list[Tensor], list[Tensor]]


class Stack:
    """The inverses of some blocks in one tensor each; the blocks' own become views of it.

    Matrices lie beside each other along the first dimension. Of normalisations, which are vectors, all lie in one row.
    """

    def __init__(self, blocks: list[Block], kept: dict[int, Inverse | Eigen]) -> None:
        self.blocks = blocks
        own = [kept[block.index] for block in blocks]
        assert all(isinstance(one, Inverse) for one in own)
        self._vector = blocks[0].kind == NORM
        self._a = torch.cat([one.a for one in own], dim=1 if self._vector else 0)
        self._g = None if self._vector else torch.cat([one.g for one in own])  # type: ignore[misc]
        shape = (1, 1, self._a.shape[1]) if self._vector else (len(self._a), blocks[0].g, blocks[0].a)
        self._gradients = torch.zeros(shape, device=self._a.device)
        for block, one in zip(blocks, own, strict=True):
            one.a = self._part(self._a[:, None] if self._vector else self._a, block)
            if self._vector:
                one.a = one.a[:, 0]
            elif self._g is not None:
                one.g = self._part(self._g, block)

    def room(self, block: Block) -> Tensor:
        """Where this block's gradient belongs."""
        return self._part(self._gradients, block)

    def apply(self) -> tuple[dict[int, Tensor], Tensor]:
        """What becomes of the gradients, by the index of the block, and their slope along it."""
        found = Inverse(self._a, self._g).apply(self._gradients)
        along = (found * self._gradients).sum()
        finite(found)
        return {block.index: self._part(found, block) for block in self.blocks}, along

    def _part(self, whole: Tensor, block: Block) -> Tensor:
        before = self.blocks[: self.blocks.index(block)]
        if self._vector:
            first = sum(one.a for one in before)
            return whole[..., first : first + block.a]
        first = sum(one.copies for one in before)
        return whole[first : first + block.copies]


def stacked(blocks: Iterable[Block], kept: dict[int, Inverse | Eigen]) -> list[Stack]:
    """Stacks of those blocks that have others of their shape."""
    alike: dict[object, list[Block]] = {}
    for block in blocks:
        if isinstance(kept[block.index], Inverse) and (block.kind == NORM or not block.a_diagonal):
            alike.setdefault(NORM if block.kind == NORM else (block.g, block.a), []).append(block)
    return [Stack(group, kept) for group in alike.values() if len(group) > 1]


def finite(step: Tensor) -> Tensor:
    """A step that is not finite is not made; so that nothing of it stays, such numbers become zeros."""
    return torch.nan_to_num_(step, 0.0, 0.0, 0.0)


def copy(pairs: Pairs) -> None:
    """Each of the second into its place among the first, in few launches."""
    if pairs[0]:
        torch._foreach_copy_(*pairs)
