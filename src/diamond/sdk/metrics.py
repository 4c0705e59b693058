"""What a task measured, as the server gives it: the newest value of each key, and whole curves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of one attempt. `stream` is "metrics" (logged by the program) or "util" (sampled by the agent).

    Attributes:
        count: number of samples.
        last_step: training step of the newest sample.
        last_t: Unix seconds of the newest sample; NaN when the program gave none.
        last_value: may be NaN or infinite.
        thinned: of the older samples, some are no longer kept.
    """

    key: str
    stream: str
    count: int
    last_step: float
    last_t: float
    last_value: float
    thinned: bool = False

    @staticmethod
    def of(raw: dict[str, Any]) -> Series:
        return Series(
            key=str(raw["key"]),
            stream=str(raw.get("stream", "metrics")),
            count=int(raw.get("count", 0)),
            last_step=_number(raw.get("last_step")),
            last_t=_number(raw.get("last_t")),
            last_value=_number(raw.get("last_value")),
            thinned=bool(raw.get("thinned", False)),
        )


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One sample, or a bucket of neighbouring ones; `x` and `last` belong to the bucket's last sample."""

    x: float
    min: float
    max: float
    mean: float
    last: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric's points in order of x (`step`, or Unix seconds with x="time").

    Attributes:
        exact: every point is one sample; otherwise points are buckets.
        non_finite: how many samples were NaN or infinite; they are in no point.
        first_non_finite_x: where the first of those is.
        gaps: stretches of nothing but such samples, as (x of the first, x of the last); the first 200 of them.
        thinned: of the older samples, some are no longer kept; the smallest and the largest are.
    """

    key: str
    x: str
    count: int
    points: tuple[CurvePoint, ...]
    exact: bool = True
    non_finite: int = 0
    first_non_finite_x: float | None = None
    gaps: tuple[tuple[float, float], ...] = ()
    thinned: bool = False

    @staticmethod
    def of(raw: dict[str, Any]) -> Curve:
        return Curve(
            key=str(raw["key"]),
            x=str(raw.get("x", "step")),
            count=int(raw.get("count", 0)),
            points=tuple(_point(item) for item in raw.get("points", ())),
            exact=bool(raw.get("exact", True)),
            non_finite=int(raw.get("non_finite", 0)),
            first_non_finite_x=raw.get("first_non_finite_x"),
            gaps=tuple((_number(first), _number(last)) for first, last in raw.get("gaps", ())),
            thinned=bool(raw.get("thinned", False)),
        )


def _point(raw: Any) -> CurvePoint:
    names = ("x", "min", "max", "mean", "last")
    values = [raw.get(name) for name in names] if isinstance(raw, dict) else list(raw)
    return CurvePoint(**{name: _number(value) for name, value in zip(names, values, strict=False)})


def _number(raw: Any) -> float:
    """JSON has no NaN: the server writes null."""
    return math.nan if raw is None else float(raw)
