"""diamond.optim's K-FAC inside a run: what it knows of the curvature goes on with the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import diamond.train as dt  # noqa: E402
from diamond.optim import KFAC  # noqa: E402


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


@pytest.mark.parametrize("options", [{}, {"lr": 0.01}, {"kind": "ekfac"}])
def test_it_goes_on_where_it_ended_to_the_last_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = losses(tmp_path / "whole", 30, **options)
    parts = [loss for until in (1, 7, 18, 30) for loss in losses(tmp_path / "parts", until, **options)]
    assert parts == whole
    assert sum(whole[-4:]) < 0.5 * sum(whole[:4])
