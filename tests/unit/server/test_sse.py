"""Framing of server-sent events and cutting bytes into whole characters."""

from __future__ import annotations

import json

import pytest

from diamond.server.sse import frame, whole_characters

TEXT = "aé€😀\r\nz"


def test_a_frame_is_one_line_of_data_whatever_the_text() -> None:
    made = frame({"text": "one\ntwo\r\nthree\u2028four"}, event="log", event_id="1:7").decode()
    lines = made.split("\n")
    assert lines[0] == "id: 1:7" and lines[1] == "event: log"
    assert lines[3:] == ["", ""] and "\r" not in made
    assert json.loads(lines[2].removeprefix("data: "))["text"] == "one\ntwo\r\nthree\u2028four"


def test_every_way_of_cutting_gives_the_same_text() -> None:
    data = TEXT.encode()
    for cut in range(len(data) + 1):
        first, used = whole_characters(data[:cut], last=False)
        rest, all_used = whole_characters(data[used:], last=True)
        assert first + rest == TEXT and used <= cut and used + all_used == len(data)
        assert "\ufffd" not in first


def test_byte_by_byte_resuming_from_what_was_used() -> None:
    data, position, got = TEXT.encode(), 0, ""
    for end in range(len(data) + 1):
        text, used = whole_characters(data[position:end], last=False)
        got, position = got + text, position + used
    assert got == TEXT and position == len(data)


@pytest.mark.parametrize("data", [b"\xff\xfeok", b"a\x80b", b"\xed\xa0\x80", b"\xf5abc"])
def test_what_is_not_utf8_is_shown_and_never_blocks(data: bytes) -> None:
    text, used = whole_characters(data, last=False)
    assert used == len(data) and "\ufffd" in text


def test_half_a_character_at_the_very_end_is_shown() -> None:
    assert whole_characters("é".encode()[:1], last=False) == ("", 0)
    assert whole_characters("é".encode()[:1], last=True) == ("\ufffd", 1)
