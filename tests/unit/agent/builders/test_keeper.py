"""The keeper: nothing that a kept program started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from diamond.agent.builders.keeper import kept
from testing.waiting import eventually


def _start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        kept(["/bin/sh", "-c", script]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_and_exit_code_are_the_programs() -> None:
    done = subprocess.run(kept(["/bin/sh", "-c", 'printf "%s|" "$@"; exit 9', "sh", "a b", "$c"]), capture_output=True)
    assert (done.returncode, done.stdout) == (9, b"a b|$c|")
    assert subprocess.run(kept(["/bin/sh", "-c", "kill -KILL $$"]), check=False).returncode == 137
    missing = subprocess.run(kept(["/no/such/program"]), capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stderr) == (127, "/no/such/program: No such file or directory\n")


def test_what_a_program_left_in_the_background_ends_with_it() -> None:
    keeper = _start("(setsid sleep 300 & echo $!) & sleep 0.2; exit 3")
    assert keeper.stdout is not None
    pid = int(keeper.stdout.readline())
    assert keeper.wait(20) == 3
    keeper.stdout.close()
    eventually(lambda: not _is_alive(pid), within_s=10, what="the background program ends")


def test_stopping_it_stops_everything_below() -> None:
    keeper = _start("trap '' TERM; sleep 300 & echo $!; wait; wait")
    assert keeper.stdout is not None
    pid = int(keeper.stdout.readline())
    began = time.monotonic()
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(20) == 143
    keeper.stdout.close()
    assert time.monotonic() - began < 10
    eventually(lambda: not _is_alive(pid), within_s=10, what="the program below ends")


def test_it_ends_with_whoever_started_it(tmp_path: Path) -> None:
    shown = tmp_path / "pid"
    script = f"echo $$ > '{shown}'; sleep 300; true"
    starter = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *kept(["/bin/sh", "-c", script])]
    )
    eventually(lambda: shown.is_file() and shown.read_text().strip(), within_s=20, what="the program runs")
    pid = int(shown.read_text())
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait(10)
    eventually(lambda: not _is_alive(pid), within_s=10, what="the program ends")
