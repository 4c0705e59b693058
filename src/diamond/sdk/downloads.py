"""Fetching what a task left behind: whole files or nothing, verified, resumed where an earlier try stopped."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diamond.core.bundles import check_relative_path
from diamond.core.errors import DigestMismatch, InvalidInput, NotFound, ProtocolError, ServerUnreachable
from diamond.core.tasks import Output
from diamond.sdk.folders import Progress
from diamond.sdk.transport import API, Transport

_CHUNK = 1024 * 1024
_OUTAGES = 5
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Download:
    """One file that is now here. `fetched` is False when it was here already, with the same contents."""

    path: str
    dest: Path
    size_bytes: int
    fetched: bool


def choose(outputs: Sequence[Output], paths: Sequence[str] | None) -> list[Output]:
    """The outputs that `paths` name: files, folders or patterns; all that are stored when it is None.

    Raises:
        NotFound: a path names no output, or only one that is kept on the endpoint alone.
    """
    if paths is None:
        return [item for item in outputs if item.stored]
    chosen: dict[str, Output] = {}
    for wanted in paths:
        name = wanted.strip("/").removeprefix("./")
        found = [
            item
            for item in outputs
            if name in ("", ".")
            or item.path == name
            or item.path.startswith(name + "/")
            or fnmatch.fnmatch(item.path, name)
        ]
        stored = [item for item in found if item.stored]
        if not found:
            have = ", ".join(item.path for item in outputs[:20]) or "none"
            raise NotFound(f"the task has no output {wanted[:80]!r}", hint=f"its outputs: {have}")
        if not stored:
            raise NotFound(
                f"{found[0].path!r} is not at the server ({found[0].size_bytes} bytes): it was kept on the endpoint",
                hint="it was too large, or changed or vanished while it was read; look into the job's run directory "
                "there (diamond show TASK)",
            )
        chosen |= {item.path: item for item in stored}
    return list(chosen.values())


class Downloader:
    """Fetches outputs of one task."""

    def __init__(self, transport: Transport, task_id: str, *, sleep: Callable[[float], None] | None = None) -> None:
        self._transport = transport
        self._path = f"{API}/tasks/{task_id}/outputs/content"
        self._sleep = sleep or time.sleep

    def fetch_all(self, items: Sequence[Output], dest: Path, progress: Progress | None) -> list[Download]:
        # Checked before the first byte: a path from the server must not lead out of `dest`.
        targets = [dest.joinpath(*check_relative_path(item.path, "the output").split("/")) for item in items]
        total = sum(item.size_bytes for item in items)
        done = 0
        found = []
        for number, (item, target) in enumerate(zip(items, targets, strict=True)):

            def tell(here: int, before: int = done, files: int = number) -> None:
                if progress:
                    progress(before + here, total, files)

            found.append(self.fetch(item, target, tell))
            done += item.size_bytes
            tell(item.size_bytes, done - item.size_bytes, number + 1)
        return found

    def fetch(self, item: Output, target: Path, tell: Callable[[int], None]) -> Download:
        """One file to `target`. Appears there complete and verified, or not at all."""
        wanted = item.sha256.removeprefix("sha256:")
        if (wanted and not _HEX.fullmatch(wanted)) or item.size_bytes < 0:
            raise ProtocolError(
                f"the server names an impossible checksum or size for {item.path[:200]!r}",
                hint="is it a Diamond server, and of the same version? see: diamond check",
            )
        if target.is_dir():
            raise InvalidInput(f"{target} is a folder; the output {item.path!r} is a file", hint="choose another place")
        if wanted and target.is_file() and target.stat().st_size == item.size_bytes and _hash(target) == wanted:
            return Download(path=item.path, dest=target, size_bytes=item.size_bytes, fetched=False)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"{target.parent} cannot be made: {error.strerror}") from error
        # Named by contents: the rest of another version is never continued.
        part = target.with_name(f".{target.name[:180]}.{wanted[:12] or 'new'}.part")
        if not wanted:
            part.unlink(missing_ok=True)
        for last_try in (False, True):
            try:
                digest = self._fill(item, part, tell)
                if not wanted and part.stat().st_size != item.size_bytes:
                    raise ProtocolError(
                        f"{item.path!r} arrived shorter than its {item.size_bytes} bytes", hint="fetch it again"
                    )
            except ProtocolError:
                part.unlink(missing_ok=True)
                raise
            if not wanted or digest == wanted:
                os.replace(part, target)
                return Download(path=item.path, dest=target, size_bytes=item.size_bytes, fetched=True)
            part.unlink(missing_ok=True)
            if last_try:
                break
        raise DigestMismatch(
            f"{item.path!r} arrived twice with other contents than the task reported (sha256 {digest[:12]}…, "
            f"not {wanted[:12]}…)",
            hint="the file may have changed at the server; look into its log",
        )

    def _fill(self, item: Output, part: Path, tell: Callable[[int], None]) -> str:
        source = Source(path=self._path, params={"path": item.path}, name=item.path, size_bytes=item.size_bytes)
        return fill(self._transport, source, part, tell, sleep=self._sleep)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Bytes at the server: by which route, how many, and how to call them in messages."""

    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    name: str
    size_bytes: int


def fill(
    transport: Transport,
    source: Source,
    part: Path,
    tell: Callable[[int], None],
    *,
    base: int = 0,
    sleep: Callable[[float], None] | None = None,
) -> str:
    """Bring `part` to its full length, resuming; gives the SHA-256 of what it then holds after `base`.

    Args:
        base: how many bytes at the beginning of `part` are something else, and stay.

    Raises:
        ProtocolError: the server sends more than it said.
        ServerUnreachable: it cannot be reached for long; what arrived stays.
    """
    outages = 0
    with open(part, "a+b") as file:
        hasher = hashlib.sha256()
        file.seek(base)
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
        have = file.tell() - base
        if have > source.size_bytes:
            file.truncate(base)
            have, hasher = 0, hashlib.sha256()
        while have < source.size_bytes:
            # Compressed bytes would not be those that were counted and hashed.
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            before = have
            try:
                with transport.stream("GET", source.path, params=source.params, headers=headers) as answer:
                    if have and answer.status_code != 206:  # a proxy that knows no ranges: from the start
                        file.truncate(base)
                        have, hasher = 0, hashlib.sha256()
                    for chunk in answer.iter_raw(_CHUNK):
                        if have + len(chunk) > source.size_bytes:
                            raise ProtocolError(
                                f"the server sends more than the {source.size_bytes} bytes of {source.name!r}",
                                hint="the file may have changed at the server; look into its log",
                            )
                        file.write(chunk)
                        hasher.update(chunk)
                        have += len(chunk)
                        tell(min(have, source.size_bytes))
            except ServerUnreachable:
                outages = 0 if have > before else outages + 1
                if outages > _OUTAGES:
                    raise
                (sleep or time.sleep)(min(0.5 * 2**outages, 5.0))
                continue
            if have <= before:
                break  # shorter than reported: the digest will say so
        file.flush()
        os.fsync(file.fileno())
    return hasher.hexdigest()


def _hash(path: Path) -> str:
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()
