"""Brings what a job leaves behind to the server. Which files those are is decided in `output_files`.

Must not change the run directory, nor decide what the job's result is.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from diamond.agent.link import Backoff, Link
from diamond.agent.output_files import find
from diamond.agent.work_tree import WorkTree
from diamond.core.errors import DiamondError, Unauthenticated
from diamond.core.tasks import Output

MAX_LISTED_BYTES = 4 * 1024 * 1024  # of the list of outputs, as it is sent: a report must stay small enough to be taken
_PIECE_BYTES = 4 * 1024 * 1024
_PACK_BYTES = 4 * 1024 * 1024
_SMALL_BYTES = 256 * 1024
_ASK_AT_ONCE = 1000
_ENTRY_BYTES = 150  # of an entry of the list beside its path


class OutputsStopped(Exception):
    """The agent stops; the outputs are collected at its next start."""


class Collector:
    """Brings outputs to the server. Thread-safe."""

    def __init__(self, *, link: Link, stop: threading.Event) -> None:
        self._link = link
        self._stop = stop

    def collect(self, work: Path, patterns: tuple[str, ...], max_bytes: int) -> tuple[tuple[Output, ...], str]:
        """The outputs, uploaded as far as `max_bytes` reach, and notes for the job's detail.

        Waits for a server that is away. Files that were uploaded before are not sent again.

        Raises:
            OutputsStopped: the agent stops.
        """
        with WorkTree(work) as tree:
            return self._collect(tree, patterns, max_bytes)

    def _collect(self, tree: WorkTree, patterns: tuple[str, ...], max_bytes: int) -> tuple[tuple[Output, ...], str]:
        found = find(tree, patterns, self._check_stop)
        notes = found.notes
        outputs: list[Output] = []
        left = max_bytes
        room = MAX_LISTED_BYTES
        for path, real in found.files.items():
            room -= len(json.dumps(path, ensure_ascii=False).encode()) + _ENTRY_BYTES
            if room < 0:
                notes.add("is left on the endpoint: the list of outputs is too long to be sent", path)
                continue
            try:
                size, digest = self._hash(tree, real, left)
            except OSError as error:
                notes.add(f"cannot be read: {error.strerror}", path)
                continue
            outputs.append(Output(path=path, size_bytes=size, sha256=digest))
            if digest:
                left -= size
            else:
                notes.add(f"stays on the endpoint: policy.toml: max_output_bytes = {max_bytes} was reached", path)
        stored = self._upload(tree, {output.sha256: found.files[output.path] for output in outputs if output.sha256})
        if stored is None:
            raise OutputsStopped
        for output in outputs:
            if output.sha256 and output.sha256 not in stored:
                notes.add("changed while it was read, or was refused by the server", output.path)
        return tuple(replace(output, stored=output.sha256 in stored) for output in outputs), notes.text()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise OutputsStopped

    def _hash(self, tree: WorkTree, path: str, left: int) -> tuple[int, str]:
        with tree.open(path) as fd:
            size = os.fstat(fd).st_size
            if size > left:
                return size, ""
            digest = hashlib.sha256()
            offset = 0
            while piece := os.pread(fd, _PIECE_BYTES, offset):
                digest.update(piece)
                offset += len(piece)
                self._check_stop()
                if offset > left:  # it grows while it is read, perhaps for ever
                    return offset, ""
            return offset, digest.hexdigest()

    def _upload(self, tree: WorkTree, files: dict[str, str]) -> set[str] | None:
        """The digests the server now has; None when the agent stops first."""
        stored: set[str] = set()
        names = list(files)
        for start in range(0, len(names), _ASK_AT_ONCE):
            batch = names[start : start + _ASK_AT_ONCE]
            try:
                received = self._patiently(lambda batch=batch: self._missing(batch))  # type: ignore[misc]
            except _Refused:
                continue
            if received is None:
                return None
            stored |= set(batch) - set(received)
            pack: list[tuple[str, bytes]] = []
            for hexdigest, have in received.items():
                data = _small(tree, files[hexdigest])
                if data is not None:
                    pack.append((hexdigest, data))
                    if sum(len(one) for _, one in pack) < _PACK_BYTES:
                        continue
                elif not self._put(tree, hexdigest, files[hexdigest], have, stored):
                    return None
                if not self._send_pack(pack, stored):
                    return None
                pack = []
            if not self._send_pack(pack, stored):
                return None
        return stored

    def _missing(self, hexdigests: list[str]) -> dict[str, int]:
        answer = self._link.call("POST", "/blobs/missing", {"digests": [f"sha256:{one}" for one in hexdigests]})
        return {str(one["digest"]).removeprefix("sha256:"): int(one["received"]) for one in answer["missing"]}

    def _put(self, tree: WorkTree, hexdigest: str, path: str, have: int, stored: set[str]) -> bool:
        try:
            with tree.open(path) as fd:
                total = os.fstat(fd).st_size
                while True:
                    piece = os.pread(fd, _PIECE_BYTES, have)
                    query = {"offset": have, "total": total}
                    answer = self._patiently(
                        lambda piece=piece, query=query: self._link.send_bytes(  # type: ignore[misc]
                            "PUT", f"/blobs/sha256:{hexdigest}", piece, query=query
                        )
                    )
                    if answer is None:
                        return False
                    if answer.get("complete"):
                        stored.add(hexdigest)
                        return True
                    now = int(answer["received"])
                    if not piece and now >= have:
                        return True  # the file is at its end and the server still not content: it changed
                    have = now
        except OSError:
            return True
        except _Refused:
            return True

    def _send_pack(self, pack: list[tuple[str, bytes]], stored: set[str]) -> bool:
        if not pack:
            return True
        # A file that changed since it was hashed would spoil the whole pack.
        good = [(name, data) for name, data in pack if hashlib.sha256(data).hexdigest() == name]
        body = b"".join(name.encode() + len(data).to_bytes(8, "big") + data for name, data in good)
        try:
            if self._patiently(lambda: self._link.send_bytes("POST", "/blobs/pack", body)) is None:
                return False
        except _Refused:
            return True
        stored |= {name for name, _ in good}
        return True

    def _patiently(self, action: Callable[[], dict[str, int]]) -> dict[str, int] | None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                return action()
            except DiamondError as error:
                if not error.transient and not isinstance(error, Unauthenticated):
                    raise _Refused(str(error)) from error
                self._stop.wait(max(backoff.next_s(), error.retry_after_s or 0.0))
        return None


class _Refused(Exception):
    """The server will never take this one."""


def _small(tree: WorkTree, path: str) -> bytes | None:
    try:
        with tree.open(path) as fd:
            return os.pread(fd, _SMALL_BYTES + 1, 0) if os.fstat(fd).st_size <= _SMALL_BYTES else None
    except OSError:
        return b""
