"""The two factors of every block: sums over a step, and averages over steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diamond.optim.blocks import EMBEDDING, NORM, Block
from diamond.optim.uses import Thinning, Use, input_rows, norm_squares, output_rows, vocabulary_sums


@dataclass(eq=False)
class Sums:
    """What the uses of one block in one step add up to.

    `a` and `g` are sums over `positions` and over the terms of the loss; for a diagonal input factor `a` is a vector,
    and for a normalisation `g` is not needed. Sums, not means, so that uneven ranks and batches weigh as they should.
    """

    block: Block
    a: Tensor | None = None
    g: Tensor | None = None
    positions: float = 0.0

    def add_inputs(self, use: Use, sharing: str, thin: Thinning | None = None) -> None:
        if self.block.kind in (NORM, EMBEDDING):  # theirs come with the gradients
            return
        rows = input_rows(use, sharing, thin)
        self._add_a(rows.transpose(1, 2) @ rows, rows.shape[1])

    def add_gradient(
        self, use: Use, gradient: Tensor, sharing: str, factor: float = 1.0, thin: Thinning | None = None
    ) -> None:
        """`factor` multiplies the squares."""
        if self.block.kind == NORM:
            self._add_a(norm_squares(use, gradient)[None] * factor, 0)
            return
        if self.block.kind == EMBEDDING:
            words, width = vocabulary_sums(use, gradient)
            self._add_a(words[None] * factor, float(words.sum() * factor))
            self.g = width[None] * factor if self.g is None else self.g.add_(width[None], alpha=factor)
            return
        rows = output_rows(use, gradient, sharing, thin)
        found = rows.transpose(1, 2) @ rows
        if factor != 1.0:
            found *= factor
        self.g = found if self.g is None else self.g.add_(found)

    def _add_a(self, found: Tensor, positions: float) -> None:
        self.a = found if self.a is None else self.a.add_(found)
        self.positions += positions


class Average:
    """A mean over steps in which older ones fade, right from the first step on."""

    def __init__(self, value: Tensor | None = None, weight: float = 0.0) -> None:
        self._sum = value
        self.weight = weight

    def add(self, value: Tensor, decay: float) -> None:
        if self._sum is None:
            self._sum = value * (1 - decay)
        else:
            self._sum.mul_(decay).add_(value, alpha=1 - decay)
        self.weight = self.weight * decay + (1 - decay)

    def mean(self) -> Tensor:
        assert self._sum is not None, "nothing was averaged"
        return self._sum / self.weight

    @property
    def known(self) -> bool:
        return self._sum is not None

    def state(self) -> dict[str, object]:
        return {"sum": self._sum, "weight": self.weight}


class Factors:
    """Averages of one block's A and G."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.a = Average()
        self.g = Average()

    @property
    def known(self) -> bool:
        return self.a.known and (self.block.kind == NORM or self.g.known)

    def update(self, a: Tensor, g: Tensor | None, decay: float) -> bool:
        """False, and nothing changed, where a number is not finite."""
        for one in (a, g):
            if one is not None and not bool(torch.isfinite(one.sum())):
                return False
        self.a.add(a, decay)
        if g is not None:
            self.g.add(g, decay)
        return True

    def balance(self, a: Tensor, g: Tensor) -> Tensor:
        """How the damping is split between the two, by their mean eigenvalues: one number for each copy."""
        mean_a = a.mean(1) if self.block.a_diagonal else a.diagonal(dim1=1, dim2=2).mean(1)
        mean_g = g.diagonal(dim1=1, dim2=2).mean(1)
        tiny = torch.finfo(mean_a.dtype).tiny
        return (mean_a.clamp_min(tiny) / mean_g.clamp_min(tiny)).sqrt().clamp(1e-6, 1e6)
