"""Images in tests of the web application: packages without a network, and further machines that build."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testing.service import Service
from testing.waiting import eventually
from testing.wheels import make_wheel


@contextmanager
def packages_here(folder: Path) -> Iterator[None]:
    """Agents that start inside find `tinytool` 1.1 and 1.2 and `othertool` 3.0, and nothing else."""
    for name, version in (("tinytool", "1.1"), ("tinytool", "1.2"), ("othertool", "3.0")):
        make_wheel(folder, name, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        yield


def wait_for_builder(service: Service, endpoint: str = "local") -> None:
    """An agent is online before it has found out what its machine can do."""

    def known() -> bool:
        with service.client() as client:
            facts = client.endpoints.get(endpoint).facts
            return facts is not None and "venv" in facts.builders

    eventually(known, within_s=90, what=f"{endpoint} knows its builders")


@contextmanager
def another_agent(service: Service, name: str) -> Iterator[None]:
    """One more endpoint on this machine, of whoever the service's home belongs to."""
    with service.client() as client:
        _, token = client.endpoints.create(name)
    home = service.home.path / f"agent-{name}"
    home.mkdir()
    secret = home / "token"
    secret.touch(mode=0o600)
    secret.write_text(token)
    argv = [sys.executable, "-m", "diamond.agent", "--scheduler", "local", "--server", service.url]
    argv += ["--token-file", str(secret), "--home", str(home)]
    with (service.home.path / f"agent-{name}.log").open("ab") as out:
        running = subprocess.Popen(
            argv,
            env={**service.env, **_pip()},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_for_builder(service, name)
        yield
    finally:
        running.terminate()
        running.wait(timeout=20)


def _pip() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
