"""PyTorch for the jobs of a site: this machine's interpreter and its packages, seen there read-only."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from testing.cluster import SOURCE_INSIDE
from testing.minihpc.pythons import find

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = f"python{VERSION}"  # on the path of a site made with `pythons=[VERSION]`
_PACKAGES_INSIDE = "/opt/packages"
PYTHONPATH = f"{SOURCE_INSIDE}:{_PACKAGES_INSIDE}"  # ours first: what is installed here may have a folder of that name


def why_not() -> str | None:
    """What keeps a site of this machine from having PyTorch; None when nothing does."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    if find(VERSION) is None:
        return f"this machine has no self-contained Python {VERSION} to lend to a site"
    return None


def binds() -> dict[str, Path]:
    """For Site(binds=…)."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return {_PACKAGES_INSIDE: Path(found.origin).parents[1]}
