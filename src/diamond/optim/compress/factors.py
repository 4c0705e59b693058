"""Averages symmetric matrices over ranks, packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from diamond.optim.compress.codec import Send
from diamond.optim.compress.collectives import start
from diamond.optim.compress.counting import Count
from diamond.optim.compress.exchange import sum_of
from diamond.optim.compress.meeting import together
from diamond.optim.compress.triangle import Packed, pack, unpack

_KIND = "factor"


def average_factors(
    matrices: Sequence[torch.Tensor], how: str, *, group: dist.ProcessGroup | None = None, count: Count | None = None
) -> list[torch.Tensor]:
    """The mean of each matrix over the ranks, the same bits on all of them.

    Args:
        matrices: symmetric ones of one device, of the same sizes on all ranks.
        how: as `Compress.factor`. Coded ones are gathered and summed after decoding, the others summed on the wire.
        group: which ranks; all where left out.
        count: counts the bytes, for example `wire.count`.
    """
    if not matrices:
        return []
    ranks = group if group is not None else together("average_factors")
    counted = count if count is not None else Count()
    world = ranks.size()
    counted.add_plain(_KIND, sum(one.numel() * one.element_size() for one in matrices), "sum", world)
    packed = pack([one / world for one in matrices], how)
    if packed.summable:
        return unpack(replace(packed, buffer=_carried(Send("sum", packed.buffer), ranks, counted)))
    rows = _gathered(packed, ranks, counted)
    each = [unpack(replace(packed, buffer=row)) for row in rows]
    return [sum_of(list(same)) for same in zip(*each, strict=True)]


def _gathered(packed: Packed, group: dist.ProcessGroup, count: Count) -> torch.Tensor:
    """A row a rank. Filtered buffers differ in length, and all are sent as long as the longest."""
    buffer = packed.buffer
    if packed.how.startswith("filtered"):
        length = torch.tensor([buffer.numel()], device=buffer.device)
        longest = int(_carried(Send("gather", length), group, count).max())
        buffer = torch.nn.functional.pad(buffer, (0, longest - buffer.numel()))
    return _carried(Send("gather", buffer), group, count)


def _carried(send: Send, group: dist.ProcessGroup, count: Count) -> torch.Tensor:
    work, came = start(send, group)
    count.add(_KIND, send, group.size())
    work.wait()
    return came
