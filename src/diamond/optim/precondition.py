"""What is applied to a block's gradient: inverses of its damped factors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diamond.optim import pieces, solvers
from diamond.optim.blocks import NORM, Block
from diamond.optim.factors import Factors


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

    def answered(self, solved: Iterable[solvers.Solved], before: Mapping[int, Inverse]) -> dict[int, Inverse]:
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
            elif kept is not None:
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
    before: Mapping[int, Inverse],
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
