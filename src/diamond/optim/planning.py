"""Chooses how K-FAC runs on a machine: who works on what, how often, in which types, within a memory budget.

Pure and deterministic: the same blocks, hardware and wishes give the same Plan on every rank. What things cost is
costs.py's matter.

The choice, in this order: the part of a step that K-FAC takes stays within `overhead`; updates are no rarer than
FRESH where that can be had; no more is approximated (blocks split, half precision) than that or the memory demands;
updates as often as possible; then the least time. Where `overhead` cannot be kept because of what every step takes
(preconditioning, gradients), rarer updates would not help: they are made rare enough to add little to it, no rarer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from diamond.optim import costs
from diamond.optim.costs import FACTOR_DTYPES, FACTORS, Block, Components, blocks_memory, parse_bytes, size_text
from diamond.optim.errors import OptimError
from diamond.optim.hardware import Hardware, typical
from diamond.optim.planned import Comparison, Plan, counted
from diamond.optim.solvers import METHODS

__all__ = ["Block", "Comparison", "Components", "Plan", "blocks_memory", "parse_bytes", "plan_blocks"]

# Steps between updates of factors and of inverses; rarer than the last only where it is asked for.
LADDER = ((1, 1), (1, 2), (1, 5), (1, 10), (2, 20), (5, 50), (10, 100), (20, 200), (50, 200))
FRESH = (10, 100)  # steps between updates of factors and of inverses that cost little accuracy, if any
SPLITS = (8192, 4096, 2048, 1024)
_QUARTERS = 4  # parts of the blocks that may have more workers than the rest
_LITTLE = 0.25  # of what every step takes, or of the overhead asked for, where that cannot be kept
_WORTH = 2.0  # times as fast a coarser approximation must be, where the overhead cannot be kept
LAYER_STARTS = 37  # operations of a layer's forward and backward pass and of a first-order optimizer


@dataclass(frozen=True, kw_only=True)
class _Wishes:
    """What is asked for, checked; None leaves it to the planner."""

    world: int
    overhead: float
    workers: int | None
    factor_every: int | None
    inverse_every: int | None
    factor_dtype: str | None
    factor: str | None
    largest: int | None
    widest: int | None
    solver: str
    sampling: float
    lengths: float
    lengths_every: int
    sums: bool

    def __post_init__(self) -> None:
        for name in ("world", "workers", "factor_every", "inverse_every", "largest", "widest", "lengths_every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptimError(f"{name}={value!r}: give a whole number of 1 or more")
        if self.workers is not None and self.world % self.workers:
            raise OptimError(f"workers={self.workers}: give a divisor of the {self.world} ranks")
        if not (self.overhead > 0 and math.isfinite(self.overhead)):
            raise OptimError(f"overhead={self.overhead!r}: give a part of the step above 0, such as 0.15")
        for name, part in (("sampling", self.sampling), ("lengths", self.lengths)):
            if not (part >= 0 and math.isfinite(part)):
                raise OptimError(f"{name}={part!r}: give a part of a step, 0 or more")
        for name, choices in (("factor_dtype", FACTOR_DTYPES), ("factor", FACTORS), ("solver", METHODS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise OptimError(f"{name}={value!r}: give one of {', '.join(choices)}")


class _Passes(NamedTuple):
    """Seconds of what goes through the whole model, whenever that happens."""

    sampled_s: float
    followed_s: float


class _Way(NamedTuple):
    """One way to run, feasible or not."""

    penalty: int  # for what it approximates
    rung: int
    within: bool
    memory: int
    parts: Components  # whenever they happen
    table: costs.Table
    owners: torch.Tensor
    workers: torch.Tensor
    costs: costs.Costs
    factor_dtype: str
    factor: str


# ---- the choice ------------------------------------------------------------------------------------------------------


def plan_blocks(
    blocks: Sequence[Block],
    *,
    world: int = 1,
    memory: str | float | None = None,
    hardware: Hardware | None = None,
    step_s: float | None = None,
    overhead: float = 0.15,
    workers: int | None = None,
    factor_every: int | None = None,
    inverse_every: int | None = None,
    factor_dtype: str | None = None,
    factor: str | None = None,
    largest: int | None = None,
    widest: int | None = None,
    solver: str = "auto",
    sampling: float = 1 / 3,
    lengths: float = 0.0,
    lengths_every: int = 4,
    sums: bool = True,
) -> Plan:
    """
    Args:
        blocks: the layers.
        world: ranks that train together.
        memory: what K-FAC may take on each rank ("8GiB", "512 MiB", 8e9); None for any.
        hardware: measured, or typical figures of a CPU.
        step_s: seconds of a training step without K-FAC; None to estimate them from the blocks' own products.
        overhead: the part of a step that K-FAC may take.
        workers, factor_every, inverse_every, factor_dtype, factor, largest, solver: fixed where given.
        widest: dimensions above it are split in any case; None for whole ones where that can be had.
        sampling: what the extra backward pass of a statistics step takes, as a part of a step; 0 for none.
        lengths: what measuring how far to go takes whenever that is done, as a part of a step; 0 for never.
        lengths_every: how rarely that is, in updates of the factors.
        sums: every rank keeps the statistics of all blocks until the end of a step (otherwise each is sent at once).

    Raises:
        OptimError: an argument makes no sense, or the memory is too little: the message says how much is enough.
    """
    wishes = _Wishes(
        world=world, overhead=overhead, workers=workers, factor_every=factor_every, inverse_every=inverse_every,
        factor_dtype=factor_dtype, factor=factor, largest=largest, widest=widest, solver=solver, sampling=sampling,
        lengths=lengths, lengths_every=lengths_every, sums=sums,
    )  # fmt: skip
    budget = parse_bytes(memory)
    hardware = hardware or typical("cpu", world)
    if step_s is not None and not (step_s > 0 and math.isfinite(step_s)):
        raise OptimError(f"step_s={step_s!r}: give the seconds of a step, or None to have them estimated")
    ladder = _ladder(wishes)
    fresh = max((at for at, pair in enumerate(ladder) if pair[1] <= FRESH[1]), default=0)
    ways: list[_Way] = []
    least: _Way | None = None
    found = costs.columns(blocks)
    lasts = step_s or _estimated_step(found, hardware)
    followed = wishes.lengths * lasts + costs.lengths_s(found, hardware) if wishes.lengths else 0.0
    passes = _Passes(wishes.sampling * lasts, followed)
    for way in _ways(found, hardware, wishes, ladder, lasts, passes, fresh, budget):
        if least is None or way.memory < least.memory:
            least = way
        if budget is None or way.memory <= budget:
            ways.append(way)
    if not ways:
        assert least is not None and budget is not None
        raise OptimError(
            f"memory={memory!r} is too little for {counted(len(blocks), 'block')} on {counted(world, 'rank')}: "
            f"at least {least.memory} bytes ({size_text(least.memory)}) a rank are needed"
        )
    best = _best(ways, ladder, wishes, fresh)
    return _plan(blocks, hardware, wishes, ladder, lasts, best, budget, step_s is None)


def _estimated_step(blocks: costs.Columns, hardware: Hardware) -> float:
    """Forward once, backward twice the products of every layer; a diagonal input is a table, which is looked up."""
    forward = hardware.gemms_s(blocks.positions.double(), blocks.g.double(), blocks.a.double())
    products = torch.where(blocks.a_diagonal, 0.0, 3 * blocks.copies * forward)
    return max(1e-6, hardware.with_starts(float(products.sum()), LAYER_STARTS * len(products)))


def _ladder(wishes: _Wishes) -> list[tuple[int, int]]:
    """Pairs of periods, from fresh to stale, that keep to what was asked for."""
    pairs = []
    for factors, inverses in LADDER:
        every = wishes.factor_every or min(factors, wishes.inverse_every or factors)
        pairs.append((every, wishes.inverse_every or every * -(-inverses // every)))
    return list(dict.fromkeys(pairs))


def _ways(
    blocks: costs.Columns,
    hardware: Hardware,
    wishes: _Wishes,
    ladder: list[tuple[int, int]],
    step_s: float,
    passes: _Passes,
    fresh: int,
    budget: int | None,
) -> Iterator[_Way]:
    """All that are looked at. Which they are does not depend on the budget, so that more memory cannot make it worse;
    splitting ends as soon as nothing could be gained by it."""
    whole = int(
        torch.cat(
            [blocks.a * ~blocks.a_diagonal, blocks.g * ~blocks.g_diagonal, torch.zeros(1, device=costs.HERE)]
        ).max()
    )
    whole, first = min(whole, wishes.widest or whole), None if whole <= (wishes.widest or whole) else wishes.widest
    splits = [wishes.largest] if wishes.largest else [first, *(size for size in SPLITS if size < whole)]
    packings = [wishes.factor] if wishes.factor else (["none"] if wishes.world == 1 else ["tri", "bf16-tri"])
    dtypes = [wishes.factor_dtype] if wishes.factor_dtype else list(FACTOR_DTYPES)
    for depth, largest in enumerate(splits):
        found = costs.table(blocks, hardware, largest, wishes.solver)
        dealt_to = costs.balance(found.cubes.tolist(), found.elements.tolist(), wishes.world)
        owners = torch.tensor(dealt_to, dtype=torch.int64, device=costs.HERE)
        good = False
        for workers in _shares(found, wishes):
            dealt = costs.cost(found, owners, workers, wishes.world)
            for dtype in dtypes:
                room = max(costs.memory(dealt, world=wishes.world, factor_dtype=dtype, sums=wishes.sums))
                for packing in packings:
                    sizes = costs.wire(dealt, world=wishes.world, factor=packing, factor_dtype=dtype)
                    parts = costs.seconds(dealt, sizes, hardware, wishes.world)
                    parts = parts._replace(
                        statistics=parts.statistics + passes.sampled_s, step_lengths=passes.followed_s
                    )
                    rung, within = _climb(parts, ladder, wishes, step_s)
                    penalty = 4 * depth + 2 * dtypes.index(dtype) + packings.index(packing)
                    good |= penalty == 0 and within and rung <= fresh and (budget is None or room <= budget)
                    yield _Way(
                        penalty, rung, within, room, parts, found, owners, workers, dealt, dtype, packing,
                    )  # fmt: skip
        if good:
            return


def _shares(found: costs.Table, wishes: _Wishes) -> Iterator[torch.Tensor]:
    """Numbers of workers for each block: from one divisor of the world to the next by quarters of the blocks, those
    first that save most gradient traffic for their memory."""
    count = len(found.weights)
    if wishes.workers is not None:
        yield torch.full((count,), wishes.workers, dtype=torch.int64, device=costs.HERE)
        return
    divisors = [size for size in range(1, wishes.world + 1) if wishes.world % size == 0]
    order = torch.argsort(found.weights / found.elements.clamp_min(1), descending=True, stable=True)
    for few, many in pairwise(divisors):
        for part in range(_QUARTERS):
            workers = torch.full((count,), few, dtype=torch.int64, device=costs.HERE)
            workers[order[: count * part // _QUARTERS]] = many
            yield workers
    yield torch.full((count,), wishes.world, dtype=torch.int64, device=costs.HERE)


def _amortised(parts: Components, pair: tuple[int, int], wishes: _Wishes) -> Components:
    factors, inverses = pair
    return Components(
        parts.statistics / factors,
        parts.factor_communication / factors,
        parts.inverses / inverses,
        parts.inverse_communication / inverses,
        parts.preconditioning,
        parts.gradient_communication,
        parts.step_lengths / (wishes.lengths_every * factors),
    )


def _climb(parts: Components, ladder: list[tuple[int, int]], wishes: _Wishes, step_s: float) -> tuple[int, bool]:
    """The first rung that keeps to the overhead. If none does, the first whose updates add little to what every step
    takes, which no rung changes; the last, if none does even that."""
    budget = wishes.overhead * step_s
    took = [sum(_amortised(parts, pair, wishes)) for pair in ladder]
    for rung, seconds in enumerate(took):
        if seconds <= budget:
            return rung, True
    little = _LITTLE * max(budget, parts.always)
    return next((rung for rung, seconds in enumerate(took) if seconds - parts.always <= little), len(took) - 1), False


def _best(ways: list[_Way], ladder: list[tuple[int, int]], wishes: _Wishes, fresh: int) -> _Way:
    def seconds(way: _Way) -> float:
        return sum(_amortised(way.parts, ladder[way.rung], wishes))

    good = [way for way in ways if way.within]
    if not good:  # as close to the overhead as can be had
        least = min(seconds(way) for way in ways)
        near = [way for way in ways if seconds(way) <= _WORTH * least]
        return min(near, key=lambda way: (way.penalty, seconds(way)))
    # Approximations that the memory does not demand serve to come down to FRESH, and no further: otherwise a slower
    # network, which brings them in, would make updates more frequent.
    plain = min(way.penalty for way in ways)
    calm = [way if way.penalty == plain else way._replace(rung=max(way.rung, fresh)) for way in good]
    return min(calm, key=lambda way: (max(way.rung, fresh), way.penalty, way.rung, seconds(way)))


def _plan(
    blocks: Sequence[Block],
    hardware: Hardware,
    wishes: _Wishes,
    ladder: list[tuple[int, int]],
    step_s: float,
    way: _Way,
    budget: int | None,
    guessed: bool,
) -> Plan:
    sizes = costs.wire(way.costs, world=wishes.world, factor=way.factor, factor_dtype=way.factor_dtype)
    factors, inverses = ladder[way.rung]
    components = _amortised(way.parts, ladder[way.rung], wishes)
    starting_s = way.costs.precondition_starts * hardware.start_s
    crowded = starting_s >= way.parts.preconditioning / 2
    return Plan(
        blocks=tuple(blocks),
        world=wishes.world,
        workers=tuple(way.workers.tolist()),
        owners=tuple(way.owners.tolist()),
        factor_every=factors,
        inverse_every=inverses,
        factor_dtype=way.factor_dtype,
        factor=way.factor,
        solver=wishes.solver,
        newton_schulz_up_to=hardware.newton_schulz_up_to,
        largest=way.table.largest,
        step_s=step_s,
        components=components,
        memory_by_rank=tuple(
            costs.memory(way.costs, world=wishes.world, factor_dtype=way.factor_dtype, sums=wishes.sums)
        ),
        wire_bytes=sizes[0] * (wishes.world - 1) / wishes.world / factors + sizes[1] / inverses + sizes[2],
        within=way.within,
        reasons=(
            *_reasons(way, wishes, ladder, budget, guessed),
            *([] if way.within else [_excess(components, wishes, step_s, crowded)]),
        ),
        device=hardware.device + (", measured" if hardware.measured else ""),
    )


def _reasons(
    way: _Way, wishes: _Wishes, ladder: list[tuple[int, int]], budget: int | None, guessed: bool
) -> Iterator[str]:
    asked = f"{wishes.overhead:.0%} of a step" + (", whose time is an estimate" if guessed else "")
    factors, inverses = ladder[way.rung]
    updates = f"factors every {factors}, inverses every {inverses} steps: "
    if len(ladder) == 1:
        yield updates + "as asked for" + ("" if way.within else f", which takes more than {asked}")
    elif not way.within:
        yield updates + f"and still more than {asked}"
    elif way.rung == 0:
        yield updates + f"even that stays within {asked}"
    else:
        yield updates + f"more often would take more than {asked}, or need coarser approximations"
    if wishes.world > 1 and len(way.workers):
        few, many = int(way.workers.min()), int(way.workers.max())
        room = "with memory for any" if budget is None else f"within {size_text(budget)} a rank"
        counts = str(few) if few == many else f"{few} to {many}"
        why = "as asked for" if wishes.workers else f"the fastest {room}"
        yield f"{counts} of {wishes.world} ranks precondition a block (gradient workers): {why}"
        lossless = "nothing is lost" if way.factor != "bf16-tri" else "rounding buys fresher curvature"
        yield f"factors travel as {way.factor}: {'as asked for' if wishes.factor else lossless}"
    if way.factor_dtype != "float32":
        why = "as asked for" if wishes.factor_dtype else "single precision does not fit or leaves too little time"
        yield f"factors and inverses are kept in {way.factor_dtype}: {why}"
    if way.table.largest is not None:
        given = way.table.largest in (wishes.largest, wishes.widest)
        why = "as asked for" if given else "larger ones do not fit or take too long"
        yield f"dimensions above {way.table.largest} are split into blocks: {why}"


def _excess(parts: Components, wishes: _Wishes, step_s: float, crowded: bool) -> str:
    """Which part alone is above the overhead that was asked for, and what would help."""
    budget = wishes.overhead * step_s
    asked = f"the {wishes.overhead:.0%} asked for"
    if parts.always <= budget:
        longest = max(parts._fields, key=lambda name: getattr(parts, name)).replace("_", " ")
        return (
            f"most of it is {longest}: a larger batch, gradient accumulation, fewer blocks (exclude=…) or larger "
            "periods (factor_every=…, inverse_every=…) would help"
        )
    often = [name for name in ("preconditioning", "gradient_communication") if getattr(parts, name) > budget]
    which = often[0].replace("_", " ") if len(often) == 1 else "preconditioning and gradient communication"
    taken = getattr(parts, often[0]) if len(often) == 1 else parts.always
    said = f"{which} alone: {taken / step_s:.0%} of a step, more than {asked} at whatever periods; "
    if which == "gradient communication":
        return said + "more memory for more workers, a larger batch or gradient accumulation would help"
    why = "it is many small operations, so " if crowded else ""
    return said + why + "a larger batch, gradient accumulation or fewer blocks (exclude=…) would help"
