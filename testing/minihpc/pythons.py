"""Other Python versions for a site's login node, borrowed from whatever this machine has installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path


@lru_cache
def find(version: str) -> Path | None:
    """The folder of a self-contained Python of that version ("3.10"): bin, lib and nothing else's; None without one."""
    program = f"python{version}"
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [str(path) for path in sorted(versions.glob(f"{version}*/bin/{program}"))]
    if found := shutil.which(program):
        candidates.append(found)
    for candidate in candidates:
        done = subprocess.run(
            [candidate, "-I", "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True, check=False
        )
        prefix = Path(done.stdout.strip() or "/usr")
        # The distribution's own lives among everything else in /usr and cannot be carried elsewhere.
        if done.returncode == 0 and prefix not in (Path("/usr"), Path("/usr/local")):
            return prefix
    return None


def inside(version: str) -> str:
    """Where a site has it; `python{version}` is on the path as well."""
    return f"/opt/python-{version}"
