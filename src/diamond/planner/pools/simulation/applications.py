"""Kinds of tasks as they truly behave: times of a step by placement, gradient noise and progress by epoch.

Read from the tables that the Pollux and Sia artifacts publish. Work is counted in samples at the reference batch: one
step at that batch is `reference` of work, a step at a larger one is worth more, by the gain that the gradient's noise
allows. Where a placement was not measured, times are interpolated between those that were, as their authors do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator
from scipy.spatial import QhullError

from diamond.core.errors import InvalidInput
from diamond.planner.pools.batches import Batch, Limits, Noise
from diamond.planner.pools.simulation.tables import Row, read_csv

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Counts = tuple[int, ...]
"""GPUs on each node of a placement."""

ANY = ""
"""The kind of GPU of tables that name none: they hold for all."""

TOTALS = 50  # batches that are tried, spaced geometrically
SIA_TYPES = ("aws", "dgx-ext", "rtx")
_SIA_SLOWDOWNS = {"cifar10": 1.8, "imagenet": 1.2, "yolov3": 1.2, "bert": 1.2, "deepspeech2": 1.2, "ncf": 1.5}
_SIA_RESTARTS = {"cifar10": 50.0, "deepspeech2": 25.0, "bert": 120.0, "yolov3": 80.0, "imagenet": 250.0, "ncf": 15.0}
_NAME = re.compile(r"\w[\w.+-]{0,60}")
_SIA_LARGEST = {("deepspeech2", "rtx"): 57}


class Times:
    """Seconds of a step on one kind of GPU, by placement and batch of each GPU."""

    def __init__(self, placements: Mapping[Counts, Floats], scaling: Floats, largest: int | None = None) -> None:
        """Rows of `placements` are (per_gpu, step_s, sync_s); of `scaling` (nodes, gpus, per_gpu, step_s, sync_s)."""
        self._placements = placements
        self._scaling = scaling
        sizes = np.concatenate([rows[:, 0] for rows in placements.values()])
        self.smallest = int(sizes.min())
        self.largest = min(int(sizes.max()), largest or int(sizes.max()))
        self._between = _Between(np.concatenate([_means(placements), scaling]))
        self._found: dict[tuple[Counts, int], tuple[float, float]] = {}

    def largest_for(self, counts: Counts) -> int:
        """The most that a GPU was seen to hold in such a placement."""
        rows = self._placements.get(smallest_rotation(counts))
        if rows is not None:
            return min(self.largest, int(rows[-1, 0]))
        wider = (self._scaling[:, 0] >= len(counts)) & (self._scaling[:, 1] >= sum(counts))
        return min(self.largest, int(self._scaling[wider, 2].max())) if wider.any() else self.largest

    def at(self, counts: Counts, per_gpu: Ints) -> tuple[Floats, Floats]:
        """(step_s, compute_s) for each of these batches."""
        counts = smallest_rotation(counts)
        missing = [int(size) for size in per_gpu if (counts, int(size)) not in self._found]
        if missing:
            step, sync = self._looked_up(counts, np.array(missing, dtype=np.float64))
            compute = np.maximum(step - sync, 0.0)
            self._found.update(
                {(counts, size): (step[i], compute[i]) for i, size in enumerate(missing)},
            )
        found = np.array([self._found[counts, int(size)] for size in per_gpu])
        return found[:, 0], found[:, 1]

    def _looked_up(self, counts: Counts, per_gpu: Floats) -> tuple[Floats, Floats]:
        rows = self._placements.get(counts)
        if rows is not None:
            return np.interp(per_gpu, rows[:, 0], rows[:, 1]), np.interp(per_gpu, rows[:, 0], rows[:, 2])
        return self._between.at(len(counts), sum(counts), per_gpu)


class _Between:
    """Times between the placements that were measured; beyond them, those of the nearest."""

    def __init__(self, rows: Floats) -> None:
        self._most_nodes = float(rows[:, 0].max())
        self._nearest: Any = NearestNDInterpolator(rows[:, :3], rows[:, 3:], rescale=True)
        try:
            self._linear: Any = LinearNDInterpolator(rows[:, :3], rows[:, 3:])
        except QhullError:  # all on one node: there is nothing between
            self._linear = None

    def at(self, nodes: int, gpus: int, per_gpu: Floats) -> tuple[Floats, Floats]:
        points = np.column_stack(
            [np.full(len(per_gpu), min(float(nodes), self._most_nodes)), np.full(len(per_gpu), float(gpus)), per_gpu]
        )
        found = np.full((len(per_gpu), 2), np.nan) if self._linear is None else self._linear(points)
        outside = np.isnan(found).any(axis=1)
        if outside.any():
            found[outside] = self._nearest(points[outside])
        return found[:, 0], found[:, 1]


@dataclass(eq=False)
class Application:
    """What is true of one kind of task; a policy is only told of it what it could have measured.

    Attributes:
        sizes: total batches its training was recorded at, in order; `squares` and `variances` (batch, epoch) are
            those of the gradient.
        ends: work done when each epoch is over, the last being the task's end.
        times: by kind of GPU; ANY holds for all kinds.
        slowdown: how much slower a step is than the tables say.
        fixed_batch: the only total batch it trains at, if there is one.
        max_gpus: on how many it can run at all.
    """

    name: str
    sizes: Floats
    squares: Floats
    variances: Floats
    ends: Floats
    times: Mapping[str, Times]
    slowdown: float = 1.0
    restart_s: float = 30.0
    fixed_batch: int | None = None
    max_gpus: int = 64
    _noises: dict[int, tuple[Floats, Floats]] = field(default_factory=dict)
    _rates: dict[tuple[str, Counts, Batch], Floats] = field(default_factory=dict)
    _best: dict[tuple[str, Counts], tuple[Floats, list[Batch]]] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        folder: Path,
        name: str,
        *,
        gpu_types: Sequence[str] = (),
        slowdown: float = 1.0,
        restart_s: float = 30.0,
        largest: Mapping[str, int] | None = None,
    ) -> Application:
        """From `folder/name`: placements.csv, scalability.csv and validation-BATCH.csv.

        Args:
            gpu_types: reads placements-TYPE.csv and scalability-TYPE.csv for each; without, one table holds for all.
            largest: the most samples a GPU of a kind may be given, where that is less than was measured.
        """
        home = _home(Path(folder), name)
        curves = _read_curves(home)
        epochs = min(len(rows) for rows in curves.values())
        sizes = sorted(curves)
        stacked = np.stack([curves[size][:epochs] for size in sizes])
        reference = sizes[0]
        return cls(
            name=name,
            sizes=np.array(sizes, dtype=np.float64),
            squares=stacked[:, :, 1],
            variances=stacked[:, :, 2],
            ends=stacked[:, :, 0].min(axis=0) * reference,
            times={
                gpu_type: _read_times(home, gpu_type, (largest or {}).get(gpu_type)) for gpu_type in gpu_types or (ANY,)
            },
            slowdown=slowdown,
            restart_s=restart_s,
            fixed_batch=sizes[-1] if name == "ncf" else None,  # as its authors run it
            max_gpus=1 if name == "ncf" else 64,
        )

    @property
    def reference(self) -> int:
        return int(self.sizes[0])

    @property
    def largest(self) -> int:
        return int(self.sizes[-1])

    @property
    def epochs(self) -> int:
        return len(self.ends)

    @property
    def total(self) -> float:
        """Work from start to end."""
        return float(self.ends[-1])

    def scaled(self, factor: float) -> Application:
        """The same with so many times the work."""
        return replace(self, ends=self.ends * factor)

    def runs_on(self, gpu_type: str) -> bool:
        return ANY in self.times or gpu_type in self.times

    def limits(self, gpu_type: str) -> Limits:
        times = self._times(gpu_type)
        return Limits(reference=self.reference, largest=self.largest, per_gpu=(times.smallest, times.largest))

    def most_gpus(self, gpu_type: str) -> int:
        """More would leave each less than it can work on."""
        return max(1, min(self.max_gpus, self.largest // self._times(gpu_type).smallest))

    def noise(self, total: int, epoch: int) -> Noise:
        """Of the gradient while it trains at this batch."""
        if total not in self._noises:
            squares, variances = self._gradients(np.array([total]))
            self._noises[total] = squares[0], variances[0]
        squares, variances = self._noises[total]
        return Noise(square=float(squares[epoch]), variance=float(variances[epoch]))

    def step(self, gpu_type: str, counts: Counts, per_gpu: int) -> tuple[float, float]:
        """(step_s, compute_s) as a task would measure them."""
        step, compute = self._times(gpu_type).at(counts, np.array([per_gpu]))
        return float(step[0]) * self.slowdown, float(compute[0]) * self.slowdown

    def split(self, gpu_type: str, counts: Counts, total: int) -> Batch:
        """How a total batch is spread over a placement."""
        per_gpu, passes = self._spread(gpu_type, counts, np.array([float(total)]))
        return Batch(per_gpu=int(per_gpu[0]), accumulation=int(passes[0]))

    def fitted(self, gpu_type: str, counts: Counts, batch: Batch) -> Batch:
        """What is left of a batch that a model chose, in the memory of this placement."""
        per_gpu = min(batch.per_gpu, self._times(gpu_type).largest_for(counts))
        per_gpu = min(per_gpu, self.largest // (sum(counts) * (batch.accumulation + 1)))
        return Batch(per_gpu=max(1, per_gpu), accumulation=batch.accumulation)

    def rates(self, gpu_type: str, counts: Counts, batch: Batch) -> Floats:
        """Work a second, by epoch."""
        key = (gpu_type, smallest_rotation(counts), batch)
        if key not in self._rates:
            self._rates[key] = self._rated(gpu_type, counts, np.array([batch.per_gpu]), np.array([batch.accumulation]))[
                0
            ]
        return self._rates[key]

    def best(self, gpu_type: str, counts: Counts) -> tuple[Floats, list[Batch]]:
        """The highest of these rates, and the batch that gives it, by epoch."""
        key = (gpu_type, smallest_rotation(counts))
        if key not in self._best:
            self._best[key] = self._chosen(gpu_type, counts)
        return self._best[key]

    def _chosen(self, gpu_type: str, counts: Counts) -> tuple[Floats, list[Batch]]:
        lowest = max(self.reference, self._times(gpu_type).smallest * sum(counts))
        if lowest > self.largest:
            return np.zeros(self.epochs), [Batch(per_gpu=1, accumulation=0)] * self.epochs
        totals = np.array([self.fixed_batch]) if self.fixed_batch else np.geomspace(lowest, self.largest, TOTALS)
        tried = np.unique(np.column_stack(self._spread(gpu_type, counts, totals)), axis=0)
        rates = self._rated(gpu_type, counts, tried[:, 0], tried[:, 1])
        best = rates.argmax(axis=0)
        return rates.max(axis=0), [Batch(per_gpu=int(tried[i, 0]), accumulation=int(tried[i, 1])) for i in best]

    def _spread(self, gpu_type: str, counts: Counts, totals: Floats) -> tuple[Ints, Ints]:
        gpus = sum(counts)
        local = np.ceil(totals / gpus - 1e-8)
        passes = np.ceil(local / self._times(gpu_type).largest_for(counts) - 1e-8) - 1
        if gpus == 1:  # the gradient's noise shows only between two passes
            passes = np.where(totals > self.reference, np.maximum(passes, 1), passes)
        per_gpu = np.ceil(local / (passes + 1) - 1e-8)
        per_gpu = np.maximum(1, np.minimum(per_gpu, self.largest // (gpus * (passes + 1))))
        return per_gpu.astype(np.int64), passes.astype(np.int64)

    def _rated(self, gpu_type: str, counts: Counts, per_gpu: Ints, passes: Ints) -> Floats:
        totals = per_gpu * (passes + 1) * sum(counts)
        step, compute = self._times(gpu_type).at(counts, per_gpu)
        squares, variances = self._gradients(totals)
        scale = (totals / self.reference)[:, None]
        gain = (variances + squares) / (variances / scale + squares)
        seconds = (step + passes * compute) * self.slowdown
        return np.asarray(gain * self.reference / seconds[:, None])

    def _gradients(self, totals: Ints) -> tuple[Floats, Floats]:
        """Of each batch and epoch, in a straight line between the batches that were recorded."""
        inside = np.clip(totals, self.sizes[0], self.sizes[-1])
        upper = np.clip(np.searchsorted(self.sizes, inside), 1, max(1, len(self.sizes) - 1))
        if len(self.sizes) == 1:
            chosen = np.zeros(len(totals), dtype=np.int64)
            return self.squares[chosen], self.variances[chosen]
        share = ((inside - self.sizes[upper - 1]) / (self.sizes[upper] - self.sizes[upper - 1]))[:, None]
        return (
            self.squares[upper - 1] * (1 - share) + self.squares[upper] * share,
            self.variances[upper - 1] * (1 - share) + self.variances[upper] * share,
        )

    def _times(self, gpu_type: str) -> Times:
        found = self.times.get(gpu_type) or self.times.get(ANY)
        if found is None:
            raise InvalidInput(
                f"{self.name} was not measured on {gpu_type!r} GPUs",
                hint=f"Use nodes of the kinds {', '.join(sorted(self.times))}.",
                field="nodes",
            )
        return found


def pollux_applications(folder: Path, names: Iterable[str]) -> dict[str, Application]:
    """As Pollux's own simulator sets them up; yolov3 has room for 8 samples on a GPU there."""
    return {name: Application.read(folder, name, largest={ANY: 8} if name == "yolov3" else None) for name in names}


