"""What K-FAC costs on a machine: seconds, memory and bytes on the wire of blocks that are dealt out to ranks.

Pure arithmetic over the shapes of blocks and a Hardware; it decides nothing. planning.py does.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diamond.optim.errors import OptimError
from diamond.optim.hardware import Hardware
from diamond.optim.products import pays
from diamond.optim.solvers import block_sizes

HERE = torch.device("cpu")  # where the arithmetic happens, whatever the user's default device is
BUCKET_BYTES = 25 << 20  # of one message; DDP's own
FACTORS = ("none", "tri", "bf16-tri")
FACTOR_DTYPES = ("float32", "bfloat16")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_SUM_BYTES = 4  # sums of a step and the solver's working copies are in single precision
_SOLVER_COPIES = 3
_SPLIT_BYTES = 6  # of a number of products.Split
_ENOUGH = 2048  # rows of statistics, or twice the width: what uses.Thinning takes of many more,
_SPARE = 4  # and how many times as many it has laid out before

# How often K-FAC reads or writes its numbers beside products and solvers, and how many operations the host starts, in
# units of Hardware.start_s; found by timing it on networks of many small layers.
_PASSES = {"rows": 6, "norm": 16, "factor": 10, "gradient": 9, "lengths": 40, "patches": 24, "split": 7}
_STARTS = {
    "look": 30,  # of a block, for its statistics
    "invert": 20,  # of a block
    "size": 120,  # of all matrices of a size, to invert them
    "block": 1,  # of a block, to precondition it
    "stack": 9,  # of all blocks of a shape, likewise
    "split": 20,  # more, where their products are made of others
    "lengths": 80,  # of a block, to measure how far to go
}
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
        patches: what each position sees is laid out first, as for a convolution.
    """

    name: str
    a: int
    g: int
    copies: int = 1
    params: int | None = None
    positions: int = 1
    a_diagonal: bool = False
    g_diagonal: bool = False
    patches: bool = False

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
    step_lengths: float = 0.0

    @property
    def always(self) -> float:
        """What every step takes, whatever the periods."""
        return self.preconditioning + self.gradient_communication


class Columns(NamedTuple):
    """Blocks as columns of numbers: one number a block in each tensor."""

    a: Tensor
    g: Tensor
    copies: Tensor
    positions: Tensor
    weights: Tensor
    a_diagonal: Tensor
    g_diagonal: Tensor
    patches: Tensor
    stacked: Tensor  # blocks of its shape, which are preconditioned together; itself is one
    matrices: Tensor  # of all those


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
    invert_starts: Tensor  # of operations
    precondition_starts: Tensor
    halves: Tensor  # numbers of its inverse that are there a second time, in parts
    tensors: Tensor  # that its inverse consists of
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
    halves: Tensor  # those that are there a second time, by rank
    packed_elements: int
    solver_bytes: int
    look_starts: float  # operations that the host starts for statistics, for inverses, to precondition
    invert_starts: float
    precondition_starts: float
    messages: tuple[int, int, int]  # in which factors, inverses and gradients travel, at least


def columns(blocks: Sequence[Block]) -> Columns:
    rows = [
        (one.a, one.g, one.copies, one.positions, one.weights, one.a_diagonal, one.g_diagonal, one.patches)
        for one in blocks
    ]
    a, g, copies, positions, weights, *flags = (
        torch.tensor(rows, dtype=torch.int64, device=HERE).reshape(-1, 8).unbind(1)
    )
    a_diagonal, g_diagonal, patches = (one.bool() for one in flags)
    # As stacks.py has it: normalisations all together, matrices by their shape, tables of words each alone.
    alone = torch.where(a_diagonal & ~g_diagonal, torch.arange(len(rows), device=HERE), -1)
    shapes = torch.stack([torch.where(g_diagonal, 0, a), torch.where(g_diagonal, 0, g), alone], 1)
    kinds, kind, stacked = torch.unique(shapes, dim=0, return_inverse=True, return_counts=True)
    matrices = torch.zeros(len(kinds), dtype=torch.int64, device=HERE).index_add_(0, kind, copies)
    return Columns(a, g, copies, positions, weights, a_diagonal, g_diagonal, patches, stacked[kind], matrices[kind])


class _Side(NamedTuple):
    """One of the two factors of every block and copy."""

    elements: Tensor
    packed: Tensor
    cubes: Tensor
    solve_s: Tensor
    statistics_s: Tensor
    apply_s: Tensor
    pieces: Tensor
    size: Tensor  # of a piece; 0 for a diagonal
    groups: Tensor  # its part of the matrices of its size, which are inverted together


