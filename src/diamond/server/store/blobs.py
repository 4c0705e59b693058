"""Content-addressed files: what a digest names is there completely and verified, or not at all.

Owns everything under its root: ``<hex[:2]>/<hex>`` is a blob, ``partial/<hex>@<sender>`` an unfinished upload of one,
``partial/<hex>.tmp`` a blob being written in one go, ``partial/<hex>.going`` one that is being collected,
``partial/<name>.lock`` held by whoever changes any of them.
Must not know what refers to a blob, nor who may have it: both are the caller's matter. Whoever is going to refer to one
claims it first, which its time of change tells: what was claimed since is not collected (`set_aside`).

Uploads of one digest by one sender share one partial file. The lock is held for each write, not for a whole upload, so
a client that stalls keeps nobody waiting, and two of one sender's that send the same blob finish it together. Those of
different senders have nothing to do with each other: nobody can finish, or spoil, what another began.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from diamond.core.errors import DigestMismatch
from diamond.server.store.files import locked, storage_full, sync_folder, write_all

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_UPLOAD = re.compile(r"[0-9a-f]{64}(@\w+)?")
_SENDER = re.compile(r"\w*")
CLAIM_EVERY_S = 3600.0  # a claim is written down when the last one is older: thousands of files are claimed at once
_RESEND = "send the file again from its first byte; if it changed since its digest was taken, take the digest anew"


@dataclass(frozen=True, slots=True)
class PutResult:
    """How far an upload is: bytes held, and whether the blob is complete and verified."""

    received: int
    complete: bool


class BlobStore:
    """Files named by the SHA-256 of their content. Safe for any number of threads and processes.

    A complete blob was hashed from disk, synced and renamed into place, so it survives power failure.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._partial = f"{root}/partial"

    def path(self, digest: str) -> Path:
        """Where the blob lies if it is complete. Never write to it."""
        return Path(self._blob_path(digest))

    def has(self, digest: str) -> bool:
        return os.path.isfile(self._blob_path(digest))

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Those of `digests` that are not complete, each once, in their order."""
        return [digest for digest in dict.fromkeys(digests) if not self.has(digest)]

    def claim(self, digests: Iterable[str]) -> list[str]:
        """As `missing`; those that are complete will not be collected for a while, so that they can be referred to."""
        return [digest for digest in dict.fromkeys(digests) if not _claim(self._blob_path(digest))]

    def claimed_at(self, digest: str) -> float | None:
        """When it was last claimed, or else stored, in Unix seconds, to within an hour; None if it is not complete."""
        with suppress(FileNotFoundError):
            return os.stat(self._blob_path(digest)).st_mtime
        return None

    def size(self, digest: str) -> int:
        """How many bytes the blob has; 0 if it is not complete."""
        return _size_of(self._blob_path(digest)) or 0

    def open(self, digest: str) -> BinaryIO:
        """The blob for reading; it stays readable when it is deleted meanwhile.

        Raises:
            FileNotFoundError: it is not complete.
        """
        return open(self._blob_path(digest), "rb")

    def partial_size(self, digest: str, sender: str = "") -> int:
        """How many bytes of a sender's unfinished upload are held; 0 if there is none."""
        return _size_of(self._partial_path(digest, sender)) or 0

    def unfinished_bytes(self, sender: str, besides: Collection[str] = ()) -> int:
        """How many bytes are held of the uploads that `sender` began, `besides` those of these digests."""
        left_out = {f"{_hex(digest)}@{sender}" for digest in besides}
        names = [entry.name for entry in _scan(self._partial)]
        mine = [name for name in names if name.endswith(f"@{sender}") and name not in left_out]
        return sum(_size_of(f"{self._partial}/{name}") or 0 for name in mine)

    def put_chunk(
        self,
        digest: str,
        total_size: int,
        offset: int,
        chunks: Iterable[bytes],
        sender: str = "",
        *,
        to_prove: bool = False,
    ) -> PutResult:
        """Take bytes of a blob from `offset` on, and finish it when all `total_size` are there.

        Bytes already held are skipped. Beyond what is held nothing is stored: the sender resumes from `received`.
        When `chunks` raises, what it gave before stays, and the upload goes on from there. For a complete blob this
        does nothing, without looking at `chunks`, unless the sender has `to_prove` that they have it: then all of its
        bytes are taken and checked like those of a new one, and let go of. Until it is complete, its bytes count as
        those of the `sender` who began it (`unfinished_bytes`).

        Raises:
            DigestMismatch: the bytes are not what the digest says; they were removed.
            StorageFull: what came before the failing chunk is kept; the same call succeeds once there is space.
        """
        if offset < 0 or total_size < 0:
            raise ValueError(f"negative offset or size: {offset}, {total_size}")
        partial = self._partial_path(digest, sender)
        if _claim(self._blob_path(digest)) and not to_prove:
            return PutResult(total_size, True)
        with storage_full(f"blob {digest}"):
            position = offset
            for chunk in chunks:
                if position + len(chunk) > total_size:
                    raise DigestMismatch(
                        f"blob {digest}: more than the {total_size} bytes that were announced arrived", hint=_RESEND
                    )
                with self._held(partial):
                    held = _size_of(partial) or 0
                    if (self.has(digest) and not to_prove) or position > held:
                        break
                    self._append(partial, held, memoryview(chunk)[held - position :])
                position += len(chunk)
            return self._finish(digest, total_size, partial, to_prove=to_prove)

    def put_bytes(self, digest: str, data: bytes) -> None:
        """Store a whole blob. Idempotent.

        Raises:
            DigestMismatch: `data` is not what the digest says; nothing was stored.
            StorageFull: nothing was stored; the same call succeeds once there is space.
        """
        actual = hashlib.sha256(data).hexdigest()
        if actual != _hex(digest):
            raise _mismatch(digest, actual, len(data))
        with storage_full(f"blob {digest}"):
            if _claim(self._blob_path(digest)):
                return
            partial = f"{self._partial}/{_hex(digest)}"
            with self._held(partial):
                temporary = f"{partial}.tmp"
                try:
                    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                    try:
                        write_all(fd, data)
                        os.fsync(fd)
                    finally:
                        os.close(fd)
                    self._publish(temporary, digest)
                except OSError:
                    _unlink(temporary)
                    raise
                self._forget_upload(partial)

    def delete(self, digest: str) -> None:
        """Remove a blob. Idempotent; works on a full disk; an unfinished upload of it stays."""
        _unlink(self._blob_path(digest))

    def set_aside(self, digest: str, unclaimed_since: float) -> int | None:
        """Take a blob out of the store, unless somebody claimed it since; its size, None if it stays or is not here.

        It is looked at after it was renamed, when nobody can claim it any more: a claim that came before is seen, one
        that comes later finds nothing, and its file is sent again. What a process that was killed set aside is found by
        the next call. `discard` removes it for good.
        """
        blob, aside = self._blob_path(digest), self._aside_path(digest)
        claimed_at = self.claimed_at(digest)
        if claimed_at is None:
            return _size_of(aside)
        if claimed_at >= unclaimed_since:
            return None
        os.makedirs(self._partial, exist_ok=True)
        try:
            os.rename(blob, aside)
        except FileNotFoundError:
            return None  # another deleted it meanwhile
        found = os.stat(aside)
        if found.st_mtime >= unclaimed_since:
            os.rename(aside, blob)
            return None
        return found.st_size

    def discard(self, digest: str) -> None:
        """Remove what was set aside. Idempotent; works on a full disk."""
        _unlink(self._aside_path(digest))

    def total_bytes(self) -> int:
        """The size of all complete blobs together."""
        total = 0
        for shard in _scan(self._root):
            if len(shard.name) == 2 and shard.is_dir():
                for entry in _scan(shard.path):
                    with suppress(FileNotFoundError):
                        total += entry.stat().st_size
        return total

    def sweep_partials(self, older_than_s: float) -> int:
        """Remove unfinished uploads that took no byte for `older_than_s` seconds; returns how many."""
        swept = 0
        for name in {entry.name.partition(".")[0] for entry in _scan(self._partial)}:
            if not _UPLOAD.fullmatch(name):
                continue
            path = f"{self._partial}/{name}"
            # Someone who holds the lock is using it: whatever its age, it is not abandoned.
            with locked(f"{path}.lock", create=False, wait=False) as held:
                if not held:
                    continue
                files = (path, f"{path}.tmp", f"{path}.going")
                latest = [os.stat(file).st_mtime for file in files if os.path.exists(file)]
                if latest and time.time() - max(latest) < older_than_s:
                    continue
                swept += bool(latest)
                for suffix in ("", ".from", ".tmp", ".going", ".lock"):  # the lock, which is held, last
                    _unlink(f"{path}{suffix}")
        return swept

    def _blob_path(self, digest: str) -> str:
        name = _hex(digest)
        return f"{self._root}/{name[:2]}/{name}"

    def _aside_path(self, digest: str) -> str:
        return f"{self._partial}/{_hex(digest)}.going"

    def _partial_path(self, digest: str, sender: str) -> str:
        if not _SENDER.fullmatch(sender):
            raise ValueError(f"not a sender: {sender!r}")
        return f"{self._partial}/{_hex(digest)}" + (f"@{sender}" if sender else "")

    @contextmanager
    def _held(self, partial: str) -> Iterator[None]:
        with locked(f"{partial}.lock"):
            yield

    def _append(self, partial: str, held: int, data: memoryview) -> None:
        """Write at the end of the partial file; on an error it is as long as before."""
        if not data:
            return
        fd = os.open(partial, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            write_all(fd, data)
        except OSError:
            os.ftruncate(fd, held)
            raise
        finally:
            os.close(fd)

    def _finish(self, digest: str, total_size: int, partial: str, *, to_prove: bool) -> PutResult:
        """Verify and publish the partial file if all bytes are there."""
        with self._held(partial):
            if self.has(digest) and not to_prove:
                self._forget_upload(partial)
                return PutResult(total_size, True)
            held = _size_of(partial) or 0
            if held < total_size:
                if held == 0:
                    self._forget_upload(partial)
                return PutResult(held, False)
            with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o600), "rb") as file:
                # Read back what landed on disk: hashing what passed by would not notice a lost or torn write.
                actual = hashlib.file_digest(file, "sha256").hexdigest()
                if actual != _hex(digest):
                    self._forget_upload(partial)
                    raise _mismatch(digest, actual, held)
                try:
                    os.fsync(file.fileno())
                except OSError:
                    # The kernel may have let go of the unwritten pages: only a fresh upload can be trusted.
                    self._forget_upload(partial)
                    raise
            if not _claim(self._blob_path(digest)):
                self._publish(partial, digest)
            self._forget_upload(partial)
            return PutResult(total_size, True)

    def _publish(self, source: str, digest: str) -> None:
        target = self._blob_path(digest)
        shard = os.path.dirname(target)
        with suppress(FileExistsError):
            os.mkdir(shard)
        os.rename(source, target)
        sync_folder(shard)
        # Always, not only after this mkdir: whoever made the folder may have been killed before this line.
        sync_folder(self._root)

    def _forget_upload(self, partial: str) -> None:
        """Remove the partial file and, with it, the lock the caller holds: `locked` allows that."""
        _unlink(partial)
        _unlink(f"{partial}.lock")


def _hex(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"not a digest: {digest!r}")
    return digest[7:]


def _mismatch(digest: str, actual: str, size: int) -> DigestMismatch:
    return DigestMismatch(
        f"blob {digest}: the {size} bytes that arrived have the digest sha256:{actual}; they were removed", hint=_RESEND
    )


def _claim(path: str) -> bool:
    """Whether it is there; then it counts as used now."""
    try:
        if time.time() - os.stat(path).st_mtime > CLAIM_EVERY_S:
            os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
