"""Quotas: how much of everything a user or a project may have, and how much they have.

Limits are set by administrators for one user, one project, or as the default of every user or every project; a
user or project with limits of its own has those instead of the default. Somebody's personal project has none: what
is in it is limited by what its user may have. Months are calendar months in UTC.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from diamond.core.errors import InvalidInput

KINDS = ("user", "project", "every-user", "every-project")
EVERYBODY = "all"  # what the every-… kinds have in place of a name
WARN_FRACTION = 0.8  # of a limit, from where on people are told
DAY_S = 86_400
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B?", re.IGNORECASE)
_UNITS = ("", "K", "M", "G", "T", "P")
_MOST_BYTES = 2**60
_MOST_HOURS = 1e9


def parse_bytes(raw: object) -> int:
    """A number of bytes, or text such as ``500GiB`` (units of 1024, whether the i is written or not)."""
    if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw <= _MOST_BYTES:
        return raw
    found = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    value = float(found[1]) * 1024 ** _UNITS.index(found[2].upper()) if found else math.inf
    if value > _MOST_BYTES:
        raise ValueError(f'{str(raw)[:40]!r} is not an amount of storage; write bytes, or "500 GiB"')
    return int(value)


def _parse_count(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 <= raw <= 1_000_000_000:
        raise ValueError(f"must be a whole number from 0, or null for no limit, not {str(raw)[:40]!r}")
    return raw


def _parse_hours(raw: object) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not 0 <= raw <= _MOST_HOURS:
        raise ValueError(f"must be a number of hours from 0, or null for no limit, not {str(raw)[:40]!r}")
    return float(raw)


def _parsed(parse: Callable[[object], Any]) -> dict[str, Any]:
    return {"parse": parse}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be had. None: no limit.

    Attributes:
        tasks: unfinished at once. One more is refused.
        nodes: held at once. A task waits until there is room, and is refused if it alone asks for more.
        gpus: held at once, on all nodes together; like `nodes`.
        gpu_hours: of a calendar month. What runs when they are used up goes on; what comes after it waits.
        storage_bytes: of images at endpoints, and of uploads and outputs at the server.
    """

    tasks: int | None = field(default=None, metadata=_parsed(_parse_count))
    nodes: int | None = field(default=None, metadata=_parsed(_parse_count))
    gpus: int | None = field(default=None, metadata=_parsed(_parse_count))
    gpu_hours: float | None = field(default=None, metadata=_parsed(_parse_hours))
    storage_bytes: int | None = field(default=None, metadata=_parsed(parse_bytes))

    def given(self) -> Mapping[str, float]:
        """Those that limit anything, by name."""
        return {name: value for name in NAMES if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class Use:
    """What is had, in the units of `Limits`."""

    tasks: int = 0
    nodes: int = 0
    gpus: int = 0
    gpu_hours: float = 0.0
    storage_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Quota:
    """How a user or a project stands.

    Attributes:
        kind: "user" or "project"; `name`: whose.
        own: whether the limits were set for it in particular, or are the default.
        left: what may still be had of each thing that is limited.
        renews_at: when the GPU-hours begin anew.
    """

    kind: str
    name: str
    limits: Limits
    used: Use
    left: dict[str, float] = field(default_factory=dict)
    own: bool = False
    renews_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class QuotaSetting:
    """Limits as an administrator set them."""

    kind: str
    name: str
    limits: Limits
    updated_at: float


NAMES = tuple(one.name for one in fields(Limits))


def left_of(limits: Limits, used: Use) -> dict[str, float]:
    return {name: max(0, limit - getattr(used, name)) for name, limit in limits.given().items()}


def check_kind(kind: str, name: str) -> None:
    """Refuse what is no kind of quota, or a name where there is none."""
    if kind not in KINDS:
        raise InvalidInput(f"{kind[:40]!r} is none of {', '.join(KINDS)}", field="kind")
    if not name or "\x00" in name:
        raise InvalidInput("is not a name", field="name")
    if kind.startswith("every-") and name != EVERYBODY:
        raise InvalidInput(
            f"{name[:40]!r} names nobody",
            hint=f"limits of {kind} are under the name {EVERYBODY!r}; those of one are of kind {kind[6:]!r}",
            field="name",
        )


def shown(name: str, amount: float) -> str:
    """An amount of what is limited, as people read it: ``4``, ``12.5``, ``3.2 GiB``."""
    if name != "storage_bytes":
        return f"{amount:.1f}".removesuffix(".0")
    value, unit = float(amount), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + (f" {_UNITS[unit]}iB" if unit else " B")


# ---- days and months, in UTC ---------------------------------------------------------------------------------------


def day_of(at: float) -> int:
    """The number of the day, from 1970 on."""
    return int(at // DAY_S)


def month_of(at: float) -> tuple[float, float]:
    """When the calendar month of this moment began, and when the next one does."""
    moment = datetime.datetime.fromtimestamp(at, datetime.timezone.utc)  # noqa: UP017 - 3.10 as well
    first = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + datetime.timedelta(days=32)).replace(day=1)
    return first.timestamp(), following.timestamp()


def by_day(start: float, end: float) -> dict[int, float]:
    """How many seconds of the time from `start` to `end` fall on each day."""
    found: dict[int, float] = {}
    at = start
    while at < end:
        day = day_of(at)
        until = min(end, float((day + 1) * DAY_S))
        found[day] = until - at
        at = until
    return found