def table(blocks: Columns, hardware: Hardware, largest: int | None, how: str = "auto") -> Table:
    splits = _splits(blocks, hardware, largest)
    a = _side(blocks, blocks.a, blocks.g, blocks.a_diagonal, hardware, largest, how, splits)
    g = _side(blocks, blocks.g, blocks.a, blocks.g_diagonal, hardware, largest, how, splits)
    rows = torch.minimum(blocks.positions, _SPARE * _enough(blocks.a))
    laid_out_s = hardware.touch_s(rows * blocks.a * blocks.patches, _PASSES["patches"])
    both = _Side(*(blocks.copies * (x + y) for x, y in zip(a, g, strict=True)))
    most = int(torch.cat([a.size, g.size, torch.zeros(1, device=HERE)]).max())
    return Table(
        largest=largest,
        elements=both.elements,
        packed=both.packed,
        weights=blocks.weights,
        cubes=both.cubes,
        statistics_s=both.statistics_s + blocks.copies * laid_out_s,
        solve_s=both.solve_s + hardware.touch_s(both.elements, _PASSES["factor"]),
        precondition_s=both.apply_s + hardware.touch_s(blocks.weights, _PASSES["gradient"]),
        invert_starts=_STARTS["invert"] + _STARTS["size"] * (a.groups + g.groups),
        precondition_starts=_STARTS["block"] + (_STARTS["stack"] + _STARTS["split"] * splits) / blocks.stacked,
        halves=both.elements * splits,
        tensors=torch.where(blocks.g_diagonal, 1, 2),
        solver_bytes=_SOLVER_COPIES * _SUM_BYTES * most**2,
    )


def _splits(blocks: Columns, hardware: Hardware, largest: int | None) -> Tensor:
    """Of which blocks products are large enough to be made of half-precision ones, as stacks.py has it."""
    if hardware.is_cpu:
        return torch.zeros_like(blocks.a_diagonal)
    a_side = torch.where(blocks.a_diagonal, 0, _cut(blocks.a, largest)[0])
    large: Tensor = pays(blocks.matrices, blocks.g, blocks.a, _cut(blocks.g, largest)[0], a_side)
    return ~blocks.g_diagonal & large


