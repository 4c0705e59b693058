"""Some values of each tensor: the largest (with their places), or random ones (all ranks know which)."""

from __future__ import annotations

import math

import torch

from diamond.optim.compress.codec import Dice, Layout, as_bytes, from_bytes

_PAIR_BYTES = 8  # a value of 4 bytes and its place in 4
_MOST_PLACES = 2**31 - 1


class TopK:
    """The largest `fraction` of every tensor, at least one value. What pairs do not make shorter is sent whole.

    Sent: all places (int32), then all values (float32), of one tensor after the other.
    """

    summable = False

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def kept(self, size: int) -> int:
        """How many values of a tensor are sent; `size` of them: without their places."""
        count = min(size, max(1, math.ceil(self.fraction * size))) if size else 0
        return size if count * _PAIR_BYTES >= size * 4 or size > _MOST_PLACES else count

    def encode(self, flat: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        places, values = [], []
        for part in layout.split(flat):
            count = self.kept(part.numel())
            if count == part.numel():
                values.append(part)
                continue
            place = torch.topk(part.abs(), count, sorted=False).indices
            places.append(place.to(torch.int32))
            values.append(part[place])
        return torch.cat([as_bytes(one) for one in (*places, *values)]) if values else flat.new_empty(0).byte()

    def decode(self, sent: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        counts = [self.kept(size) for size in layout.sizes]
        placed = sum(count for count, size in zip(counts, layout.sizes, strict=True) if count < size)
        places = from_bytes(sent[: placed * 4], torch.int32).long()
        values = from_bytes(sent[placed * 4 :], torch.float32)
        whole = torch.zeros(layout.numel, device=sent.device)
        at_place = at_value = begin = 0
        for count, size in zip(counts, layout.sizes, strict=True):
            chosen = values[at_value : at_value + count]
            if count == size:
                whole[begin : begin + size] = chosen
            else:
                whole[begin : begin + size].scatter_(0, places[at_place : at_place + count], chosen)
                at_place += count
            at_value += count
            begin += size
        return whole


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
