"""A plan: how K-FAC runs, what that is predicted to cost, and how it is told. planning.py makes it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from diamond.optim.costs import Block, Components, size_text
from diamond.optim.errors import OptimError

_WIDTH = 110  # of lines of text


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
        lines = [f"K-FAC for {counted(len(self.blocks), 'block')} on {counted(self.world, 'rank')} ({self.device})", ""]
        for reason in self.reasons:
            lines += textwrap.wrap(reason, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines += ["", f"  {'predicted, a step':26}{'time':>12}{'of training':>13}"]
        rows = {**self.components._asdict(), "K-FAC in all": self.kfac_s, "training without it": self.step_s}
        for name, took in (rows | {"training with it": self.kfac_s + self.step_s}).items():
            lines.append(f"  {name.replace('_', ' '):26}{took * 1e3:>9.3f} ms{took / self.step_s:>12.1%}")
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