def sia_applications(
    folder: Path, names: Iterable[str], gpu_types: Sequence[str] = SIA_TYPES
) -> dict[str, Application]:
    """As Sia's own simulator sets them up: with its restart times, and slower than measured, as it found them run."""
    return {
        name: Application.read(
            folder,
            name,
            gpu_types=gpu_types,
            slowdown=_SIA_SLOWDOWNS.get(name, 1.0),
            restart_s=_SIA_RESTARTS.get(name, 30.0),
            largest={kind: most for (of, kind), most in _SIA_LARGEST.items() if of == name},
        )
        for name in names
    }


def smallest_rotation(counts: Counts) -> Counts:
    """Nodes form a ring: where it begins makes no difference."""
    return min(counts[i:] + counts[:i] for i in range(len(counts)))


def _means(placements: Mapping[Counts, Floats]) -> Floats:
    """One row for all placements of as many GPUs on as many nodes."""
    sums: dict[tuple[int, int, float], list[Floats]] = {}
    for counts, rows in placements.items():
        for row in rows:
            sums.setdefault((len(counts), sum(counts), float(row[0])), []).append(row[1:])
    return np.array([[*key, *np.mean(rows, axis=0)] for key, rows in sorted(sums.items())])


def _home(folder: Path, name: str) -> Path:
    """A folder in that folder: a workload's names must not lead elsewhere."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"application {name[:40]!r} is no folder's name", hint="Use letters, digits, '.', '_' and '-'."
        )
    return folder / name


def _read_times(home: Path, gpu_type: str, largest: int | None) -> Times:
    suffix = f"-{gpu_type}" if gpu_type else ""
    rows: dict[Counts, list[list[float]]] = {}
    placements = home / f"placements{suffix}.csv"
    for row in read_csv(placements, ("placement", "local_bsz", "step_time", "sync_time")):
        rows.setdefault(_counts(row), []).append([row.whole("local_bsz", least=1), *_step(row)])
    if not rows:
        raise InvalidInput(f"{placements}: no placement in it", hint="Name a table with at least one line.")
    columns = ("num_nodes", "num_replicas", "local_bsz")
    scaling = [
        [*(row.whole(column, least=1) for column in columns), *_step(row)]
        for row in read_csv(home / f"scalability{suffix}.csv", (*columns, "step_time", "sync_time"))
    ]
    return Times(
        {counts: np.array(sorted(found), dtype=np.float64) for counts, found in rows.items()},
        np.array(scaling, dtype=np.float64).reshape(-1, len(columns) + 2),
        largest,
    )


def _counts(row: Row) -> Counts:
    """GPUs on each node, a digit a node."""
    text = row.text("placement")
    if not re.fullmatch(r"[1-9]{1,1000}", text):
        raise row.wrong("placement", f"{text[:40]!r} is not a digit of 1 to 9 for each node")
    return tuple(int(digit) for digit in text)


def _step(row: Row) -> tuple[float, float]:
    step_s, sync_s = row.number("step_time", least=0), row.number("sync_time", least=0)
    if not step_s:
        raise row.wrong("step_time", "a step takes time")
    return step_s, sync_s


def _read_curves(home: Path) -> dict[int, Floats]:
    """By total batch: (progress in steps at the reference batch, gradient square, gradient variance) of each epoch."""
    found = {}
    for path in sorted(home.glob("validation-*.csv")):
        size = re.fullmatch(r"validation-([1-9]\d{0,8})\.csv", path.name, re.ASCII)
        rows = _read_curve(path) if size else []
        if size and rows:
            found[int(size[1])] = np.array(rows)
    if not found:
        raise InvalidInput(f"{home}: no validation-BATCH.csv in it", hint="Name a folder of an application's tables.")
    return found


def _read_curve(path: Path) -> list[list[float]]:
    rows: list[list[float]] = []
    for row in read_csv(path, ("progress", "grad_sqr", "grad_var")):
        progress = row.number("progress")
        square, variance = row.number("grad_sqr", least=0), row.number("grad_var", least=0)
        if progress <= (rows[-1][0] if rows else 0.0):
            raise row.wrong("progress", f"{progress:g} is not above that of the line before")
        if not square + variance > 0:
            raise row.wrong("grad_var", "there is no gradient where grad_sqr and grad_var are both 0")
        rows.append([progress, square, variance])
    return rows
