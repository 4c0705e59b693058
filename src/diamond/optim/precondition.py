"""What is applied to a block's gradient: inverses of its damped factors, or its curvature in their eigenbasis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diamond.optim import pieces, solvers
from diamond.optim.blocks import NORM, Block
from diamond.optim.factors import Factors
from diamond.optim.uses import Use, input_rows, number_of_samples, output_rows

_AT_ONCE = 2**24  # numbers of the gradients of single samples
_FAR = 10.0  # beyond what draws differ by


@dataclass(eq=False)
class Inverse:
    """(G + damping)^-1 M (A + damping)^-1. `a` is a vector where the input factor is a diagonal; no `g` for a norm.

    Of sides in pieces, `a` and `g` hold more matrices than there are copies.
    """

    a: Tensor
    g: Tensor | None

    def apply(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        last = out if self.g is None else None
        if self.a.dim() == 2:
            right = torch.mul(matrix, self.a[:, None], out=last)
        else:
            right = pieces.right(matrix, self.a, last)
        return right if self.g is None else pieces.left(self.g, right, out)

    def apply_to_rows(self, inputs: Tensor, slopes: Tensor, out: Tensor) -> None:
        """To the product of rows (rows, g) and (rows, a); of one copy."""
        assert self.g is not None
        torch.mm(self.g[0] @ slopes.T, inputs @ self.a[0], out=out[0])

    def tensors(self) -> list[Tensor]:
        return [self.a] if self.g is None else [self.a, self.g]


@dataclass(eq=False)
class Eigen:
    """EKFAC: the curvature's diagonal in the eigenbasis of the factors, kept up to date between decompositions."""

    a: Tensor  # eigenvectors as columns
    g: Tensor
    moments: Tensor
    damping: float

    def apply(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        _, rows, columns = self.moments.shape
        seen = pieces.left(self.g.transpose(1, 2), pieces.filled(matrix, rows, columns))
        seen = pieces.right(seen, self.a) / (self.moments + self.damping)
        seen = pieces.left(self.g, seen)
        if seen.shape == matrix.shape:
            return pieces.right(seen, self.a.transpose(1, 2), out)
        done = pieces.right(seen, self.a.transpose(1, 2))[:, : matrix.shape[1], : matrix.shape[2]]
        return done if out is None else out.copy_(done)

    def squares(self, use: Use, gradient: Tensor, sharing: str) -> Tensor:
        """Sum over samples of their squared gradients, in this basis.

        The gradient of a sample is the sum over its positions. In pictures and fields these move together, which no
        Kronecker product of single positions knows.
        """
        copies, outputs, inputs = self.moments.shape
        b, a = output_rows(use, gradient, sharing), input_rows(use, sharing)
        b = pieces.right(pieces.filled(b, b.shape[1], outputs), self.g)
        a = pieces.right(pieces.filled(a, a.shape[1], inputs), self.a)
        samples = number_of_samples(use, b.shape[1])
        if samples == b.shape[1]:
            return torch.bmm(b.square().transpose(1, 2), a.square())
        b, a = b.reshape(copies, samples, -1, outputs), a.reshape(copies, samples, -1, inputs)
        found = torch.zeros_like(self.moments)
        at_once = max(1, _AT_ONCE // found.numel())
        for first in range(0, samples, at_once):
            some = slice(first, first + at_once)
            found += torch.einsum("cnpo,cnpi->cnoi", b[:, some], a[:, some]).square().sum(1)
        return found

    def learn(self, mean: Tensor, decay: float) -> None:
        """Averages the moments. Where they are far too small, as a product of factors may be, they grow at once."""
        grown = mean.sum() / self.moments.sum().clamp_min(torch.finfo(mean.dtype).tiny)
        self.moments.mul_(torch.where(grown > _FAR, grown, 1.0))
        self.moments.mul_(decay).add_(mean, alpha=1 - decay)

    def tensors(self) -> list[Tensor]:
        return [self.a, self.g, self.moments]


@dataclass(eq=False)
class Asked:
    """What is to be inverted of some blocks.

    Attributes:
        matrices, dampings: for a solver, in the order of `blocks`: those of the inputs first, then of the outputs.
        blocks: each with the inverse of its input factor where that is a diagonal.
        found: what needs no solver, by the index of the block.
    """

    matrices: list[Tensor]
    dampings: list[Tensor]
    blocks: list[tuple[Block, Tensor | None]]
    found: dict[int, Inverse]

    def answered(self, solved: Iterable[solvers.Solved], before: Mapping[int, Inverse | Eigen]) -> dict[int, Inverse]:
        """By the index of the block. Where no inverse could be found, the one `before` stays."""
        results = iter(solved)
        found = dict(self.found)
        for block, vector in self.blocks:
            a = [next(results).inverse for _ in range(block.a_shape[0])] if vector is None else []
            g = [next(results).inverse for _ in range(block.g_shape[0])]
            left, right = _stacked(a), _stacked(g)
            kept = before.get(block.index)
            if right is not None and (vector is not None or left is not None):
                found[block.index] = Inverse(left if vector is None else vector, right)  # type: ignore[arg-type]
            elif isinstance(kept, Inverse):
                found[block.index] = kept
        return found


def asked_of(factors: list[Factors], damping: float) -> Asked:
    """Of these factors as they are now."""
    asked = Asked([], [], [], {})
    root = damping**0.5
    for one in factors:
        block, a = one.block, one.a.mean()
        if block.kind == NORM:
            asked.found[block.index] = Inverse((a + damping).reciprocal(), None)
            continue
        g = one.g.mean()
        balance = one.balance(a, g)
        vector = None
        if block.a_diagonal:
            vector = (a + (root * balance)[:, None]).reciprocal()
        else:
            asked.matrices.extend(a.unbind(0))
            asked.dampings.extend((root * balance).repeat_interleave(block.a_pieces).unbind(0))
        asked.matrices.extend(g.unbind(0))
        asked.dampings.extend((root / balance).repeat_interleave(block.g_pieces).unbind(0))
        asked.blocks.append((block, vector))
    return asked


def inverses_of(
    factors: list[Factors],
    damping: float,
    how: str,
    before: Mapping[int, Inverse | Eigen],
    newton_schulz_up_to: int = 0,
) -> dict[int, Inverse]:
    """By the index of the block. Where no inverse can be found, the one `before` stays."""
    asked = asked_of(factors, damping)
    solved = solvers.inverses(asked.matrices, asked.dampings, how, newton_schulz_up_to=newton_schulz_up_to)
    return asked.answered(solved, before)


def _stacked(matrices: Sequence[Tensor | None]) -> Tensor | None:
    """None where one is missing."""
    there = [one for one in matrices if one is not None]
    return torch.stack(there) if there and len(there) == len(matrices) else None


def eigenbases_of(
    factors: list[Factors], damping: float, before: Mapping[int, Inverse | Eigen]
) -> dict[int, Inverse | Eigen]:
    """Norms and embeddings, whose input factor is a diagonal already, keep an inverse.

    The moments begin as products of the factors' eigenvalues, with the sum that those `before` had: it is the mean
    square of gradients, the same in every basis.
    """
    found: dict[int, Inverse | Eigen] = {}
    whole = [one for one in factors if not one.block.a_diagonal]
    found.update(inverses_of([one for one in factors if one.block.a_diagonal], damping, "auto", {}))
    matrices = [matrix for one in whole for mean in (one.a.mean(), one.g.mean()) for matrix in mean.unbind(0)]
    solved = iter(solvers.eigenbases(matrices))
    for one in whole:
        block = one.block
        a = [next(solved) for _ in range(block.a_shape[0])]
        g = [next(solved) for _ in range(block.g_shape[0])]
        bases = [basis for basis in (*a, *g) if basis is not None]
        if len(bases) < len(a) + len(g):
            continue
        values = [each.clamp_min(0) for each, _ in bases]
        values_a = torch.stack(values[: len(a)]).reshape(block.copies, 1, -1)
        values_g = torch.stack(values[len(a) :]).reshape(block.copies, -1, 1)
        vectors = [each for _, each in bases]
        moments = values_g * values_a
        known = before.get(block.index)
        if isinstance(known, Eigen):
            moments *= known.moments.sum() / moments.sum().clamp_min(torch.finfo(moments.dtype).tiny)
        found[block.index] = Eigen(torch.stack(vectors[: len(a)]), torch.stack(vectors[len(a) :]), moments, damping)
    return found
