"""What the tests of both libraries share: lives of small trainings (lives.py), and examples as tasks start them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import diamond.train
from diamond.core.tasks import TaskSpec

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LAUNCH = Path(diamond.train.__file__).with_name("launch.py")


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DIAMOND_", "SLURM_"))}
    return {**env, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **more}


def example(name: str, to: Path) -> Path:
    """A copy of an example whose task is one."""
    folder = to / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__", "checkpoints", "model*"))
    spec = TaskSpec.parse(yaml.safe_load((folder / "task.yaml").read_text()))
    assert (spec.ranks_per_node, spec.run) == (2, "python train.py")
    return folder


def launched(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of it, as a task starts them."""
    argv = [sys.executable, str(LAUNCH), "--ranks", "2", "--", sys.executable, "train.py"]
    return subprocess.run(
        argv, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=200, check=False
    )


def live(library: str, *runs: str) -> tuple[dict[str, list[list[int]]], str]:
    """The exit statuses of each run's lives, and what was said meanwhile."""
    argv = [sys.executable, "-m", "tests.train.lives", library, *runs]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return told, done.stderr


def steps_of(folder: Path, rank: int) -> dict[int, list[Any]]:
    """The last life in which each step was done, on a rank."""
    return {step: rest for step, *rest in lines(folder / f"rank-{rank}")}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same(wild: Path, calm: Path, world: int) -> None:
    for rank in range(world):
        assert steps_of(wild, rank) == steps_of(calm, rank), "the same losses to the last bit, of the same samples"
        assert (wild / f"weights-{rank}").read_text() == (calm / f"weights-{rank}").read_text()
