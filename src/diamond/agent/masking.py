"""Hides secret values in what leaves the endpoint: each byte of one becomes ``*``, so that offsets hold.

Found are the values themselves, their lines, and the forms in which programs like to show them: in base64 (wherever in
a longer text they begin), in URLs and in JSON. What a program does beyond that (encryption, one letter a line) cannot
be found by anybody. Pure but for `wash`, which writes stars over a file.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import stat
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diamond.agent.needles import Needles
from diamond.core.secrets import MIN_MASKED_BYTES

_MIN_LINE_BYTES = 8
_PIECE_BYTES = 1024 * 1024
_LINE = re.compile(rb"[^\n]+")
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def forms(value: bytes) -> set[bytes]:
    """All that is looked for, for one value."""
    if len(value) < MIN_MASKED_BYTES:
        return set()
    text = value.decode(errors="surrogateescape")
    found = {value}
    whole = value.rstrip(b"\n")
    found.add(whole)
    if b"\n" in whole:
        found |= {line for raw in whole.split(b"\n") if len(line := raw.strip()) >= _MIN_LINE_BYTES}
    for one in {value, whole}:
        found |= _in_base64(one)
    with contextlib.suppress(UnicodeEncodeError):
        for quoted in (
            urllib.parse.quote(text, safe=""),
            urllib.parse.quote(text),
            urllib.parse.quote_plus(text),
            json.dumps(text)[1:-1],
            json.dumps(text, ensure_ascii=False)[1:-1],
        ):
            found.add(quoted.encode())
        found |= {_lower_hex(urllib.parse.quote(text, safe=safe)).encode() for safe in ("", "/")}
    return {one for one in found if len(one) >= MIN_MASKED_BYTES}


def _lower_hex(quoted: str) -> str:
    """``%2F`` as some libraries write it."""
    head, *rest = quoted.split("%")
    return head + "".join(f"%{part[:2].lower()}{part[2:]}" for part in rest)


def _in_base64(value: bytes) -> set[bytes]:
    """As it looks inside the base64 of something longer, which may begin at any of three places; in both alphabets."""
    found = set()
    for before in range(3):
        text = base64.b64encode(b"\0" * before + value)
        # Only the characters that depend on nothing but the value: not those it shares with what is beside it.
        sure = text[(0, 2, 3)[before] : (before + len(value)) * 8 // 6]
        found |= {sure, sure.translate(bytes.maketrans(b"+/", b"-_"))}
    return found


@dataclass(frozen=True)
class Cut:
    """What of some bytes may be sent now. `is_all`: nothing was held back or left over."""

    data: bytes
    is_all: bool
    spans: tuple[tuple[int, int], ...] = ()  # where a value was, in the bytes looked at


class Mask:
    """Hides a job's secrets. `everything`: they are not known (any more), so nothing is shown but line ends."""

    def __init__(self, values: Iterable[str] = (), *, everything: bool = False) -> None:
        needles = {form for value in values for form in forms(value.encode())}
        self._needles = Needles(needles)
        self.longest = self._needles.longest
        self.everything = everything

    @property
    def is_idle(self) -> bool:
        return not self._needles and not self.everything

    def text(self, text: str) -> str:
        """One text, whole."""
        if self.is_idle or not text:
            return text
        raw = text.encode(errors="surrogatepass")
        return self._hide(raw, self._needles.spans(raw)).decode(errors="surrogatepass")

    def cut(self, data: bytes, room: int, *, more: bool) -> Cut:
        """The next bytes to send of a stream, at most about `room`.

        Args:
            data: what comes next; up to `longest` more than `room`, if there is so much.
            more: whether anything may follow `data`. If so, an end that might be the beginning of a value is held
                back, until what follows shows whether it is.
        """
        if self.everything:
            lines = tuple(found.span() for found in _LINE.finditer(data[:room]))
            return Cut(self._hide(data[:room], lines), len(data) <= room, lines)
        spans = self._needles.spans(data)
        end = self._sure_end(data, spans) if more else len(data)
        end = min(end, room)
        for start, stop in spans:
            if start < end < stop:  # a value is sent whole, or not yet
                end = start or stop
        return Cut(self._hide(data, spans)[:end], end == len(data), spans)

    def _sure_end(self, data: bytes, spans: tuple[tuple[int, int], ...]) -> int:
        """Where the last bytes begin that could be the beginning of a value."""
        end = self._needles.beginning(data)
        # A value that reaches into them and is complete is told from its own beginning on, not from its middle.
        for start, stop in reversed(spans):
            if start < end < stop:
                end = start if len(data) - start < self.longest else stop
        return end

    @staticmethod
    def _hide(data: bytes, spans: tuple[tuple[int, int], ...]) -> bytes:
        if not spans:
            return data
        hidden = bytearray(data)
        for start, stop in spans:
            hidden[start:stop] = b"*" * (stop - start)
        return bytes(hidden)


def wash(path: Path, mask: Mask, offset: int = 0) -> None:
    """Write stars over every value in a file, from `offset` on. A file that cannot be written stays as it is."""
    if mask.is_idle:
        return
    with contextlib.suppress(OSError):
        while True:
            data = _read(path, offset, _PIECE_BYTES + mask.longest)
            if not data:
                return
            is_last = len(data) < _PIECE_BYTES + mask.longest
            found = mask.cut(data, _PIECE_BYTES, more=not is_last)
            cover(path, offset, found.spans)
            offset += max(1, len(found.data))


def cover(path: Path, offset: int, spans: Iterable[tuple[int, int]]) -> None:
    """Stars over these places of a file, counted from `offset`. Nothing is made longer, nor moved."""
    places = list(spans)
    if not places:
        return
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | _FILE)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return
            for start, stop in places:
                stop = min(offset + stop, found.st_size)
                at = offset + start
                while at < stop:
                    at += os.pwrite(fd, b"*" * min(stop - at, _PIECE_BYTES), at)
        finally:
            os.close(fd)


def _read(path: Path, offset: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | _FILE)
    try:
        return os.pread(fd, size, offset) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
