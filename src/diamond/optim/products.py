"""Products of single-precision matrices on a GPU: as exact as these are, and fast where they are large.

An inverse has entries of very different weight: rounded to the 11 bits that TensorFloat-32 keeps, what is left of its
small eigenvalues may be noise. So that is never used here, whatever the user allows for the model. Large products are
made of half-precision ones instead: a number is the sum of a high and a low part of 11 bits each, and of the four
products of such parts three are computed, all in one. That is several times as fast as single precision, for about a
tenth of its accuracy. Half precision has a short range of exponents, so matrices come in units of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_LARGEST = 8192.0  # that the largest number of a matrix becomes: below what half precision holds, and leaves it room
_LEAST = 1e-30  # whatever is smaller than that altogether counts as zeros
_LINED_UP = 8  # numbers of half precision that are read at once: sides are filled up to a multiple
_WORTH = 4e10  # operations of a stack from which the splitting, which starts many operations, is repaid


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Products in full single precision, whatever else is allowed; afterwards as it was before."""
    if device.type != "cuda":
        yield
        return
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def pays(copies: Any, g: Any, a: Any, g_side: Any, a_side: Any) -> Any:
    """Whether splitting does, for matrices of g x a between others of these sides (0 for a diagonal); numbers, or
    tensors of them."""
    return 2.0 * copies * g * a * (g_side + a_side) >= _WORTH


class Split:
    """Symmetric matrices, ready to be multiplied by: those that have these pieces on their diagonals.

    Args:
        factors: (copies * pieces, n, n), those of a copy after each other.
        copies: of the matrices that they are multiplied by.
    """

    def __init__(self, factors: Tensor, copies: int) -> None:
        self.size = factors.shape[-1]
        self.pieces = len(factors) // copies
        room = _filled_up(self.size)
        self.unit = _unit(factors.reshape(copies, -1, self.size))
        each = (1 / self.unit).repeat_interleave(self.pieces, 0)
        parts = torch.zeros(len(factors), 3, room, room, dtype=torch.float16, device=factors.device)
        high, less, low = parts[:, :, : self.size, : self.size].unbind(1)
        # What they meet comes as high part, what it is too large by, high part: see `_cut`.
        torch.mul(factors, each, out=high)
        torch.neg(high, out=less)
        torch.addcmul(less, factors, each, out=low)
        self._tall = parts.view(len(factors), 3 * room, room)

    def left_of(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Their product with (copies, n, columns), and its unit."""
        copies, _, columns = matrix.shape
        unit, room = _unit(matrix), self._tall.shape[-1]
        done = []
        for piece in range(self.pieces):
            part = matrix[:, piece * self.size : (piece + 1) * self.size]
            laid = _room(copies, 3, room, _filled_up(columns), like=matrix, whole=part.shape[1:] == (room, columns))
            _cut(part, 1 / unit, [one[:, : part.shape[1], :columns] for one in laid.unbind(1)])
            factor = self._tall[piece :: self.pieces, :, : part.shape[1]].transpose(1, 2)  # they are symmetric
            done.append(_product(factor, laid.view(copies, 3 * room, -1))[:, :, :columns])
        return done[0] if len(done) == 1 else torch.cat(done, 1), unit * self.unit

    def right_of(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The product of (copies, rows, n) with them, and its unit."""
        copies, rows, _ = matrix.shape
        unit, room = _unit(matrix), self._tall.shape[-1]
        done = []
        for piece in range(self.pieces):
            part = matrix[:, :, piece * self.size : (piece + 1) * self.size]
            laid = _room(copies, rows, 3, room, like=matrix, whole=part.shape[2] == room)
            _cut(part, 1 / unit, [one[:, :, : part.shape[2]] for one in laid.unbind(2)])
            found = _product(laid.view(copies, rows, 3 * room), self._tall[piece :: self.pieces])
            done.append(found[:, :, : part.shape[2]])
        return done[0] if len(done) == 1 else torch.cat(done, 2), unit * self.unit


def _cut(matrix: Tensor, per_unit: Tensor, into: Sequence[Tensor]) -> None:
    """The high part, what that is more than the matrix, and the high part again."""
    high, more, again = into
    torch.mul(matrix, per_unit, out=high)
    torch.addcmul(high, matrix, per_unit, value=-1, out=more)
    again.copy_(high)


def _unit(matrix: Tensor) -> Tensor:
    """(copies, 1, 1)"""
    largest: Tensor = torch.linalg.vector_norm(matrix, torch.inf, (1, 2), keepdim=True)
    return largest.clamp_min_(_LEAST).div_(_LARGEST)


def _room(*shape: int, like: Tensor, whole: bool) -> Tensor:
    """Of zeros, unless all of it will be written."""
    make = torch.empty if whole else torch.zeros
    return make(shape, dtype=torch.float16, device=like.device)


def _filled_up(n: int) -> int:
    return -(-n // _LINED_UP) * _LINED_UP


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Of half-precision numbers, summed in single precision."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
