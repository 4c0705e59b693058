"""The launcher has the use of its node noted, on each node in a file of its own, and ends that with the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diamond.core import measuring
from diamond.train import launch

# The usual interval is longer than a test.
QUICK = measuring.MEASURE.replace("every=${2:-10}", "every=1")


def run(folder: Path, *more: str, bash: str = "bash", seconds: float = 3.5) -> subprocess.CompletedProcess[str]:
    (folder / "measure.sh").write_text(f"echo $$ > {folder}/pid\n{QUICK}")
    argv = [sys.executable, launch.__file__, "--ranks", "1", "--measure", bash, str(folder / "measure.sh"), *more]
    argv += ["--", sys.executable, "-c", f"import time; x = bytearray(50_000_000); time.sleep({seconds})"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ((), "util.jsonl"),
        (("--nodes", "2", "--node-rank", "1", "--master-addr", "x", "--master-port", "1"), "util.node1.jsonl"),
    ],
)
def test_it_is_noted_and_nothing_stays(tmp_path: Path, more: tuple[str, ...], name: str) -> None:
    done = run(tmp_path, *more)
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    assert found
    assert found[-1]["sys/rss_bytes"] > 50_000_000
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}")


def test_a_node_without_that_shell_runs_its_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, bash="/no/such/bash", seconds=0.1)
    assert (done.returncode, done.stderr) == (0, "")


def test_of_very_many_nodes_some_are_measured(tmp_path: Path) -> None:
    assert launch.MEASURED_NODES == measuring.MAX_NODES
    where = ("--nodes", "200", "--node-rank", "150", "--master-addr", "x", "--master-port", "1")
    assert run(tmp_path, *where, seconds=0.5).returncode == 0
    assert not (tmp_path / "pid").exists()
