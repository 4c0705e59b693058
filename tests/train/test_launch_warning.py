"""Warnings that come to the launcher as a file, as they do on several nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diamond.train import launch
from testing.waiting import eventually

PROGRAM = """
import os, signal, sys, time
times = []
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGUSR1, lambda number, frame: times.append(number))
open(f"{sys.argv[1]}/ready-{os.environ['RANK']}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/go"):
    time.sleep(0.05)
print(f"warned {len(times)} times", flush=True)
"""


def test_it_comes_once_and_only_to_those_who_expect_it(tmp_path: Path) -> None:
    argv = [sys.executable, launch.__file__, "--ranks", "2", "--warning-file", str(tmp_path / "warning"), "--"]
    argv += [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2, what="both ranks run")
        (tmp_path / "warning").touch()
        time.sleep(2 * launch.LOOK_S + 0.5)
        assert process.poll() is None, "who does not expect it lives on"
        (tmp_path / "go").touch()
        said = process.communicate(timeout=30)[0].splitlines()
    assert (sorted(said), process.returncode) == (["[0] warned 1 times", "[1] warned 0 times"], 0)


LATE = """
import os, signal, sys, time
told = []
open(f"{sys.argv[1]}/ready-{os.environ['RANK']}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/listen-{os.environ['RANK']}"):
    time.sleep(0.05)
signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
until = time.monotonic() + 20
while not told and time.monotonic() < until:
    time.sleep(0.05)
time.sleep(2.5)
print(f"warned {len(told)} times", flush=True)
"""


@pytest.mark.parametrize("how", ["signal", "file"])
def test_it_waits_for_ranks_that_are_still_being_started(tmp_path: Path, how: str) -> None:
    """One listens long before the other; each is told once."""
    argv = [sys.executable, launch.__file__, "--ranks", "2"]
    argv += ["--warning-file", str(tmp_path / "warning")] if how == "file" else []
    argv += ["--", sys.executable, "-c", LATE, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        eventually(lambda: len(list(tmp_path.glob("ready-*"))) == 2, what="both ranks run")
        if how == "file":
            (tmp_path / "warning").touch()
        else:
            process.send_signal(signal.SIGUSR1)
        for rank in ("1", "0"):
            time.sleep(launch.LOOK_S + 0.5)
            (tmp_path / f"listen-{rank}").touch()
        said = process.communicate(timeout=60)[0].splitlines()
    assert (sorted(said), process.returncode) == (["[0] warned 1 times", "[1] warned 1 times"], 0)
