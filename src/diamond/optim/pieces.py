"""Dimensions too large for one matrix: of their factor only blocks on the diagonal are ever computed and kept.

A dimension of n in k pieces has k matrices of ceil(n / k) for each copy, those of a copy after each other. Where that
is a little more than n, the last piece ends in zeros, and what is multiplied by it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diamond.optim.blocks import Block
from diamond.optim.errors import OptimError
from diamond.optim.solvers import block_sizes

LARGEST = 8192  # of the matrices that are inverted: 256 MiB each


def chosen(blocks: list[Block], exclude: Sequence[str], largest: Any, planned: int | None = None) -> list[Block]:
    """The blocks that K-FAC takes, numbered anew; sides above `largest`, or what was planned, in pieces."""
    if isinstance(largest, bool) or not isinstance(largest, int) or largest < 1:
        raise OptimError(f"largest={largest!r}: give a whole number of at least 1")
    there = [one for one in blocks if one.numbers]  # a layer may have no outputs
    kept = [one for one in there if not any(one.name == name or one.name.startswith(name + ".") for name in exclude)]
    largest = largest if planned is None else min(largest, planned)
    for place, block in enumerate(kept):
        block.index = place
        block.a_pieces = 1 if block.a_diagonal else len(block_sizes(block.a, largest))
        block.g_pieces = len(block_sizes(block.g, largest))
    return kept


def grams(rows: Tensor, pieces: int) -> Tensor:
    """Sums over rows of the products of columns with each other: (copies, rows, n) as (copies * pieces, size, size)."""
    parts = _cut(rows, pieces)
    return parts.transpose(1, 2) @ parts


def right(matrix: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    """(copies, rows, n) times the matrices that have these pieces on their diagonals."""
    if len(factors) == len(matrix):
        return torch.bmm(matrix, factors, out=out)
    parts = torch.bmm(_cut(matrix, len(factors) // len(matrix)), factors)
    done = parts.reshape(len(matrix), -1, *parts.shape[1:]).transpose(1, 2).flatten(2)[:, :, : matrix.shape[2]]
    return done if out is None else out.copy_(done)


def left(factors: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Likewise from the other side of (copies, n, columns)."""
    if len(factors) == len(matrix):
        return torch.bmm(factors, matrix, out=out)
    copies, n, columns = matrix.shape
    size = factors.shape[-1]
    tall = filled(matrix, len(factors) // copies * size, columns)
    done = torch.bmm(factors, tall.reshape(-1, size, columns)).reshape(copies, -1, columns)[:, :n]
    return done if out is None else out.copy_(done)


def filled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """With zeros below and to the right, so that it has so many."""
    missing = (0, columns - matrix.shape[2], 0, rows - matrix.shape[1])
    return F.pad(matrix, missing) if any(missing) else matrix


def _cut(rows: Tensor, pieces: int) -> Tensor:
    """(copies, rows, n) as (copies * pieces, rows, size)."""
    if pieces == 1:
        return rows
    copies, number, n = rows.shape
    size = -(-n // pieces)
    wide = filled(rows, number, pieces * size).reshape(copies, number, pieces, size)
    return wide.transpose(1, 2).reshape(-1, number, size)
