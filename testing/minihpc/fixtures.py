"""Sites as pytest fixtures: one of each release for the whole session, shared by every test that leaves it as it was.

A conftest imports them by name. Where sites cannot run, the tests that ask for one are skipped and say why;
with DIAMOND_REQUIRE_SITE=1 they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from testing.minihpc import rootfs
from testing.minihpc.site import Site, available


def require(release: str = "trixie") -> rootfs.Rootfs:
    """Skip (or fail) the test unless sites of this release can run here; builds the root file system if need be."""
    if reason := available(release):
        _refuse(reason)
    try:
        return rootfs.get(release)
    except rootfs.RootfsError as error:
        _refuse(f"the root file system of a miniature HPC centre ({release}) could not be built: {error}")


def require_apptainer(facts: rootfs.Rootfs) -> None:
    """Skip (or fail) the test by name when the site has no Apptainer though it should."""
    if facts.apptainer is None:
        _refuse(f"this site has no Apptainer: {'; '.join(facts.warnings) or f'{facts.release} has no package of it'}")


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """Slurm 24.11 with Apptainer, four nodes."""
    require("trixie")
    with Site("alpha") as running:
        yield running


@pytest.fixture(scope="session")
def old_site() -> Iterator[Site]:
    """Slurm 22.05 without containers: the old end of what is supported."""
    require("bookworm")
    with Site("oldie", release="bookworm") as running:
        yield running


def _refuse(reason: str) -> NoReturn:
    if os.environ.get("DIAMOND_REQUIRE_SITE") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
