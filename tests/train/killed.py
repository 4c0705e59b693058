"""Trains a small model over and over again, killing its ranks at random moments. A program of its own: ranks are forked
from a process that has torch loaded already, so that fifty lives take a minute.

    python killed.py FOLDER WORLD UNTIL KILLS SEED    prints what happened as JSON
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diamond.train as dt

SAMPLES = 103  # a prime: no batch size divides it


class Noisy(Dataset[Any]):
    """What a sample is depends on the dice, too."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values + 0.1 * torch.rand(8), values.sum()


def train(folder: Path, until: int, *, delay_s: float = 0.0) -> None:
    """Each step of each rank is a line: step, loss to the last bit, epoch, samples."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    loader: Any = DataLoader(Noisy(), batch_size=8, shuffle=True)
    kind = os.environ.get("PARALLEL", "auto")
    with dt.run(checkpoints=folder / "checkpoints", seed=3, save_every_s=0.0, parallel=kind) as run:
        model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
        with (folder / f"rank-{run.rank}").open("a") as lines:
            for index, values, target in run.steps(loader, until=until):
                loss = ((model(values).squeeze(1) - target) ** 2).mean()
                run.backward(loss)
                run.step()
                run.state["seen"] = run.state.get("seen", 0) + 1
                line = [run.step_number, float(loss.detach()).hex(), loader.epoch, index.tolist(), run.state["seen"]]
                lines.write(json.dumps(line) + "\n")
                lines.flush()
                time.sleep(delay_s)


def one_life(folder: Path, world: int, until: int, kill_after_s: float | None, dice: random.Random) -> bool:
    """Whether training came to its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), DIAMOND_TRAIN_QUIET="1",
            )  # fmt: skip
            code = 1
            try:
                train(folder, until, delay_s=0.002)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        ranks.append(pid)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        # One rank, or all at once, as a node that loses power.
        for pid in ranks if dice.random() < 0.5 else [dice.choice(ranks)]:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
    codes = [os.waitpid(pid, 0)[1] for pid in ranks]
    return all(code == 0 for code in codes)


def main() -> None:
    folder, world, until, kills, seed = Path(sys.argv[1]), *(int(each) for each in sys.argv[2:6])
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    ended = []
    for _ in range(kills):
        ended.append(one_life(folder, world, until, dice.uniform(0.05, 1.2), dice))
    finished = one_life(folder, world, until, None, dice)
    print(json.dumps({"killed": ended.count(False), "finished": finished}))


if __name__ == "__main__":
    main()
