"""A disk small enough to fill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing import disks
from testing.stores import Stores


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB that can be filled for real."""
    if reason := disks.why_not():
        pytest.skip(reason)
    with disks.small_disk(tmp_path / "disk", mib=1) as path:
        yield path


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    return Stores(tmp_path)
