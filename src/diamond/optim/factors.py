"""The two factors of every block: sums over a step, and averages over steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diamond.optim.blocks import EMBEDDING, NORM, Block
from diamond.optim.pieces import grams
from diamond.optim.uses import Thinning, Use, input_rows, norm_squares, output_rows, vocabulary_sums


@dataclass(eq=False)
class Sums:
    """What the uses of one block in one step add up to.

    `a` and `g` are sums over `positions` and over the terms of the loss; for a diagonal input factor `a` is a vector,
    and for a normalisation `g` is not needed. Sums, not means, so that uneven ranks and batches weigh as they should.

    Uses without the bias that a block has (of derivatives, in networks that are solutions of differential equations)
    are of another kind, with inputs and gradients of other sizes: they are summed in `bare`, until `join`.
    """

    block: Block
    a: Tensor | None = None
    g: Tensor | None = None
    positions: float = 0.0
    bare: Sums | None = None

    def add_inputs(self, use: Use, sharing: str, thin: Thinning | None = None) -> None:
        if self.block.kind in (NORM, EMBEDDING):  # theirs come with the gradients
            return
        rows = input_rows(use, sharing, thin)
        self._of_kind(use)._add_a(grams(rows, self.block.a_pieces), rows.shape[1])

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
            self.g = width * factor if self.g is None else self.g.add_(width, alpha=factor)
            return
        found = grams(output_rows(use, gradient, sharing, thin), self.block.g_pieces)
        if factor != 1.0:
            found *= factor
        into = self._of_kind(use)
        into.g = found if into.g is None else into.g.add_(found)

    def join(self) -> None:
        """Makes one Kronecker product of those of both kinds: that with the same two partial traces as their sum.

        Each kind's inputs are weighed by how large its gradients are, and the other way round.
        """
        bare, self.bare = self.bare, None
        kinds = [one for one in (self, bare) if one is not None and one.a is not None and one.g is not None]
        if bare is None or not kinds:
            return
        a, g = _one_product(
            torch.stack([one.a / one.positions for one in kinds if one.a is not None]),
            torch.stack([one.g for one in kinds if one.g is not None]),
        )
        self.positions = sum(one.positions for one in kinds)
        self.a, self.g = a * self.positions, g

    def _of_kind(self, use: Use) -> Sums:
        if self.block.bias_name is None or use.options.get("bias", True):
            return self
        if self.bare is None:
            self.bare = Sums(self.block)
        return self.bare

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
        copies = self.block.copies
        mean_a = a.mean(1) if self.block.a_diagonal else _trace(a, copies) / self.block.a
        mean_g = _trace(g, copies) / self.block.g
        tiny = torch.finfo(mean_a.dtype).tiny
        return (mean_a.clamp_min(tiny) / mean_g.clamp_min(tiny)).sqrt().clamp(1e-6, 1e6)


def _trace(matrices: Tensor, copies: int) -> Tensor:
    """Of all pieces of a copy."""
    return matrices.diagonal(dim1=1, dim2=2).sum(1).reshape(copies, -1).sum(1)


def _one_product(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """For the sum of several Kronecker products, along the first dimension."""
    of_a, of_g = (one.diagonal(dim1=-2, dim2=-1).sum((1, 2)) for one in (a, g))
    tiny = torch.finfo(a.dtype).tiny
    all_g, both = of_g.sum().clamp_min(tiny), (of_a * of_g).sum().clamp_min(tiny)
    return torch.tensordot(of_g / all_g, a, dims=1), torch.tensordot(of_a * (all_g / both), g, dims=1)
