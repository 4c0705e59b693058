"""Trains a small model with `diamond.train`, as a task at a site does. A program of its own; each step is a line.

python trained.py LEDGER UNTIL STEP_S    writes LEDGER.<rank>; a step takes STEP_S seconds longer than it computes
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diamond.train as dt

SAMPLES = 211  # a prime: no batch size divides it
BATCH = 16


class Noisy(Dataset[Any]):
    """What a sample is depends on the dice, too."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values + 0.1 * torch.rand(8), values.sum()


def main() -> None:
    ledger, until, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    loader: Any = DataLoader(Noisy(), batch_size=BATCH, shuffle=True)
    with dt.run(seed=3) as run:
        model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
        with open(f"{ledger}.{run.rank}", "a") as lines:
            for index, values, target in run.steps(loader, until=until):
                time.sleep(step_s)
                loss = ((model(values).squeeze(1) - target) ** 2).mean()
                run.backward(loss)
                run.step()
                run.log(loss=loss)
                line = {
                    "step": run.step_number,
                    "loss": float(loss.detach()).hex(),
                    "epoch": loader.epoch,
                    "samples": index.tolist(),
                    "job": os.environ.get("DIAMOND_JOB_ID", ""),
                    "node": os.environ.get("SLURMD_NODENAME", ""),
                    "at": time.time(),
                }
                lines.write(json.dumps(line) + "\n")
                lines.flush()


if __name__ == "__main__":
    main()
