"""A training whose nodes are lost: says each batch in a file before it is used, by job, generation and rank.

outlived.py LEDGER UNTIL STEP_S [HOLD]    writes LEDGER.<job>.<generation>.<rank>

At step HOLD it waits until the file LEDGER-go is there.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diamond.train as dt

SAMPLES = 211  # a prime: no batch size divides it
BATCH = 8


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each sample is its own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, generator=torch.Generator().manual_seed(at)), torch.tensor(at)


def main() -> None:
    ledger, until, step_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    hold = int(sys.argv[4]) if len(sys.argv) > 4 else None
    torch.set_num_threads(1)
    with dt.run(save_every_s=1.0) as run:
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbers(), batch_size=BATCH, shuffle=True))
        job, generation = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("DIAMOND_GENERATION", "0"))
        with open(f"{ledger}.{job}.{generation}.{run.rank}", "a") as lines:
            for inputs, numbers in run.steps(loader, until=until):
                line = {
                    "step": run.step_number + 1,
                    "epoch": loader.epoch,
                    "samples": numbers.tolist(),
                    "generation": [job, generation],
                    "node": os.environ.get("SLURMD_NODENAME", ""),
                    "at": time.time(),
                }
                lines.write(json.dumps(line) + "\n")
                lines.flush()
                time.sleep(step_s)
                while run.step_number == hold and not os.path.exists(f"{ledger}-go"):
                    time.sleep(0.1)
                run.backward(model(inputs).square().mean())
                run.step()


if __name__ == "__main__":
    main()
