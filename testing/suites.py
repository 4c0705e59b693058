"""Every suite at once, and a second look, alone, at the few that failed beside the others.

    python -m testing.suites -n 3        # what `make test` runs; further arguments are pytest's

Some eight thousand tests share a few cores with clusters, browsers and containers that they start. A test of such a
thing that fails in that crowd, and passes when the machine is its own, has met a limit of time or a race. It is named
at the very end, whichever way it went, so that it is looked into and not forgotten. Tests of our own functions do not
get a second look, nor does a run in which many fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FEW = 5
# What starts servers, clusters, browsers, containers or ranks, or measures the machine. The rest computes, and computes
# the same every time.
_CROWDED = tuple(
    f"tests/{suite}/" for suite in ("integration", "web", "contract", "api", "train", "optim", "authorisation")
)
_SOME_FAILED = 1  # pytest's status; any other is no matter of single tests


def main(arguments: list[str]) -> int:
    status = _pytest(arguments)
    failed = _failed()
    if status != _SOME_FAILED or not deserve_a_second_look(failed):
        return status
    print(f"\n{len(failed)} failed beside the others; once more, alone:\n", flush=True)
    status = _pytest(["-n", "0", "--last-failed"])
    still = set(_failed())
    print("\nFailed beside the others, and then alone:")
    for name in failed:
        print(f"  {'failed again' if name in still else 'passed'}  {name}")
    return status


def deserve_a_second_look(failed: list[str]) -> bool:
    return 0 < len(failed) <= FEW and all(name.startswith(_CROWDED) for name in failed)


def _pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def _failed() -> list[str]:
    """What failed in the run before, as pytest keeps it."""
    try:
        return sorted(json.loads(Path(".pytest_cache/v/cache/lastfailed").read_text()))
    except FileNotFoundError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
