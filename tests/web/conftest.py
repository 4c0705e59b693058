"""For each file a browser, and a service with this machine as its endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.browser import Visitor, running_chromium
from testing.service import Service


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Not for longer: while it is there, nothing else in this process can have an event loop of its own."""
    with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One user, whose browsers are signed in by themselves; the endpoint `local` runs real processes."""
    with Service(tmp_path_factory.mktemp("web") / "home") as running:
        yield running


@pytest.fixture
def visit(chromium: Any, service: Service) -> Iterator[Callable[..., Visitor]]:
    """`visit(dark=True, width=400, scripts=False)`: somebody at the service; all must leave without complaints."""
    visitors: list[Visitor] = []

    def come(**how: Any) -> Visitor:
        visitors.append(Visitor(chromium, service.url, **how))
        return visitors[-1]

    yield come
    for visitor in visitors:
        visitor.leave()
