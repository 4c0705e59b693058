"""What K-FAC costs on a machine: seconds, memory and bytes on the wire of blocks that are dealt out to ranks.

Pure arithmetic over the shapes of blocks and a Hardware; it decides nothing. planning.py does.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from diamond.optim.errors import OptimError
from diamond.optim.hardware import Hardware
from diamond.optim.solvers import block_sizes

BUCKET_BYTES = 25 << 20  # of one message; DDP's own
FACTORS = ("none", "tri", "bf16-tri")
FACTOR_DTYPES = ("float32", "bfloat16")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_SUM_BYTES = 4  # sums of a step and the solver's working copies are in single precision
_SOLVER_COPIES = 3
_UNITS = {"b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}


@dataclass(frozen=True)
class Block:
    """A layer as K-FAC sees it: `copies` matrices of g rows and a columns, with a factor on either side.

    Attributes:
        params: its weights, copies * a * g unless given.
        positions: rows that enter its statistics in a step, on one rank and for one copy (samples times places).
        a_diagonal, g_diagonal: that factor is kept as a vector.
    """

    name: str
    a: int
    g: int
    copies: int = 1
    params: int | None = None
    positions: int = 1
    a_diagonal: bool = False
    g_diagonal: bool = False

    def __post_init__(self) -> None:
        for field in ("a", "g", "copies", "positions"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptimError(f"block {self.name!r}: {field}={value!r}: give a whole number of 1 or more")

    @property
    def weights(self) -> int:
        return self.copies * self.a * self.g if self.params is None else self.params

    @property
    def sides(self) -> tuple[tuple[int, bool], tuple[int, bool]]:
        return (self.a, self.a_diagonal), (self.g, self.g_diagonal)

    @property
    def largest(self) -> int:
        """Of its dimensions that are inverted as matrices; 0 for none."""
        return max(0 if diagonal else n for n, diagonal in self.sides)


class Components(NamedTuple):
    """Seconds of a step on the slowest rank, averaged over steps."""

    statistics: float
    factor_communication: float
    inverses: float
    inverse_communication: float
    preconditioning: float
    gradient_communication: float


@dataclass(frozen=True, kw_only=True)
class Table:
    """What each block costs, with none of its dimensions above `largest`: one number a block in each tensor."""

    largest: int | None
    elements: Tensor  # of its two factors
    packed: Tensor  # of their triangles
    weights: Tensor
    cubes: Tensor  # what balances owners
    statistics_s: Tensor
    solve_s: Tensor
    precondition_s: Tensor
    solver_bytes: int  # while the largest matrix of all is inverted


class Costs(NamedTuple):
    """Of one way to deal blocks out. The first four recur with their periods, the last two with every step."""

    statistics_s: float
    factor_elements: int  # all that is reduced
    solve_s: float
    inverse_elements: int  # that the rank with most of them receives
    precondition_s: float
    gradient_elements: int  # likewise, at every step
    owned: Tensor  # elements of factors, by rank
    held: Tensor  # elements of inverses, by rank
    packed_elements: int
    solver_bytes: int


def table(blocks: Sequence[Block], hardware: Hardware, largest: int | None, how: str = "auto") -> Table:
    @cache
    def pieces(n: int) -> list[tuple[int, int]]:
        sizes = block_sizes(n, largest)
        return [(size, sizes.count(size)) for size in sorted(set(sizes))] if len(sizes) > 1 else [(n, 1)]

    @cache
    def side(n: int, diagonal: bool, positions: int) -> tuple[int, int, int, float, float]:
        """Elements, those of triangles, cubes, seconds to invert, seconds of statistics."""
        if diagonal:
            return n, n, 0, 0.0, 0.0
        found = pieces(n)
        return (
            sum(count * size**2 for size, count in found),
            sum(count * size * (size + 1) // 2 for size, count in found),
            sum(count * size**3 for size, count in found),
            sum(count * hardware.solve_s(size, how) for size, count in found),
            sum(count * hardware.gemm_s(size, size, positions) for size, count in found),
        )

    def applied(n: int, others: int, diagonal: bool) -> float:
        """Seconds of an inverse times a matrix with so many columns."""
        took = 0.0
        for size, count in () if diagonal else pieces(n):
            took += count * hardware.gemm_s(size, others, size)
        return took

    @cache
    def row(a: int, g: int, copies: int, positions: int, a_diagonal: bool, g_diagonal: bool) -> tuple[float, ...]:
        of_a, of_g = side(a, a_diagonal, positions), side(g, g_diagonal, positions)
        both = applied(a, g, a_diagonal) + applied(g, a, g_diagonal)
        return (*(copies * (x + y) for x, y in zip(of_a, of_g, strict=True)), copies * both)

    shapes = [(one.a, one.g, one.copies, one.positions, one.a_diagonal, one.g_diagonal) for one in blocks]
    columns = list(zip(*(row(*shape) for shape in shapes), strict=True)) if shapes else [()] * 6
    elements, packed, cubes = (torch.tensor(column, dtype=torch.float64) for column in columns[:3])
    solve_s, statistics_s, precondition_s = (torch.tensor(column, dtype=torch.float64) for column in columns[3:])
    whole = max((max(block_sizes(one.largest, largest)) for one in blocks), default=0)
    return Table(
        largest=largest,
        elements=elements.long(),
        packed=packed.long(),
        weights=torch.tensor([one.weights for one in blocks], dtype=torch.int64),
        cubes=cubes,
        statistics_s=statistics_s,
        solve_s=solve_s,
        precondition_s=precondition_s,
        solver_bytes=_SOLVER_COPIES * _SUM_BYTES * whole**2,
    )


def balance(cubes: Sequence[float], elements: Sequence[int], world: int) -> list[int]:
    """An owner for each block: the largest first, each to the rank with least to do (then with least to keep)."""
    ranks: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(world)]
    owners = [0] * len(cubes)
    for place in sorted(range(len(cubes)), key=lambda at: (-cubes[at], -elements[at], at)):
        load, kept, rank = ranks[0]
        owners[place] = rank
        heapq.heapreplace(ranks, (load + cubes[place], kept + elements[place], rank))
    return owners


def cost(found: Table, owners: Tensor, workers: Tensor, world: int) -> Costs:
    """Where `workers[l]` ranks precondition block l: those of the owner's group of so many neighbours."""
    first = owners // workers * workers

    def on_workers(values: Tensor) -> Tensor:
        """Sums over the blocks that each rank works on."""
        steps = torch.zeros(world + 1, dtype=values.dtype)
        steps.index_add_(0, first, values)
        steps.index_add_(0, first + workers, -values)
        return steps.cumsum(0)[:-1]

    def of_owners(values: Tensor) -> Tensor:
        return torch.zeros(world, dtype=values.dtype).index_add_(0, owners, values)

    owned, held = of_owners(found.elements), on_workers(found.elements)
    shared = torch.where(workers < world, found.weights, 0)  # a gradient that some ranks get from others
    return Costs(
        statistics_s=float(found.statistics_s.sum()),
        factor_elements=int(found.elements.sum()),
        solve_s=float(of_owners(found.solve_s).max()),
        inverse_elements=int((held - owned).max()),
        precondition_s=max(0.0, float(on_workers(found.precondition_s).max())),
        gradient_elements=int((shared.sum() - on_workers(shared)).max()),
        owned=owned,
        held=held,
        packed_elements=int(found.packed.sum()),
        solver_bytes=found.solver_bytes,
    )


