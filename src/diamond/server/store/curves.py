"""From the records of one metric to what a chart of it needs: few points, nothing lost that would be seen.

Pure functions over arrays. Must not import numpy before a curve is asked for, nor know where records are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_GAPS = 200


class CurvePoint(NamedTuple):
    """One sample, or a bucket of neighbouring ones: `x` and `last` are its last sample's, so they really occurred."""

    x: float
    min: float
    max: float
    mean: float
    last: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A key's points in the asked range, in order of x.

    Attributes:
        count: samples in the range, non-finite ones included.
        exact: whether every point is one sample; otherwise each is a bucket.
        non_finite: samples that are NaN or infinite; they are in no point.
        first_non_finite_x: where the earliest recorded of them is.
        gaps: stretches of nothing but such samples, as (x of the first, x of the last); the first `MAX_GAPS`.
        thinned: there were more samples once, of which older ones are no longer kept; `count` is of those that are.
    """

    key: str
    x: str
    count: int
    points: list[CurvePoint]
    exact: bool = True
    non_finite: int = 0
    first_non_finite_x: float | None = None
    gaps: tuple[tuple[float, float], ...] = ()
    thinned: bool = False


def downsample(
    records: NDArray[np.float64],
    key: str,
    *,
    max_points: int,
    x: Literal["step", "time"],
    x_min: float | None,
    x_max: float | None,
) -> Curve:
    """At most `max_points` points of rows (step, time, value), in order of x."""
    import numpy as np

    xs = np.ascontiguousarray(records[:, 0 if x == "step" else 1])
    values = np.ascontiguousarray(records[:, 2])
    # A mask, not a search: the steps of a resumed run go back.
    inside = np.isfinite(xs)
    if x_min is not None:
        inside &= xs >= x_min
    if x_max is not None:
        inside &= xs <= x_max
    if not inside.all():
        xs, values = xs[inside], values[inside]
    count = len(xs)
    finite = np.isfinite(values)
    all_finite = bool(finite.all())
    first_non_finite_x = None if all_finite else float(xs[int(finite.argmin())])
    if (xs[1:] < xs[:-1]).any():
        order = np.argsort(xs, kind="stable")
        xs, values, finite = xs[order], values[order], finite[order]
    gaps: tuple[tuple[float, float], ...] = ()
    if not all_finite:
        gaps = _gaps(xs, finite)
        xs, values = xs[finite], values[finite]
    exact = len(xs) <= max_points
    if exact:
        columns = [xs, values, values, values, values]
    else:
        # Buckets of equal numbers of samples, so that a dense stretch keeps its resolution beside a sparse one.
        edges = np.arange(max_points + 1) * len(xs) // max_points
        starts, last = edges[:-1], edges[1:] - 1
        low = np.minimum.reduceat(values, starts)
        high = np.maximum.reduceat(values, starts)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.add.reduceat(values, starts) / np.diff(edges)
        mean = np.clip(np.where(np.isfinite(mean), mean, low / 2 + high / 2), low, high)
        columns = [xs[last], low, high, mean, values[last]]
    points = list(map(CurvePoint._make, zip(*(column.tolist() for column in columns), strict=True)))
    return Curve(key, x, count, points, exact, count - len(xs), first_non_finite_x, gaps)


def _gaps(xs: NDArray[np.float64], finite: NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
    """Where runs of non-finite values begin and end."""
    import numpy as np

    edge = np.diff(np.concatenate(([True], finite, [True])).astype(np.int8))
    begins, ends = np.flatnonzero(edge == -1)[:MAX_GAPS], np.flatnonzero(edge == 1)[:MAX_GAPS] - 1
    return tuple(zip(xs[begins].tolist(), xs[ends].tolist(), strict=True))
