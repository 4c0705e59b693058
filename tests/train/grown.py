"""Trains a small model on several ranks and notes every piece of every step. A program of its own: ranks are forked.

Asked line by line (served.py): {"folder": …, "world": 2, "until": 10, "run": {…}, "loader": {…}}
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import diamond.train as dt
import diamond.train.loop.running  # noqa: F401 - here, so that no rank has to
from tests.train.forked import fork_ranks, wait_for

# What torch.compile imports when it is used: here, once it is, so that no rank has to.
COMPILING = ("torch._inductor.compile_fx", "torch._inductor.codecache", "torch.utils.cpp_extension")


class Noted(torch.optim.SGD):
    """Keeps what its learning rate really was."""

    rate = 0.0

    def step(self, closure: Any = None) -> Any:
        self.rate = float(self.param_groups[0]["lr"])
        return super().step(closure)


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Any:
        return (self._data[at] for at in range(len(self._data)))


def data(samples: int) -> TensorDataset:
    dice = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 6, generator=dice)
    return TensorDataset(torch.arange(samples), inputs, inputs.sum(1) + inputs[:, 0] * inputs[:, 1])


def train(given: dict[str, Any]) -> dict[str, Any]:
    """Each piece is a line: step, epoch, samples that count, learning rate of the step, its factor."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = Noted(model.parameters(), lr=0.02, momentum=0.5)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5) if given.get("scheduler") else None
    dataset: Any = data(given.get("samples", 103))
    loader: Any = DataLoader(
        Stream(dataset) if given.get("stream") else dataset, **{"batch_size": 4, **given.get("loader", {})}
    )
    pieces: list[Any] = []
    with dt.run(checkpoints=Path(given["folder"]), seed=3, **given.get("run", {})) as run:
        things = [model, optimizer, loader, *([scheduler] if scheduler else [])]
        model, optimizer, loader, *_ = run.prepare(*things)
        ends = {name: given[name] for name in ("until", "until_samples") if name in given}
        for index, values, targets in run.steps(loader, **ends):
            piece = run._in_loop("test")
            epoch = loader.epoch
            loss = ((model(values).squeeze(1) - targets) ** 2).mean()
            run.backward(loss)
            run.step()
            counted = index.tolist() if piece.weight else []
            pieces.append(
                [run.step_number, epoch, counted, optimizer.rate, run.lr_scale, piece.is_last, float(loss.detach())]
            )
        named = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
        weights = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
            for name, value in named.items()
        }
        compiled = any(getattr(one, "_compiled_call_impl", None) is not None for one in model.modules())
        return {
            "pieces": pieces, "weights": weights, "samples": run.samples, "steps": run.step_number,
            "lr": float(optimizer.param_groups[0]["lr"]), "batch": loader.global_batch, "compiled": compiled,
        }  # fmt: skip


def one_job(given: dict[str, Any]) -> dict[str, Any]:
    """On all its ranks, each a process."""
    world = given.get("world", 1)
    folder = Path(given["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "said").unlink(missing_ok=True)

    def work(rank: int) -> None:
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(said, 2)
        (folder / f"told-{rank}").write_text(json.dumps(train(given)))

    codes = wait_for(fork_ranks(world, work, **given.get("env", {})))
    told = [] if any(codes) else [json.loads((folder / f"told-{rank}").read_text()) for rank in range(world)]
    return {"told": told, "said": (folder / "said").read_text()}


def main() -> None:
    for name in ("DIAMOND_GLOBAL_BATCH", "DIAMOND_CONTINUE_FILE", "SLURM_JOB_END_TIME"):
        os.environ.pop(name, None)
    for line in sys.stdin:
        given = json.loads(line)
        if given.get("run", {}).get("compile") and "env" not in given:
            for name in COMPILING:
                importlib.import_module(name)
        print(json.dumps(one_job(given)), flush=True)


if __name__ == "__main__":
    main()
