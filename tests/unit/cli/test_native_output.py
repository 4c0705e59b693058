"""A library in C that prints: in a process of its own, since it is the process's standard output that is meant."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, sys
from diamond.cli import native_output
native = ctypes.CDLL(None)
print("before")
with native_output.to_stderr():
    native.printf(b"from C\\n")
print("after")
native.printf(b"%s\\n", b"C again")
native.fflush(None)
"""


def test_what_c_prints_meanwhile_is_no_output_of_ours() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split("\n")) == ["", "C again", "after", "before"]
    assert done.stderr == "from C\n"


def test_output_is_back_after_an_error() -> None:
    program = PROGRAM.replace('native.printf(b"from C\\n")', "raise SystemExit(print('said') or 3)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "before\n", "said\n")
