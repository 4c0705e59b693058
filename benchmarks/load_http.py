"""A small HTTP/1.1 client for load: keep-alive connections, bodies by length or in chunks, nothing else.

The machine that measures is the machine that is measured: a general client would take more of it than the server does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

_IDLE_S = 20.0  # the server keeps quiet connections for 30


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._used_at = 0.0

    async def ask(
        self, method: str, path: str, token: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        reader = await self._send(method, path, token, body, headers)
        status, fields = await _head(reader)
        data = b"".join([piece async for piece in _body(reader, fields)])
        if fields.get("connection") == "close":
            self.close()
        return Answer(status, data)

    async def stream(self, path: str, token: str) -> AsyncIterator[bytes]:
        """Lines of an answer that does not end."""
        reader = await self._send("GET", path, token, None, None)
        status, fields = await _head(reader)
        if status != 200:
            raise ConnectionError(f"{path}: {status}")
        rest = b""
        async for piece in _body(reader, fields):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line

    async def _send(
        self, method: str, path: str, token: str, body: Any, headers: dict[str, str] | None
    ) -> asyncio.StreamReader:
        if time.monotonic() - self._used_at > _IDLE_S:
            self.close()  # the server is about to hang up; whoever sends at that moment is told nothing
        self._used_at = time.monotonic()
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**20)
        assert self._reader is not None
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}:{self._port}", f"Authorization: Bearer {token}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if method != "GET":
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        self._writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await self._writer.drain()
        return self._reader

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *rest = raw.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
    return int(first.split()[1]), fields


async def _body(reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
    if fields.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).strip(), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
    elif length := int(fields.get("content-length", "0")):
        yield await reader.readexactly(length)
