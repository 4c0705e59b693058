"""Symmetric matrices, such as the factors of K-FAC, as one flat buffer of their upper triangles.

"tri" and "bf16-tri" are sums on the wire. The coded ones (intN-tri, filteredN-tri) send the diagonal as it is
(float32) and each entry beside it as a correlation, a_ij / sqrt(a_ii a_jj): between -1 and 1 for every positive
semidefinite matrix whatever the units of its rows, so that a uniform grid suits all of it. The grid reaches as far as
the largest correlation of the matrix (float32, sent along).

Filtered: correlations smaller than `FILTER` times the largest are dropped: a bit for each entry says which are kept,
and codes follow for those. A matrix that this does not make shorter is sent unfiltered. The error of an entry is at
most FILTER (dropped), or half a step of the grid (kept), times the largest correlation, times sqrt(a_ii a_jj).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from diamond.optim.compress.codec import as_bytes, from_bytes
from diamond.optim.compress.quantise import pack_bits, unpack_bits
from diamond.optim.compress.spec import check_factor
from diamond.optim.errors import OptimError

FILTER = 1 / 32
_HEAD_BYTES = 8  # largest correlation, and how many are kept (-1: all)
_ALL = -1


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Matrices in one buffer. `sides` are their sizes, `dtypes` what they were."""

    buffer: torch.Tensor
    sides: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    how: str

    @property
    def summable(self) -> bool:
        """Whether buffers of several ranks may be added before they are unpacked."""
        return self.how in ("none", "tri", "bf16-tri")

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


def pack(matrices: Sequence[torch.Tensor], how: str) -> Packed:
    """Symmetric matrices (the upper triangle counts) of one device as one buffer.

    Raises:
        OptimError: `how` is unknown, or one of them is no square matrix.
    """
    check_factor(how)
    for at, one in enumerate(matrices):
        if one.dim() != 2 or one.shape[0] != one.shape[1]:
            raise OptimError(f"matrices[{at}] has the shape {tuple(one.shape)}; give square, symmetric matrices")
    if how == "none":
        parts = [one.reshape(-1).float() for one in matrices]
    else:
        parts = [_encode(one.float(), how) for one in matrices]
    sides, dtypes = tuple(one.shape[0] for one in matrices), tuple(one.dtype for one in matrices)
    empty = torch.empty(0, dtype=_wire_dtype(how))
    return Packed(buffer=torch.cat(parts) if parts else empty, sides=sides, dtypes=dtypes, how=how)


def unpack(packed: Packed) -> list[torch.Tensor]:
    """The matrices again, symmetric to the bit."""
    matrices, begin = [], 0
    for side, dtype in zip(packed.sides, packed.dtypes, strict=True):
        matrix, begin = _decode(packed.buffer, begin, side, packed.how)
        matrices.append(matrix.to(dtype))
    return matrices


@lru_cache(maxsize=64)
def triangle(side: int, offset: int, device: torch.device) -> torch.Tensor:
    """Places of the upper triangle in a flattened matrix, row by row; `offset` 1 leaves the diagonal out."""
    rows, columns = torch.triu_indices(side, side, offset, device=device)
    places: torch.Tensor = rows * side + columns
    return places


def _wire_dtype(how: str) -> torch.dtype:
    return {"none": torch.float32, "tri": torch.float32, "bf16-tri": torch.bfloat16}.get(how, torch.uint8)


def _bits(how: str) -> tuple[int, bool]:
    name = how.removesuffix("-tri")
    return int(name[-1]), name.startswith("filtered")


def _encode(matrix: torch.Tensor, how: str) -> torch.Tensor:
    side = matrix.shape[0]
    if how in ("tri", "bf16-tri"):
        return matrix.reshape(-1)[triangle(side, 0, matrix.device)].to(_wire_dtype(how))
    bits, filtered = _bits(how)
    diagonal = matrix.diagonal()
    unit = diagonal.abs().sqrt()
    beside = triangle(side, 1, matrix.device)
    shares = (matrix / (unit[:, None] * unit[None, :])).reshape(-1)[beside]
    # A row without a diagonal is empty in a positive semidefinite matrix; a NaN must stay one.
    shares = torch.where((unit[:, None] * unit[None, :]).reshape(-1)[beside] == 0, 0.0, shares)
    largest = shares.abs().amax() if shares.numel() else shares.new_zeros(())
    most = 2 ** (bits - 1) - 1
    codes = torch.nan_to_num(shares / largest * most, nan=0.0).round().clamp(-most, most) + most
    codes = codes.to(torch.uint8)
    count, mask = _ALL, codes.new_empty(0)
    if filtered:
        keep = shares.abs() >= FILTER * largest
        number = int(keep.sum())
        if number * bits + shares.numel() < shares.numel() * bits:
            count, mask, codes = number, pack_bits(_whole_bytes(keep.to(torch.uint8), 1), 1), codes[keep]
    head = torch.cat([as_bytes(largest), as_bytes(torch.tensor([count], dtype=torch.int32, device=matrix.device))])
    return torch.cat([head, as_bytes(diagonal.clone()), mask, pack_bits(_whole_bytes(codes, bits), bits)])


def _decode(buffer: torch.Tensor, begin: int, side: int, how: str) -> tuple[torch.Tensor, int]:
    """A matrix, and where the next one begins."""
    if how == "none":
        whole = buffer[begin : begin + side * side].view(side, side)
        # A sum over ranks may round differently on the two sides of the diagonal.
        return whole.triu() + whole.triu(1).T, begin + side * side
    if how in ("tri", "bf16-tri"):
        size = side * (side + 1) // 2
        places = triangle(side, 0, buffer.device)
        return _mirrored(buffer[begin : begin + size].float(), places, side), begin + size
    bits, _ = _bits(how)
    most, size = 2 ** (bits - 1) - 1, side * (side - 1) // 2

    def take(count: int) -> torch.Tensor:
        nonlocal begin
        begin += count
        return buffer[begin - count : begin]

    head = take(_HEAD_BYTES)
    largest, count = from_bytes(head[:4], torch.float32), int(from_bytes(head[4:], torch.int32))
    diagonal = from_bytes(take(side * 4), torch.float32)
    keep = unpack_bits(take(-(-size // 8)), 1)[:size].bool() if count != _ALL else None
    number = size if keep is None else count
    codes = unpack_bits(take(-(-number * bits // 8)), bits)[:number]
    values = (codes.float() - most) * (largest / most)
    if keep is not None:
        values = torch.zeros(size, device=buffer.device).masked_scatter_(keep, values) + 0 * largest
    matrix = _mirrored(values, triangle(side, 1, buffer.device), side)
    unit = diagonal.abs().sqrt()
    matrix *= unit[:, None] * unit[None, :]
    matrix.diagonal().copy_(diagonal)
    return matrix, begin


def _mirrored(values: torch.Tensor, places: torch.Tensor, side: int) -> torch.Tensor:
    flat = torch.zeros(side * side, device=values.device)
    flat[places] = values
    upper = flat.view(side, side)
    flat = upper.T.contiguous().view(-1)
    flat[places] = values
    return flat.view(side, side)


def _whole_bytes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    lanes = 8 // bits
    return torch.nn.functional.pad(codes, (0, -codes.numel() % lanes))
