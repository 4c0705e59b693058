"""What this machine does in which time: solvers, products of matrices and collectives, measured in a few seconds.

Owns the measurements and the curves through them. What they are used for is the planner's matter. Every rank of a
group gets the same answer (the slowest rank's), so that all of them plan alike.
"""

from __future__ import annotations

import bisect
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diamond.optim.errors import OptimError
from diamond.optim.solvers import inverses

SOLVERS = ("cholesky", "newton-schulz", "eigen")
COLLECTIVES = ("all_reduce", "reduce_scatter", "broadcast", "all_gather")
DTYPES = ("float32", "bfloat16")
TALL = 4  # a product that sums over more than so many times its sides is one of statistics, not of preconditioning
MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_ROWS = 4096  # of the tall matrices that are measured
_REPETITIONS = 5
_VERSION = 1

# PyTorch 2.13 has new names for them and warns of the old ones.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Curve = tuple[tuple[float, float], ...]  # (size, seconds), sizes ascending


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Times of one kind of machine, in seconds.

    Attributes:
        device: what it is, in words.
        world: ranks of the group that the collectives belong to.
        solvers: for each method the time of one matrix in a batch, over n.
        products: for "float32:tall" (x'x of many rows), "float32:square" and so on the time over floating-point
            operations.
        collectives: for each kind its latency and its bytes a second, the bytes being those of the whole tensor.
        measured: here and now; otherwise typical figures.
    """

    device: str
    world: int = 1
    solvers: Mapping[str, Curve]
    products: Mapping[str, Curve]
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    measured: bool = False

    def solve_s(self, n: int, how: str = "auto") -> float:
        """Of one n x n matrix among many; "auto" is Cholesky, or Newton-Schulz where that was measured to be faster."""
        if how == "auto":
            how = "newton-schulz" if n <= self.newton_schulz_up_to else "cholesky"
        return _on_curve(self._curve(self.solvers, how, "how"), n, grows=3.0)

    def gemm_s(self, m: int, n: int, k: int, dtype: str | torch.dtype = "float32") -> float:
        """Of an m x k matrix times a k x n one."""
        if not (m and n and k):
            return 0.0
        name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        shape = ":tall" if k > TALL * m and k > TALL * n else ":square"
        curve = self._curve(self.products, name + shape, "dtype")
        return _on_curve(curve, 2.0 * m * n * k, grows=1.0)

    def collective_s(self, kind: str, size_bytes: float, *, ranks: int | None = None, calls: int = 1) -> float:
        """Of `calls` collectives over so many bytes together; `ranks` where fewer than the whole group take part."""
        if kind not in COLLECTIVES:
            raise OptimError(f"kind={kind!r} is no collective: give one of {', '.join(COLLECTIVES)}")
        ranks = self.world if ranks is None else ranks
        if ranks <= 1 or size_bytes <= 0:
            return 0.0
        if kind not in self.collectives:
            raise OptimError(f"{self.device} was measured without {kind}: measure it in a group of several ranks")
        latency, bandwidth = self.collectives[kind]
        return calls * latency + size_bytes / bandwidth * _volume(kind, ranks) / _volume(kind, max(2, self.world))

    @property
    def newton_schulz_up_to(self) -> int:
        """The largest measured n up to which Newton-Schulz beats Cholesky; 0 for none. GPUs only: see `inverses`."""
        best = 0
        if not self.device.startswith("cpu"):
            cholesky = dict(self.solvers.get("cholesky", ()))
            for n, seconds in self.solvers.get("newton-schulz", ()):
                if seconds >= cholesky.get(n, 0.0):
                    break
                best = int(n)
        return best

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """
        Raises:
            OptimError: it is not what `to_json` writes.
        """
        try:
            found = json.loads(text)
            if found.pop("version") != _VERSION:
                raise OptimError("text is of another version of Hardware: measure anew")
            for name in ("solvers", "products"):
                found[name] = {key: tuple((x, y) for x, y in curve) for key, curve in found[name].items()}
            found["collectives"] = {key: (x, y) for key, (x, y) in found["collectives"].items()}
            return cls(**{one.name: found[one.name] for one in fields(cls)})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptimError(f"text is no Hardware ({error!r}): give what to_json wrote") from error

    def _curve(self, curves: Mapping[str, Curve], key: str, argument: str) -> Curve:
        if not curves.get(key):
            raise OptimError(
                f"{argument}: {self.device} has no times for {key!r}, only for {', '.join(sorted(curves))}"
            )
        return curves[key]


def _on_curve(curve: Curve, at: float, *, grows: float) -> float:
    """Straight lines between points on logarithmic axes; beyond the last a power law; below the first its own time,
    since there it is the start of the computation that takes it."""
    place = bisect.bisect_left(curve, at, key=itemgetter(0))
    if place == 0:
        return curve[0][1]
    size, seconds = curve[place - 1]
    if place < len(curve):
        grows = math.log(curve[place][1] / seconds) / math.log(curve[place][0] / size)
    return seconds * float((at / size) ** grows)


def _volume(kind: str, ranks: int) -> float:
    """What a rank sends for each byte, in a ring."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(kind, (ranks - 1) / ranks)


# ---- typical figures -------------------------------------------------------------------------------------------------


def typical(device: str = "cpu", world: int = 1) -> Hardware:
    """Figures to plan with where nothing was measured: "cpu" (one thread, ranks on one machine) or "h200".

    An H200's times of Cholesky and of eigenvectors at 512 (64 at once), 1024 and 4096 are measured ones; the rest is
    estimated from its peak rates, and its collectives are those of GPUs of one node.
    """
    name = device.lower()
    if name == "cpu":
        found = _CPU
    elif "h200" in name or name.startswith("cuda"):
        found = _H200
    else:
        raise OptimError(f'device={device!r} has no typical figures: give "cpu" or "h200", or measure')
    latency, link = found["link"]
    collectives = {kind: (latency, link / _volume(kind, max(2, world))) for kind in COLLECTIVES}
    return Hardware(
        device=found["device"],
        world=world,
        solvers=found["solvers"],
        products={
            f"{dtype}:{shape}": tuple((10.0**power, start + 10.0**power / rate) for power in range(6, 14))
            for (dtype, shape), (start, rate) in found["rates"].items()
        },
        collectives=collectives if world > 1 else {},
    )


_H200: dict[str, Any] = {
    "device": "NVIDIA H200 (typical)",
    "solvers": {
        "cholesky": ((64, 3e-5), (512, 7e-3 / 64), (1024, 1.2e-3), (4096, 8.2e-3)),
        "eigen": ((64, 1e-3), (512, 0.953 / 64), (1024, 11.5e-3), (4096, 0.105)),
    },
    "rates": {
        ("float32", "tall"): (1e-5, 3e13),
        ("float32", "square"): (1e-5, 4e13),
        ("bfloat16", "tall"): (1e-5, 3e14),
        ("bfloat16", "square"): (1e-5, 5e14),
    },
    "link": (3e-5, 2e11),
}
_CPU: dict[str, Any] = {
    "device": "cpu (typical)",
    "solvers": {
        "cholesky": ((32, 6e-5), (128, 4.5e-4), (512, 8e-3), (1024, 5e-2)),
        "newton-schulz": ((32, 1.6e-4), (128, 2.6e-3), (512, 0.15)),
        "eigen": ((32, 1.3e-4), (128, 9e-4), (512, 2.5e-2)),
    },
    "rates": {
        ("float32", "tall"): (5e-6, 9e10),
        ("float32", "square"): (5e-6, 9e10),
        ("bfloat16", "tall"): (5e-6, 2e10),  # where the processor has no instructions for it
        ("bfloat16", "square"): (5e-6, 2e10),
    },
    "link": (2e-4, 1e9),
}


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    seconds: float = 3.0,
    sizes: Sequence[int] | None = None,
) -> Hardware:
    """Measures for about so many seconds; collective where torch.distributed is initialised.

    Args:
        device: a GPU if there is one, otherwise the CPU.
        group: whose collectives are measured and whose ranks get the same answer; the default group unless given.
        seconds: half for solvers, a quarter each for products and collectives. What would take longer is left out, and
            estimated from what was measured; the smallest size is measured in any case.
        sizes: the n of solvers and products.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise OptimError(f"seconds={seconds} is no time to measure: give more than 0, such as 3.0")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = tuple(sorted(set(sizes or ((64, 256, 1024, 4096) if place.type == "cuda" else (32, 128, 512)))))
    if wanted[0] < 1:
        raise OptimError(f"sizes={tuple(wanted)} holds no size of a matrix: give numbers of 1 or more")
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    clock = _Clock(place)
    with torch.no_grad():
        solvers = _measure_solvers(clock, wanted, seconds / 2)
        products = _measure_products(clock, wanted, seconds / 4)
        collectives: dict[str, tuple[float, float]] = {}
        if together:
            solvers = _slowest(solvers, [(how, n) for how in SOLVERS for n in wanted], clock, group)
            products = _slowest(products, _product_keys(wanted), clock, group)
            collectives = _measure_collectives(clock, group, seconds / 4)
    return Hardware(
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        world=dist.get_world_size(group) if together else 1,
        solvers=_curves(solvers),
        products=_curves({(f"{dtype}:{shape}", flops): took for (dtype, shape, flops), took in products.items()}),
        collectives=collectives,
        measured=True,
    )


class _Clock:
    """Times what a device does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def once(self, work: Callable[[], object]) -> float:
        self._settle()
        begin = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - begin

    def median(self, work: Callable[[], object], limit_s: float) -> float:
        """After one to warm up, and at least twice."""
        self.once(work)
        until = time.perf_counter() + limit_s
        took = [self.once(work), self.once(work)]
        while len(took) < _REPETITIONS and time.perf_counter() < until:
            took.append(self.once(work))
        return statistics.median(took)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _random(clock: _Clock, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    dice = torch.Generator(clock.device).manual_seed(1)
    return torch.randn(*shape, generator=dice, device=clock.device).to(dtype)


def _measure_solvers(clock: _Clock, sizes: Sequence[int], limit_s: float) -> dict[tuple[Any, ...], float]:
    found: dict[tuple[Any, ...], float] = {}
    until = time.perf_counter() + limit_s
    for at, how in enumerate(SOLVERS):
        ends = time.perf_counter() + (until - time.perf_counter()) / (len(SOLVERS) - at)  # what one leaves, others use
        expected, last = 0.0, sizes[0]
        for n in sizes:
            expected *= (n / last) ** 3
            left = ends - time.perf_counter()
            fitting = int(left / (4 * expected)) if expected else 8  # one to warm up, two at least, and their making
            if fitting < 1:
                break
            count = max(1, min(8, (1 << 20) // (n * n), fitting))
            rows = _random(clock, 2 * n, n)
            matrices = [rows.T @ rows / (2 * n)] * count
            took = clock.median(lambda: inverses(matrices, [0.01] * count, how), left / 4)  # noqa: B023 - called here
            found[how, n] = expected = took / count
            last = n
    return found


def _product_keys(sizes: Iterable[int]) -> list[tuple[Any, ...]]:
    return [
        (dtype, shape, 2.0 * n * n * (n if shape == "square" else max(_ROWS, (TALL + 1) * n)))
        for dtype in DTYPES
        for shape in ("tall", "square")
        for n in sizes
    ]


def _measure_products(clock: _Clock, sizes: Sequence[int], limit_s: float) -> dict[tuple[Any, ...], float]:
    found: dict[tuple[Any, ...], float] = {}
    keys = _product_keys(sizes)
    left = {(dtype, shape): limit_s / (2 * len(DTYPES)) for dtype, shape, _ in keys}
    rate: dict[tuple[str, str], float] = {}
    for (dtype, shape, flops), n in zip(keys, list(sizes) * (2 * len(DTYPES)), strict=True):
        if flops * rate.get((dtype, shape), 0.0) * 4 > left[dtype, shape]:
            continue
        rows = _random(clock, n if shape == "square" else round(flops / (2 * n * n)), n, dtype=getattr(torch, dtype))
        begin = time.perf_counter()
        took = clock.median(lambda: rows.T @ rows, left[dtype, shape] / 4)  # noqa: B023 - called here
        found[dtype, shape, flops] = took
        rate[dtype, shape] = took / flops
        left[dtype, shape] -= time.perf_counter() - begin
    return found


def _slowest(
    found: dict[tuple[Any, ...], float],
    keys: Sequence[tuple[Any, ...]],
    clock: _Clock,
    group: dist.ProcessGroup | None,
) -> dict[tuple[Any, ...], float]:
    """Over all ranks; what some ranks had no time for is what the others found."""
    times = torch.tensor([found.get(key, 0.0) for key in keys], dtype=torch.float64).to(clock.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return {key: took for key, took in zip(keys, times.tolist(), strict=True) if took > 0}


def _measure_collectives(
    clock: _Clock, group: dist.ProcessGroup | None, limit_s: float
) -> dict[str, tuple[float, float]]:
    """All ranks do the same: every decision is made on the time of the slowest."""
    world = dist.get_world_size(group)
    found = {}
    for kind in COLLECTIVES:
        points: list[tuple[float, float]] = []
        spent = 0.0
        for size in MESSAGE_BYTES:
            if points and spent + 4 * points[-1][1] * size / points[-1][0] > limit_s / len(COLLECTIVES):
                break
            work = _collective(kind, size // (4 * world) * world, clock, group)
            work()
            took = [clock.once(work) for _ in range(_REPETITIONS if spent < limit_s / 16 else 2)]
            agreed = torch.tensor([statistics.median(took), spent + sum(took)], dtype=torch.float64).to(clock.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
            median, spent = agreed.tolist()
            points.append((size // (4 * world) * world * 4, median))
        found[kind] = latency_and_bandwidth(points)
    return found


def _collective(kind: str, count: int, clock: _Clock, group: dist.ProcessGroup | None) -> Callable[[], object]:
    whole = torch.zeros(count, device=clock.device)
    part = torch.zeros(count // dist.get_world_size(group), device=clock.device)
    source = dist.get_process_group_ranks(group)[0] if group is not None else 0
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, source, group=group),
        "all_gather": lambda: _all_gather(whole, part, group=group),
    }[kind]


def latency_and_bandwidth(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line latency + bytes / bandwidth through (bytes, seconds) with the least relative error."""
    if len(points) == 1:
        return points[0][1] / 2, 2 * points[0][0] / points[0][1]
    # Least squares of 1 = (latency + slope * bytes) / seconds, in two unknowns.
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    scale = aa * bb - ab * ab
    latency, slope = ((bb * a - ab * b) / scale, (aa * b - ab * a) / scale) if scale > 0 else (0.0, b / bb)
    if slope <= 0:  # noise: the largest message says at least how much goes through
        slope = points[-1][1] / points[-1][0]
    return max(0.0, latency), 1 / slope


def _curves(found: Mapping[tuple[Any, ...], float]) -> dict[str, Curve]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for (key, size), took in sorted(found.items()):
        curves.setdefault(key, []).append((size, max(took, 1e-9)))
    return {key: tuple(points) for key, points in curves.items()}
