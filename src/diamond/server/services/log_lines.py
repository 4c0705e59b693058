"""A log by its lines: some of them by number, and the numbers of those that hold a text.

Logs are bytes at offsets. Which line begins where is remembered sparsely, once for every quarter of a MiB, and only
what a log has gained since is looked through again: a page may jump about in a million lines. Lines are shortened for
showing, so that one of a gigabyte costs no more than any other. Must not change a byte of what is downloaded.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from diamond.core.states import TaskState
from diamond.server.services import attempts
from diamond.server.services.context import Context
from diamond.server.store.streams import StreamStore

MAX_LINES = 1000
MAX_SHOWN = 2000  # bytes of one line
MAX_FOUND = 10_000
MAX_SEARCH = 200
_BLOCK_BYTES = 256 * 1024
_MAX_READ_BYTES = 16 * 1024 * 1024
_MAX_KNOWN = 64
_KEPT = 8 * MAX_SHOWN  # of a long line, at either end
# A terminal's orders other than colours: cursor movements, titles of windows.
_ORDERS = re.compile(rb"\x1b(?:\[[0-9;:?<>=]*[ -/]*[@-ln-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-Za-z]|[=>78cDEHM])")
_COLOURS = re.compile(rb"\x1b\[[0-9;:]*m")


@dataclass(frozen=True, kw_only=True)
class Line:
    """`text` may hold colours (SGR). `num_bytes` is the whole line's; `offset` is where in the log it begins."""

    number: int  # from 1
    text: str
    num_bytes: int
    offset: int
    is_cut: bool


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Some lines of one attempt's log. `total` counts a last line that has no end yet. `attempt` 0: there is no job."""

    lines: list[Line]
    total: int
    num_bytes: int
    attempt: int
    newest: int
    is_over: bool
    state: TaskState


@dataclass(frozen=True, kw_only=True)
class Found:
    """Numbers of lines; `more`: there are others after them."""

    lines: list[int]
    more: bool
    total: int


@dataclass
class _Index:
    """Line starts: `lines[i]` lines end before `offsets[i]`. All before the last of them was looked through."""

    lines: list[int] = field(default_factory=lambda: [0])
    offsets: list[int] = field(default_factory=lambda: [0])
    gap: tuple[int, int] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Indexes:
    """What is known of the logs that somebody looks at, in this process. Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Index] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, job_id: str) -> _Index:
        with self._lock:
            index = self._known.setdefault(job_id, _Index())
            self._known.move_to_end(job_id)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            return index


_INDEXES = _Indexes()


def read(
    ctx: Context,
    user_id: str,
    task_id: str,
    *,
    attempt: int | None = None,
    first: int | None = None,
    count: int = 200,
) -> Excerpt:
    """`count` lines from number `first` on; the last ones without it. Fewer where they are very long.

    Raises:
        NotFound: there is no such task or attempt.
    """
    # State before bytes, as in reading by offset: what is read after a final state is all there will ever be.
    found = attempts.find(ctx, user_id, task_id, attempt)
    lines: list[Line] = []
    total = size = 0
    if found.job_id:
        size = ctx.streams.size(found.job_id, "log")
        known = _catch_up(ctx.streams, found.job_id, size)
        total = known.lines[-1] + (1 if size > known.offsets[-1] else 0)
        count = max(0, min(count, MAX_LINES))
        begin = max(1, total - count + 1) if first is None else max(1, first)
        lines = _lines(ctx.streams, found.job_id, known, begin, count, size)
    return Excerpt(
        lines=lines,
        total=total,
        num_bytes=size,
        attempt=found.number,
        newest=found.newest,
        is_over=found.job_state.is_final if found.job_id else found.task_state.is_final,
        state=found.task_state,
    )


def find(ctx: Context, user_id: str, task_id: str, text: str, *, attempt: int | None = None) -> Found:
    """Lines that hold `text`, in any spelling of its ASCII letters; colours are looked through.

    Raises:
        NotFound: there is no such task or attempt.
    """
    found = attempts.find(ctx, user_id, task_id, attempt)
    wanted = text[:MAX_SEARCH].encode(errors="replace").lower()
    if not found.job_id or not wanted or b"\n" in wanted:
        return Found(lines=[], more=False, total=0)
    size = ctx.streams.size(found.job_id, "log")
    known = _catch_up(ctx.streams, found.job_id, size)
    total = known.lines[-1] + (1 if size > known.offsets[-1] else 0)
    numbers: list[int] = []
    before = 0
    for block in _whole_lines(ctx.streams, found.job_id, 0, size):
        plain = (_COLOURS.sub(b"", block) if b"\x1b" in block else block).lower()
        at = plain.find(wanted)
        line, counted = before, 0
        while at >= 0:
            line += plain.count(b"\n", counted, at)
            if len(numbers) == MAX_FOUND:
                return Found(lines=numbers, more=True, total=total)
            if not numbers or numbers[-1] != line + 1:
                numbers.append(line + 1)
            end = plain.find(b"\n", at)
            if end < 0:
                break
            line, counted = line + 1, end + 1
            at = plain.find(wanted, counted)
        before += block.count(b"\n")
    return Found(lines=numbers, more=False, total=total)


def plain_tail(excerpt: Excerpt) -> str:
    """The same for where nothing can be coloured."""
    return "\n".join(_COLOURS.sub(b"", line.text.encode(errors="replace")).decode() for line in excerpt.lines)


def _catch_up(streams: StreamStore, job_id: str, size: int) -> _Index:
    """What is known, up to `size`; begun anew when bytes in its middle were dropped since."""
    index = _INDEXES.of(job_id)
    with index.lock:
        gap = streams.gap(job_id, "log")
        if gap != index.gap or size < index.offsets[-1]:
            index.lines, index.offsets, index.gap = [0], [0], gap
        while index.offsets[-1] < size:
            if not _one_block(streams, job_id, index, size):
                break
        return _Index(lines=list(index.lines), offsets=list(index.offsets), gap=gap)


def _one_block(streams: StreamStore, job_id: str, index: _Index, size: int) -> bool:
    """Look through one block more; False when no line ends in what is left."""
    offset = position = index.offsets[-1]
    newlines = 0
    while position < size:
        piece = streams.read(job_id, "log", position, min(_BLOCK_BYTES, size - position))
        if piece.next_offset == position:
            return False
        data = _without_first_break(piece.data) if piece.dropped and position == offset else piece.data
        newlines += data.count(b"\n")
        end = data.rfind(b"\n")
        position = piece.next_offset
        if end >= 0:
            index.lines.append(index.lines[-1] + newlines)
            index.offsets.append(position - (len(data) - end - 1))
            return True
        if index.gap is not None and position == index.gap[0]:  # a line that the hole cut off: the marker ends it
            index.lines.append(index.lines[-1] + 1)
            index.offsets.append(position)
            return True
    return False


def _without_first_break(marker: bytes) -> bytes:
    """A hole's marker begins with the end of the line before; after a whole line there is nothing to end."""
    return marker.removeprefix(b"\n")


