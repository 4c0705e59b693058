"""Trains a model whose gradient's noise is known, on one or several ranks, and prints what the run measured. A program
of its own, as ranks are forked.

Asked line by line (served.py): {"folder": …, "world": 2, "until": 10, "env": {…}, "batch_size": 8, "run": {…}}

The loss of a sample x is w·x, so its gradient is x itself, whatever w is: drawn with mean `MEAN` and variance 1 in each
of `WIDTH` coordinates. So |G|² and tr(S) are what `expected` says.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diamond.train as dt
from tests.train.forked import fork_ranks, wait_for

WIDTH, SAMPLES, MEAN = 256, 40_000, 0.125
# What is imported only when it is used: here, so that no rank has to.
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.tensor", "diamond.train.loop.running")


@functools.cache
def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7)) + MEAN


def expected() -> tuple[float, float]:
    return WIDTH * MEAN**2, float(WIDTH)


class Dot(nn.Module):
    """In two parameters of unequal size, which may be two groups of the optimizer. The first half has all the noise
    that its share of coordinates brings; `flat` has a gradient that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = nn.Parameter(torch.zeros(WIDTH))
        self.flat = nn.Parameter(torch.zeros(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        shown: torch.Tensor = values @ self.noisy
        return shown + 0.0 * self.flat.sum()


def train(folder: Path, until: int, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    model: Any = Dot()
    groups = [{"params": [model.noisy]}, {"params": [model.flat]}]
    optimizer: Any = torch.optim.SGD(groups, lr=given.get("lr", 0.0))
    loader: Any = DataLoader(TensorDataset(samples()), batch_size=given.get("batch_size", 16), shuffle=True)
    with dt.run(checkpoints=folder / "checkpoints", **given.get("run", {})) as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        weights = []
        for (values,) in run.steps(loader, until=until):
            if run.rank == given.get("slow_rank"):
                time.sleep(given["slow_s"])
            loss = model(values).mean()
            run.backward(loss)
            weights.append(model.module.noisy.grad.clone() if run.world > 1 and given.get("grads") else None)
            run.step()
    if given.get("grads"):
        torch.save(weights, folder / f"grads-{run.rank}.pt")
    if run.is_main:
        (folder / "measures.json").write_text(json.dumps(run.measures))
        (folder / "noise").write_text(repr(run._noise_scale()))
    else:
        (folder / f"noise-{run.rank}").write_text(repr(run._noise_scale()))


def one_job(folder: Path, world: int, until: int, env: dict[str, str], given: dict[str, Any]) -> bool:
    """Whether all its ranks came to their end."""
    folder.mkdir(parents=True, exist_ok=True)
    return not any(wait_for(fork_ranks(world, lambda rank: train(folder, until, given), **env)))


def main() -> None:
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    samples()
    for line in sys.stdin:
        given = json.loads(line)
        place = Path(given.pop("folder")), given.pop("world"), given.pop("until"), given.pop("env")
        print(json.dumps({"finished": one_job(*place, given)}), flush=True)


if __name__ == "__main__":
    main()
