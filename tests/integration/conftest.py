"""A running service most integration tests share: starting one costs a second or two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service") / "home with space") as running:
        yield running
