"""diamond.optim's K-FAC inside a run: what it knows of the curvature goes on with the training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import diamond.train as dt  # noqa: E402
from diamond.optim import KFAC, Compress, OptimError, attach  # noqa: E402
from tests.train.trained import ROOT, environment  # noqa: E402


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DIAMOND_CONTINUE_FILE", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIAMOND_TRAIN_QUIET", "1")


def losses(folder: Path, until: int, **options: Any) -> list[float]:
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, inputs[:, :2].sum(1, keepdim=True).tanh())
    found = []
    with dt.run(checkpoints=folder, seed=3) as run:
        model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))
        optimizer: Any = KFAC(model, factor_every=3, inverse_every=4, **options)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=16, shuffle=True))
        for given, wanted in run.steps(loader, until=until):
            loss = nn.functional.mse_loss(model(given), wanted)
            run.backward(loss)
            run.step()
            found.append(loss.item())
    return found


@pytest.mark.parametrize("options", [{}, {"lr": 0.01}])
def test_it_goes_on_where_it_ended_to_the_last_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = losses(tmp_path / "whole", 30, **options)
    parts = [loss for until in (1, 7, 18, 30) for loss in losses(tmp_path / "parts", until, **options)]
    assert parts == whole
    assert sum(whole[-4:]) < 0.5 * sum(whole[:4])


def test_made_before_ranks_meet_it_follows_the_model_into_copies_and_shards(tmp_path: Path) -> None:
    scenes = (f"{tmp_path}/{one}" for one in ("copies:ddp:9", "shards:fsdp:9", "parts:fsdp:4", "parts:fsdp:9"))
    argv = [sys.executable, "-m", "tests.train.preconditioned", *scenes]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        copies, shards, begun, ended = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            for name in ("copies/9", "shards/9", "parts/4", "parts/9")
        )
        # Rounded otherwise, and differences of a ten-thousandth of the weights' size, by which lengths are measured,
        # leave about three digits of that after nine steps.
        assert copies["losses"] == pytest.approx(shards["losses"], rel=1e-2)
        assert sum(copies["losses"][-3:]) < 0.5 * sum(copies["losses"][:3])
        assert set(copies["owners"]) == set(shards["owners"]) == {0, 1}, "the work is shared"
        assert begun["losses"] + ended["losses"] == shards["losses"]


def test_what_was_to_be_compressed_is_once_the_model_sends_something() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = KFAC(model, compress=Compress(grad="bf16"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sending = nn.parallel.DistributedDataParallel(model)
        assert optimizer.wire is None
        optimizer.rebind(sending)
        assert optimizer.wire is not None
        with pytest.raises(RuntimeError, match="hook"):
            attach(sending, Compress(grad="bf16"))
    finally:
        dist.destroy_process_group()


def test_it_cannot_follow_another_model_or_after_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = KFAC(model, damping=1e-3)
    with pytest.raises(OptimError, match="model is not the one"):
        optimizer.rebind(nn.Linear(3, 2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    optimizer.rebind(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5e-3] == schedule.get_last_lr()
    before = model[0].weight.clone()
    nn.functional.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    optimizer.rebind(model)
    model[0].weight = nn.Parameter(before)
    with pytest.raises(OptimError, match=r"has made 1 steps.*before its first step"):
        optimizer.rebind(model)
