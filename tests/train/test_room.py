"""Whether there is memory for a standby: read from what the kernel and the scheduler say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diamond.train import lines


def group(folder: Path, limit: str, current: int, cache: int, names: tuple[str, str] = lines._V2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def test_every_group_above_counts_and_files_in_memory_do_not(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("1:cpu:/elsewhere\n0::/slurm/job/step\n")
    assert lines._left_in_cgroups(str(own), str(root)) == []
    group(root / "slurm" / "job" / "step", "max", 100, 0)
    group(root / "slurm" / "job", "1000", 900, 300)
    group(root, "5000", 1000, 0)
    assert lines._left_in_cgroups(str(own), str(root)) == [400, 4000]


def test_the_older_kind_of_groups(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("4:memory:/slurm/job\n0::/\n")
    group(root / "memory" / "slurm" / "job", "1000", 900, 300, lines._V1)
    assert lines._left_in_cgroups(str(own), str(root)) == [400]


def test_a_job_of_slurm_has_what_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "100")
    assert lines.free_bytes(60 * 2**20) <= 40 * 2**20
    assert lines.free_bytes(200 * 2**20) == 0
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "all of it")
    assert lines.free_bytes(0) > 2**20


def test_what_a_process_holds() -> None:
    mine = lines.resident_bytes([os.getpid()])
    assert 2**20 < mine < 2**36
    assert lines.resident_bytes([os.getpid(), 2**22 + 1]) == pytest.approx(mine, rel=0.2), "one that is gone holds none"
