"""Policies by name: the one that Diamond uses, and those it is compared with, written from their papers."""

from __future__ import annotations

from collections.abc import Callable

from diamond.core.errors import InvalidInput
from diamond.planner.pools.policies.fifo import Fifo
from diamond.planner.pools.policies.pollux import Pollux
from diamond.planner.pools.policies.sia import Sia
from diamond.planner.pools.policies.srtf import Srtf
from diamond.planner.pools.policies.tiresias import Tiresias
from diamond.planner.pools.snapshot import Policy


def _diamond() -> Policy:
    from diamond.planner.pools.policies.goodput import Goodput  # what only compares does without it

    return Goodput()


POLICIES: dict[str, Callable[[], Policy]] = {
    "diamond": _diamond,
    "fifo": Fifo,
    "srtf": Srtf,
    "tiresias": Tiresias,
    "pollux": Pollux,
    "sia": Sia,
}


def named(name: str) -> Policy:
    """A new policy of that name.

    Raises:
        InvalidInput: there is none; the hint lists those there are.
    """
    if name not in POLICIES:
        raise InvalidInput(
            f"there is no policy {name[:40]!r}", hint=f"policies: {', '.join(sorted(POLICIES))}", field="policy"
        )
    return POLICIES[name]()
