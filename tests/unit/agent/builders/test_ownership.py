"""The filter that answers chown with success, on this machine's own kernel."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from diamond.agent.builders import ownership


def run(program: str, *argv: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", ownership.__name__, sys.executable, "-c", program, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, user=user)


@pytest.mark.skipif(not ownership.is_supported(), reason=f"no filter for {platform.machine()}")
def test_giving_files_away_succeeds_and_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    program = (
        "import os, stat, sys\n"
        "path = sys.argv[1]; before = os.stat(path).st_uid\n"
        "os.chown(path, 4242, 4242); os.lchown(path, 4242, 4242); os.chown(path, 4242, -1, dir_fd=os.open('/', 0))\n"
        "with open(path) as file: os.fchown(file.fileno(), 4242, 4242)\n"
        "os.setgroups([4242])\n"
        "os.mknod(path + '.device', stat.S_IFCHR | 0o600, os.makedev(1, 3))\n"
        "os.mknod(path + '.fifo', stat.S_IFIFO | 0o600); os.mkfifo(path + '.second')\n"
        "print(os.stat(path).st_uid == before, os.path.exists(path + '.device'), os.path.exists(path + '.fifo'))\n"
    )
    done = run(program, str(file))
    assert done.stdout.strip() == "True False True", done.stderr


@pytest.mark.skipif(not ownership.is_supported(), reason=f"no filter for {platform.machine()}")
def test_exit_codes_pass_and_absent_programs_are_named() -> None:
    assert run("raise SystemExit(7)").returncode == 7
    argv = [sys.executable, "-m", ownership.__name__, "no-such-program"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == ownership.CANNOT_START
    assert "no-such-program" in done.stderr


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "ppc64le"])
def test_jumps_stay_inside(machine: str) -> None:
    """The kernel refuses a filter with a jump behind its end; here also for machines the tests do not run on."""
    code = ownership.program(machine)
    assert len(code) % 8 == 0
    steps = [code[at : at + 8] for at in range(0, len(code), 8)]
    for position, step in enumerate(steps):
        assert position + 1 + max(step[2], step[3]) < len(steps) or step[:2] == b"\x06\x00"
