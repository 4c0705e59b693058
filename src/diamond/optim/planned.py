"""A plan: how K-FAC runs, what that is predicted to cost, and how it is told. planning.py makes it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

from diamond.optim.costs import Block, Components, size_text
from diamond.optim.errors import OptimError

_WIDTH = 110  # of lines of text


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _lines(rows: Sequence[Sequence[str]], least: Sequence[int]) -> list[str]:
    """Names to the left, what belongs to them to the right; columns grow where a number needs it."""
    widths = [max(width, *(len(row[at]) + (at > 0) for row in rows if len(row) > at)) for at, width in enumerate(least)]
    return [
        row[0].ljust(widths[0]) + "".join(one.rjust(width) for one, width in zip(row[1:], widths[1:], strict=False))
        for row in rows
    ]


def _shown(name: str, value: float) -> str:
    return size_text(value) if name.endswith("_bytes") else f"{value * 1e3:.3f} ms"


class Comparison(NamedTuple):
    """Predicted against measured: (name, predicted, measured) in the plan's order."""

    rows: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        rows = [("", "predicted", "measured", "ratio")]
        for name, predicted, measured in self.rows:
            ratio = f"{measured / predicted:.2f}" if predicted else "-"
            rows.append((name, _shown(name, predicted), _shown(name, measured), ratio))
        return "\n".join(_lines(rows, (24, 14, 14, 8)))


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
        lines = [f"K-FAC for {counted(len(self.blocks), 'block')} on {counted(self.world, 'rank')} ({self.device})", ""]
        for reason in self.reasons:
            lines += textwrap.wrap(reason, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        table = [("predicted, a step", "time", "of training")]
        rows = {**self.components._asdict(), "K-FAC in all": self.kfac_s, "training without it": self.step_s}
        for name, took in (rows | {"training with it": self.kfac_s + self.step_s}).items():
            table.append((name.replace("_", " "), f"{took * 1e3:.3f} ms", f"{took / self.step_s:.1%}"))
        sizes = [
            ("memory a rank, at most", size_text(self.memory_bytes)),
            ("received a rank", size_text(self.wire_bytes)),
        ]
        return "\n".join([*lines, "", *(f"  {line}" for line in _lines([*table, *sizes], (26, 12, 13)))])

    def compare(self, measured: Mapping[str, float]) -> Comparison:
        """Predicted against measured values of any of: the components, kfac_s, step_s, memory_bytes, wire_bytes.

        Raises:
            OptimError: a name is none of them, or what was measured is no number.
        """
        if not isinstance(measured, Mapping):
            raise OptimError(f"measured={type(measured).__name__}: give a dictionary, such as {{'kfac_s': 0.002}}")
        known = self.components._asdict()
        known |= {name: getattr(self, name) for name in ("kfac_s", "step_s", "memory_bytes", "wire_bytes")}
        if unknown := sorted(set(measured) - set(known), key=str):
            raise OptimError(
                f"measured: nothing was predicted for {', '.join(map(str, unknown))}, only for {', '.join(known)}"
            )
        values: Mapping[str, Any] = measured
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, Real):
                raise OptimError(f"measured: {name}={value!r}: give a number, of seconds or bytes")
        return Comparison(tuple((name, known[name], measured[name]) for name in known if name in measured))
