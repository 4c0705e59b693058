"""What is applied to a block's gradient: inverses of its damped factors, or its curvature in their eigenbasis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diamond.optim import solvers
from diamond.optim.blocks import NORM
from diamond.optim.factors import Factors
from diamond.optim.uses import Use, input_rows, output_rows


@dataclass(eq=False)
class Inverse:
    """(G + damping)^-1 M (A + damping)^-1. `a` is a vector where the input factor is a diagonal; no `g` for a norm."""

    a: Tensor
    g: Tensor | None

    def apply(self, matrix: Tensor) -> Tensor:
        right = matrix * self.a[:, None] if self.a.dim() == 2 else torch.bmm(matrix, self.a)
        return right if self.g is None else torch.bmm(self.g, right)

    def tensors(self) -> list[Tensor]:
        return [self.a] if self.g is None else [self.a, self.g]


@dataclass(eq=False)
class Eigen:
    """EKFAC: the curvature's diagonal in the eigenbasis of the factors, kept up to date between decompositions."""

    a: Tensor  # eigenvectors as columns; empty where the input factor is a diagonal
    g: Tensor
    moments: Tensor
    damping: float

    def apply(self, matrix: Tensor) -> Tensor:
        seen = self._to(matrix) / (self.moments + self.damping)
        left = torch.bmm(self.g, seen)
        return left if not self.a.numel() else torch.bmm(left, self.a.transpose(1, 2))

    def _to(self, matrix: Tensor) -> Tensor:
        left = torch.bmm(self.g.transpose(1, 2), matrix)
        return left if not self.a.numel() else torch.bmm(left, self.a)

    def squares(self, use: Use, gradient: Tensor, sharing: str) -> Tensor:
        """Sum over positions of the squared gradients of single positions, in this basis."""
        outputs = torch.bmm(output_rows(use, gradient, sharing), self.g).square()
        inputs = torch.bmm(input_rows(use, sharing), self.a).square()
        return torch.bmm(outputs.transpose(1, 2), inputs)

    def tensors(self) -> list[Tensor]:
        return [self.a, self.g, self.moments]


def inverses_of(
    factors: list[Factors],
    damping: float,
    how: str,
    before: dict[int, Inverse | Eigen],
    newton_schulz_up_to: int = 0,
) -> dict[int, Inverse]:
    """By the index of the block. Where no inverse can be found, the one `before` stays."""
    matrices: list[Tensor] = []
    dampings: list[Tensor] = []
    found: dict[int, Inverse] = {}
    dense: list[tuple[Factors, Tensor | None]] = []
    root = damping**0.5
    for one in factors:
        a = one.a.mean()
        if one.block.kind == NORM:
            found[one.block.index] = Inverse((a + damping).reciprocal(), None)
            continue
        g = one.g.mean()
        balance = one.balance(a, g)
        vector = None
        if one.block.a_diagonal:
            vector = (a + (root * balance)[:, None]).reciprocal()
        else:
            matrices.extend(a.unbind(0))
            dampings.extend((root * balance).unbind(0))
        matrices.extend(g.unbind(0))
        dampings.extend((root / balance).unbind(0))
        dense.append((one, vector))
    solved = iter(solvers.inverses(matrices, dampings, how, newton_schulz_up_to=newton_schulz_up_to))
    for one, vector in dense:
        left = [next(solved).inverse for _ in range(one.block.copies)] if vector is None else []
        right = [next(solved).inverse for _ in range(one.block.copies)]
        if any(matrix is None for matrix in left + right):
            kept = before.get(one.block.index)
            if isinstance(kept, Inverse):
                found[one.block.index] = kept
            continue
        found[one.block.index] = Inverse(torch.stack(left) if vector is None else vector, torch.stack(right))  # type: ignore[arg-type]
    return found


def eigenbases_of(factors: list[Factors], damping: float) -> dict[int, Inverse | Eigen]:
    """Norms and embeddings, whose input factor is a diagonal already, keep an inverse."""
    found: dict[int, Inverse | Eigen] = {}
    whole = [one for one in factors if not one.block.a_diagonal]
    found.update(inverses_of([one for one in factors if one.block.a_diagonal], damping, "auto", {}))
    matrices = [matrix for one in whole for mean in (one.a.mean(), one.g.mean()) for matrix in mean.unbind(0)]
    solved = iter(solvers.eigenbases(matrices))
    for one in whole:
        pairs = [pair for _ in range(2 * one.block.copies) if (pair := next(solved)) is not None]
        if len(pairs) < 2 * one.block.copies:
            continue
        a, g = pairs[: one.block.copies], pairs[one.block.copies :]
        values_a = torch.stack([pair[0] for pair in a]).clamp_min(0)
        values_g = torch.stack([pair[0] for pair in g]).clamp_min(0)
        moments = values_g[:, :, None] * values_a[:, None, :]
        found[one.block.index] = Eigen(
            torch.stack([pair[1] for pair in a]), torch.stack([pair[1] for pair in g]), moments, damping
        )
    return found
