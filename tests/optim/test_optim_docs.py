"""The Python of docs/optim.md runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import diamond.optim as do  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "optim.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
SCRIPTS = [block for block in BLOCKS if block.startswith("import torch\n")]
PARTS = [block for block in BLOCKS if block not in SCRIPTS]


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DIAMOND_CONTINUE_FILE", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIAMOND_TRAIN_QUIET", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def connected() -> Iterator[None]:
    """One rank, for what needs a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(block: str, **given: Any) -> dict[str, Any]:
    names = {"__name__": "__main__", **given}
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    return names


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_script_runs_alone_and_learns(number: int) -> None:
    torch.manual_seed(0)
    left = run(SCRIPTS[number])
    assert left["loss"].item() < 0.01
    assert left["optimizer"].skipped == 0


@pytest.mark.parametrize("number", range(len(PARTS)))
@pytest.mark.usefixtures("connected")
def test_a_part_runs_where_there_is_a_model(number: int) -> None:
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(inner)
    given = {"torch": torch, "nn": nn, "do": do, "model": model, "ddp_model": model}
    assert set(run(PARTS[number], **given)) - set(given) - {"__name__", "__builtins__"}, "it makes something"


def test_there_are_both() -> None:
    assert len(SCRIPTS) >= 2 and len(PARTS) >= 2
