"""The example in examples/burgers_fno: its physics is right, and it trains on two ranks under the launcher."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
import yaml

import diamond.train
from diamond.core.tasks import TaskSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "burgers_fno"
LAUNCH = Path(diamond.train.__file__).with_name("launch.py")


@pytest.fixture(scope="module")
def burgers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("burgers", EXAMPLE / "burgers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exact_solution(u0: torch.Tensor, time: float, viscosity: float) -> torch.Tensor:
    """By the Cole-Hopf transform, which turns Burgers' equation into the heat equation; on a 16 times finer grid."""
    n, finer = u0.shape[-1], 16
    k = 2j * math.pi * torch.arange(n * finer // 2 + 1, dtype=torch.float64)
    u0_hat = torch.nn.functional.pad(torch.fft.rfft(u0), (0, (finer - 1) * n // 2)) * finer
    integral = u0_hat / torch.where(k == 0, 1, k)
    heat = torch.exp(-torch.fft.irfft(integral, n=n * finer) / (2 * viscosity))
    heat_hat = torch.fft.rfft(heat) * torch.exp(viscosity * k**2 * time)
    u = -2 * viscosity * torch.fft.irfft(k * heat_hat, n=n * finer) / torch.fft.irfft(heat_hat, n=n * finer)
    return u[..., ::finer]


def test_solver_agrees_with_the_exact_solution(burgers: ModuleType) -> None:
    u0 = burgers.initial_conditions(16, seed=5)
    exact = exact_solution(u0, burgers.T, burgers.NU)
    error = (burgers.solve(u0) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < 1e-4  # far below what the network is asked for


def test_data_do_not_depend_on_the_number_of_ranks(burgers: ModuleType) -> None:
    whole = burgers.dataset(5, seed=3)
    shares = [burgers.dataset(5, 3, rank, 2) for rank in range(2)]
    for part in range(2):
        assert torch.allclose(whole[part][0::2], shares[0][part], atol=1e-6)
        assert torch.allclose(whole[part][1::2], shares[1][part], atol=1e-6)


def test_task_file_is_a_valid_task() -> None:
    spec = TaskSpec.parse(yaml.safe_load((EXAMPLE / "task.yaml").read_text()))
    assert (spec.ranks_per_node, spec.run) == (2, "python train.py")


def test_two_ranks_train_and_leave_their_results(tmp_path: Path) -> None:
    folder = tmp_path / "burgers_fno"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", "*.pt", "*.svg", "result.json"))
    metrics_file = tmp_path / "metrics.jsonl"
    env = {name: value for name, value in os.environ.items() if not name.startswith("DIAMOND_")}
    env.update(EPOCHS="3", TRAIN_SAMPLES="128", TEST_SAMPLES="8", DIAMOND_METRICS_FILE=str(metrics_file))
    env["OMP_NUM_THREADS"] = "1"  # two ranks with a thread for each core would wait for each other
    command = [sys.executable, str(LAUNCH), "--ranks", "2", "--", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch   3/3" in done.stdout

    lines = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    errors = [line["val/rel_l2"] for line in lines if "val/rel_l2" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert len(errors) == 3
    assert errors[-1] < errors[0]

    result = json.loads((folder / "result.json").read_text())
    assert (result["ranks"], result["epochs"]) == (2, 3)
    assert lines[-1]["test/rel_l2"] == result["test_rel_l2"]
    checkpoint = torch.load(folder / "model.pt", weights_only=True)
    assert sum(part.numel() for part in checkpoint["state"].values()) == result["parameters"]
    assert not list(folder.glob("*.tmp"))
    svg = ElementTree.parse(folder / "prediction.svg").getroot()
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 9  # three curves for each of three samples

    command = [sys.executable, "look.py", "model.pt", "9"]
    looked = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert "sample 7: relative L2 error" in looked.stdout
    assert (folder / "look.svg").exists()
