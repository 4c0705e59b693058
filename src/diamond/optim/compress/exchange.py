"""In which rounds codecs are exchanged: summed on the wire, gathered, or in two steps.

All ranks decode the same bytes in the same order, so that they end with the same bits.
"""

from __future__ import annotations

import torch

from diamond.optim.compress.codec import Codec, Dice, Exchange, Layout, Rebuilt, Rounds, Send
from diamond.optim.compress.floats import Half
from diamond.optim.compress.powersgd import PowerSGD
from diamond.optim.compress.quantise import Quantised
from diamond.optim.compress.sparse import RandomK, TopK
from diamond.optim.compress.spec import Compress
from diamond.optim.compress.two_step import in_two_steps


def exchange_for(compress: Compress, warm: dict[str, torch.Tensor]) -> Exchange:
    """`warm` keeps what PowerSGD begins the next step with."""
    name, number, code = compress.method
    if name == "none":
        return Untouched()
    if name == "powersgd":
        return PowerSGD(int(number), warm, thin=_thin(code, compress))
    if name == "int":
        quantised = Quantised(int(number), chunk=compress.chunk, nearest=compress.remembers)
        return Coded(quantised, two_step_from=compress.two_step_from)
    codecs: dict[str, Codec] = {
        "bf16": Half(torch.bfloat16),
        "fp16": Half(torch.float16),
        "topk": TopK(number, bits=int(code[3:]) if code else 0),
        "randomk": RandomK(number, unbiased=not compress.remembers),
    }
    return Summed(codecs[name]) if codecs[name].summable else Coded(codecs[name])


def _thin(code: str, compress: Compress) -> Exchange:
    """How PowerSGD's factors travel. To the nearest: its way to compress is biased as it is."""
    if not code:
        return Untouched()
    if code == "bf16":
        return Summed(Half(torch.bfloat16))
    quantised = Quantised(int(code[3:]), chunk=compress.chunk, nearest=True)
    return Coded(quantised, two_step_from=compress.two_step_from)


class Untouched:
    """Nothing is lost and nothing is saved."""

    def reduce(self, flat: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        total = yield Send("sum", flat / world)
        return Rebuilt(total, flat)

    def scatter(self, rows: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        came = yield Send("scatter", rows)
        return Rebuilt(sum_of(list(came)) / world, rows)


class Summed:
    """One all-reduce. Divided before, because the sum of many may be too large for 16 bits."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def reduce(self, flat: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        sent = self.codec.encode(flat / world, layout, dice)
        own = self.codec.decode(sent, layout, dice) * world
        total = yield Send("sum", sent)
        return Rebuilt(self.codec.decode(total, layout, dice), own)

    def scatter(self, rows: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        sent = torch.stack([self.codec.encode(row, layout, dice) for row in rows])
        own = torch.stack([self.codec.decode(row, layout, dice) for row in sent])
        came = yield Send("scatter", sent)
        total = sum_of([self.codec.decode(row, layout, dice) for row in came])
        return Rebuilt(total / world, own)


class Coded:
    """One all-gather of codes; quantised ones between many ranks in two steps."""

    def __init__(self, codec: Codec, *, two_step_from: int | None = None) -> None:
        self.codec, self.two_step_from = codec, two_step_from

    def reduce(self, flat: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        if self.two_step_from is not None and world >= self.two_step_from:
            assert isinstance(self.codec, Quantised)
            return (yield from in_two_steps(self.codec, flat, layout, dice, world))
        sent = self.codec.encode(flat, layout, dice)
        came = yield Send("gather", sent)
        each = [self.codec.decode(row, layout, dice) for row in came]
        return Rebuilt(sum_of(each) / world, each[dice.rank])

    def scatter(self, rows: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        sent = torch.stack([self.codec.encode(row, layout, dice) for row in rows])
        own = torch.stack([self.codec.decode(row, layout, dice) for row in sent])
        came = yield Send("scatter", sent)
        return Rebuilt(sum_of([self.codec.decode(row, layout, dice) for row in came]) / world, own)


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Added in the order given."""
    total = tensors[0].clone()
    for one in tensors[1:]:
        total += one
    return total
