"""How a centre's rule and an owner's become one: never wider than either. Pure but for links of folders.

Each function takes the centre's value and the owner's. None means no rule.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar

from diamond.agent.patterns import is_under

Number = TypeVar("Number", int, float)


def both(centre: bool | None, own: bool | None) -> bool | None:
    """Of permissions. Nothing said is less than a yes and more than a no."""
    if centre is False or own is False:
        return False
    return True if centre and own else None


def either(centre: bool, own: bool) -> bool:
    """Of demands."""
    return centre or own


def least(centre: Number | None, own: Number | None) -> Number | None:
    """Of limits."""
    if centre is None or own is None:
        return own if centre is None else centre
    return min(centre, own)


def union(centre: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    """Of what is denied."""
    return tuple(dict.fromkeys((*centre, *own)))


def common(centre: tuple[str, ...] | None, own: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Of what is allowed: patterns of one list that a pattern of the other covers.

    Two that only overlap (`gpu*`, `*-large`) leave nothing: what both mean cannot be written as a pattern, and the
    narrower reading is the safe one.
    """
    return _meet(centre, own, covers)


def common_folders(centre: tuple[str, ...] | None, own: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Of folders: those of one list that lie in one of the other, links followed."""
    return _meet(centre, own, lambda outer, inner: is_under(inner, (outer,)))


def folders_shown(centre: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    """Of what is shown in containers: the owner may name less of it, and by naming nothing takes it as it is."""
    return (common_folders(centre, own) or ()) if own else centre


def folder_within(centre: str | None, own: str | None) -> str | None:
    """Of one folder: the owner's, if it lies in the centre's."""
    if centre is None or own is None:
        return own if centre is None else centre
    return own if is_under(own, (os.path.realpath(centre),)) else centre


def place_of_builds(centre: str, own: str) -> str:
    """Of `builds`: "any" is both places, and two different ones are none."""
    if "any" in (centre, own):
        return own if centre == "any" else centre
    return own if centre == own else "off"


def _meet(
    centre: Iterable[str] | None, own: Iterable[str] | None, contains: Callable[[str, str], bool]
) -> tuple[str, ...] | None:
    if centre is None or own is None:
        found = own if centre is None else centre
        return None if found is None else tuple(found)
    centre, own = tuple(centre), tuple(own)
    kept = [name for name in own if any(contains(other, name) for other in centre)]
    kept += [name for name in centre if any(contains(other, name) for other in own)]
    return tuple(dict.fromkeys(kept))


def covers(outer: str, inner: str) -> bool:
    """Whether every name that the pattern `inner` fits, `outer` fits as well. Sets ([ab]) cover only themselves."""
    if outer == inner or outer == "*":
        return True
    if "[" in outer + inner:
        return False

    @cache
    def fits(at: int, of: int) -> bool:
        if at == len(outer):
            return of == len(inner)
        if outer[at] == "*":
            return fits(at + 1, of) or (of < len(inner) and fits(at, of + 1))
        if of == len(inner) or inner[of] == "*":
            return False
        return (outer[at] == "?" or outer[at] == inner[of]) and fits(at + 1, of + 1)

    return len(outer) * len(inner) <= 10_000 and fits(0, 0)
