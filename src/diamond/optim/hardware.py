"""What a machine does in which time: solvers, products of matrices, small operations and collectives.

Owns the curves through what measuring.py measured, and typical figures for where nothing was. What they are used for
is the planner's matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from diamond.optim.errors import OptimError

SOLVERS = ("cholesky", "newton-schulz", "eigen")
COLLECTIVES = ("all_reduce", "reduce_scatter", "broadcast", "all_gather")
DTYPES = ("float32", "bfloat16")
TALL = 4  # a product that sums over more than so many times its sides is one of statistics, not of preconditioning
_VERSION = 2

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
        start_s: of the host to start one small operation; a GPU works meanwhile, a CPU does not.
        bytes_s: a second, that operations on numbers one by one read and write together.
        collectives: for each kind its latency and its bytes a second, the bytes being those of the whole tensor.
        measured: here and now; otherwise typical figures.
    """

    device: str
    world: int = 1
    solvers: Mapping[str, Curve]
    products: Mapping[str, Curve]
    start_s: float = 5e-6
    bytes_s: float = 1e10
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    measured: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.device.startswith("cpu")

    def solve_s(self, n: int, how: str = "auto") -> float:
        """Of one n x n matrix among many; "auto" is Cholesky, or Newton-Schulz where that was measured to be faster."""
        return float(self.solves_s(_numbers([n]), how))

    def solves_s(self, n: Tensor, how: str = "auto") -> Tensor:
        """The same for many n at once."""
        if how != "auto":
            return _on_curve(self._curve(self.solvers, how, "how"), n, grows=3.0)
        found, most = self.solves_s(n, "cholesky"), self.newton_schulz_up_to
        return torch.where(n <= most, self.solves_s(n, "newton-schulz"), found) if most else found

    def gemm_s(self, m: int, n: int, k: int, dtype: str | torch.dtype = "float32") -> float:
        """Of an m x k matrix times a k x n one."""
        return float(self.gemms_s(_numbers([m]), _numbers([n]), _numbers([k]), dtype))

    def gemms_s(
        self, m: Tensor, n: Tensor, k: Tensor, dtype: str | torch.dtype = "float32", batch: Tensor | None = None
    ) -> Tensor:
        """The same for many products; `batch` says of each with how many alike it is computed at once.

        A batch fills a GPU as one large product does; a CPU takes one after another.
        """
        name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
        square, tall = (self._curve(self.products, f"{name}:{shape}", "dtype") for shape in ("square", "tall"))
        high = (k > TALL * m) & (k > TALL * n)
        least = torch.where(high, tall[0][0], square[0][0])
        flops = 2.0 * m * n * k
        at = flops
        if batch is not None:
            at = torch.maximum(flops, torch.minimum(flops * batch, least)) if self.is_cpu else flops * batch
        found = torch.where(high, _on_curve(tall, at), _on_curve(square, at)) * (flops / at)
        return torch.where(flops > 0, found, 0.0)

    def touch_s(self, numbers: Tensor | float, passes: float = 1.0) -> Any:
        """Of operations on so many numbers of single precision, each read or written so often."""
        return numbers * (passes * 4.0 / self.bytes_s)

    def with_starts(self, busy_s: float, starts: float) -> float:
        """Of so many operations that keep the device busy so long: a GPU is, while the host starts the next ones."""
        starting_s = starts * self.start_s
        return busy_s + starting_s if self.is_cpu else max(busy_s, starting_s)

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
        if not self.is_cpu:
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


def _numbers(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device="cpu")


def _on_curve(curve: Curve, at: Tensor, *, grows: float = 1.0) -> Tensor:
    """Straight lines between points on logarithmic axes; beyond the last a power law; below the first its own time,
    since there it is the start of the computation that takes it."""
    sizes, seconds = (_numbers(column) for column in zip(*curve, strict=True))
    slopes = torch.cat([seconds.log().diff() / sizes.log().diff(), _numbers([grows])])
    after = torch.searchsorted(sizes, at)
    last = (after - 1).clamp_min(0)
    return torch.where(after == 0, seconds[0], seconds[last] * (at / sizes[last]) ** slopes[last])


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
        start_s=found["start_s"],
        bytes_s=found["bytes_s"],
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
    "start_s": 6e-6,
    "bytes_s": 3.5e12,
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
    "start_s": 2e-6,
    "bytes_s": 1e10,
    "link": (2e-4, 1e9),
}
