"""Trains a small model over and over again, killing its ranks at random moments. A program of its own: ranks are forked
from a process that has torch loaded already, so that fifty lives take a minute.

A kill is aimed: it waits for a step drawn beforehand, then a random moment longer, and the run waits for it a few steps
later, so that it comes neither before the training nor after its end. Some more, which do not count, come while
the ranks begin.

Asked line by line (served.py): {"folder": …, "world": 2, "until": 100, "kills": 5, "seed": 1, "parallel": "auto"}
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diamond.train as dt
from tests.train.forked import fork_ranks, has_ended, wait_for

SAMPLES = 103  # a prime: no batch size divides it
PATIENCE_S = 60.0  # for a life to come as far as its kill
HOLD_STEPS = 5  # from the step at which a kill is due to the one where the run waits for it
EARLY = 0.15  # of the lives, killed while they begin
# What torch and Diamond import only when they are used. A life that has to do so spends most of its time on it.
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.tensor", "diamond.train.loop.running")


class Noisy(Dataset[Any]):
    """What a sample is depends on the dice, too."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values + 0.1 * torch.rand(8), values.sum()


class Aim(NamedTuple):
    """When to kill: once `step` is done, or in any case so long after the start, and then a moment later."""

    step: int
    after_s: float
    moment_s: float


def train(folder: Path, until: int, *, delay_s: float = 0.0, after_step: Callable[[int], None]) -> None:
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
                after_step(run.step_number)
                time.sleep(delay_s)


class Life:
    """The ranks of one start, and how far the first of them has come."""

    def __init__(self, folder: Path, world: int, until: int, hold_at: int | None) -> None:
        self._hold_at = hold_at
        self._reached = mmap.mmap(-1, 8)  # shared with the ranks

        def work(rank: int) -> None:
            train(folder, until, delay_s=0.002, after_step=self._note if rank == 0 else lambda step: None)

        self.ranks = fork_ranks(world, work)

    def _note(self, step: int) -> None:
        self._reached[:8] = step.to_bytes(8, "little")
        if self._hold_at is not None and step >= self._hold_at:
            time.sleep(2 * PATIENCE_S)  # until it is killed

    @property
    def reached(self) -> int:
        """The last step done in this life; 0 before the first."""
        return int.from_bytes(self._reached[:8], "little")

    def kill(self, aim: Aim, dice: random.Random) -> bool:
        """Whether it was training when it was killed."""
        ends = time.monotonic() + aim.after_s
        while self.reached < aim.step and time.monotonic() < ends and not any(map(has_ended, self.ranks)):
            time.sleep(0.0005)
        time.sleep(aim.moment_s)
        # One rank, or all at once, as a node that loses power.
        shot = self.ranks if dice.random() < 0.5 else [dice.choice(self.ranks)]
        was_training = self.reached >= aim.step and not any(map(has_ended, self.ranks))
        for pid in shot:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
        ended = dict(zip(self.ranks, self.wait(), strict=True))
        return was_training and all(ended[pid] == -signal.SIGKILL for pid in shot)

    def wait(self) -> list[int]:
        """How each rank ended; negative: of a signal."""
        return wait_for(self.ranks)


def one_run(folder: Path, world: int, until: int, kills: int, seed: int) -> dict[str, Any]:
    """All its lives, and what happened."""
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    killed = lives = 0
    room = until // (kills + 1)  # steps for each kill: a run that comes further may be at its end too soon
    while killed < kills and lives < 3 * kills:
        lives += 1
        step = killed * room + 1 + dice.randrange(room - HOLD_STEPS)
        early = dice.random() < EARLY
        aim = Aim(step, dice.uniform(0.0, 0.3) if early else PATIENCE_S, dice.uniform(0.0, 0.02))
        killed += Life(folder, world, until, hold_at=step + HOLD_STEPS - 1).kill(aim, dice)
    finished = not any(Life(folder, world, until, hold_at=None).wait())
    return {"killed": killed, "lives": lives, "finished": finished}


def main() -> None:
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        given = json.loads(line)
        os.environ["PARALLEL"] = given.pop("parallel")
        print(json.dumps(one_run(Path(given.pop("folder")), **given)), flush=True)


if __name__ == "__main__":
    main()
