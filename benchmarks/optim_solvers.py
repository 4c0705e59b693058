"""How long inverses of damped factors take, by solver and size, alone and in batches; and computed aside of training.

    [PYTHONPATH=src] python -m benchmarks.optim_solvers [--quick] [--check]

Run it where the accelerator is; on a processor the largest sizes are left out. Matrices are factors of a layer as it
meets them: eigenvalues that fall by a factor of ten thousand, damped. Each solver is called as K-FAC calls it, so what
does not converge is counted with its way out by Cholesky. torch.linalg.inv is the peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.harness import Bench, median, options
from benchmarks.optim_overhead import seconds, synchronize
from diamond.optim import KFAC
from diamond.optim.solvers import inverses

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
HOW = ("cholesky", "newton-schulz", "eigen")
DAMPING = 1e-3
SINGLE = (256, 512, 1024, 2048, 4096, 8192) if CUDA else (256, 512, 1024, 2048)
BATCHES = ((256, 128), (64, 512), (16, 1024)) if CUDA else ((64, 128), (16, 512))
QUICK_SINGLE, QUICK_BATCHES = (128, 256), ((16, 64),)


def factors(number: int, n: int) -> list[Tensor]:
    """Symmetric, with eigenvalues from 1 to 1e-4, evenly in their logarithms: of random bases, each a few reflections
    away from another, for a basis of its own for each would take longer than all solvers."""
    dice = torch.Generator(DEVICE).manual_seed(n)
    values = torch.logspace(0, -4, n, device=DEVICE)
    found = []
    for _ in range(number):
        matrix = torch.diag(values)
        for _ in range(4):
            normal = torch.randn(n, device=DEVICE, generator=dice)
            normal /= normal.norm()
            matrix = matrix - 2 * normal[:, None] * (normal @ matrix)
            matrix = matrix - 2 * (matrix @ normal)[:, None] * normal
        found.append((matrix + matrix.T) / 2)
    return found


def milliseconds(call: Callable[[], Any], times: int) -> list[float]:
    call()
    return [one * 1e3 for one in seconds(call, times)]


def solvers(bench: Bench, number: int, n: int, times: int) -> None:
    matrices = factors(number, n)
    dampings = [DAMPING] * number
    took: dict[str, list[float]] = {}
    notes = []
    for how in HOW:
        took[how] = milliseconds(lambda how=how: inverses(matrices, dampings, how), times)  # type: ignore[misc]
        solved = inverses(matrices, dampings, how)
        held = sum(one.method == how for one in solved)
        notes.append(f"{how}: {held} of {number} without a way out, residual {residual(matrices, solved):.1e}")
    damped = torch.stack(matrices) + DAMPING * torch.eye(n, device=DEVICE)
    took["torch.linalg.inv"] = milliseconds(lambda: torch.linalg.inv(damped), times)
    first, *others = took
    what = f"n={n}" if number == 1 else f"{number} matrices of {n}"
    bench.add(
        f"{what}: {first}", median(took[first]), "ms", "lower", runs=took[first], note="; ".join(notes),
        peer={how: round(median(took[how]), 4) for how in others}, peer_runs={how: took[how] for how in others},
    )  # fmt: skip


def residual(matrices: list[Tensor], solved: list[Any]) -> float:
    """The largest of |1 - (M + damping) X| over |1|."""
    n = len(matrices[0])
    one = torch.eye(n, device=DEVICE)
    products = [(matrix + DAMPING * one) @ found.inverse for matrix, found in zip(matrices, solved, strict=True)]
    return max(float((one - product).norm()) / n**0.5 for product in products)


def aside(bench: Bench, width: int, depth: int, steps: int) -> None:
    """Seconds of training steps with inverses every ten steps, now and aside, in turns."""
    took: dict[str, list[float]] = {"now": [], "aside": []}
    for _ in range(3):
        for way, runs in took.items():
            torch.manual_seed(0)
            layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
            model = nn.Sequential(*layers).to(DEVICE)
            x = torch.randn(256, width, device=DEVICE)
            y = x.roll(1, 1)
            optimizer = KFAC(model, 0.01, inverses=way, factor_every=10, inverse_every=10)

            def step(model: nn.Module = model, optimizer: KFAC = optimizer, x: Tensor = x, y: Tensor = y) -> None:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

            for _ in range(100):  # K-FAC looks often in the beginning
                step()
            synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            synchronize()
            runs.append((time.perf_counter() - began) / steps * 1e3)
    bench.add(
        f"a step of {depth} layers of {width}, inverses aside", median(took["aside"]), "ms", "lower",
        runs=took["aside"], peer={"now": round(median(took["now"]), 4)}, peer_runs={"now": took["now"]},
    )  # fmt: skip


def main() -> int:
    chosen = options(__doc__ or "")
    bench = Bench("optim_solvers_gpu" if CUDA else "optim_solvers_cpu", packages=("torch",))
    if CUDA:
        bench.versions["device"] = torch.cuda.get_device_name()
    for n in QUICK_SINGLE if chosen.quick else SINGLE:
        solvers(bench, 1, n, 3 if chosen.quick or n > 2000 else 7)
    for number, n in QUICK_BATCHES if chosen.quick else BATCHES:
        solvers(bench, number, n, 3 if chosen.quick else 5)
    aside(bench, *(64, 2, 10) if chosen.quick else (1024, 8, 100) if CUDA else (256, 4, 60))
    return bench.finish(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
