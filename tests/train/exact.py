"""Trains a small model with what makes going on hard, and the same without Diamond. A program of its own: ranks are
forked from a process that has torch loaded already, so that a life takes half a second.

Asked line by line (served.py): {"folder": …, "world": 3, "until": 12, "lives": [7, null], "plain": true, …}

A life is the step in whose turn every rank kills itself, or null: to the end. With `plain`, the batches that each rank
was given are trained on once more, by a loop that knows nothing of Diamond. `Case` has the rest.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

import diamond.train as dt
from tests.train.forked import fork_ranks, wait_for

SAMPLES, BATCH, SEED = 72, 4, 3  # whole batches for one, two and three ranks
TURNS = itertools.count()
KEPT: list[nn.Module] = []
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.tensor", "diamond.train.loop.running")


@dataclass
class Case:
    """What a training is made of.

    Attributes:
        saves: steps in whose turn `run.save()` is called, and where in it.
        poison: the step after which weights are not numbers: the last rank's, or `everywhere`.
        fails: the step in whose turn the script fails by an error of its own.
    """

    folder: str
    world: int
    until: int
    lives: list[int | None] = field(default_factory=lambda: [None])
    plain: bool = False
    data: str = "known"
    sampler: str | None = None
    samples: int = SAMPLES
    workers: int = 0
    norm: bool = False
    dropout: bool = True
    saves: dict[str, str] = field(default_factory=dict)
    poison: int | None = None
    everywhere: bool = False
    beside: bool = False
    fails: int | None = None
    run: dict[str, Any] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return Path(self.folder, name)


class Known(Dataset[Any]):
    """Each sample is its number's."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, values, values.sum()


class Generated(IterableDataset[Any]):
    """Shuffles and augments in a generator, whose body runs while it is read."""

    def __init__(self, samples: int) -> None:
        self._known = Known(samples)

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(len(self._known)).tolist():
            _, values, target = self._known[index]
            yield index, values + 0.1 * torch.rand(8), target


class Augmented(Dataset[Any]):
    """Draws from dice of its own, and knows the epoch."""

    def __init__(self, samples: int) -> None:
        self._known = Known(samples)
        self._dice = torch.Generator().manual_seed(5)
        self._epoch = 0.0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch / 64

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, index: int) -> Any:
        _, values, target = self._known[index]
        values = values + 0.1 * torch.rand(8, generator=self._dice)
        values[0] = self._epoch
        return index, values, target


class Shuffled(Sampler[int]):
    """Draws from dice of its own, and from those that the epoch's number gives."""

    def __init__(self, samples: int) -> None:
        self._samples, self._dice, self._epoch = samples, random.Random(5), 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._samples, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        turned = self._dice.randrange(self._samples)
        return iter(order[turned:] + order[:turned])


class Counting(Shuffled):
    """Is in a state that nobody knows of."""

    def __iter__(self) -> Iterator[int]:
        self.set_epoch(self._epoch + 1000 * next(TURNS))
        return super().__iter__()


class Parted(Shuffled):
    """Gives each rank its own part."""

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(range(self._samples), int(os.environ["RANK"]), None, int(os.environ["WORLD_SIZE"]))


def network(case: Case) -> nn.Module:
    """Large enough for gradients to lie elsewhere in DDP's buckets once it has ordered them anew."""
    torch.manual_seed(1)
    norm: nn.Module = nn.BatchNorm1d(32) if case.norm else nn.LayerNorm(32)
    drop = nn.Dropout(0.2 if case.dropout else 0.0)
    return nn.Sequential(nn.Linear(8, 32), norm, drop, nn.Tanh(), nn.Linear(32, 1))


def loader_of(case: Case) -> DataLoader[Any]:
    kind: Any = {"generated": Generated, "augmented": Augmented}.get(case.data, Known)
    dataset = kind(case.samples)
    samplers: dict[str, Any] = {"shuffled": Shuffled, "counting": Counting, "parted": Parted}
    given: dict[str, Any] = {"num_workers": case.workers, "persistent_workers": case.workers > 0}
    if case.sampler == "distributed":
        given["sampler"] = DistributedSampler(dataset, num_replicas=case.world, rank=int(os.environ["RANK"]))
    elif case.sampler is not None:
        given["sampler"] = samplers[case.sampler](case.samples)
    else:
        given["shuffle"] = kind is not Generated
    return DataLoader(dataset, batch_size=BATCH, **given)


def judged(model: nn.Module) -> str:
    """What the model says in an evaluation, to the last bit."""
    inner = getattr(model, "module", model)
    inner.eval()
    with torch.no_grad():
        said = inner(torch.linspace(-1, 1, 80).view(10, 8)).double().sum().item()
    inner.train()
    return float(said).hex()


