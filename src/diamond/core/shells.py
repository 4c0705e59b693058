"""A shell in a running job: what is asked, what comes of it, and how its bytes travel.

Two byte streams join the user and the program: input (client -> agent) and output (agent -> client). Each is a sequence
of frames, and each end may be cut off at any moment: streams are addressed by byte offset, so that whoever comes back
goes on exactly where it stopped. The server passes the bytes on without looking into them, and keeps none.

A frame is one byte that says what it is, four bytes of length (big-endian), and that many bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from diamond.core.errors import InvalidInput, ProtocolError, TooLarge

# Client -> agent
STDIN = b"i"
STDIN_END = b"e"
WINDOW = b"w"  # rows and columns, two bytes each
SIGNAL = b"s"  # one byte: the signal's number
# Agent -> client
STDOUT = b"o"
STDERR = b"r"

MAX_CHUNK_BYTES = 256 * 1024  # bytes of one request or answer
MAX_FRAME_BYTES = 64 * 1024
MAX_ARGV_BYTES = 96 * 1024  # Linux takes 128 KiB in one word
_HEAD = struct.Struct(">cI")
_WINDOW = struct.Struct(">HH")
_TERM = re.compile(r"[A-Za-z0-9._+-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class NewShell:
    """What a user asks for: a program in a task's running job, by argv, never through a shell's text."""

    argv: tuple[str, ...]
    tty: bool = False
    rows: int = 24
    cols: int = 80
    term: str = "xterm-256color"
    node: int = 0  # which of the job's nodes, from 0

    def check(self) -> None:
        """Raises InvalidInput, naming the field."""
        if not self.argv or not self.argv[0]:
            raise InvalidInput("must name a program", hint='e.g. ["bash"]', field="argv")
        if any("\0" in word for word in self.argv):
            raise InvalidInput("must not hold NUL characters", field="argv")
        try:
            size = sum(len(word.encode()) + 1 for word in self.argv)
        except UnicodeEncodeError:
            raise InvalidInput("must be text in UTF-8", field="argv") from None
        if size > MAX_ARGV_BYTES:
            raise TooLarge(
                f"is {size} bytes long; {MAX_ARGV_BYTES} are allowed",
                hint="send long text through standard input",
                field="argv",
            )
        for name in ("rows", "cols"):
            if not 0 <= getattr(self, name) <= 0xFFFF:
                raise InvalidInput("must be from 0 to 65535", field=name)
        if not _TERM.fullmatch(self.term):
            raise InvalidInput(f"{self.term[:40]!r} is not the name of a terminal type", field="term")
        if self.node < 0:
            raise InvalidInput("counts from 0", field="node")


@dataclass(frozen=True, kw_only=True)
class ShellOrder:
    """Server -> agent, in `DesiredState.shells`: a shell that nobody has taken up yet."""

    shell_id: str
    job_id: str
    argv: tuple[str, ...]
    tty: bool = False
    rows: int = 24
    cols: int = 80
    term: str = ""
    node: int = 0
    user: str = ""  # who asked, for the endpoint's own records


@dataclass(frozen=True, kw_only=True)
class ShellEnd:
    """How a shell ended. Without an exit code or signal the program's fate is not known; `message` says why."""

    exit_code: int | None = None
    signal: int | None = None
    message: str = ""

    @property
    def status(self) -> int:
        """The exit status a shell would show; 255 when only the connection's end is known."""
        if self.signal is not None:
            return 128 + self.signal
        return 255 if self.exit_code is None else self.exit_code


@dataclass(frozen=True, kw_only=True)
class Shell:
    """How a shell stands. Kept in memory alone: a server that restarts has forgotten it."""

    id: str
    task_id: str
    job_id: str
    endpoint: str
    tty: bool
    state: str  # "waiting" for its agent, "running", "over"
    created_at: float
    end: ShellEnd | None = None


@dataclass(frozen=True, kw_only=True)
class ShellReceived:
    """How many bytes of a stream the server has; go on from there."""

    received: int


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(payload)) + payload


def data_frames(kind: bytes, data: bytes) -> bytes:
    """Bytes of any length as frames."""
    pieces = (data[at : at + MAX_FRAME_BYTES] for at in range(0, len(data), MAX_FRAME_BYTES))
    return b"".join(frame(kind, piece) for piece in pieces)


def window_frame(rows: int, cols: int) -> bytes:
    return frame(WINDOW, _WINDOW.pack(min(max(rows, 0), 0xFFFF), min(max(cols, 0), 0xFFFF)))


def window_size(payload: bytes) -> tuple[int, int]:
    """Rows and columns. Raises ProtocolError."""
    try:
        rows, cols = _WINDOW.unpack(payload)
    except struct.error as error:
        raise ProtocolError("a window size makes no sense") from error
    return rows, cols


class FrameReader:
    """Finds the frames in a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Kind and payload of every frame that is complete by now. Raises ProtocolError."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes in a shell's stream")
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield kind, payload
