"""What runs on login nodes keeps to Python 3.10, checked without one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "diamond"


def test_nothing_newer_than_python_3_10_is_used_by_the_agent() -> None:
    folders = [str(SOURCE / name) for name in ("core", "planner", "agent", "train")]
    # compat.py is where the newer names are, behind a look at the version. Only what vermin says of single names
    # counts: it takes some words for modules of Python 2 and then calls the file as a whole impossible.
    argv = [str(Path(sys.executable).with_name("vermin")), "-t=3.10-", "--no-tips", "--violations"]
    done = subprocess.run(
        [*argv, "--exclude-regex", r"compat\.py$", "--exclude-regex", r"/planner/pools/", *folders],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Analyzing" in done.stdout, done.stderr
    newer = [line for line in done.stdout.splitlines() if re.search(r"requires? .*\b3\.(1[1-9]|[2-9]\d)", line)]
    assert not newer, done.stdout
