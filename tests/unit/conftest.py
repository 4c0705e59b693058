"""Unit tests open no network connections: one that tries has forgotten what it is."""

from __future__ import annotations

import socket
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real_connect = socket.socket.connect

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_UNIX:  # asyncio's own wake-up pair
            real_connect(self, address)
            return
        raise AssertionError(f"a unit test tried to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
