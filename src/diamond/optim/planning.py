"""Chooses how K-FAC runs on a machine: who works on what, how often, in which types, within a memory budget.

Pure and deterministic: the same blocks, hardware and wishes give the same Plan on every rank. What things cost is
costs.py's matter.

The choice, in this order: the part of a step that K-FAC takes stays within `overhead`; updates are no rarer than
FRESH where that can be had; no more is approximated (blocks split, half precision) than that or the memory demands;
updates as often as possible; then the least time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from diamond.optim import costs
from diamond.optim.costs import FACTOR_DTYPES, FACTORS, Block, Components, blocks_memory, parse_bytes, size_text
from diamond.optim.errors import OptimError
from diamond.optim.hardware import Hardware, typical
from diamond.optim.solvers import METHODS

__all__ = ["Block", "Comparison", "Components", "Plan", "blocks_memory", "parse_bytes", "plan_blocks"]

LADDER = (
    (1, 1), (1, 2), (1, 5), (1, 10), (2, 20), (5, 50), (10, 100), (20, 200), (50, 500), (100, 1000), (200, 2000),
    (500, 5000), (1000, 10000),
)  # fmt: skip
FRESH = (10, 100)  # steps between updates of factors and of inverses that cost little accuracy, if any
SPLITS = (8192, 4096, 2048, 1024)
_QUARTERS = 4  # parts of the blocks that may have more workers than the rest


def _shown(name: str, value: float) -> str:
    return size_text(value) if name.endswith("_bytes") else f"{value * 1e3:.3f} ms"


class Comparison(NamedTuple):
    """Predicted against measured: (name, predicted, measured) in the plan's order."""

    rows: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        lines = [f"{'':24}{'predicted':>14}{'measured':>14}{'ratio':>8}"]
        for name, predicted, measured in self.rows:
            ratio = f"{measured / predicted:.2f}" if predicted else "-"
            lines.append(f"{name:24}{_shown(name, predicted):>14}{_shown(name, measured):>14}{ratio:>8}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How K-FAC runs, and what that is predicted to cost.

    Attributes:
        workers: for each block how many ranks keep its inverses and precondition its gradient; `world` of them need
            least communication, 1 the least memory.
        owners: for each block the rank that averages its factors and inverts them.
        factor_every, inverse_every: steps between updates.
        factor_dtype: of averaged factors and inverses in memory.
        factor: how factors travel (one of costs.FACTORS).
        solver, newton_schulz_up_to: for solvers.inverses.
        largest: dimensions above it are split into blocks; None for whole ones.
        step_s: of training without K-FAC.
        components: seconds that K-FAC adds to a step, on average.
        memory_by_rank: bytes.
        wire_bytes: that a rank receives in a step, on average, beyond the training's own.
        within: whether K-FAC's part keeps to the overhead that was asked for.
        reasons: of each choice, in words.
    """

    blocks: tuple[Block, ...]
    world: int
    workers: tuple[int, ...]
    owners: tuple[int, ...]
    factor_every: int
    inverse_every: int
    factor_dtype: str
    factor: str
    solver: str
    newton_schulz_up_to: int
    largest: int | None
    step_s: float
    components: Components
    memory_by_rank: tuple[int, ...]
    wire_bytes: float
    within: bool
    reasons: tuple[str, ...]
    device: str

    @property
    def kfac_s(self) -> float:
        return sum(self.components)

    @property
    def overhead(self) -> float:
        """K-FAC's seconds for each second of training without it."""
        return self.kfac_s / self.step_s

    @property
    def memory_bytes(self) -> int:
        return max(self.memory_by_rank)

    def worker_ranks(self, block: int) -> range:
        """The ranks that precondition this block; its owner is one of them."""
        count = self.workers[block]
        first = self.owners[block] // count * count
        return range(first, first + count)

    def source(self, block: int, rank: int) -> int:
        """The rank that this one gets the block's preconditioned gradient from; itself where it is a worker."""
        ranks = self.worker_ranks(block)
        return rank if rank in ranks else ranks[rank % len(ranks)]

    def explain(self) -> str:
        """The plan as a table in plain text."""
        ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
        lines = [f"K-FAC for {len(self.blocks)} blocks on {ranks} ({self.device})", ""]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += ["", f"  {'predicted, a step':26}{'time':>12}{'of training':>13}"]
        for name, took in [*self.components._asdict().items(), ("K-FAC in all", self.kfac_s)]:
            lines.append(f"  {name.replace('_', ' '):26}{took * 1e3:>9.3f} ms{took / self.step_s:>12.1%} ")
        lines.append(f"  {'training without it':26}{self.step_s * 1e3:>9.3f} ms")
        lines.append(f"  {'memory a rank, at most':26}{size_text(self.memory_bytes):>12}")
        lines.append(f"  {'received a rank':26}{size_text(self.wire_bytes):>12}")
        return "\n".join(lines)

    def compare(self, measured: Mapping[str, float]) -> Comparison:
        """Predicted against measured values of any of: the components, kfac_s, step_s, memory_bytes, wire_bytes.

        Raises:
            OptimError: a name is none of them.
        """
        known = self.components._asdict()
        known |= {name: getattr(self, name) for name in ("kfac_s", "step_s", "memory_bytes", "wire_bytes")}
        if unknown := sorted(set(measured) - set(known)):
            raise OptimError(f"measured: nothing was predicted for {', '.join(unknown)}, only for {', '.join(known)}")
        return Comparison(tuple((name, known[name], measured[name]) for name in known if name in measured))


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
    solver: str
    sampling: float
    sums: bool

    def __post_init__(self) -> None:
        for name in ("world", "workers", "factor_every", "inverse_every", "largest"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptimError(f"{name}={value!r}: give a whole number of 1 or more")
        if self.workers is not None and self.world % self.workers:
            raise OptimError(f"workers={self.workers}: give a divisor of the {self.world} ranks")
        if not (self.overhead > 0 and math.isfinite(self.overhead)):
            raise OptimError(f"overhead={self.overhead!r}: give a part of the step above 0, such as 0.15")
        for name, choices in (("factor_dtype", FACTOR_DTYPES), ("factor", FACTORS), ("solver", METHODS)):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise OptimError(f"{name}={value!r}: give one of {', '.join(choices)}")


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
    solver: str = "auto",
    sampling: float = 1 / 3,
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
        sampling: what the extra backward pass of a statistics step takes, as a part of a step; 0 for none.
        sums: every rank keeps the statistics of all blocks until the end of a step (otherwise each is sent at once).

    Raises:
        OptimError: an argument makes no sense, or the memory is too little: the message says how much is enough.
    """
    wishes = _Wishes(
        world=world, overhead=overhead, workers=workers, factor_every=factor_every, inverse_every=inverse_every,
        factor_dtype=factor_dtype, factor=factor, largest=largest, solver=solver, sampling=sampling, sums=sums,
    )  # fmt: skip
    budget = parse_bytes(memory)
    hardware = hardware or typical("cpu", world)
    if step_s is not None and not (step_s > 0 and math.isfinite(step_s)):
        raise OptimError(f"step_s={step_s!r}: give the seconds of a step, or None to have them estimated")
    lasts = step_s or _estimated_step(blocks, hardware)
    ladder = _ladder(wishes)
    fresh = max((at for at, pair in enumerate(ladder) if pair[1] <= FRESH[1]), default=0)
    ways: list[_Way] = []
    least: _Way | None = None
    with torch.device("cpu"):  # whatever the user's default is
        for way in _ways(blocks, hardware, wishes, ladder, lasts, fresh, budget):
            if least is None or way.memory < least.memory:
                least = way
            if budget is None or way.memory <= budget:
                ways.append(way)
    if not ways:
        assert least is not None and budget is not None
        raise OptimError(
            f"memory={memory!r} is too little for {len(blocks)} blocks on {world} ranks: "
            f"at least {least.memory} bytes ({size_text(least.memory)}) a rank are needed"
        )
    return _plan(blocks, hardware, wishes, ladder, lasts, _best(ways, ladder, fresh), budget, step_s is None)


def _estimated_step(blocks: Sequence[Block], hardware: Hardware) -> float:
    """Forward once, backward twice the products of every layer; a diagonal input is a table, which is looked up."""
    shapes: dict[tuple[int, int, int], int] = {}
    for block in blocks:
        if not block.a_diagonal:
            shape = (block.positions, block.g, block.a)
            shapes[shape] = shapes.get(shape, 0) + block.copies
    return max(1e-6, sum(3 * count * hardware.gemm_s(*shape) for shape, count in shapes.items()))


def _ladder(wishes: _Wishes) -> list[tuple[int, int]]:
    """Pairs of periods, from fresh to stale, that keep to what was asked for."""
    pairs = []
    for factors, inverses in LADDER:
        every = wishes.factor_every or min(factors, wishes.inverse_every or factors)
        pairs.append((every, wishes.inverse_every or every * -(-inverses // every)))
    return list(dict.fromkeys(pairs))


def _ways(
    blocks: Sequence[Block],
    hardware: Hardware,
    wishes: _Wishes,
    ladder: list[tuple[int, int]],
    step_s: float,
    fresh: int,
    budget: int | None,
) -> Iterator[_Way]:
    """All that are looked at. Which they are does not depend on the budget, so that more memory cannot make it worse;
    splitting ends as soon as nothing could be gained by it."""
    whole = max((block.largest for block in blocks), default=0)
    splits = [wishes.largest] if wishes.largest else [None, *(size for size in SPLITS if size < whole)]
    packings = [wishes.factor] if wishes.factor else (["none"] if wishes.world == 1 else ["tri", "bf16-tri"])
    dtypes = [wishes.factor_dtype] if wishes.factor_dtype else list(FACTOR_DTYPES)
    for depth, largest in enumerate(splits):
        found = costs.table(blocks, hardware, largest, wishes.solver)
        owners = torch.tensor(costs.balance(found.cubes.tolist(), found.elements.tolist(), wishes.world))
        owners = owners.to(torch.int64)
        good = False
        for workers in _shares(found, wishes):
            dealt = costs.cost(found, owners, workers, wishes.world)
            for dtype in dtypes:
                room = max(costs.memory(dealt, world=wishes.world, factor_dtype=dtype, sums=wishes.sums))
                for packing in packings:
                    sizes = costs.wire(dealt, world=wishes.world, factor=packing, factor_dtype=dtype)
                    parts = costs.seconds(dealt, sizes, hardware, wishes.world)
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
        yield torch.full((count,), wishes.workers, dtype=torch.int64)
        return
    divisors = [size for size in range(1, wishes.world + 1) if wishes.world % size == 0]
    order = torch.argsort(found.weights / found.elements.clamp_min(1), descending=True, stable=True)
    for few, many in pairwise(divisors):
        for part in range(_QUARTERS):
            workers = torch.full((count,), few, dtype=torch.int64)
            workers[order[: count * part // _QUARTERS]] = many
            yield workers
    yield torch.full((count,), wishes.world, dtype=torch.int64)


def _amortised(parts: Components, pair: tuple[int, int], sampled_s: float) -> Components:
    factors, inverses = pair
    return Components(
        (parts.statistics + sampled_s) / factors,
        parts.factor_communication / factors,
        parts.inverses / inverses,
        parts.inverse_communication / inverses,
        parts.preconditioning,
        parts.gradient_communication,
    )


def _climb(parts: Components, ladder: list[tuple[int, int]], wishes: _Wishes, step_s: float) -> tuple[int, bool]:
    """The first rung that keeps to the overhead; the last, if none does."""
    for rung, pair in enumerate(ladder):
        if sum(_amortised(parts, pair, wishes.sampling * step_s)) <= wishes.overhead * step_s:
            return rung, True
    return len(ladder) - 1, False


def _best(ways: list[_Way], ladder: list[tuple[int, int]], fresh: int) -> _Way:
    """Approximations that the memory does not demand serve to come down to FRESH, and no further: otherwise a slower
    network, which brings them in, would make updates more frequent."""
    plain = min(way.penalty for way in ways)
    calm = [way if way.penalty == plain else way._replace(rung=max(way.rung, fresh)) for way in ways]

    def merit(way: _Way) -> tuple[bool, int, int, int, float]:
        took = sum(_amortised(way.parts, ladder[way.rung], 0.0))
        return not way.within, max(way.rung, fresh), way.penalty, way.rung, took

    return min(calm, key=merit)


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
        components=_amortised(way.parts, ladder[way.rung], wishes.sampling * step_s),
        memory_by_rank=tuple(
            costs.memory(way.costs, world=wishes.world, factor_dtype=way.factor_dtype, sums=wishes.sums)
        ),
        wire_bytes=sizes[0] * (wishes.world - 1) / wishes.world / factors + sizes[1] / inverses + sizes[2],
        within=way.within,
        reasons=tuple(_reasons(way, wishes, ladder, budget, guessed)),
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
        yield updates + f"and still more than {asked}: preconditioning or gradients alone take too long"
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
        why = "as asked for" if wishes.largest else "whole ones do not fit or take too long"
        yield f"dimensions above {way.table.largest} are split into blocks: {why}"
