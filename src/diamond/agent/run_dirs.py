"""Removes run directories nobody needs any more. Must be told which are needed: it knows no jobs."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path


def remove_old(jobs_dir: Path, kept: set[str], older_than_s: float) -> None:
    """Remove run directories that are not `kept` and have not changed for so long."""
    oldest = time.time() - older_than_s
    with contextlib.suppress(OSError):
        for folder in list(jobs_dir.iterdir()):
            with contextlib.suppress(OSError):
                if folder.name not in kept and os.lstat(folder).st_mtime < oldest:
                    shutil.rmtree(folder, ignore_errors=True)
