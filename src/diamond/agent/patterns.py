"""How rules of policy.toml are compared with what an order says: names with wildcards, paths below folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "none"


def is_under(path: str, roots: Iterable[str]) -> bool:
    """Whether a path of this machine lies in one of these folders, symbolic links followed."""
    if not path.startswith(("/", "~")):
        return False  # out of the run directory, to who knows where
    real = os.path.realpath(os.path.expanduser(re.sub("^/+", "/", path)))
    return any(os.path.commonpath((real, root)) == root for root in map(os.path.realpath, roots))
