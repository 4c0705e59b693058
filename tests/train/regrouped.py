"""A training run for the tests of `regroup`: says every step in a file, and misbehaves where it is told to.

regrouped.py FOLDER STEPS [fail|hang|shell]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diamond.train as dt

folder, until = Path(sys.argv[1]), int(sys.argv[2])
mischief = sys.argv[3] if len(sys.argv) > 3 else ""
STEP_S = float(os.environ.get("STEP_S", "0.02"))


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """512 samples, each of which is its own number."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(at)
        return torch.randn(8, generator=made), torch.tensor(at)


SAVE_S = float(os.environ.get("SAVE_S", "0.3"))
HANG_S = 3.0 if "hang" in mischief else 0
with dt.run(checkpoints=folder / "checkpoints", save_every_s=SAVE_S, hang_after_s=HANG_S) as run:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    model, optimizer, loader = run.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(Numbers(), batch_size=8, shuffle=True)
    )
    for done, (inputs, numbers) in enumerate(run.steps(loader, until=until)):
        if mischief == "fail" and run.step_number == 10 and run.rank == 1:
            raise ValueError("the user's own mistake")
        hangs = mischief == "hang" or (mischief == "hang-once" and "DIAMOND_RESTARTS" not in os.environ)
        if hangs and run.step_number >= 40 and done > 5 and run.rank == run.world - 1:
            time.sleep(1000)
        loss = model(inputs).square().mean()
        run.backward(loss)
        run.step()
        time.sleep(STEP_S)
        with (folder / f"rank{run.rank}").open("a") as file:
            place = f"{run.step_number} {run.world} {os.getpid()} {os.environ.get('DIAMOND_GENERATION', 0)}"
            file.write(f"{time.time():.3f} {place} {loss.item():.9g} {numbers.tolist()}\n")
