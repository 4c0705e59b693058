"""The frames of a shell's streams, and what may be asked for."""

from __future__ import annotations

import random

import pytest

from diamond.core.errors import InvalidInput, ProtocolError, TooLarge
from diamond.core.shells import (
    MAX_FRAME_BYTES,
    STDIN,
    STDIN_END,
    STDOUT,
    FrameReader,
    NewShell,
    ShellEnd,
    data_frames,
    frame,
    window_frame,
    window_size,
)


def test_frames_survive_any_cutting() -> None:
    rng = random.Random(1)
    data = rng.randbytes(3 * MAX_FRAME_BYTES + 17)
    stream = frame(STDIN_END) + data_frames(STDOUT, data) + window_frame(24, 80)
    reader, found, at = FrameReader(), [], 0
    while at < len(stream):
        step = rng.choice((1, 3, 7, 4096, 100_000))
        found += list(reader.feed(stream[at : at + step]))
        at += step
    assert found[0] == (STDIN_END, b"")
    assert b"".join(payload for kind, payload in found if kind == STDOUT) == data
    assert window_size(found[-1][1]) == (24, 80)
    assert data_frames(STDIN, b"") == b""


def test_nonsense_is_told_from_frames() -> None:
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(b"o\xff\xff\xff\xff"))
    with pytest.raises(ProtocolError):
        window_size(b"\0")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (NewShell(argv=()), "argv"),
        (NewShell(argv=("",)), "argv"),
        (NewShell(argv=("sh", "a\0b")), "argv"),
        (NewShell(argv=("sh", "\udcff")), "argv"),
        (NewShell(argv=("sh",), rows=70_000), "rows"),
        (NewShell(argv=("sh",), cols=-1), "cols"),
        (NewShell(argv=("sh",), term="x\ny"), "term"),
        (NewShell(argv=("sh",), node=-1), "node"),
    ],
)
def test_what_cannot_be_asked_for(asked: NewShell, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        asked.check()
    assert caught.value.field == field


def test_a_long_command_belongs_into_standard_input() -> None:
    with pytest.raises(TooLarge, match="standard input"):
        NewShell(argv=("sh", "-c", "x" * 100_000)).check()
    NewShell(argv=("sh", "-c", "", "\n", "ü" * 1000)).check()


def test_exit_statuses_as_a_shell_shows_them() -> None:
    assert ShellEnd(exit_code=3).status == 3
    assert ShellEnd(signal=9).status == 137
    assert ShellEnd(message="the link is gone").status == 255
