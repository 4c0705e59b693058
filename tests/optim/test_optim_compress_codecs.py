"""Ways to compress by themselves: what is sent, what is rebuilt, what chance may do, what memory makes good."""

from __future__ import annotations

import math

import pytest
import torch

from diamond.optim.compress import Compress
from diamond.optim.compress.codec import Codec, Dice, Layout
from diamond.optim.compress.exchange import Untouched, exchange_for
from diamond.optim.compress.floats import Half
from diamond.optim.compress.lockstep import in_lockstep
from diamond.optim.compress.powersgd import PowerSGD, orthonormal
from diamond.optim.compress.quantise import Quantised, pack_bits, unpack_bits
from diamond.optim.compress.sparse import RandomK, TopK

SHAPES = ((40, 30), (30,), (7,), (600,), (5, 4, 3, 3), (1,))
EVERY = (
    "none", "bf16", "fp16", "powersgd:2", "powersgd:2:bf16", "powersgd:2:int8", "topk:0.05", "topk:0.05:int4",
    "randomk:0.05", "int8", "int4", "int2", "int1",
)  # fmt: skip


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    return Layout(tuple(f"p{at}" for at in range(len(shapes))), tuple(range(len(shapes))), shapes)


LAYOUT = layout_of(*SHAPES)


def normal(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def rebuilt(codec: Codec, flat: torch.Tensor, layout: Layout = LAYOUT, step: int = 0) -> torch.Tensor:
    dice = Dice(3, step=step)
    return codec.decode(codec.encode(flat, layout, dice), layout, dice)


# ---- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_bits_are_really_packed(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (4096,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8 and packed.numel() == 4096 * bits // 8
    assert torch.equal(unpack_bits(packed, bits), codes)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_quantised_bytes_are_bits_and_a_scale_for_each_chunk(bits: int) -> None:
    sent = Quantised(bits, chunk=512).encode(normal(LAYOUT.numel), LAYOUT, Dice(0))
    chunks = [3 * [512], [32], [8], 2 * [512], [184], [8]]  # of each tensor, in values
    assert sent.numel() * sent.element_size() == sum(width * bits // 8 + 4 for widths in chunks for width in widths)


@pytest.mark.parametrize("nearest", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantised_errors_stay_within_a_step_of_the_chunks_scale(bits: int, nearest: bool) -> None:
    flat = normal(LAYOUT.numel) * torch.logspace(-6, 6, LAYOUT.numel)
    largest = torch.cat(
        [chunk.abs().max().expand(chunk.numel()) for part in LAYOUT.split(flat) for chunk in torch.split(part, 512)]
    )
    error = (rebuilt(Quantised(bits, nearest=nearest), flat) - flat).abs()
    levels = 2 ** (bits - 1) - 1
    if nearest and bits == 2:
        # The scale is smaller than the largest value, which is cut off; the error is still below the value's size.
        assert bool((error <= flat.abs() * (1 + 1e-6) + 0.5 * largest).all())
    else:
        assert bool((error <= largest / levels * (0.5 if nearest else 1.0) * 1.001).all())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounding_at_random_is_unbiased(bits: int) -> None:
    """The mean of n draws lies within 6 standard errors; a draw between two levels `gap` apart varies by gap/2 at most.
    For 64 values that is exceeded by chance once in 10 million seeds, and the seed is fixed."""
    draws, values = 20_000, normal(64, seed=5)
    layout = layout_of((draws * 64,))
    seen = rebuilt(Quantised(bits, chunk=64), values.repeat(draws), layout).view(draws, 64)
    gap = 2 * values.abs().max() / max(1, 2**bits - 2)
    assert seen.unique().numel() <= 2**bits
    assert float((seen.double().mean(0) - values).abs().max()) <= 6 * float(gap) / 2 / math.sqrt(draws)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounding_to_the_nearest_makes_every_tensor_smaller(bits: int) -> None:
    """An error memory needs |x - C(x)| < |x|."""
    for seed in range(5):
        flat = normal(LAYOUT.numel, seed) ** 3
        lost = flat - rebuilt(Quantised(bits, nearest=True), flat)
        assert float(lost.norm()) < float(flat.norm())


def test_zeros_stay_zeros_and_nothing_divides_by_them() -> None:
    zeros = torch.zeros(LAYOUT.numel)
    for codec in (Quantised(1), Quantised(8), Quantised(2, nearest=True), TopK(0.1), RandomK(0.1, unbiased=True)):
        assert torch.equal(rebuilt(codec, zeros).abs(), zeros)


# ---- choices -----------------------------------------------------------------------------------------------------


def test_topk_sends_the_largest_of_each_tensor_and_their_places() -> None:
    flat = normal(LAYOUT.numel)
    codec = TopK(0.05)
    seen = rebuilt(codec, flat)
    for got, part in zip(LAYOUT.split(seen), LAYOUT.split(flat), strict=True):
        count = codec.kept(part.numel())
        assert int((got != 0).sum()) == count
        assert torch.equal(got[got != 0], part[got != 0])
        assert float(part[got != 0].abs().min()) >= float(part.abs().sort(descending=True).values[count - 1])
    # Of each of 60, 2, 1, 30 and 9 values four bytes and a place, and a byte for each block of 255 values; whole, 4.
    assert codec.encode(flat, LAYOUT, Dice(0)).numel() == 5 * (60 + 2 + 1 + 30 + 9) + 5 + 1 + 1 + 3 + 1 + 4


def test_topk_in_few_bits_sends_the_same_places_and_rounds_the_values() -> None:
    flat = normal(LAYOUT.numel)
    exact = rebuilt(TopK(0.05), flat)
    for bits, levels in ((8, 127), (4, 7)):
        codec = TopK(0.05, bits=bits)
        for got, kept, whole in zip(*(LAYOUT.split(one) for one in (rebuilt(codec, flat), exact, flat)), strict=True):
            truth = kept if codec.kept(whole.numel()) < whole.numel() else whole
            assert float((got - truth).abs().max()) <= float(truth.abs().max()) / levels / 2 * 1.001
    # Of the tensors sent in part: blocks, places, a scale, and codes in whole bytes of 8 values. Two are sent whole.
    parts = (5 + 60 + 4 + 32) + (1 + 2 + 4 + 4) + (3 + 30 + 4 + 16) + (1 + 9 + 4 + 8)
    assert TopK(0.05, bits=4).encode(flat, LAYOUT, Dice(0)).numel() == parts + 2 * (4 + 4)


def test_places_come_back_from_full_and_empty_blocks() -> None:
    flat = torch.zeros(3000)
    flat[300:900] = 1 + torch.arange(600.0)
    assert torch.equal(rebuilt(TopK(0.2), flat, layout_of((3000,))), flat)


def test_topk_of_everything_loses_nothing_and_sends_no_places() -> None:
    flat = normal(LAYOUT.numel)
    assert torch.equal(rebuilt(TopK(1.0), flat), flat)
    assert TopK(1.0).encode(flat, LAYOUT, Dice(0)).numel() == 4 * LAYOUT.numel


def test_randomk_is_unbiased_over_steps_and_sends_values_only() -> None:
    """A value comes through with probability 1/block, times block: its standard deviation is below |x|·sqrt(block)."""
    values, steps, at_once = normal(50, seed=2), 4, 1000
    layout, codec = layout_of((50 * at_once,)), RandomK(0.2, unbiased=True)
    assert codec.encode(values, layout_of((50,)), Dice(0)).numel() == 10
    seen = torch.cat([rebuilt(codec, values.repeat(at_once), layout, step).view(-1, 50) for step in range(steps)])
    assert not torch.equal(seen[:at_once], seen[at_once : 2 * at_once])
    most = 6 * values.abs() * math.sqrt(5) / math.sqrt(steps * at_once)
    assert bool(((seen.double().mean(0) - values).abs() <= most).all())


def test_randomk_sums_on_the_wire_because_all_ranks_know_the_places() -> None:
    codec, a, b = RandomK(0.1, unbiased=False), normal(LAYOUT.numel, 1), normal(LAYOUT.numel, 2)
    first, second = Dice(9, step=4, rank=0), Dice(9, step=4, rank=1)
    total = codec.encode(a, LAYOUT, first) + codec.encode(b, LAYOUT, second)
    assert torch.equal(
        codec.decode(total, LAYOUT, second), codec.decode(codec.encode(a + b, LAYOUT, first), LAYOUT, first)
    )


def test_half_has_the_precision_of_its_type() -> None:
    flat = normal(LAYOUT.numel)
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        codec = Half(dtype)
        assert codec.encode(flat, LAYOUT, Dice(0)).element_size() == 2
        error = (rebuilt(codec, flat) - flat).abs()
        assert bool((error <= flat.abs() * 2.0**-digits + 1e-7).all())


# ---- low rank ----------------------------------------------------------------------------------------------------


def powersgd(rank: int, ranks: list[torch.Tensor], warm: list[dict[str, torch.Tensor]], step: int = 0):  # type: ignore[no-untyped-def]
    world = len(ranks)
    return in_lockstep(
        [
            PowerSGD(rank, warm[at], thin=Untouched()).reduce(flat, LAYOUT, Dice(1, step=step, rank=at), world)
            for at, flat in enumerate(ranks)
        ]
    )


def test_powersgd_of_enough_rank_is_exact_and_sends_two_flat_sums() -> None:
    flats = [normal(LAYOUT.numel, seed) for seed in (1, 2)]
    for flat in flats:
        flat[:1200] = torch.outer(flat[:40], flat[40:70]).view(-1)  # a matrix of rank 1; the sum of two has rank 2
        flat[1837:2017] = torch.outer(flat[:5], flat[40:76]).view(-1)
    warm: list[dict[str, torch.Tensor]] = [{}, {}]
    ends, sent = powersgd(2, flats, warm)
    torch.testing.assert_close(ends[0].average, (flats[0] + flats[1]) / 2, atol=1e-4, rtol=1e-4)
    plain = LAYOUT.numel - 1200 - 180
    assert [(one[0].how, one[0].tensor.numel()) for one in sent] == [
        ("sum", (40 + 5) * 2 + plain),
        ("sum", (30 + 36) * 2),
    ]


def test_powersgd_finds_the_best_rank_by_beginning_where_it_ended() -> None:
    flat = normal(LAYOUT.numel)
    matrix = flat[:1200].view(40, 30)
    best = torch.linalg.svdvals(matrix)[2:].norm()
    warm: list[dict[str, torch.Tensor]] = [{}]
    errors = []
    for step in range(60):
        ends, _ = powersgd(2, [flat], warm, step)
        errors.append(float((ends[0].average - flat)[:1200].norm() / best))
    assert errors[0] > 1.05 and errors[-1] < 1.005


def test_powersgd_gets_over_a_step_of_zeros() -> None:
    """A factor of zeros would stay zero for ever."""
    flat, warm = normal(LAYOUT.numel), [{}]
    powersgd(2, [torch.zeros(LAYOUT.numel)], warm)
    ends, _ = powersgd(2, [flat], warm, 1)
    assert float(ends[0].average[:1200].norm()) > 0.1 * float(flat[:1200].norm())


def test_powersgd_sends_small_matrices_as_they_are() -> None:
    found = PowerSGD(2, {}, thin=Untouched()).matrices(layout_of((3, 3), (4, 4), (100,), (5, 5)))
    assert [one.name for one in found] == ["p3"]


@pytest.mark.parametrize(("code", "most"), [("bf16", 1.05), ("int8", 1.6)])
def test_powersgd_in_few_bits_keeps_small_columns(code: str, most: float) -> None:
    """Columns that differ a hundredfold in size each keep their bits. The tail beyond the rank is lost in any case."""
    sizes = torch.logspace(0, -4, 40)
    left, right = torch.linalg.qr(normal(2400).view(60, 40)).Q, torch.linalg.qr(normal(1600, 1).view(40, 40)).Q
    flat = (left * sizes @ right.T).reshape(-1)
    exchange = exchange_for(Compress(grad=f"powersgd:20:{code}"), {})
    for step in range(12):
        ends, sent = in_lockstep([exchange.reduce(flat, layout_of((60, 40)), Dice(1, step=step), 1)])
    lost = (ends[0].average - flat).view(60, 40)
    assert float(lost.norm()) < most * float(sizes[20:].norm())
    assert float((left[:, 15:18].T @ lost).norm()) < 0.1 * float(sizes[15:18].norm())
    assert sum(one[0].tensor.numel() * one[0].tensor.element_size() for one in sent) <= 100 * 20 * 2


def test_orthonormal_columns_even_of_nearly_dependent_ones() -> None:
    matrix = normal(200).view(50, 4)
    matrix[:, 1] = matrix[:, 0] + 1e-3 * matrix[:, 1]
    made = orthonormal([matrix])[0]
    torch.testing.assert_close(made.T @ made, torch.eye(4), atol=1e-5, rtol=0)
    matrix[:, 3] = 0
    made = orthonormal([matrix])[0]
    assert bool(torch.isfinite(made).all()) and float(made[:, 3].norm()) == 0


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad", "world", "two_step"),
    [
        *((grad, 2, 9) for grad in ("topk:0.05", "topk:0.05:int4", "randomk:0.05", "powersgd:2")),
        *((grad, *how) for grad in ("int1", "int2", "int4", "powersgd:2:int8") for how in ((2, 9), (3, 2))),
    ],
)
def test_what_memory_holds_back_arrives_in_the_end(grad: str, world: int, two_step: int) -> None:
    """Sent in T steps + still remembered = T gradients, and the part remembered per step goes to nothing."""
    compress = Compress(grad=grad, error_feedback=True, two_step_from=two_step)
    gradients = [normal(LAYOUT.numel, 10 + rank) for rank in range(world)]
    truth = sum(gradients) / world
    exchanges = [exchange_for(compress, {}) for _ in range(world)]
    memory = [torch.zeros(LAYOUT.numel) for _ in range(world)]
    total, away = torch.zeros(LAYOUT.numel), []
    for step in range(60):
        wanted = [gradient + kept for gradient, kept in zip(gradients, memory, strict=True)]
        rounds = [
            exchange.reduce(one, LAYOUT, Dice(1, step=step, rank=rank), world)
            for rank, (exchange, one) in enumerate(zip(exchanges, wanted, strict=True))
        ]
        ends, _ = in_lockstep(rounds)
        memory = [one - end.own for one, end in zip(wanted, ends, strict=True)]
        total += ends[0].average
        away.append(float((total / (step + 1) - truth).norm() / truth.norm()))
    torch.testing.assert_close(total + sum(memory) / world, truth * 60, atol=1e-2, rtol=1e-3)
    assert away[-1] < 0.4 and away[-1] < 0.7 * away[14]


@pytest.mark.parametrize("grad", EVERY)
@pytest.mark.parametrize(("world", "two_step"), [(2, 9), (3, 9), (3, 2)])
def test_all_ranks_rebuild_the_same_bits(grad: str, world: int, two_step: int) -> None:
    compress = Compress(grad=grad, two_step_from=two_step)
    flats = [normal(LAYOUT.numel, rank) for rank in range(world)]
    rounds = [
        exchange_for(compress, {}).reduce(flat, LAYOUT, Dice(1, rank=rank), world) for rank, flat in enumerate(flats)
    ]
    ends, _ = in_lockstep(rounds)
    assert all(torch.equal(end.average, ends[0].average) for end in ends)
    if two_step > world:
        # A sum on the wire differs from the sum here by rounding in 16 bits.
        torch.testing.assert_close(ends[0].average, sum(end.own for end in ends) / world, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("grad", EVERY)
def test_a_scatter_gives_each_rank_the_average_of_its_row(grad: str) -> None:
    world, compress = 3, Compress(grad=grad)
    rows = [normal(world * LAYOUT.numel, rank).view(world, -1) for rank in range(world)]
    rounds = [
        exchange_for(compress, {}).scatter(one, LAYOUT, Dice(1, rank=rank), world) for rank, one in enumerate(rows)
    ]
    ends, _ = in_lockstep(rounds)
    for rank, end in enumerate(ends):
        expected = sum(other.own[rank] for other in ends) / world
        torch.testing.assert_close(end.average, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("bits", [1, 4])
def test_two_steps_are_unbiased_and_send_no_more_for_more_ranks(bits: int) -> None:
    draws, values = 3000, [normal(64, rank) for rank in range(4)]
    layout, sizes = layout_of((64 * draws,), (20,)), {}
    for world in (2, 4):
        exchange = exchange_for(Compress(grad=f"int{bits}", two_step_from=2, chunk=8), {})
        flats = [torch.cat([one.repeat(draws), one[:20]]) for one in values[:world]]
        ends, sent = in_lockstep(
            [exchange.reduce(flat, layout, Dice(1, rank=rank), world) for rank, flat in enumerate(flats)]
        )
        sizes[world] = sum(one[0].tensor.numel() for one in sent)
        # Each of two roundings has at most half a gap of deviation, a gap being 2·largest for one bit.
        gap = 2 * max(float(flat.abs().max()) for flat in flats) / max(1, 2**bits - 2)
        mean = ends[0].average[:-20].view(draws, 64).double().mean(0)
        assert float((mean - sum(values[:world]) / world).abs().max()) <= 6 * gap / math.sqrt(draws)
    assert sizes[4] <= 1.001 * sizes[2]


def test_two_steps_do_not_depend_on_the_bucket() -> None:
    """The same tensors in one buffer and in two, in another order: the same bits, for whoever remembers them."""
    world, exchange = 3, exchange_for(Compress(grad="int2", error_feedback=True, two_step_from=2, chunk=16), {})
    flats = [normal(LAYOUT.numel, rank) for rank in range(world)]
    order = [[4, 0], [5, 3, 1, 2]]

    def ends_of(layout: Layout, parts: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rounds = [exchange.reduce(one, layout, Dice(1, rank=rank), world) for rank, one in enumerate(parts)]
        return [(end.average, end.own) for end in in_lockstep(rounds)[0]]

    whole = ends_of(LAYOUT, flats)
    for bucket in order:
        layout = Layout(
            tuple(LAYOUT.names[at] for at in bucket),
            tuple(LAYOUT.keys[at] for at in bucket),
            tuple(LAYOUT.shapes[at] for at in bucket),
        )
        parts = [torch.cat([LAYOUT.split(flat)[at] for at in bucket]) for flat in flats]
        for seen, expected in zip(ends_of(layout, parts), whole, strict=True):
            for got, true in zip(seen, expected, strict=True):
                assert torch.equal(got, torch.cat([LAYOUT.split(true)[at] for at in bucket]))
