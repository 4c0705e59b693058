"""The builders that are tried, each where it is at home: one bench of each for the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.builders import VALUE, BuilderBench, Job, SiteBench
from testing.cluster import BINDS
from testing.images import image_binds
from testing.minihpc import Site
from testing.minihpc.fixtures import require, require_apptainer
from testing.podman import PodmanBench
from testing.proxy import Proxy

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole images are built here, beside whatever else the machine does."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(1200))


Starter = Callable[[pytest.FixtureRequest], BuilderBench]


@pytest.fixture(scope="session")
def build_site() -> Iterator[tuple[Site, Proxy]]:
    """A site with a base image, and its way to package indexes."""
    require("trixie")
    with Site("builds", binds={**BINDS, **image_binds()}) as site, Proxy(site.server_address) as proxy:
        yield site, proxy


def _apptainer(request: pytest.FixtureRequest) -> BuilderBench:
    site, proxy = request.getfixturevalue("build_site")
    require_apptainer(site.facts)
    return SiteBench(site, proxy, "apptainer", "image.sif")


def _charliecloud(request: pytest.FixtureRequest) -> BuilderBench:
    site, proxy = request.getfixturevalue("build_site")
    return SiteBench(site, proxy, "charliecloud", "image")


def _podman(request: pytest.FixtureRequest) -> BuilderBench:
    bench = PodmanBench()
    if bench.why_not:
        pytest.skip(bench.why_not)
    return bench


def _venv(request: pytest.FixtureRequest) -> BuilderBench:
    site, proxy = request.getfixturevalue("build_site")
    return SiteBench(site, proxy, "venv", "image", base="host")


# A further builder is one more line here.
STARTERS: dict[str, Starter] = {
    "apptainer": _apptainer,
    "charliecloud": _charliecloud,
    "podman": _podman,
    "venv": _venv,
}


@pytest.fixture(scope="session", params=STARTERS)
def bench(request: pytest.FixtureRequest) -> Iterator[BuilderBench]:
    """One builder, with an images root of its own that all tests of it share."""
    running = STARTERS[request.param](request)
    yield running
    running.close()


# A virtual environment has no / of its own; DIAMOND_IMAGE_ROOT says where files are instead.
MAKES_FILE = """\
mkdir -p "${DIAMOND_IMAGE_ROOT:-}/opt/made"
printf %s "$GREETING" > "${DIAMOND_IMAGE_ROOT:-}/opt/made/by"
"""


@pytest.fixture(scope="session")
def built(bench: BuilderBench) -> Job:
    """One image with something of everything that every builder can do."""
    recipe = bench.recipe(
        pip=["six==1.16.0"],
        envs={"GREETING": VALUE, "EMPTY": ""},
        files={"/opt/given/data.txt": "bundle:sha256:" + "0" * 64},
        labels={"purpose": "contract"},
        build=MAKES_FILE,
        test="python3 -c 'import six; print(\"six is\", six.__version__)'",
    )
    return bench.build(recipe, brings={"/opt/given/data.txt": "given\n"})
