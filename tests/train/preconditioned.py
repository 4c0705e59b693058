"""Trains small models with K-FAC made before anything is known of ranks, over and over again on two of them. A program
of its own: ranks are forked from a process that has torch loaded already.

    python -m tests.train.preconditioned FOLDER:KIND:UNTIL ...

writes FOLDER/UNTIL-RANK.json for each: the losses of that life, and who owns which layer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch loads it sooner or later: once here rather than in every rank
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import diamond.train as dt
import diamond.train.loop.running  # noqa: F401 - loaded before ranks are forked
from diamond.optim import KFAC
from tests.train.forked import fork_ranks, wait_for

WORLD = 2


def train(folder: Path, kind: str, until: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, inputs[:, :2].sum(1, keepdim=True).tanh())
    model: Any = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.LayerNorm(15), nn.Linear(15, 1))
    model.append(Shift())
    optimizer: Any = KFAC(model, curvature="ggn-exact", damping=1e-3, factor_every=3, inverse_every=4)
    schedule: Any = LambdaLR(optimizer, lambda step: 1 - step / 40)
    loader: Any = DataLoader(data, batch_size=8, shuffle=True)
    losses = []
    with dt.run(checkpoints=folder / "checkpoints", seed=3, parallel=kind) as run:
        model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, loader)
        for given, wanted in run.steps(loader, until=until):
            loss = nn.functional.mse_loss(model(given), wanted)
            run.backward(loss)
            run.step()
            losses.append(loss.item())
    told = {"losses": losses, "owners": optimizer.crew.owners}
    (folder / f"{until}-{run.rank}.json").write_text(json.dumps(told))


class Shift(nn.Module):
    """No layer that K-FAC knows: the fallback's."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def live(scene: str) -> bool:
    """Whether all ranks came to their end."""
    folder, kind, until = scene.split(":")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return not any(wait_for(fork_ranks(WORLD, lambda rank: train(Path(folder), kind, int(until)))))


if __name__ == "__main__":
    raise SystemExit(0 if all(live(scene) for scene in sys.argv[1:]) else 1)