def _pieces(streams: StreamStore, job_id: str, offset: int, size: int, step: int) -> Iterator[tuple[bytes, int]]:
    """Bytes from `offset`, a line's beginning, on, with the offset after them."""
    is_fresh = True
    while offset < size:
        piece = streams.read(job_id, "log", offset, min(step, size - offset))
        if piece.next_offset == offset:
            return
        data = _without_first_break(piece.data) if piece.dropped and is_fresh else piece.data
        offset = piece.next_offset
        if data:
            is_fresh = data.endswith(b"\n")
            yield data, offset


def _whole_lines(streams: StreamStore, job_id: str, offset: int, size: int) -> Iterator[bytes]:
    """The log in large blocks that end with a line; the last one as it is. A line longer than that is cut in two, of
    which only the last has an end."""
    rest = b""
    for data, _ in _pieces(streams, job_id, offset, size, 4 * 1024 * 1024):
        end = data.rfind(b"\n") + 1
        if end or len(rest) > _MAX_READ_BYTES:
            yield rest + data[:end]
            rest = data[end:]
        else:
            rest += data
    if rest:
        yield rest


class _Growing:
    """A line as its pieces come: of a very long one, its beginning and its end."""

    def __init__(self, number: int, offset: int) -> None:
        self.number, self.offset, self.num_bytes = number, offset, 0
        self._head = self._tail = b""

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        room = _KEPT - len(self._head)
        self._head += data[:room]
        if len(data) > room:
            self._tail = (self._tail + data[max(room, len(data) - _KEPT) :])[-_KEPT:]

    def line(self) -> Line:
        """As a terminal would show it at the end: what a progress bar wrote over is gone."""
        shown = (self._head + self._tail).rstrip(b"\r")
        if self._tail and b"\r" not in self._tail.rstrip(b"\r"):
            shown = self._head
        shown = shown[shown.rfind(b"\r") + 1 :]
        if b"\x1b" in shown:
            shown = _ORDERS.sub(b"", shown)
        is_cut = len(shown) > MAX_SHOWN
        text = shown[:MAX_SHOWN].decode(errors="replace")
        return Line(number=self.number, text=text, num_bytes=self.num_bytes, offset=self.offset, is_cut=is_cut)


def _lines(streams: StreamStore, job_id: str, index: _Index, first: int, count: int, size: int) -> list[Line]:
    at = max(0, bisect_right(index.lines, first - 1) - 1)
    made: list[Line] = []
    current = _Growing(index.lines[at] + 1, index.offsets[at])
    taken = 0
    for data, after in _pieces(streams, job_id, index.offsets[at], size, 64 * 1024):
        taken += len(data)
        start = 0
        while len(made) < count and (end := data.find(b"\n", start)) >= 0:
            if current.number >= first:
                current.add(data[start:end])
                made.append(current.line())
            start = end + 1
            # Offsets are counted from the end: a marker in front of the bytes is not part of the log.
            current = _Growing(current.number + 1, after - (len(data) - start))
        if len(made) >= count or (made and taken > _MAX_READ_BYTES):
            return made
        current.add(data[start:])
    if current.num_bytes and current.number >= first:
        made.append(current.line())
    return made
