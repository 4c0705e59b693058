"""A training that leaves its batch to Diamond, whose gradients are as noisy as they are made.

python growing.py LEDGER SAMPLES BATCH SAMPLE_S    appends a line for every step to LEDGER

The loss of a sample x is w·x, so its gradient is x, whatever w is: something that all have in common, and a coordinate
of its own. So a few gradients tell the noise scale exactly, and it is `NOISE` times the batch. Waiting for `SAMPLE_S`
seconds a sample stands for computing.
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

WIDTH = 20_000
NOISE = 1000


class Apart(Dataset[torch.Tensor]):
    def __init__(self, batch: int) -> None:
        # What b of them have for a gradient has the square WIDTH c^2 + 2 c + 1 / b: the last is noise, the rest is not.
        self._common = ((1 + WIDTH / (NOISE * batch)) ** 0.5 - 1) / WIDTH

    def __len__(self) -> int:
        return WIDTH

    def __getitem__(self, index: int) -> torch.Tensor:
        found = torch.full((WIDTH,), self._common)
        found[index] += 1.0
        return found


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ self.weights


def main() -> None:
    ledger, samples, batch, sample_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    with dt.run(seed=3, batch="grow") as run:
        model: Any = Dot()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader: Any = DataLoader(Apart(batch), batch_size=batch, shuffle=True)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        before = run.samples
        for values in run.steps(loader, until_samples=samples):
            if run.samples != before:
                _note(ledger, run, loader.global_batch)
                before = run.samples
            time.sleep(sample_s * len(values))
            run.backward(model(values).mean())
            run.step()
        _note(ledger, run, loader.global_batch)


def _note(ledger: str, run: Any, batch: int) -> None:
    if run.rank == 0:
        line = {"samples": run.samples, "batch": batch, "world": run.world, "step": run.step_number,
                "wish": os.environ.get("DIAMOND_GLOBAL_BATCH")}  # fmt: skip
        with open(ledger, "a") as lines:
            lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
