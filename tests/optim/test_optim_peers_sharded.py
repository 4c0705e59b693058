"""FSDP2 on two gloo ranks against one process with the whole batch. This file is also the program of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diamond.optim.peers import ScheduleFreeAdamW, make

ROOT = Path(__file__).parents[2]
WORLD = 2
STEPS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "lars": {"lr": 0.2, "trust": 0.1},
    "lamb": {"lr": 0.02},
    "soap": {"lr": 0.01, "precondition_every": 2},
    "muon": {"lr": 0.05, "adamw_lr": 0.01},
    "schedule-free": {"lr": 0.02, "warmup_steps": 2},
}


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    if name == "soap":  # square: with fewer gradients than dimensions, rounding alone chooses some eigenvectors
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    # Rows that two ranks cannot share evenly, and one row, of which the second rank holds nothing.
    layers = [nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*layers).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        given = batch(step).chunk(world)[rank]
        (model(given) - given.sum(1, keepdim=True).sin()).square().mean().backward()
        optimizer.step()


def trained(name: str, model: nn.Module, rank: int, world: int) -> None:
    optimizer = make(name, model, **OPTIONS[name])
    train(model, optimizer, rank, world)
    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.eval()


def run_rank(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    for name in OPTIONS:
        model = network(name)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        trained(name, model, rank, WORLD)
        found = {key: param.full_tensor() for key, param in model.named_parameters()}  # type: ignore[operator]
        torch.save(found, folder / f"{name}{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank had at the end, for each optimizer."""
    folder = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, __file__, str(folder)]
    ranks = [
        subprocess.Popen([*argv, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(WORLD)
    ]
    try:
        said = [one.communicate(timeout=120)[0].decode() for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [one.returncode for one in ranks] == [0] * WORLD, "\n".join(said)
    return folder


@pytest.mark.parametrize("name", OPTIONS)
def test_sharded_parameters_go_the_way_of_whole_ones(name: str, sharded: Path) -> None:
    model, before = network(name), network(name)
    trained(name, model, 0, 1)
    ranks = [torch.load(sharded / f"{name}{rank}.pt", weights_only=True) for rank in range(WORLD)]
    for (key, param), start in zip(model.named_parameters(), before.parameters(), strict=True):
        assert (param - start).abs().max().item() > 1e-3, f"{key} has moved"
        for found in ranks:
            assert (found[key] - param).abs().max().item() < 1e-9, key


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]), int(sys.argv[2]))
