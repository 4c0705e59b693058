"""What is kept between steps, and what is counted."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from diamond.optim.compress import Compress, Wire
from diamond.optim.compress.codec import Layout, Send
from diamond.optim.compress.counting import Count, ErrorMeter
from diamond.optim.compress.fsdp import own_parameters, shard_layout
from diamond.optim.compress.memory import ErrorMemory, Room
from diamond.optim.compress.wire import nothing_or_nan
from diamond.optim.errors import OptimError

CPU = torch.device("cpu")
SIZES = {"a": 3, "b": 2, "c": 4}


def layout(*names: str) -> Layout:
    return Layout(names, tuple(range(len(names))), tuple((SIZES[name],) for name in names))


def test_errors_move_with_their_parameters_when_buckets_are_formed_anew() -> None:
    memory = ErrorMemory()
    memory.flat(layout("a", "b"), CPU).copy_(torch.tensor([1.0, 2, 3, 4, 5]))
    memory.flat(layout("c"), CPU).copy_(torch.tensor([6.0, 7, 8, 9]))
    assert memory.flat(layout("c", "b"), CPU).tolist() == [6, 7, 8, 9, 4, 5]
    assert memory.flat(layout("a"), CPU).tolist() == [1, 2, 3]
    memory.flat(layout("c", "b"), CPU).mul_(10)
    assert memory.flat(layout("a", "b"), CPU).tolist() == [1, 2, 3, 40, 50]


def test_memory_is_saved_apart_from_what_goes_on() -> None:
    memory = ErrorMemory()
    flat = memory.flat(layout("a", "b"), CPU)
    flat.copy_(torch.arange(5.0))
    saved = memory.state_dict()
    flat.fill_(7)
    other = ErrorMemory()
    other.load_state_dict(saved)
    assert other.flat(layout("b", "a"), CPU).tolist() == [3, 4, 0, 1, 2]
    other.scale(0.5)
    assert other.flat(layout("b", "a"), CPU).tolist() == [1.5, 2, 0, 0.5, 1]


def test_the_memory_of_another_model_is_refused_by_name() -> None:
    memory = ErrorMemory()
    memory.load_state_dict({"a": torch.zeros(4)})
    with pytest.raises(OptimError, match="'a' holds 4 values, but 3 are sent"):
        memory.flat(layout("a"), CPU)


def test_the_state_of_another_method_is_refused() -> None:
    state = Wire(Compress(grad="topk:0.1")).state_dict()
    Wire(Compress(grad="topk:0.1")).load_state_dict(state)
    with pytest.raises(OptimError, match=r"grad='topk:0.1'.*grad='int8'"):
        Wire(Compress(grad="int8")).load_state_dict(state)


def test_traffic_counts_what_leaves_a_rank() -> None:
    count = Count()
    count.add("grad", Send("gather", torch.zeros(10, dtype=torch.uint8)), 4)
    count.add("grad", Send("sum", torch.zeros(10)), 4)
    count.add("factor", Send("scatter", torch.zeros(4, 3, dtype=torch.uint8)), 4)
    assert count.sent == {"grad all_gather": 10, "grad all_reduce": 40, "factor all_to_all": 12}
    assert count.traffic == 30 + 60 + 9
    count.add_plain("grad", 400, "sum", 4)
    again = Count()
    again.load_state_dict(count.state_dict())
    assert again == count and again.plain_traffic == 600


def test_relative_errors_leave_out_steps_that_say_nothing() -> None:
    meter = ErrorMeter()
    assert math.isnan(meter.read().last) and math.isnan(meter.read().mean)
    # Two buckets of the first step, then zeros, a NaN, and a last step.
    for step, lost, wanted in ((0, 3.0, 6.0), (0, 4.0, 8.0), (1, 0.0, 0.0), (2, math.nan, 1.0), (3, 1.0, 10.0)):
        meter.add(step, torch.tensor([lost]), torch.tensor([wanted]))
    assert meter.read() == pytest.approx((0.1, 0.3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_any_value_that_is_not_finite_is_seen(bad: float) -> None:
    values = torch.full((100,), 3e38)
    values[50:] = -3e38
    assert float(nothing_or_nan(values)) == 0
    values[77] = bad
    assert math.isnan(float(nothing_or_nan(values)))
    assert float(nothing_or_nan(torch.empty(0))) == 0


def test_a_shard_is_read_as_its_parameters_or_as_a_square() -> None:
    assert shard_layout("x", ((3, 4), (5,)), 17).shapes == ((3, 4), (5,))
    assert shard_layout("x", ((3, 4), (5,)), 24).shapes == ((4, 6),)
    assert shard_layout("x", (), 13).shapes == ((13,),)
    assert set(shard_layout("x", ((3,),), 3).keys).isdisjoint(shard_layout("y", ((3,),), 3).keys)


def test_parameters_come_in_the_order_of_their_modules_and_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 1))
    model[2].weight = nn.Parameter(torch.zeros(1, 4))
    model.append(model[0])
    assert [id(one) for one in own_parameters(model)] == [id(one) for one in model.parameters()]


def test_room_is_the_same_until_buckets_are_formed_anew() -> None:
    room = Room()
    first = room.like(torch.zeros(5), layout("a", "b"))
    apart = room.like(torch.zeros(4), layout("c"))
    assert room.like(torch.ones(5), layout("a", "b")) is first and room.like(torch.ones(4), layout("c")) is apart
    assert room.like(torch.zeros(7), layout("a", "c")).shape == (7,)
    assert room.like(torch.zeros(5), layout("a", "b")) is not first
