"""Renews the inverses: at once, or aside, while training goes on with those it has.

What is begun aside is taken a number of steps later that was fixed when it began, done or not, so that all ranks switch
at the same step and runs repeat themselves.
"""

from __future__ import annotations

from typing import Any

from diamond.optim.errors import OptimError
from diamond.optim.factors import Factors
from diamond.optim.planning import Plan
from diamond.optim.precondition import Asked, Inverse, asked_of, inverses_of
from diamond.optim.solvers import Background

WAYS = ("now", "aside")
_PART = 4  # of the steps until the next renewal that it may take: training with old inverses is worse
_KEY = "inverses"


def made(way: str, kept: dict[int, Inverse], how: str, plan: Plan | None) -> Refreshing:
    """
    Raises:
        OptimError: there is no such way.
    """
    if way not in WAYS:
        raise OptimError(f"inverses={way!r} is not known; one of {', '.join(WAYS)}")
    return Refreshing(way == "aside", kept, how, plan.newton_schulz_up_to if plan else 0)


class Refreshing:
    """Of one optimizer.

    Args:
        aside: whether it will be asked to `begin`.
        kept: the inverses in use, by the index of the block; it changes none of them.
        how, newton_schulz_up_to: for solvers.inverses.

    Attributes:
        due: at which step what is under way will be taken; None where nothing is.
    """

    def __init__(self, aside: bool, kept: dict[int, Inverse], how: str, newton_schulz_up_to: int) -> None:
        self.aside = aside
        self.due: int | None = None
        self._kept, self._how, self._newton_schulz_up_to = kept, how, newton_schulz_up_to
        self._background: Background | None = None
        self._asked: Asked | None = None
        self._coming: dict[int, Inverse] = {}

    def now(self, factors: list[Factors], damping: float) -> dict[int, Inverse]:
        return inverses_of(factors, damping, self._how, self._kept, self._newton_schulz_up_to)

    def begin(self, factors: list[Factors], damping: float, step: int, period: int) -> None:
        """Of the factors as they are now; to be taken well before the next time, after so many steps."""
        asked = asked_of(factors, damping)
        if len({matrix.device for matrix in asked.matrices}) > 1:
            raise OptimError("inverses='aside': the model is on several devices of this process; use inverses='now'")
        self._background = self._background or Background()
        self._background.submit(
            _KEY, asked.matrices, asked.dampings, copy=False, how=self._how,
            newton_schulz_up_to=self._newton_schulz_up_to,
        )  # fmt: skip
        self._asked, self._coming = asked, {}
        self.due = step + -(-period // _PART)

    def take(self, step: int) -> dict[int, Inverse] | None:
        """What is due at this step, waiting for it if need be; None for nothing.

        Raises:
            Exception: whatever the computation raised.
        """
        if self.due is None or step < self.due:
            return None
        found = self.coming()
        self.put(None, {})
        return found

    def coming(self) -> dict[int, Inverse]:
        """What is under way, on this rank; waits for it, and leaves it under way."""
        if self._asked is not None and self._background is not None:
            asked, self._asked = self._asked, None
            self._coming = asked.answered(self._background.wait(_KEY), self._kept)
        return self._coming

    def put(self, due: int | None, coming: dict[int, Inverse]) -> None:
        """As if this were under way; whatever was is dropped."""
        self.coming()
        self.due, self._coming = due, coming

    def __getstate__(self) -> dict[str, Any]:
        """For copies: a thread cannot be copied, so what it computes is waited for."""
        self.coming()
        return {**vars(self), "_background": None}
