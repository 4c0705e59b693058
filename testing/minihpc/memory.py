"""Memory limits that bite: a site whose Slurm kills what takes more than it asked for, so that OUT_OF_MEMORY is real.

Uses the machine's cgroup v1 memory hierarchy, in groups named after the site.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

HIERARCHY = Path("/sys/fs/cgroup/memory")
CONF = {"TaskPlugin": "task/cgroup"}


def available() -> str | None:
    """What keeps memory limits from working here; None when nothing does."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, _, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(","):
            return None
    # Under cgroup v2 Slurm wants systemd, or a delegated tree with no process at its root.
    return "memory limits in a miniature HPC centre need the machine's memory controller in cgroup v1"


CGROUP_CONF = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\n"


def make_group(site_id: str) -> Path:
    """The group a site sees as the top of the hierarchy: node names repeat, and Slurm names its groups after them."""
    group = HIERARCHY / f"diamond-{site_id}"
    group.mkdir()
    return group


def remove_groups(site_id: str) -> None:
    """Remove what Slurm left of a site's groups. They are empty once its processes are gone."""
    top = HIERARCHY / f"diamond-{site_id}"
    for folder in sorted((path for path in (top, *top.rglob("*")) if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
