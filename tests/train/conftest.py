"""What tests of several files here ask of programs that have torch loaded already."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.served import Measured, Served


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    """Trains with measured.py; answers with what its first rank measured last."""
    program = Served("measured")

    def run(folder: Path, world: int, until: int, given: dict[str, Any], **env: str) -> dict[str, Any]:
        assert program.ask(folder=str(folder), world=world, until=until, env=env, **given)["finished"]
        told: dict[str, Any] = json.loads((folder / "measures.json").read_text())
        return told

    yield run
    program.close()
