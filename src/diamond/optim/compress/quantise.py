"""8, 4, 2 or 1 bit a value, with a scale for every chunk of values, packed into bytes.

With two bits and more the levels are -n … 0 … n times the scale, n = 2^(bits-1) - 1; one bit is the sign.
At random: the scale is the largest value of the chunk, and a value goes to one of its two neighbours with the
probability that makes the expectation the value. To the nearest: the error is smaller than the chunk, which an error
memory needs; there 1 and 2 bits use a scale near the mean size, which is closer than the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad

from diamond.optim.compress.codec import Dice, Layout, as_bytes, from_bytes

_SCALE_BYTES = 4
_TERNARY_SCALE = 1.5  # times the mean size: close to the least squared error for bell-shaped values


@dataclass(frozen=True)
class Band:
    """Tensors of a layout whose chunks are equally wide, as one matrix of chunks.

    `members` are (position in the layout, first row, rows).
    """

    width: int
    rows: int
    members: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=512)
def bands_of(layout: Layout, chunk: int) -> tuple[Band, ...]:
    """Large tensors have chunks of `chunk` values; a smaller one is a chunk of its own, rounded up to whole bytes."""
    members: dict[int, list[tuple[int, int, int]]] = {}
    rows: dict[int, int] = {}
    for at, size in enumerate(layout.sizes):
        if not size:
            continue
        width = min(chunk, -(-size // 8) * 8)
        count = -(-size // width)
        members.setdefault(width, []).append((at, rows.get(width, 0), count))
        rows[width] = rows.get(width, 0) + count
    return tuple(Band(width, rows[width], tuple(members[width])) for width in sorted(members))


class Quantised:
    """`bits` a value. Sent: for each band its scales (float32), then its codes."""

    summable = False

    def __init__(self, bits: int, *, chunk: int = 512, nearest: bool = False) -> None:
        self.bits, self.chunk, self.nearest = bits, chunk, nearest

    def encode(self, flat: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        bands = bands_of(layout, self.chunk)
        pieces = [self.encode_rows(rows_of(flat, layout, band), self.chance(layout, band, dice)) for band in bands]
        return torch.cat([piece.view(-1) for pair in pieces for piece in pair]) if pieces else flat.new_empty(0).byte()

    def decode(self, sent: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        bands, begin = bands_of(layout, self.chunk), 0
        matrices = []
        for band in bands:
            size = self.bytes_of(band.rows, band.width)
            matrices.append(self.decode_rows(sent[begin : begin + size], band.rows, band.width))
            begin += size
        return from_rows(matrices, layout, bands, sent.device)

    def bytes_of(self, rows: int, width: int) -> int:
        return rows * (_SCALE_BYTES + width * self.bits // 8)

    def chance(self, layout: Layout, band: Band, dice: Dice, *, purpose: int = 0, shared: bool = False) -> torch.Tensor:
        """Random numbers for the rows of a band, drawn for each tensor; none where rounding is to the nearest."""
        if self.nearest:
            return torch.empty(0, device=dice.device)
        drawn = [
            dice.uniform(layout.keys[at], count * band.width, purpose=purpose, shared=shared)
            for at, _, count in band.members
        ]
        return torch.cat(drawn).view(band.rows, band.width)

    def encode_rows(self, rows: torch.Tensor, chance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and codes, as bytes."""
        scale = self._scale(rows)
        unit = torch.where(scale > 0, rows / scale, torch.zeros((), device=rows.device))
        if self.bits == 1:
            codes = unit >= 0 if self.nearest else chance < (unit + 1) / 2
        else:
            most = (1 << (self.bits - 1)) - 1
            level = unit * most
            level = level.round() if self.nearest else (level + chance).floor()
            # A NaN has no code; the scale carries it.
            codes = torch.nan_to_num(level.clamp(-most, most), nan=0.0) + most
        return as_bytes(scale), pack_bits(codes.to(torch.uint8), self.bits)

    def decode_rows(self, sent: torch.Tensor, rows: int, width: int) -> torch.Tensor:
        scale = from_bytes(sent[: rows * _SCALE_BYTES], torch.float32).view(rows, 1)
        codes = unpack_bits(sent[rows * _SCALE_BYTES :], self.bits).view(rows, width).float()
        if self.bits == 1:
            return (codes * 2 - 1) * scale
        most = (1 << (self.bits - 1)) - 1
        return (codes - most) * (scale / most)

    def _scale(self, rows: torch.Tensor) -> torch.Tensor:
        if self.nearest and self.bits <= 2:
            scale: torch.Tensor = rows.abs().mean(1, keepdim=True) * (1.0 if self.bits == 1 else _TERNARY_SCALE)
            return scale
        return rows.abs().amax(1, keepdim=True)


def rows_of(flat: torch.Tensor, layout: Layout, band: Band) -> torch.Tensor:
    """The chunks of a band, filled up with zeros."""
    parts = layout.split(flat)
    rows = [pad(parts[at], (0, count * band.width - parts[at].numel())) for at, _, count in band.members]
    return torch.cat(rows).view(band.rows, band.width)


def from_rows(
    matrices: list[torch.Tensor], layout: Layout, bands: tuple[Band, ...], device: torch.device
) -> torch.Tensor:
    """The flat buffer that `rows_of` took apart."""
    flat = torch.empty(layout.numel, device=device)
    parts = layout.split(flat)
    for matrix, band in zip(matrices, bands, strict=True):
        for at, first, count in band.members:
            parts[at].copy_(matrix[first : first + count].reshape(-1)[: parts[at].numel()])
    return flat


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes below 2^bits (uint8, a multiple of 8/bits of them) as bytes, the first in the lowest bits."""
    if bits == 8:
        return codes.reshape(-1)
    lanes = codes.reshape(-1, 8 // bits)
    packed = lanes[:, 0].clone()
    for lane in range(1, 8 // bits):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def unpack_bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    lanes: torch.Tensor = (packed.view(-1, 1) >> shifts) & ((1 << bits) - 1)
    return lanes.view(-1)
