"""The agent's store of downloaded content: blobs and manifests by digest, each checked, shared by all jobs.

cache/blobs/ab/<hex>        whole and verified, read-only
cache/partial/<hex>         on its way; a later attempt goes on where it stopped
cache/manifests/<hex>.json

Owns the size bound. Must not know jobs or run directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from diamond.agent.link import Link
from diamond.core.bundles import Manifest, check_manifest, is_digest
from diamond.core.codec import decode, encode
from diamond.core.compat import sha256_of
from diamond.core.errors import DigestMismatch, ServerUnreachable
from diamond.core.rundir import write_atomic

_READ_BYTES = 1024 * 1024


class Cache:
    """Thread-safe. The directory belongs to one agent."""

    def __init__(self, path: Path, link: Link) -> None:
        self._path = path
        self._link = link
        self._lock = threading.Lock()
        self._digest_locks: dict[str, threading.Lock] = {}
        self._pins: Counter[str] = Counter()
        for name in ("blobs", "partial", "manifests"):
            (path / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    def manifest(self, digest: str) -> Manifest:
        """A bundle's manifest, checked: its digest, and that it writes nowhere outside its target.

        Raises:
            DiamondError: from the server, or because the manifest is not what it should be.
        """
        assert is_digest(digest), digest
        saved = self._path / "manifests" / f"{_hex(digest)}.json"
        with contextlib.suppress(OSError, ValueError):
            manifest = decode(Manifest, json.loads(saved.read_bytes()))
            if manifest.digest == digest:
                check_manifest(manifest)
                return manifest
        manifest = decode(Manifest, self._link.call("GET", f"/bundles/{digest}"))
        if manifest.digest != digest:
            raise DigestMismatch(f"the manifest of bundle {digest} is another one ({manifest.digest})")
        check_manifest(manifest)
        write_atomic(saved, json.dumps(encode(manifest)).encode())
        return manifest

    def blob_path(self, digest: str) -> Path:
        return self._path / "blobs" / _hex(digest)[:2] / _hex(digest)

    def missing(self, digests: Iterable[str]) -> list[str]:
        return [digest for digest in dict.fromkeys(digests) if not self.blob_path(digest).exists()]

    @contextlib.contextmanager
    def pinned(self, digests: Iterable[str]) -> Iterator[None]:
        """While inside, these blobs are not thrown out."""
        chosen = set(digests)
        with self._lock:
            self._pins.update(chosen)
        try:
            yield
        finally:
            with self._lock:
                self._pins.subtract(chosen)
                self._pins += Counter()

    def fetch(self, digest: str, size_bytes: int, should_stop: Callable[[], bool] = lambda: False) -> Path:
        """The blob's file, downloaded if need be. Call with the digest pinned.

        Raises:
            DiamondError: transient ones may be tried again and go on where they stopped.
            OSError: the disk is full, or cannot be written.
        """
        path = self.blob_path(digest)
        with self._one_at_a_time(digest):
            if path.exists():
                with contextlib.suppress(OSError):
                    os.utime(path)  # the time of last use; many file systems do not keep it themselves
                return path
            partial = self._path / "partial" / _hex(digest)
            self._download(digest, size_bytes, partial, should_stop)
            if _digest_of(partial) != digest:
                partial.unlink()
                raise DigestMismatch(f"blob {digest} arrived damaged", hint="launch again; if it stays, check the disk")
            os.chmod(partial, 0o400)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            os.replace(partial, path)
            return path

    def _download(self, digest: str, size_bytes: int, partial: Path, should_stop: Callable[[], bool]) -> None:
        have = partial.stat().st_size if partial.exists() else 0
        if have > size_bytes:
            partial.unlink()
            have = 0
        if have == size_bytes and partial.exists():
            return
        with (
            self._link.download(f"/blobs/{digest}", offset=have) as (start, pieces),
            open(partial, "r+b" if start else "wb") as file,
        ):
            file.seek(start)
            for piece in pieces:
                file.write(piece)
                if should_stop():
                    raise ServerUnreachable("stopped while downloading")
                if file.tell() > size_bytes:
                    break
            file.flush()
            os.fsync(file.fileno())
        got = partial.stat().st_size
        if got < size_bytes:
            raise ServerUnreachable(f"blob {digest} broke off after {got} of {size_bytes} bytes")

    @contextlib.contextmanager
    def _one_at_a_time(self, digest: str) -> Iterator[None]:
        with self._lock:
            lock = self._digest_locks.setdefault(digest, threading.Lock())
        with lock:
            yield
        with self._lock:
            if not lock.locked():
                self._digest_locks.pop(digest, None)

    def trim(self, limit_bytes: int) -> int:
        """Throw out what was longest not used until at most `limit_bytes` are left; returns the bytes freed."""
        found: list[tuple[float, int, Path]] = []
        for folder in ("blobs", "partial"):
            for path in (self._path / folder).rglob("*"):
                with contextlib.suppress(OSError):
                    stat = path.lstat()
                    if not path.is_dir():
                        found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        freed = 0
        for _, size, path in sorted(found):
            if total - freed <= limit_bytes:
                break
            with self._lock:
                if self._pins.get("sha256:" + path.name):
                    continue
                with contextlib.suppress(OSError):
                    path.unlink()
                    freed += size
        return freed


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return "sha256:" + sha256_of(file)
