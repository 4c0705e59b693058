"""A training of any number of ranks, whose computing is waited for: as many seconds a sample as it is told.

python elastic.py LEDGER STEPS SAMPLE_S    appends the loss of every step to LEDGER

Waiting stands for computing, so that many of them on few cores still get faster with more ranks. All else is real: the
model, its gradients and their exchange, checkpoints, and the losses, which do not depend on how many ranks there were.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diamond.train as dt

BATCH = 64
AT_ONCE = 8  # samples that a rank computes at once


def main() -> None:
    ledger, steps, sample_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    inputs = torch.randn(1024, 16)
    targets = torch.sin(inputs.sum(1, keepdim=True))
    with dt.run(seed=3, batch=BATCH) as run:
        model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        loader: Any = DataLoader(TensorDataset(inputs, targets), batch_size=AT_ONCE, shuffle=True)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        before = run.step_number
        for given, wanted in run.steps(loader, until=steps):
            time.sleep(sample_s * len(given))
            loss = (model(given) - wanted).square().mean()
            run.backward(loss)
            run.step()
            if run.step_number == before:
                continue
            before = run.step_number
            if run.rank == 0:
                line = {"step": before, "at": time.time(), "world": run.world, "loss": float(loss.detach()),
                        "job": os.environ.get("DIAMOND_JOB_ID", "")}  # fmt: skip
                with open(ledger, "a") as lines:
                    lines.write(json.dumps(line) + "\n")
        if run.rank == 0:
            weights = nn.utils.parameters_to_vector(one.detach() for one in model.parameters())
            with open(ledger, "a") as lines:
                lines.write(
                    json.dumps({"done": True, "norm": float(weights.norm()), "sum": float(weights.sum())}) + "\n"
                )


if __name__ == "__main__":
    main()
