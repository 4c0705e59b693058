"""Samples come once an epoch, whoever computes them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.train.order import Shuffle, micro_batches


@given(count=st.integers(0, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
@settings(deadline=None, max_examples=60)
def test_a_shuffle_holds_each_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(Shuffle(count, seed=seed, epoch=epoch).take(0, count)) == list(range(count))


def test_a_shuffle_begins_anywhere_and_differs_by_epoch_and_seed() -> None:
    one = Shuffle(1000, seed=1, epoch=0)
    assert one.take(300, 400) == one.take(0, 1000)[300:400]
    others = [Shuffle(1000, seed=1, epoch=1), Shuffle(1000, seed=2, epoch=0)]
    assert all(other.take(0, 1000) != one.take(0, 1000) for other in others)
    assert Shuffle(10**15, seed=3, epoch=0)[10**14] < 10**15


def test_a_shuffle_mixes() -> None:
    """Neighbours are strangers, and the first half of an epoch is no half of the data."""
    found = Shuffle(10_000, seed=7, epoch=3).take(0, 10_000)
    steps = [abs(one - other) for one, other in pairwise(found)]
    assert 3_000 < sum(steps) / len(steps) < 3_700  # a third of the range, as chance has it
    assert 4_800 < sum(found[:5000]) / 5000 < 5_200


@given(total=st.integers(1, 200), world=st.integers(1, 9), per_rank=st.integers(1, 40), begin=st.integers(0, 10**6))
def test_a_step_is_dealt_out_whole(total: int, world: int, per_rank: int, begin: int) -> None:
    dealt = [micro_batches(begin, begin + total, rank=rank, world=world, per_rank=per_rank) for rank in range(world)]
    assert len({len(mine) for mine in dealt}) == 1, "the same number of collectives on each"
    seen = sorted(place for mine in dealt for micro in mine if micro.weight for place in range(micro.begin, micro.end))
    assert seen == list(range(begin, begin + total))
    assert all(micro.end - micro.begin <= per_rank for mine in dealt for micro in mine)
    # The mean over ranks of weighted means is the mean over samples.
    assert sum(micro.weight for mine in dealt for micro in mine) == pytest.approx(world)


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 20_011, 10**12])
def test_a_shuffle_read_in_blocks_is_the_same(count: int) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from diamond.train.loop.batches import _Blocks

    one = Shuffle(count, seed=11, epoch=2)
    many = _Blocks(one)
    places = [place for place in (0, 1, 2, 500, 8191, 8192, 8193, 20_010, 10**11) if place < count]
    assert [many[place] for place in places] == [one[place] for place in places]
