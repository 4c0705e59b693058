"""Some values of each tensor: the largest (with their places), or random ones (all ranks know which)."""

from __future__ import annotations

import math

import torch

from diamond.optim.compress.codec import Dice, Layout, as_bytes, from_bytes
from diamond.optim.compress.quantise import Quantised, bands_of

_BLOCK = 255  # a place within a block, and how many of a block are chosen, each fit a byte
_SCALED_TOGETHER = 512


class TopK:
    """The largest `fraction` of every tensor, at least one value. What places would make longer is sent whole.

    Sent, of one tensor after the other: how many values of each block of 255 are chosen and where in it they stand (a
    byte each), then the chosen values in the order of their places, as float32 or in `bits` bits, to the nearest.
    """

    summable = False

    def __init__(self, fraction: float, *, bits: int = 0) -> None:
        self.fraction = fraction
        self._coder = Quantised(bits, chunk=_SCALED_TOGETHER, nearest=True) if bits else None

    def kept(self, size: int) -> int:
        """How many values of a tensor are sent; `size` of them: without their places."""
        count = min(size, max(1, math.ceil(self.fraction * size))) if size else 0
        return size if _place_bytes(count, size) + self._value_bytes(count) >= self._value_bytes(size) else count

    def encode(self, flat: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        sent = [flat.new_empty(0, dtype=torch.uint8)]
        for part in layout.split(flat):
            count = self.kept(part.numel())
            chosen = part
            if count < part.numel():
                place = torch.topk(part.abs(), count, sorted=False).indices.sort().values
                sent.append(_pack_places(place, part.numel()))
                chosen = part[place]
            if count:
                sent.append(as_bytes(chosen) if self._coder is None else self._coder.encode(chosen, _one(count), dice))
        return torch.cat(sent)

    def decode(self, sent: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        whole = torch.zeros(layout.numel, device=sent.device)
        begin = 0

        def take(length: int) -> torch.Tensor:
            nonlocal begin
            begin += length
            return sent[begin - length : begin]

        for part in layout.split(whole):
            size, count = part.numel(), self.kept(part.numel())
            place = _unpack_places(take(_place_bytes(count, size)), count, size) if count < size else None
            coded = take(self._value_bytes(count))
            if not count:
                continue
            values = (
                from_bytes(coded, torch.float32)
                if self._coder is None
                else self._coder.decode(coded, _one(count), dice)
            )
            if place is None:
                part.copy_(values)
            else:
                part.scatter_(0, place, values)
        return whole

    def _value_bytes(self, count: int) -> int:
        if self._coder is None:
            return 4 * count
        return sum(self._coder.bytes_of(band.rows, band.width) for band in bands_of(_one(count), _SCALED_TOGETHER))


def _one(count: int) -> Layout:
    return Layout(("values",), (0,), ((count,),))


def _place_bytes(count: int, size: int) -> int:
    return -(-size // _BLOCK) + count


def _pack_places(place: torch.Tensor, size: int) -> torch.Tensor:
    """Of sorted places: how many are in each block, then where in it."""
    counts = torch.bincount(place // _BLOCK, minlength=-(-size // _BLOCK))
    return torch.cat([counts, place % _BLOCK]).to(torch.uint8)


def _unpack_places(packed: torch.Tensor, count: int, size: int) -> torch.Tensor:
    blocks = -(-size // _BLOCK)
    first = torch.arange(blocks, device=packed.device) * _BLOCK
    return torch.repeat_interleave(first, packed[:blocks].long(), output_size=count) + packed[blocks:]


class RandomK:
    """One value at random out of each of `fraction * size` equal blocks of a tensor; the places follow from the seed.

    `unbiased` multiplies each by the length of its block, so that the expectation is the tensor. Without, the error is
    always smaller than the tensor, which is what an error memory needs.
    """

    summable = True

    def __init__(self, fraction: float, *, unbiased: bool) -> None:
        self.fraction, self.unbiased = fraction, unbiased

    def encode(self, flat: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        places, lengths = self._places(layout, dice)
        return flat[places] * lengths if self.unbiased else flat[places]

    def decode(self, sent: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        places, _ = self._places(layout, dice)
        return torch.zeros(layout.numel, device=sent.device, dtype=sent.dtype).scatter_(0, places, sent)

    def _places(self, layout: Layout, dice: Dice) -> tuple[torch.Tensor, torch.Tensor]:
        """Where, in the whole buffer, and how long the block around it is."""
        places, lengths, begin = [], [], 0
        for key, size in zip(layout.keys, layout.sizes, strict=True):
            count = min(size, max(1, math.ceil(self.fraction * size))) if size else 0
            edges = torch.arange(count + 1, device=dice.device) * size // max(1, count)
            length = edges[1:] - edges[:-1]
            within = (dice.uniform(key, count, shared=True).double() * length).long()
            places.append(edges[:-1] + within + begin)
            lengths.append(length)
            begin += size
        return torch.cat(places), torch.cat(lengths).float()