def memory(costs: Costs, *, world: int, factor_dtype: str, sums: bool) -> list[int]:
    """Bytes on each rank: averages of its own factors, inverses it applies, and what a step needs for a while."""
    a_while = costs.solver_bytes + (BUCKET_BYTES if world > 1 else 0)
    a_while += costs.factor_elements * _SUM_BYTES if sums else 0
    lasting = (costs.owned + costs.held) * _ITEM_BYTES[factor_dtype]
    return [a_while + int(kept) for kept in lasting.tolist()]


def wire(costs: Costs, *, world: int, factor: str, factor_dtype: str) -> tuple[int, int, int]:
    """Bytes of factors, of inverses and of gradients whenever they travel."""
    elements = costs.factor_elements if factor == "none" else costs.packed_elements
    factors = elements * (2 if factor == "bf16-tri" else _SUM_BYTES) if world > 1 else 0
    return factors, costs.inverse_elements * _ITEM_BYTES[factor_dtype], costs.gradient_elements * _SUM_BYTES


def seconds(costs: Costs, sizes: tuple[int, int, int], hardware: Hardware, world: int) -> Components:
    """Of each part whenever it happens: divide by the periods."""
    factors, inverses, gradients = sizes

    def sent(kind: str, size: int) -> float:
        return hardware.collective_s(kind, size, ranks=world, calls=-(-size // BUCKET_BYTES))

    return Components(
        statistics=costs.statistics_s,
        factor_communication=sent("reduce_scatter", factors),
        inverses=costs.solve_s,
        inverse_communication=sent("broadcast", inverses),
        preconditioning=costs.precondition_s,
        gradient_communication=sent("broadcast", gradients),
    )


def blocks_memory(blocks: Sequence[Block], *, factor_dtype: str = "float32", largest: int | None = None) -> int:
    """Bytes of all factors and all inverses, as one rank alone keeps them."""
    elements = 0
    for block in blocks:
        for n, diagonal in block.sides:
            elements += block.copies * (n if diagonal else sum(size**2 for size in block_sizes(n, largest)))
    return 2 * elements * _ITEM_BYTES[factor_dtype]


# ---- sizes in words --------------------------------------------------------------------------------------------------


def parse_bytes(size: str | float | None, argument: str = "memory") -> int | None:
    """ "8GiB", "512 MiB", "1.5 GB" or a number of bytes; None stays None.

    Raises:
        OptimError: it is no such size.
    """
    if size is None:
        return None
    number: float = -1.0
    if isinstance(size, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", size)
        if found and found[2].lower() in _UNITS:
            number = float(found[1]) * _UNITS[found[2].lower()]
    elif not isinstance(size, bool) and isinstance(size, int | float):
        number = size
    if not (number >= 1 and math.isfinite(number)):
        raise OptimError(f'{argument}={size!r} is no size: give one such as "8GiB", "512 MiB", "8 GB" or 8e9 (bytes)')
    return int(number)


def size_text(size: float) -> str:
    power = min(4, max(0, int(math.log(size, 1024)))) if size >= 1 else 0
    return f"{size / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
