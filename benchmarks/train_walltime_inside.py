"""What trains inside the site for `train_walltime.py`: with `diamond.train`, or as submitit's documentation has it.

    python train_walltime_inside.py diamond LEDGER UNTIL STEP_S              trains
    python train_walltime_inside.py submitit LEDGER UNTIL STEP_S AT_SIGNAL   hands the training to submitit

Each step is a line of the ledger, and so is the end of each process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

SAVE_EVERY_S = 10.0  # a job that Slurm warns early trains for 25 s; with 30 s between two saves it would stand still
LIMIT_MIN = 1
WARNING_S = 6  # what Diamond asks of Slurm for a job of a minute; submitit's 90 s would be before its beginning


class Ledger:
    """Lines of one process."""

    def __init__(self, path: str) -> None:
        job, turn = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
        self._same = {"life": f"{job}.{turn}", "started": float(os.environ.get("SLURM_JOB_START_TIME", "0"))}
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the process

    def note(self, **what: Any) -> None:
        self._file.write(json.dumps({**what, **self._same, "at": time.time()}) + "\n")

    @contextlib.contextmanager
    def until_the_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.note(end=True)


def parts() -> tuple[Any, Any, Any]:
    """Model, optimizer and loader: the same for everybody."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(1)
    torch.set_num_threads(1)
    values = torch.randn(1000, 8)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, DataLoader(TensorDataset(values, values.sum(1)), batch_size=16, shuffle=True)


def with_diamond(ledger: str, until: int, step_s: float) -> None:
    import diamond.train as dt

    book = Ledger(ledger)
    model, optimizer, loader = parts()
    with book.until_the_end(), dt.run() as run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for values, target in run.steps(loader, until=until):
            time.sleep(step_s)
            loss = ((model(values).squeeze(1) - target) ** 2).mean()
            run.backward(loss)
            run.step()
            run.log(loss=loss)
            book.note(step=run.step_number)


class Training:
    """A callable with `checkpoint`, which submitit calls in the handler of its signal before it requeues the job."""

    def __init__(self, at_signal: bool) -> None:
        self.at_signal = at_signal
        self.model: Any = None
        self.optimizer: Any = None
        self.step = 0

    def __call__(self, ledger: str, until: int, step_s: float) -> None:
        import torch

        book, path = Ledger(ledger), f"{ledger}.pt"
        self.model, self.optimizer, loader = parts()
        if os.path.exists(path):
            kept = torch.load(path)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.step = kept["step"]
        saved = time.monotonic()
        with book.until_the_end():
            while self.step < until:
                for values, target in loader:
                    time.sleep(step_s)
                    self.optimizer.zero_grad()
                    ((self.model(values).squeeze(1) - target) ** 2).mean().backward()
                    self.optimizer.step()
                    self.step += 1
                    book.note(step=self.step)
                    if time.monotonic() - saved >= SAVE_EVERY_S:
                        self.save(path)
                        saved = time.monotonic()
                    if self.step >= until:
                        break

    def save(self, path: str) -> None:
        import torch

        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)

    def checkpoint(self, ledger: str, until: int, step_s: float) -> Any:
        if self.at_signal:
            self.save(f"{ledger}.pt")
        helpers = importlib.import_module("submitit.helpers")
        return helpers.DelayedSubmission(Training(self.at_signal), ledger, until, step_s)


def with_submitit(ledger: str, until: int, step_s: float, at_signal: bool) -> None:
    submitit = importlib.import_module("submitit")
    here = importlib.import_module("train_walltime_inside")  # by its name, as the job will import it
    executor = submitit.SlurmExecutor(folder=f"{ledger}.submitit", max_num_timeout=100)
    executor.update_parameters(time=LIMIT_MIN, partition="debug", signal_delay_s=WARNING_S, cpus_per_task=1)
    executor.submit(here.Training(at_signal), ledger, until, step_s)
    print(submitit.__version__)


if __name__ == "__main__":
    kind, at, last, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    if kind == "diamond":
        with_diamond(at, last, pause)
    else:
        with_submitit(at, last, pause, sys.argv[5] == "1")
