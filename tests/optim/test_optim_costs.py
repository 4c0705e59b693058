"""What K-FAC costs: operations that are started, statistics of fewer rows, blocks of large dimensions."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from diamond.optim import costs
from diamond.optim.costs import Block
from diamond.optim.hardware import Hardware, typical
from diamond.optim.planning import plan_blocks
from diamond.optim.solvers import block_sizes
from diamond.optim.uses import Thinning


def once(blocks: list[Block], hardware: Hardware, largest: int | None = None) -> costs.Components:
    """Seconds of all parts on one rank, whenever they happen."""
    owners = torch.zeros(len(blocks), dtype=torch.int64)
    dealt = costs.cost(costs.table(costs.columns(blocks), hardware, largest), owners, owners + 1, 1)
    return costs.seconds(dealt, costs.wire(dealt, world=1, factor="none", factor_dtype="float32"), hardware, 1)


def test_blocks_of_a_shape_start_fewer_operations() -> None:
    hardware = typical("h200")
    alike, different = ([Block(f"l{at}", 32 + by * at, 32) for at in range(64)] for by in (0, 1))
    assert once(alike, hardware).preconditioning < once(different, hardware).preconditioning / 3
    assert once(alike, hardware).inverses < once(different, hardware).inverses / 2
    norms = [Block(f"n{at}", 32 + at, 1, a_diagonal=True, g_diagonal=True) for at in range(64)]
    assert once(norms, hardware).preconditioning < once(different, hardware).preconditioning / 3, "all in one"


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_what_starting_takes_counts_where_blocks_are_small(device: str) -> None:
    slow = dataclasses.replace(typical(device), start_s=100 * typical(device).start_s)
    small, large = ([Block(f"l{at}", n, n + at, positions=4096) for at in range(8)] for n in (16, 2048))
    for part in ("statistics", "inverses", "preconditioning"):
        assert getattr(once(small, slow), part) > 20 * getattr(once(small, typical(device)), part)
        if device == "h200":  # the host starts what comes next while the device is busy
            assert getattr(once(large, typical(device)), part) == getattr(
                once(large, dataclasses.replace(typical(device), start_s=0.0)), part
            )


def test_memory_that_is_slow_to_read_counts() -> None:
    slow = dataclasses.replace(typical("cpu"), bytes_s=1e8)
    blocks = [Block("conv", 288, 64, positions=4096, patches=True)]
    plain = [dataclasses.replace(blocks[0], patches=False)]
    assert (
        once(blocks, slow).statistics > 1.5 * once(plain, slow).statistics > 3 * once(plain, typical("cpu")).statistics
    )
    assert once(blocks, slow).preconditioning == once(plain, slow).preconditioning


@pytest.mark.parametrize("width", [16, 1500])
def test_statistics_take_no_more_rows_than_thinning_leaves(width: int) -> None:
    """Beyond twice what is enough, more positions cost nothing; up to there, all of them count."""
    thin = Thinning(torch.Generator().manual_seed(0))
    enough = max(2048, 2 * width)
    hardware = typical("cpu")
    for positions in (enough - 1, 2 * enough - 1, 2 * enough, 3 * enough):
        taken = thin.rows(torch.zeros(positions, 1), width).shape[0]
        block = Block("layer", width, width, positions=positions)
        expected = once([dataclasses.replace(block, positions=taken)], hardware).statistics
        assert once([block], hardware).statistics == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("largest", [None, 1, 7, 64, 1000])
def test_pieces_are_those_of_block_sizes(largest: int | None) -> None:
    blocks = [Block(f"l{n}", n, 1) for n in (1, 6, 7, 8, 50, 64, 65, 999, 1000, 1001)]
    found = costs.table(costs.columns(blocks), typical("cpu"), largest)
    for at, block in enumerate(blocks):
        sizes = block_sizes(block.a, largest)
        assert int(found.elements[at]) == len(sizes) * max(sizes) ** 2 + 1
        assert int(found.packed[at]) == len(sizes) * max(sizes) * (max(sizes) + 1) // 2 + 1
    assert costs.blocks_memory(blocks, largest=largest) == 2 * 4 * int(found.elements.sum())


def test_measuring_how_far_to_go_is_counted_as_rarely_as_it_is_done() -> None:
    blocks = [Block("layer", 64, 64, positions=256)]
    given = {"step_s": 0.1, "factor_every": 5, "inverse_every": 10}
    none, four, eight = (
        plan_blocks(blocks, lengths=lengths, lengths_every=every, **given)
        for lengths, every in ((0, 4), (1, 4), (1, 8))
    )
    assert none.components.step_lengths == 0
    assert four.components.step_lengths == pytest.approx(0.1 / 20, rel=0.1) and four.components.step_lengths > 0.1 / 20
    assert eight.components.step_lengths == pytest.approx(four.components.step_lengths / 2)
    assert four.kfac_s == pytest.approx(none.kfac_s + four.components.step_lengths)


def test_many_messages_wait_for_each_other() -> None:
    """Inverses travel one by one: on a link that answers late that counts, however small they are."""
    hardware = typical("h200", 2)
    late = dataclasses.replace(hardware, collectives={k: (1e-2, rate) for k, (_, rate) in hardware.collectives.items()})
    blocks = [Block(f"l{at}", 8, 8) for at in range(10)]
    plan = plan_blocks(blocks, world=2, hardware=late, workers=2, factor_every=1, inverse_every=1, step_s=10.0)
    assert plan.components.inverse_communication == pytest.approx(20 * 1e-2, rel=0.01)
    assert plan.components.factor_communication == pytest.approx(2 * 1e-2, rel=0.01)


def test_the_default_device_does_not_matter() -> None:
    blocks = [Block("layer", 3000, 70, positions=64), Block("norm", 9, 1, a_diagonal=True, g_diagonal=True)]
    here = plan_blocks(blocks, world=4, hardware=typical("h200", 4))
    with torch.device("meta"):
        assert plan_blocks(blocks, world=4, hardware=typical("h200", 4)) == here
