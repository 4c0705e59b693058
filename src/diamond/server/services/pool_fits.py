"""Models of how fast tasks are, kept while nothing new is known: a pool is looked at every few seconds, and fitting a
model takes longer than all else of a look. Safe to call from several threads; what is given out is not to be changed.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any

from diamond.planner.pools import trained
from diamond.planner.pools.profiles import Prior, Profiles
from diamond.planner.pools.snapshot import Speed
from diamond.planner.pools.trained import Growth, Window
from diamond.server.store.pool_models import PoolRow

log = logging.getLogger(__name__)

_MOST_SPEEDS = 4096
_MOST_PROFILES = 64


class _Once:
    """Something that is looked up by what it comes from: `key`. It is made of `value` where it is not known yet."""

    __slots__ = ("key", "value")

    def __init__(self, key: object, value: Any) -> None:
        self.key, self.value = key, value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def profiles_of(pool: PoolRow) -> Profiles:
    """What the pool learnt of tasks that ended; the same object until it learns more."""
    learnt = pool.profiles or {}
    version = (pool.id, str(learnt.get("until")), str(learnt.get("since")))
    return _profiles(_Once(version, pool))


def read_profiles(pool: PoolRow) -> Profiles:
    """One's own, to learn with."""
    if not pool.profiles:
        return Profiles()
    try:
        return Profiles.from_json(json.dumps(pool.profiles["past"]))
    except (KeyError, TypeError, ValueError):
        log.warning("pool %s: what it learnt cannot be read; it begins anew", pool.id)
        return Profiles()


def speed(
    kind: str, windows: tuple[Window, ...], prior: Prior | None, batch: int | None, growth: Growth | None
) -> Speed:
    """See `trained.speed`; the same object where all of this is the same."""
    return _speed(kind, windows, _Once(id(prior), prior), batch, growth)


@lru_cache(maxsize=_MOST_PROFILES)
def _profiles(pool: _Once) -> Profiles:
    found = read_profiles(pool.value)
    pool.value = None  # the key is kept; the row need not be
    return found


@lru_cache(maxsize=_MOST_SPEEDS)
def _speed(kind: str, windows: tuple[Window, ...], prior: _Once, batch: int | None, growth: Growth | None) -> Speed:
    # The key holds the prior as well, so that no other gets its id meanwhile.
    return trained.speed(kind, windows, prior.value, batch, growth)