def error_of(model: nn.Module, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = ((model(values).squeeze(1) - target) ** 2).mean()
    return loss


class Beside:
    """Goes along with a training: a validation, the learning rate that follows from it, an average of the weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.plateau: Any = ReduceLROnPlateau(optimizer, factor=0.9, patience=1, threshold=0.9)
        # Dice of its own: else the loader throws the model's whenever it begins, where nobody keeps them apart.
        self.held_out: Any = DataLoader(Known(10), batch_size=BATCH, generator=torch.Generator())

    def prepared(self, run: Any, *things: Any) -> Any:
        *first, self.plateau, self.held_out, self.average = run.prepare(
            *things, self.plateau, self.held_out, self.average
        )
        return first

    def told(self, model: nn.Module, step: int) -> list[str]:
        """What they come to, to the last bit."""
        self.average.update_parameters(model)
        metric = 0.0
        if step % 2 == 0:
            inner = getattr(model, "module", model)
            with torch.no_grad():
                metric = sum(float(error_of(inner.eval(), *batch[1:])) for batch in self.held_out)
            inner.train()
            self.plateau.step(metric)
        rate = self.plateau.optimizer.param_groups[0]["lr"]
        return [judged(self.average), float(rate).hex(), float(metric).hex()]


def train(case: Case, life: int, rank: int) -> None:
    """Each step of each rank is a line: step, loss to the last bit, what an evaluation says, epoch, samples, values."""
    model: Any = network(case)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = loader_of(case)
    beside = Beside(model, optimizer) if case.beside else None
    dies_at = case.lives[life]
    with dt.run(checkpoints=case.path("checkpoints"), seed=SEED, **{"save_every_s": 1e6, **case.run}) as run:
        if beside is not None:
            model, optimizer, loader = beside.prepared(run, model, optimizer, loader)
        else:
            model, optimizer, loader = run.prepare(model, optimizer, loader)
        case.path(f"judged-{rank}").write_text(judged(model))
        with case.path(f"rank-{rank}").open("a") as lines:
            for index, values, target in run.steps(loader, until=case.until):
                saves = case.saves.get(str(run.step_number + 1))
                if saves == "before backward":
                    run.save()
                loss = error_of(model, values, target)
                run.backward(loss)
                run.step()
                if run.step_number == case.fails:
                    raise ValueError("the script fails")
                if run.step_number == case.poison and (case.everywhere or rank == case.world - 1):
                    torch.nn.init.constant_(next(model.parameters()), float("nan"))
                if saves == "after step":
                    run.save()
                more = beside.told(model, run.step_number) if beside is not None else []
                told = [float(loss.detach()).hex(), judged(model), loader.epoch, index.tolist(), values.tolist()]
                lines.write(json.dumps([run.step_number, *told, *more]) + "\n")
                lines.flush()
                if run.step_number == dies_at:
                    run._checkpoints.saver.wait()
                    die_together(case, life, rank)
        case.path(f"weights-{rank}").write_text(weights(model))


def die_together(case: Case, life: int, rank: int) -> None:
    """Not before all have come as far: what one of them has sent, another may still have to read."""
    case.path(f"dies-{life}-{rank}").touch()
    while len(list(Path(case.folder).glob(f"dies-{life}-*"))) < case.world:
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGKILL)


def weights(model: nn.Module) -> str:
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return json.dumps([float(one).hex() for each in whole for one in each.detach().flatten()])


def train_plainly(case: Case, rank: int) -> None:
    """The loop as it is written without Diamond, with the same batches and the same dice for the model."""
    steps = {line[0]: line for line in map(json.loads, case.path(f"rank-{rank}").read_text().splitlines())}
    model = network(case)
    average = copy.deepcopy(model)
    if case.world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    beside = Beside(average, optimizer) if case.beside else None
    torch.manual_seed(hash((SEED, rank, 0)) & 0x7FFF_FFFF_FFFF_FFFF)
    with case.path(f"plain-{rank}").open("w") as lines:
        for step in range(1, case.until + 1):
            values = torch.tensor(steps[step][5])
            targets = torch.stack([Known(case.samples)[index][2] for index in steps[step][4]])
            loss = error_of(model, values, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            more = beside.told(model, step) if beside is not None else []
            told = [step, float(loss.detach()).hex(), judged(model), *steps[step][3:6], *more]
            lines.write(json.dumps(told) + "\n")
    if case.world > 1:
        dist.barrier()
    KEPT.append(model)  # the process ends without taking the group and the model apart


def one_case(case: Case) -> dict[str, Any]:
    """How the ranks of every life ended, and what they said meanwhile."""
    Path(case.folder).mkdir(parents=True, exist_ok=True)

    def work(rank: int, life: int) -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(case.path("said"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        if life < 0:
            train_plainly(case, rank)
        else:
            train(case, life, rank)

    ends = []
    for life in [*range(len(case.lives)), *([-1] if case.plain else [])]:
        ends.append(wait_for(fork_ranks(case.world, partial(work, life=life))))
    return {"ends": ends, "said": case.path("said").read_text()}


def main() -> None:
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(one_case(Case(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
