"""Which checkpoint of another library is whole: by its seal, or by a look into its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from diamond.train import TrainError
from diamond.train.adapters import whole

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
NAME = re.compile(r"checkpoint-(\d+)")


def write(folder: Path, number: int) -> Path:
    path = folder / f"checkpoint-{number}"
    path.mkdir()
    safetensors.save_file({"a": torch.arange(300.0), "b": torch.ones(7)}, path / "model.safetensors")
    torch.save({"steps": torch.arange(500.0), "n": number}, path / "optimizer.pt")
    (path / "trainer_state.json").write_text('{"global_step": 1}')
    return path


def cut(path: Path, part: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])


def test_the_newest_that_is_whole_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whole.newest(tmp_path / "nowhere", NAME) is None
    for number in (9, 10, 100):
        write(tmp_path, number)
    assert whole.newest(tmp_path, NAME) == str(tmp_path / "checkpoint-100"), "by number, not by name"
    cut(tmp_path / "checkpoint-100" / "model.safetensors")
    cut(tmp_path / "checkpoint-10" / "optimizer.pt", 0.99)
    assert whole.newest(tmp_path, NAME) == str(tmp_path / "checkpoint-9")
    said = capsys.readouterr().err
    assert "checkpoint-100 is not whole (model.safetensors ends early)" in said
    assert "checkpoint-10 is not whole (optimizer.pt ends early or is damaged)" in said


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_no_part_of_a_file_passes_for_the_whole(name: str, part: float, tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert whole.fault(path) == ""
    cut(path / name, part)
    assert name in whole.fault(path)
    assert whole.newest(tmp_path, NAME) is None, "begun, and never finished: nothing is lost by beginning anew"


def test_a_seal_tells_of_a_changed_byte_and_of_a_missing_file(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "shard.distcp").write_bytes(b"of any form")
    assert "shard.distcp was not sealed" in whole.fault(path)
    whole.seal(path)
    assert whole.fault(path) == ""
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert whole.fault(path) == "model.safetensors is not what was written"
    (path / "model.safetensors").unlink()
    assert "model.safetensors" in whole.fault(path)


def test_work_that_was_saved_and_is_damaged_is_not_silently_begun_anew(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    whole.seal(path)
    cut(path / "optimizer.pt")
    with pytest.raises(TrainError, match=r"checkpoint-1.*Bring back a copy"):
        whole.newest(tmp_path, NAME)


def test_a_file_has_its_name_only_when_it_is_finished(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({"weights": torch.arange(500.0)}, tmp_path / f"step-{number}.ckpt")
    cut(tmp_path / "step-2.ckpt")
    name = re.compile(r"step-(\d+)\.ckpt")
    assert whole.newest(tmp_path, name) == str(tmp_path / "step-1.ckpt")
    cut(tmp_path / "step-1.ckpt")
    with pytest.raises(TrainError, match=r"step-2\.ckpt, step-1\.ckpt"):
        whole.newest(tmp_path, name)
