"""Plans keep to their budgets and overheads, and are what the machine makes sensible."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import time
from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from diamond.optim import costs
from diamond.optim.errors import OptimError
from diamond.optim.hardware import Hardware, typical
from diamond.optim.planning import LADDER, Block, Plan, blocks_memory, parse_bytes, plan_blocks

WORLDS = (1, 2, 3, 4, 6, 8, 12)
SEEDS = range(8)


def some_blocks(dice: random.Random, most: int = 2000) -> list[Block]:
    return [
        Block(
            f"layer{at}",
            dice.choice([3, 64, 65, 512, dice.randint(1, most)]),
            dice.choice([10, 64, 512, dice.randint(1, most)]),
            copies=dice.choice([1, 1, 1, 4]),
            positions=dice.choice([1, 64, 4096]),
            a_diagonal=dice.random() < 0.1,
        )
        for at in range(dice.randint(1, 20))
    ]


def slower(hardware: Hardware, times: float) -> Hardware:
    """With so much slower a network."""
    links = {kind: (latency * times, rate / times) for kind, (latency, rate) in hardware.collectives.items()}
    return dataclasses.replace(hardware, collectives=links)


def staleness(plan: Plan) -> tuple[int, int]:
    return plan.factor_every, plan.inverse_every


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_keeps_to_memory_and_overhead(seed: int) -> None:
    dice = random.Random(seed)
    blocks, world = some_blocks(dice), dice.choice(WORLDS)
    hardware = typical(dice.choice(["cpu", "h200"]), world)
    free = plan_blocks(blocks, world=world, hardware=hardware)
    for part in (2.0, 1.0, 0.8, 0.6, 0.4):
        budget = free.memory_bytes * part
        try:
            plan = plan_blocks(blocks, world=world, hardware=hardware, memory=budget)
        except OptimError as error:
            [least] = re.findall(r"at least (\d+) bytes", str(error))
            assert int(least) > budget
            plan = plan_blocks(blocks, world=world, hardware=hardware, memory=int(least))
            assert plan.memory_bytes == int(least), "what the message says is enough, and all of it is needed"
            budget = int(least)
        assert plan.memory_bytes <= budget and len(plan.memory_by_rank) == world
        assert plan.within == (plan.kfac_s <= 0.15 * plan.step_s * (1 + 1e-12))
        for at in range(len(blocks)):
            assert world % plan.workers[at] == 0 and plan.owners[at] in plan.worker_ranks(at)
            assert plan.worker_ranks(at).stop <= world
            assert {plan.source(at, rank) for rank in range(world)} == set(plan.worker_ranks(at))
        assert plan == plan_blocks(blocks, world=world, hardware=hardware, memory=budget), "the same again"


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_is_never_slower(seed: int) -> None:
    dice = random.Random(seed)
    blocks, world = some_blocks(dice), dice.choice(WORLDS)
    hardware = typical(dice.choice(["cpu", "h200"]), world)
    fixed = {"factor_every": 10, "inverse_every": 100, "factor_dtype": "float32", "largest": 4096}
    most = plan_blocks(blocks, world=world, hardware=hardware, **fixed).memory_bytes
    last, last_merit, least = float("inf"), (True, 10**9), float("inf")
    for part in (0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0, 1.5):
        try:
            plan = plan_blocks(blocks, world=world, hardware=hardware, memory=most * part, **fixed)
        except OptimError:
            assert last == float("inf"), "what fitted into less fits into more"
        else:
            assert plan.kfac_s <= last * (1 + 1e-9)
            last = plan.kfac_s
        try:
            plan = plan_blocks(blocks, world=world, hardware=hardware, memory=most * part)
        except OptimError:
            assert last_merit == (True, 10**9)
        else:
            merit = (not plan.within, max(plan.inverse_every, 100) if plan.within else 0)
            assert merit[0] <= last_merit[0] and (not plan.within or merit <= last_merit), "it does not get staler"
            assert plan.within or plan.kfac_s <= 2 * least, "nor is anything lost beyond what coarser ways must save"
            last_merit, least = merit, min(least, plan.kfac_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_owners_are_balanced(seed: int) -> None:
    dice = random.Random(seed)
    blocks, world = some_blocks(dice), dice.choice(WORLDS)
    plan = plan_blocks(blocks, world=world, hardware=typical("h200", world))
    work = costs.table(costs.columns(blocks), typical("h200"), plan.largest).cubes.tolist()
    loads = [sum(one for one, owner in zip(work, plan.owners, strict=True) if owner == rank) for rank in range(world)]
    # Graham: the last block put onto the fullest rank found it at most as full as the mean of what was dealt before.
    assert max(loads) <= sum(work) / world + max(work) * (1 - 1 / world) + 1e-6


def test_owners_are_as_close_to_the_best_as_they_are_known_to_be() -> None:
    """Longest first is at most 4/3 - 1/(3m) times the best of all assignments, here by trying them all."""
    dice = random.Random(5)
    for _ in range(20):
        world, work = dice.choice((2, 3)), [dice.randint(1, 50) for _ in range(7)]

        def fullest(owners: Sequence[int], work: list[int] = work, world: int = world) -> int:
            return max(
                sum(one for one, mine in zip(work, owners, strict=True) if mine == rank) for rank in range(world)
            )

        best = min(fullest(owners) for owners in itertools.product(range(world), repeat=7))
        assert fullest(costs.balance(work, work, world)) <= (4 / 3 - 1 / (3 * world)) * best + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slower_network_makes_updates_rarer_until_that_is_in_vain(seed: int) -> None:
    dice = random.Random(seed)
    blocks, world = some_blocks(dice), dice.choice(WORLDS[1:])
    hardware = typical("h200", world)
    plans = [plan_blocks(blocks, world=world, hardware=slower(hardware, 4.0**power), step_s=0.1) for power in range(7)]
    kept = [staleness(plan) for plan in plans if plan.within]
    assert kept == sorted(kept) and kept
    assert [plan.within for plan in plans] == sorted((plan.within for plan in plans), reverse=True)
    assert all(plan.inverse_every <= 200 and plan.factor_every <= 50 for plan in plans)


def test_approximations_that_a_slow_network_brings_in_do_not_make_updates_more_frequent() -> None:
    blocks = [Block(f"layer{at}", 8192, 8192, positions=64) for at in range(4)]
    plans = [
        plan_blocks(blocks, world=4, hardware=slower(typical("h200", 4), 1.3**power), step_s=0.5, sampling=0.0)
        for power in range(40)
    ]
    kept = [staleness(plan) for plan in plans if plan.within]
    assert kept == sorted(kept)
    assert plans[0].largest is None and any(plan.largest and plan.within for plan in plans)


def test_a_much_slower_network_does_change_the_plan() -> None:
    blocks = [Block(f"layer{at}", 1024, 1024, positions=4096) for at in range(24)]
    near, far, farther = (
        plan_blocks(blocks, world=8, hardware=slower(typical("h200", 8), times), step_s=0.1)
        for times in (1, 300, 10_000)
    )
    assert staleness(near) < staleness(far) and near.within and far.within
    assert (near.factor, far.factor) == ("tri", "bf16-tri")
    assert far.workers == (8,) * 24, "gradients are not worth sending about at every step"
    assert not farther.within and farther.workers == far.workers, "too slow, and still nothing is made worse"


@pytest.mark.parametrize("step_s", [3e-4, 1e-3, 3e-3])
def test_periods_are_not_stretched_in_vain(step_s: float) -> None:
    """Where preconditioning alone is above the budget, updates take a quarter of that at most, and are no rarer."""
    blocks = [Block(f"layer{at}", 64 + at, 64, positions=256) for at in range(100)]
    plan = plan_blocks(blocks, hardware=typical("h200"), step_s=step_s, lengths=1.0)
    assert plan.components.preconditioning > 0.15 * step_s and not plan.within
    little = 0.25 * plan.components.always
    assert plan.kfac_s - plan.components.always <= little
    at = LADDER.index(staleness(plan))
    fresher = plan_blocks(
        blocks, hardware=typical("h200"), step_s=step_s, lengths=1.0,
        factor_every=LADDER[at - 1][0], inverse_every=LADDER[at - 1][1],
    )  # fmt: skip
    assert at > 0 and fresher.kfac_s - fresher.components.always > little
    text = " ".join(plan.reasons)
    share = plan.components.preconditioning / step_s
    assert f"preconditioning alone: {share:.0%} of a step, more than the 15% asked for" in text
    assert "many small operations, so a larger batch, gradient accumulation or fewer blocks" in text


def test_rare_updates_only_where_they_are_asked_for() -> None:
    blocks = [Block("layer", 1024, 1024, positions=64)]
    given = {"hardware": typical("cpu"), "step_s": 0.35, "lengths": 3.0}
    plan = plan_blocks(blocks, **given)
    assert not plan.within and plan.components.always < 0.15 * 0.35 and staleness(plan) == (50, 200)
    asked = plan_blocks(blocks, inverse_every=5000, **given)
    assert asked.inverse_every == 5000 and asked.factor_every <= 50
    assert staleness(plan_blocks(blocks, factor_every=1000, **given)) == (1000, 1000)


def test_which_part_is_too_long_is_said() -> None:
    wide = [Block("wide", 8192, 8192, positions=64)]
    plan = plan_blocks(wide, hardware=typical("h200"), step_s=0.7, sampling=0.0, inverse_every=1, largest=8192)
    assert not plan.within and "most of it is inverses: a larger batch" in plan.explain()
    blocks = [Block(f"layer{at}", 1024, 1024, positions=64) for at in range(8)]
    far = plan_blocks(blocks, world=8, hardware=slower(typical("h200", 8), 1000), step_s=0.1, workers=1)
    assert far.reasons[-1].startswith("gradient communication alone: ")
    assert "more memory for more workers" in far.reasons[-1]


def test_little_memory_takes_fewer_workers_then_coarser_types() -> None:
    blocks = [Block(f"layer{at}", 2048, 2048, positions=4096) for at in range(32)]
    hardware = slower(typical("h200", 8), 20)
    plans = [
        plan_blocks(blocks, world=8, hardware=hardware, step_s=1.0, sums=False, memory=memory)
        for memory in (None, "1 GiB", "400MiB", "256MiB")
    ]
    memories = [plan.memory_bytes for plan in plans]
    assert memories == sorted(memories, reverse=True) and memories[0] > 1 << 30
    workers = [sum(plan.workers) for plan in plans[:3]]
    assert workers == sorted(workers, reverse=True) and workers[2] < workers[0]
    assert plans[0].workers == (8,) * 32 and plans[1].factor_dtype == "float32" == plans[0].factor_dtype
    least = plan_blocks(blocks, world=8, hardware=hardware, step_s=1.0, sums=False, memory="200MiB")
    assert least.factor_dtype == "bfloat16" or least.largest is not None
    with pytest.raises(OptimError, match=r"memory='1 MiB' is too little for 32 blocks on 8 ranks: at least \d+ bytes"):
        plan_blocks(blocks, world=8, hardware=hardware, memory="1 MiB")


def test_memory_of_one_rank_by_hand() -> None:
    block = Block("only", 100, 50, copies=2, positions=10)
    plan = plan_blocks([block], sums=False)
    elements = 2 * (100**2 + 50**2)
    assert blocks_memory([block]) == 2 * 4 * elements
    assert plan.memory_bytes == 2 * 4 * elements + 3 * 4 * 100**2, "averages, inverses, and the solver's copies"
    assert plan_blocks([block]).memory_bytes == plan.memory_bytes + 4 * elements, "and the sums of a step"
    assert blocks_memory([Block("table", 50_000, 8, a_diagonal=True)]) == 2 * 4 * (50_000 + 64)
    assert blocks_memory([block], factor_dtype="bfloat16", largest=50) == 2 * 2 * 2 * (2 * 50**2 + 50**2)
    assert plan.workers == (1,) and plan.owners == (0,) and plan.wire_bytes == 0 and plan.factor == "none"


def test_bytes_on_the_wire_by_hand() -> None:
    blocks = [Block("one", 10, 20), Block("two", 10, 20)]
    given = {"world": 2, "factor_every": 5, "inverse_every": 10}
    triangles, squares, weights = 2 * (55 + 210), 2 * 500, 200
    apart = plan_blocks(blocks, workers=1, factor="tri", **given)
    assert sorted(apart.owners) == [0, 1]
    assert apart.wire_bytes == pytest.approx(triangles * 4 / 2 / 5 + weights * 4)
    together = plan_blocks(blocks, workers=2, factor="none", **given)
    assert together.wire_bytes == pytest.approx(squares * 4 / 2 / 5 + squares / 2 * 4 / 10)
    halved = plan_blocks(blocks, workers=2, factor="bf16-tri", factor_dtype="bfloat16", **given)
    assert halved.wire_bytes == pytest.approx(triangles * 2 / 2 / 5 + squares / 2 * 2 / 10)


def test_wide_layers_are_split_where_whole_ones_take_too_long() -> None:
    blocks = [Block("wide", 16384, 512, positions=512)]
    plan = plan_blocks(blocks, hardware=typical("h200"), step_s=0.01)
    assert plan.largest is not None and plan.within
    assert plan_blocks(blocks, hardware=typical("h200"), step_s=10.0).largest is None
    assert plan_blocks(blocks, hardware=typical("h200"), step_s=10.0, largest=3000).largest == 3000


def test_what_cannot_be_met_is_said() -> None:
    blocks = [Block("layer", 512, 512, positions=1)]
    plan = plan_blocks(blocks, hardware=typical("cpu"), step_s=1e-6)
    assert not plan.within and "still more than 15% of a step" in plan.explain()
    fixed = plan_blocks(blocks, hardware=typical("cpu"), step_s=1e-6, factor_every=1, inverse_every=1)
    assert not fixed.within and "as asked for, which takes more" in fixed.explain()


def test_it_explains_itself_and_compares() -> None:
    blocks = [Block(f"layer{at}", 1024, 1024, positions=4096) for at in range(24)]
    plan = plan_blocks(blocks, world=8, hardware=typical("h200", 8), memory="8GiB")
    text = plan.explain()
    assert "24 blocks on 8 ranks" in text and "gradient workers" in text and "within 8.0 GiB a rank" in text
    assert f"factors every {plan.factor_every}, inverses every {plan.inverse_every} steps" in text
    assert all(name.replace("_", " ") in text for name in plan.components._fields)
    compared = plan.compare({"preconditioning": plan.components.preconditioning * 2, "memory_bytes": 3 << 20})
    assert [row[0] for row in compared.rows] == ["preconditioning", "memory_bytes"]
    assert "2.00" in str(compared) and "3.0 MiB" in str(compared)
    with pytest.raises(OptimError, match="nothing was predicted for magic, only for statistics"):
        plan.compare({"magic": 1.0})
    with pytest.raises(OptimError, match="measured: kfac_s=None: give a number, of seconds or bytes"):
        plan.compare({"kfac_s": None})  # type: ignore[dict-item]
    with pytest.raises(OptimError, match="measured=list: give a dictionary"):
        plan.compare([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("step_s", [1e-9, 1.0, 1e7])
def test_columns_stay_apart_whatever_the_numbers(step_s: float) -> None:
    plan = plan_blocks([Block("layer", 64, 64)], step_s=step_s)
    rows = str(plan.compare({"kfac_s": 3e5, "step_s": 1e9, "wire_bytes": 1e20, "memory_bytes": 1.0})).splitlines()
    # Name, number and unit twice, ratio; the head has three words.
    assert [len(row.split()) for row in rows] == [3, 6, 6, 6, 6]
    assert len({len(row) for row in rows}) == 1, "as wide as each other"
    table = [line for line in plan.explain().splitlines() if line.endswith("%") and " ms " in line]
    assert len(table) == len(plan.components) + 3 and len({len(line) for line in table}) == 1
    assert all(re.fullmatch(r"  \D+ +[\d.]+ ms +[\d.]+%", line) for line in table)


def test_thousands_of_layers_take_less_than_a_second() -> None:
    dice = random.Random(1)
    blocks = [Block(f"l{at}", dice.randint(1, 20_000), dice.randint(1, 20_000)) for at in range(10_000)]
    took = []
    for _ in range(2):  # the better of two: this machine has other things to do
        begin = time.thread_time()
        plan = plan_blocks(blocks, world=64, hardware=typical("h200", 64))
        took.append(time.thread_time() - begin)
        assert len(plan.workers) == 10_000
    assert min(took) < 1.0


def test_nothing_to_plan() -> None:
    plan = plan_blocks([], world=4)
    assert plan.workers == () and plan.within and plan.explain().startswith("K-FAC for 0 blocks on 4 ranks")


@pytest.mark.parametrize(
    ("given", "bytes_"),
    [
        ("8GiB", 8 << 30), ("512 MiB", 512 << 20), (" 1.5 GB ", 1_500_000_000), ("7b", 7), ("64kib", 65536),
        (8e9, 8_000_000_000), (5, 5), (None, None),
    ],
)  # fmt: skip
def test_sizes(given: str | float | None, bytes_: int | None) -> None:
    assert parse_bytes(given) == bytes_


@pytest.mark.parametrize(
    "given", ["", "8", "8G", "GiB", "-1GiB", "1e3 B", "8 GiB x", 0, -5, float("nan"), float("inf"), True]
)
def test_no_sizes(given: str | float) -> None:
    with pytest.raises(OptimError, match=r"memory=.* is no size: .*8GiB"):
        parse_bytes(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"world": 0}, "world=0"),
        ({"world": 4, "workers": 3}, "workers=3: give a divisor of the 4 ranks"),
        ({"overhead": 0.0}, "overhead=0.0"),
        ({"step_s": -1.0}, "step_s=-1.0"),
        ({"factor": "zip"}, "factor='zip': give one of none, tri, bf16-tri"),
        ({"factor_dtype": "int8"}, "factor_dtype='int8'"),
        ({"solver": "magic"}, "solver='magic'"),
        ({"factor_every": 1.5}, "factor_every=1.5"),
        ({"memory": "much"}, "memory='much'"),
        ({"lengths": -1.0}, "lengths=-1.0: give a part of a step"),
        ({"widest": 0}, "widest=0"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(OptimError, match=said):
        plan_blocks([Block("layer", 4, 4)], **given)  # type: ignore[arg-type]


def test_bad_blocks_are_named() -> None:
    with pytest.raises(OptimError, match="block 'layer': a=0"):
        Block("layer", 0, 4)