def _side(
    blocks: Columns,
    n: Tensor,
    others: Tensor,
    diagonal: Tensor,
    hardware: Hardware,
    largest: int | None,
    how: str,
    splits: Tensor,
) -> _Side:
    size, number = _cut(n, largest)
    batch = number * blocks.matrices
    wide, other = size.double(), others.double()
    enough = _enough(n)
    thinned = (blocks.positions >= 2 * enough) & ~blocks.a_diagonal
    rows = torch.where(thinned, enough, blocks.positions).double()
    norms = blocks.a_diagonal & blocks.g_diagonal
    looked_s = number * hardware.gemms_s(wide, wide, rows) + hardware.touch_s(rows * n, _PASSES["rows"])
    looked_at_diagonals_s = hardware.touch_s(torch.where(norms, rows * n, n), _PASSES["norm"])
    inverted = torch.where(diagonal, 0, size)
    _, kind, alike = torch.unique(inverted, return_inverse=True, return_counts=True)
    return _Side(
        elements=torch.where(diagonal, n, number * size**2),
        packed=torch.where(diagonal, n, number * (size * (size + 1) // 2)),
        cubes=torch.where(diagonal, 0.0, number * wide**3),
        solve_s=torch.where(diagonal, 0.0, number * hardware.solves_s(wide, how)),
        statistics_s=torch.where(diagonal, looked_at_diagonals_s, looked_s),
        apply_s=torch.where(diagonal, 0.0, number * _applied_s(wide, other, batch, splits, hardware)),
        pieces=torch.where(diagonal, 1, number),
        size=inverted,
        groups=torch.where(diagonal, 0.0, 1.0 / alike[kind]),
    )


def _applied_s(n: Tensor, others: Tensor, batch: Tensor, splits: Tensor, hardware: Hardware) -> Tensor:
    """Of a factor's product with a matrix; where it is split, products.py makes three of it, in half precision."""
    plain = hardware.gemms_s(n, others, n, batch=batch)
    if not bool(splits.any()):
        return plain
    halves = 3 * hardware.gemms_s(n, others, n, "bfloat16", batch=batch)
    return torch.where(splits, halves + hardware.touch_s(n * others, _PASSES["split"]), plain)


def _enough(n: Tensor) -> Tensor:
    return (2 * n).clamp_min(_ENOUGH)


def _cut(n: Tensor, largest: int | None) -> tuple[Tensor, Tensor]:
    """The size of the pieces that dimensions are kept in, and how many they are: solvers.block_sizes for many n."""
    if largest is None:
        return n, torch.ones_like(n)
    number = ((n + largest - 1) // largest).clamp_min(1)
    return (n + number - 1) // number, number


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
        steps = torch.zeros(world + 1, dtype=values.dtype, device=HERE)
        steps.index_add_(0, first, values)
        steps.index_add_(0, first + workers, -values)
        return steps.cumsum(0)[:-1]

    def of_owners(values: Tensor) -> Tensor:
        return torch.zeros(world, dtype=values.dtype, device=HERE).index_add_(0, owners, values)

    owned, held = of_owners(found.elements), on_workers(found.elements)
    shared = torch.where(workers < world, found.weights, 0)  # a gradient that some ranks get from others
    rows = sum(world // number for number in set(workers[workers < world].tolist()))
    spread = on_workers(torch.where(workers > 1, found.tensors, 0))
    return Costs(
        statistics_s=float(found.statistics_s.sum()),
        factor_elements=int(found.elements.sum()),
        solve_s=float(of_owners(found.solve_s).max()),
        inverse_elements=int((held - owned).max()),
        precondition_s=max(0.0, float(on_workers(found.precondition_s).max())),
        gradient_elements=int((shared.sum() - on_workers(shared)).max()),
        owned=owned,
        held=held,
        halves=on_workers(found.halves),
        packed_elements=int(found.packed.sum()),
        solver_bytes=found.solver_bytes,
        look_starts=_STARTS["look"] * len(owners),
        invert_starts=float(of_owners(found.invert_starts).max()),
        precondition_starts=max(0.0, float(on_workers(found.precondition_starts).max())),
        messages=(len(set(owners.tolist())), int(spread.max()), rows),
    )


def memory(costs: Costs, *, world: int, factor_dtype: str, sums: bool) -> list[int]:
    """Bytes on each rank: averages of its own factors, inverses it applies, and what a step needs for a while."""
    a_while = costs.solver_bytes + (BUCKET_BYTES if world > 1 else 0)
    a_while += costs.factor_elements * _SUM_BYTES if sums else 0
    lasting = (costs.owned + costs.held) * _ITEM_BYTES[factor_dtype]
    lasting = lasting + costs.halves * _SPLIT_BYTES
    return [a_while + int(kept) for kept in lasting.tolist()]


def wire(costs: Costs, *, world: int, factor: str, factor_dtype: str) -> tuple[int, int, int]:
    """Bytes of factors, of inverses and of gradients whenever they travel."""
    elements = costs.factor_elements if factor == "none" else costs.packed_elements
    factors = elements * (2 if factor == "bf16-tri" else _SUM_BYTES) if world > 1 else 0
    return factors, costs.inverse_elements * _ITEM_BYTES[factor_dtype], costs.gradient_elements * _SUM_BYTES


def seconds(costs: Costs, sizes: tuple[int, int, int], hardware: Hardware, world: int) -> Components:
    """Of each part whenever it happens, without what goes through the model: divide by the periods."""
    kinds = ("reduce_scatter", "broadcast", "broadcast")
    factors, inverses, gradients = (
        hardware.collective_s(kind, size, ranks=world, calls=max(messages, -(-size // BUCKET_BYTES)))
        for kind, size, messages in zip(kinds, sizes, costs.messages, strict=True)
    )
    return Components(
        statistics=hardware.with_starts(costs.statistics_s, costs.look_starts),
        factor_communication=factors,
        inverses=hardware.with_starts(costs.solve_s, costs.invert_starts),
        inverse_communication=inverses,
        preconditioning=hardware.with_starts(costs.precondition_s, costs.precondition_starts),
        gradient_communication=gradients,
    )


def lengths_s(blocks: Columns, hardware: Hardware) -> float:
    """What measuring how far to go takes whenever it is done, beside the forward passes."""
    touched = hardware.touch_s(float(blocks.weights.sum()), _PASSES["lengths"])
    return hardware.with_starts(touched, _STARTS["lengths"] * len(blocks.weights))


def blocks_memory(blocks: Sequence[Block], *, factor_dtype: str = "float32", largest: int | None = None) -> int:
    """Bytes of all factors and all inverses, as one rank alone keeps them."""
    elements = 0
    for block in blocks:
        for n, diagonal in block.sides:
            sizes = [1] if diagonal else block_sizes(n, largest)
            elements += block.copies * (n if diagonal else len(sizes) * sizes[0] ** 2)
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
