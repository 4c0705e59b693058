"""Bundles seen from a client: sending a folder so that nothing the server has is sent again.

Owns the order of an upload (ask what is missing, pack the small files, stream the large ones, register). Which files a
folder holds is decided in `diamond.sdk.folders`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from diamond.core.bundles import Manifest
from diamond.core.codec import decode, encode
from diamond.core.errors import ProtocolError, Unavailable
from diamond.sdk.folders import LocalFile, Progress, Scan, open_unchanged, scan
from diamond.sdk.transport import API, Transport

SMALL_BYTES = 256 * 1024
PACK_BYTES = 8 * 1024 * 1024
PART_BYTES = 64 * 1024 * 1024
_FRAME_BYTES = 64 + 8
_READ = 1024 * 1024
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What an upload came to: `sent_bytes` of `total_bytes` had to travel."""

    ref: str
    files: int
    total_bytes: int
    sent_bytes: int


class Bundles:
    """Reached as `Client.bundles`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def scan(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Scan:
        """Read a folder or file into a manifest without sending anything; see `diamond.sdk.folders.scan`."""
        return scan(path, progress=progress)

    def get(self, digest: str) -> Manifest:
        """The manifest of an uploaded bundle. Raises NotFound."""
        return decode(Manifest, self._transport.json("GET", f"{API}/bundles/{digest}"))

    def upload(self, source: Scan | str | os.PathLike[str], *, progress: Progress | None = None) -> Upload:
        """Send a folder or file. Repeating it is harmless, and after an interruption it goes on where it stopped.

        Args:
            source: a path, or what `scan` made of one.
            progress: called with (bytes sent, bytes to send, files sent).

        Returns:
            The reference to write into a spec, and how much was sent.

        Raises:
            InvalidInput: a file cannot be taken.
            Conflict: a file changed after it was read.
            StorageFull: the server's disk is full; what arrived is kept.
        """
        found = source if isinstance(source, Scan) else scan(source)
        body = encode(found.manifest)
        sent = 0
        for _ in range(_ROUNDS):
            answer = self._transport.json("POST", f"{API}/bundles", body=body, repeatable=True)
            if answer["complete"]:
                return Upload(
                    ref=str(answer["ref"]),
                    files=len(found.manifest.files),
                    total_bytes=found.manifest.total_bytes,
                    sent_bytes=sent,
                )
            sent += self._send_missing(found, answer["missing"], progress)
        # Between asking and registering the server may drop unreferenced blobs; three times is not chance.
        raise ProtocolError("the server keeps asking for files it was sent", hint="look into the server's log")

    def _send_missing(self, found: Scan, missing: list[Any], progress: Progress | None) -> int:
        wanted = {str(item["digest"]): int(item.get("received", 0)) for item in missing}
        unknown = wanted.keys() - found.sources.keys()
        if unknown:
            raise ProtocolError(f"the server asks for {next(iter(unknown))}, which is not in the bundle")
        counter = _Counter(sum(found.sources[digest].size_bytes for digest in wanted), progress)
        small = {digest: found.sources[digest] for digest in wanted if found.sources[digest].size_bytes < SMALL_BYTES}
        for group in _groups(small):
            self._transport.request(
                "POST",
                f"{API}/blobs/pack",
                content=b"".join(_frames(group)),
                headers={"Content-Type": "application/octet-stream"},
                repeatable=True,
            )
            counter.add(sum(item.size_bytes for item in group.values()), len(group))
        for digest, received in wanted.items():
            if digest not in small:
                self._put(digest, found.sources[digest], received, counter)
        return counter.done

    def _put(self, digest: str, item: LocalFile, received: int, counter: _Counter) -> None:
        counter.add(received, 0)
        standstills = 0
        while True:
            try:
                answer = self._put_part(digest, item, received, counter)
            except Unavailable:
                if standstills >= _ROUNDS:
                    raise
                answer = self._blob_state(digest, item)
            now = int(answer["received"])
            counter.settle(now - received)
            if answer["complete"]:
                return counter.add(0, 1)
            standstills = 0 if now > received else standstills + 1
            if standstills > _ROUNDS:
                raise ProtocolError(f"the server stores nothing more of {item.source}", hint="look into its log")
            received = now

    def _blob_state(self, digest: str, item: LocalFile) -> dict[str, Any]:
        """After a broken request part of it may have arrived: ask, and go on from there."""
        state = self._transport.json("POST", f"{API}/blobs/missing", body={"digests": [digest]}, repeatable=True)
        missing = {str(entry["digest"]): int(entry.get("received", 0)) for entry in state["missing"]}
        return {"received": missing.get(digest, item.size_bytes), "complete": digest not in missing}

    def _put_part(self, digest: str, item: LocalFile, offset: int, counter: _Counter) -> Any:
        end = min(offset + PART_BYTES, item.size_bytes)
        answer = self._transport.request(
            "PUT",
            f"{API}/blobs/{digest}",
            params={"offset": offset, "total": item.size_bytes},
            content=lambda: _read_part(item, offset, end, counter),
            headers={"Content-Length": str(end - offset), "Content-Type": "application/octet-stream"},
            repeatable=False,  # resumed by offset instead
        )
        return answer.json()


class _Counter:
    """Adds up progress. Bytes on their way are shown at once and corrected when the server says what it has."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self.done = 0
        self.files = 0
        self._flying = 0
        self._progress = progress
        self._tell()

    def add(self, num_bytes: int, files: int) -> None:
        self.done += num_bytes
        self.files += files
        self._tell()

    def fly(self, num_bytes: int) -> None:
        self._flying += num_bytes
        self._tell()

    def settle(self, num_bytes: int) -> None:
        self._flying = 0
        self.add(num_bytes, 0)

    def _tell(self) -> None:
        if self._progress:
            self._progress(min(self.done + self._flying, self.total), self.total, self.files)


def _groups(items: dict[str, LocalFile]) -> Iterator[dict[str, LocalFile]]:
    """Small files in requests of at most 8 MiB."""
    group: dict[str, LocalFile] = {}
    size = 0
    for digest, item in items.items():
        need = item.size_bytes + _FRAME_BYTES
        if group and size + need > PACK_BYTES:
            yield group
            group, size = {}, 0
        group[digest] = item
        size += need
    if group:
        yield group


def _frames(group: dict[str, LocalFile]) -> Iterator[bytes]:
    for digest, item in group.items():
        yield digest.removeprefix("sha256:").encode("ascii")
        yield item.size_bytes.to_bytes(8, "big")
        yield b"".join(_read(item, 0, item.size_bytes))


def _read_part(item: LocalFile, start: int, end: int, counter: _Counter) -> Iterator[bytes]:
    for chunk in _read(item, start, end):
        yield chunk
        counter.fly(len(chunk))


def _read(item: LocalFile, start: int, end: int) -> Iterable[bytes]:
    with os.fdopen(open_unchanged(item), "rb", buffering=0) as file:
        file.seek(item.offset + start)
        while start < end:
            chunk = file.read(min(_READ, end - start))
            if not chunk:
                raise OSError(f"{item.source} became shorter while it was sent")
            start += len(chunk)
            yield chunk
