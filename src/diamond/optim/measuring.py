"""Measures what this machine does in which time, in a few seconds.

Every rank of a group gets the same answer (the slowest rank's), so that all of them plan alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diamond.optim.errors import OptimError
from diamond.optim.hardware import COLLECTIVES, DTYPES, SOLVERS, TALL, Curve, Hardware
from diamond.optim.products import exactly
from diamond.optim.solvers import inverses

MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
_ROWS = 4096  # of the tall matrices that are measured
_REPETITIONS = 5
_SMALL = 64  # of the matrices that show that libraries are there
_STARTS = 200  # small operations at once: fewer than a GPU's queue holds, so that starting them is all the host does
_COPIED_BYTES = {"cuda": 256 << 20}  # what fits into a cache, or takes no longer than to start it, would tell nothing
_COPIED_BYTES_ELSEWHERE = 16 << 20

# PyTorch 2.13 has new names for them and warns of the old ones.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
        seconds: half for solvers, a quarter each for products and collectives; a few milliseconds more for small
            operations. What would take longer is left out, and estimated from what was measured; the smallest size is
            measured in any case.
        sizes: the n of solvers and products.
    """
    if not (seconds > 0 and math.isfinite(seconds)):
        raise OptimError(f"seconds={seconds} is no time to measure: give more than 0, such as 3.0")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted = tuple(sorted(set(sizes or ((64, 256, 512, 1024, 2048, 4096) if place.type == "cuda" else (32, 128, 512)))))
    if wanted[0] < 1:
        raise OptimError(f"sizes={tuple(wanted)} holds no size of a matrix: give numbers of 1 or more")
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    clock = Clock(place)
    with torch.no_grad(), torch.autocast(place.type, enabled=False):
        _load(clock)
        solvers = _measure_solvers(clock, wanted, seconds / 2)
        products = _measure_products(clock, wanted, seconds / 4)
        small = _measure_small(clock)
        collectives: dict[str, tuple[float, float]] = {}
        if together:
            solvers = _slowest(solvers, [(how, n) for how in SOLVERS for n in wanted], clock, group)
            products = _slowest(products, _product_keys(wanted), clock, group)
            small = _slowest(small, [("start",), ("byte",)], clock, group)
            collectives = _measure_collectives(clock, group, seconds / 4)
    return Hardware(
        device=torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
        world=dist.get_world_size(group) if together else 1,
        solvers=_curves(solvers),
        products=_curves({(f"{dtype}:{shape}", flops): took for (dtype, shape, flops), took in products.items()}),
        start_s=small["start",],
        bytes_s=1 / small["byte",],
        collectives=collectives,
        measured=True,
    )


class Clock:
    """Times what a device does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def once(self, work: Callable[[], object]) -> float:
        self.settle()
        begin = time.perf_counter()
        work()
        self.settle()
        return time.perf_counter() - begin

    def median(self, work: Callable[[], object], limit_s: float) -> float:
        """After one to warm up, and at least twice."""
        self.once(work)
        until = time.perf_counter() + limit_s
        took = [self.once(work), self.once(work)]
        while len(took) < _REPETITIONS and time.perf_counter() < until:
            took.append(self.once(work))
        return statistics.median(took)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _random(clock: Clock, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    dice = torch.Generator(clock.device).manual_seed(1)
    return torch.randn(*shape, generator=dice, device=clock.device).to(dtype)


def _load(clock: Clock) -> None:
    """Solves and multiplies once, one matrix and several: libraries are loaded at their first use, for up to seconds,
    which would leave no time to measure any but the smallest sizes."""
    for count in (1, 2):
        for how in SOLVERS:
            inverses([torch.eye(_SMALL, device=clock.device)] * count, [0.01] * count, how)
        rows = torch.ones(count, _SMALL, _SMALL, device=clock.device)
        torch.bmm(rows, rows)
    clock.settle()


def _measure_solvers(clock: Clock, sizes: Sequence[int], limit_s: float) -> dict[tuple[Any, ...], float]:
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
            count = max(1, min(8, (1 << (23 if clock.device.type == "cuda" else 20)) // (n * n), fitting))
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


def _measure_products(clock: Clock, sizes: Sequence[int], limit_s: float) -> dict[tuple[Any, ...], float]:
    found: dict[tuple[Any, ...], float] = {}
    keys = _product_keys(sizes)
    left = {(dtype, shape): limit_s / (2 * len(DTYPES)) for dtype, shape, _ in keys}
    rate: dict[tuple[str, str], float] = {}
    for (dtype, shape, flops), n in zip(keys, list(sizes) * (2 * len(DTYPES)), strict=True):
        if flops * rate.get((dtype, shape), 0.0) * 4 > left[dtype, shape]:
            continue
        rows = _random(clock, n if shape == "square" else round(flops / (2 * n * n)), n, dtype=getattr(torch, dtype))
        begin = time.perf_counter()
        with exactly(clock.device) if shape == "square" else nullcontext():  # as what they stand for is computed
            took = clock.median(lambda: rows.T @ rows, left[dtype, shape] / 4)  # noqa: B023 - called here
        found[dtype, shape, flops] = took
        rate[dtype, shape] = took / flops
        left[dtype, shape] -= time.perf_counter() - begin
    return found


def _measure_small(clock: Clock) -> dict[tuple[Any, ...], float]:
    """Seconds of the host to start an operation on one number, and seconds of a byte that is read or written."""
    one = torch.zeros(1, device=clock.device)
    took = []
    for _ in range(_REPETITIONS + 1):
        clock.settle()
        begin = time.perf_counter()
        for _ in range(_STARTS):
            one.add_(1.0)
        took.append((time.perf_counter() - begin) / _STARTS)
    size = _COPIED_BYTES.get(clock.device.type, _COPIED_BYTES_ELSEWHERE)
    many = torch.zeros(size // 4, device=clock.device)
    other = torch.ones_like(many)
    byte = clock.median(lambda: many.copy_(other), 0.1) / (2 * size)
    return {("start",): min(took[1:]), ("byte",): byte}  # what else runs here only makes it longer


def _slowest(
    found: dict[tuple[Any, ...], float],
    keys: Sequence[tuple[Any, ...]],
    clock: Clock,
    group: dist.ProcessGroup | None,
) -> dict[tuple[Any, ...], float]:
    """Over all ranks; what some ranks had no time for is what the others found."""
    times = torch.tensor([found.get(key, 0.0) for key in keys], dtype=torch.float64).to(clock.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return {key: took for key, took in zip(keys, times.tolist(), strict=True) if took > 0}


def _measure_collectives(
    clock: Clock, group: dist.ProcessGroup | None, limit_s: float
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


def _collective(kind: str, count: int, clock: Clock, group: dist.ProcessGroup | None) -> Callable[[], object]:
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
