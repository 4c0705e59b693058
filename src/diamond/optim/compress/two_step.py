"""Quantised values between many ranks: each averages a share of the chunks and sends that, coded again, to all.

A rank so sends two coded buffers' worth of bytes however many ranks there are. Whose share a chunk is in follows from
its tensor alone, not from the bucket the tensor came in.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import pad

from diamond.optim.compress.codec import Dice, Layout, Rebuilt, Rounds, Send
from diamond.optim.compress.quantise import Band, Quantised, bands_of, from_rows, rows_of

_SECOND = 1  # purpose of the random numbers of the second step


def in_two_steps(codec: Quantised, flat: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
    bands = bands_of(layout, codec.chunk)
    shares = [shares_of(band, world, flat.device) for band in bands]
    own: list[torch.Tensor] = []
    outgoing: list[torch.Tensor] = []
    for band, share in zip(bands, shares, strict=True):
        scale, codes = codec.encode_rows(rows_of(flat, layout, band), codec.chance(layout, band, dice))
        own.append(codec.decode_rows(torch.cat([scale, codes]), band.rows, band.width))
        outgoing += [_taken(piece.view(band.rows, -1), share).view(world, -1) for piece in (scale, codes)]
    came = yield Send("scatter", torch.cat(outgoing, 1))
    averages = [
        torch.stack(rows).sum(0) / world
        for rows in zip(*(_decoded(codec, row, bands, shares) for row in came), strict=True)
    ]
    second: list[torch.Tensor] = []
    for band, share, average in zip(bands, shares, averages, strict=True):
        chance = codec.chance(layout, band, dice, purpose=_SECOND, shared=True)
        second += codec.encode_rows(average, _taken(chance, share[dice.rank]) if chance.numel() else chance)
    gathered = yield Send("gather", torch.cat(second))
    coded = [torch.stack(rows) for rows in zip(*(_decoded(codec, row, bands, shares) for row in gathered), strict=True)]
    if codec.nearest:
        for rows, share, average, sent in zip(own, shares, averages, coded, strict=True):
            _blame(rows, share[dice.rank], world * (sent[dice.rank] - average))
    matrices = [_put_back(rows, share, band) for rows, share, band in zip(coded, shares, bands, strict=True)]
    return Rebuilt(from_rows(matrices, layout, bands, flat.device), from_rows(own, layout, bands, flat.device))


@lru_cache(maxsize=512)
def shares_of(band: Band, world: int, device: torch.device) -> torch.Tensor:
    """The rows of each rank: the chunks of a tensor in `world` runs. Where they do not divide, row `band.rows` (there
    is none) fills up."""
    runs = []
    for _, first, count in band.members:
        each = -(-count // world)
        rows = torch.arange(each * world)
        runs.append(torch.where(rows < count, rows + first, band.rows).view(world, each))
    return torch.cat(runs, 1).to(device)


def _taken(rows: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Some rows; those that fill up are zeros, and a scale of zero makes zeros."""
    return pad(rows, (0, 0, 0, 1))[share]


def _put_back(shared: torch.Tensor, share: torch.Tensor, band: Band) -> torch.Tensor:
    rows = shared.new_empty(band.rows + 1, band.width)
    rows[share.view(-1)] = shared.view(-1, band.width)
    return rows[:-1]


def _blame(own: torch.Tensor, share: torch.Tensor, lost: torch.Tensor) -> None:
    """What the second rounding lost of the average is remembered by the rank that rounded, as its own."""
    real = share < own.shape[0]
    own[share[real]] += lost[real]


def _decoded(
    codec: Quantised, row: torch.Tensor, bands: tuple[Band, ...], shares: list[torch.Tensor]
) -> list[torch.Tensor]:
    matrices, begin = [], 0
    for band, share in zip(bands, shares, strict=True):
        count = share.shape[1]
        size = codec.bytes_of(count, band.width)
        matrices.append(codec.decode_rows(row[begin : begin + size], count, band.width))
        begin += size
    return matrices
