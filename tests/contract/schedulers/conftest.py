"""The schedulers that are tried: this machine's own, and Slurm, new and old, on real sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.bench import Bench, LocalBench, SlurmBench, contract_site, eventually, is_alive
from testing.minihpc import Site
from testing.minihpc.fixtures import require

RELEASES = {"slurm-24.11": "trixie", "slurm-22.05": "bookworm"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module with EVERY_SCHEDULER is run on each, but for what `local_only` marks; all others are about local."""
    if "bench" in metafunc.fixturenames:
        everywhere = getattr(metafunc.module, "EVERY_SCHEDULER", False)
        local_only = getattr(metafunc.function, "local_only", False)
        kinds = ["local", *RELEASES] if everywhere and not local_only else ["local"]
        # The scheduler varies slowest: one site at a time is busy.
        metafunc.parametrize("bench", kinds, indirect=True, scope="function")


@pytest.fixture(scope="session")
def contract_sites() -> Iterator[Callable[[str], Site]]:
    """Sites by release, started when first asked for."""
    running: dict[str, Site] = {}

    def get(release: str) -> Site:
        if release not in running:
            require(release)
            site = contract_site(release)
            site.start()
            running[release] = site
        return running[release]

    yield get
    for site in running.values():
        site.stop()


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "local":
        bench: Bench = LocalBench(tmp_path)
    else:
        bench = SlurmBench(request.getfixturevalue("contract_sites")(RELEASES[request.param]))
    yield bench
    bench.close()


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    return eventually


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return is_alive
