"""Secret values in streams: found in every form and across every boundary, hidden byte for byte, and nothing else."""

from __future__ import annotations

import base64
import json
import os
import random
import time
import urllib.parse
from pathlib import Path

import pytest

from diamond.agent.masking import Mask, cover, wash

TOKEN = "hf_QxR7+z/=é &k9"
PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\nEFAASCBKcwggSjAgEAAoIBAQC7\n-----END KEY-----\n"


def hidden(mask: Mask, data: bytes, *, more: bool = False) -> bytes:
    return mask.cut(data, len(data), more=more).data


@pytest.mark.parametrize(
    "shown",
    [
        TOKEN,
        base64.b64encode(TOKEN.encode()).decode().rstrip("="),
        base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("="),
        urllib.parse.quote(TOKEN, safe=""),
        urllib.parse.quote(TOKEN),
        urllib.parse.quote_plus(TOKEN),
        json.dumps(TOKEN)[1:-1],
        json.dumps(TOKEN, ensure_ascii=False)[1:-1],
    ],
)
def test_every_form_is_hidden_in_place(shown: str) -> None:
    data = f"before {shown} after\n".encode()
    masked = hidden(Mask([TOKEN]), data)
    assert len(masked) == len(data)
    middle = masked[len(b"before ") : -len(b" after\n")]
    assert middle.count(b"*") >= len(middle) - 2, middle


@pytest.mark.parametrize("before", ["", "u", "us", "use", "user:"])
@pytest.mark.parametrize("after", ["", "!", "!!"])
def test_base64_of_something_longer(before: str, after: str) -> None:
    """A Basic authorization header holds a password at any of three alignments."""
    whole = base64.b64encode((before + TOKEN + after).encode())
    masked = hidden(Mask([TOKEN]), whole)
    left = bytes(shown if shown != ord("*") else ord("A") for shown in masked)
    opened = base64.b64decode(left)
    assert not any(TOKEN.encode()[at : at + 4] in opened for at in range(len(TOKEN.encode()) - 3))


def test_each_line_of_a_key_is_hidden() -> None:
    text = PEM.replace("\n", "\r\n").encode()
    masked = hidden(Mask([PEM]), text)
    assert b"MIIE" not in masked and b"EFAA" not in masked
    assert masked.count(b"\r\n") == 4


def test_what_is_too_short_to_be_told_from_other_text_is_left() -> None:
    mask = Mask(["abc"])
    assert mask.is_idle
    assert hidden(Mask(["abc", "abcd"]), b"abc abcd abc") == b"abc **** abc"


def test_any_way_of_cutting_a_stream_hides_the_same() -> None:
    """The property that matters: whatever the pieces, no byte of a value leaves, and nothing else changes."""
    rng = random.Random(7)
    values = [TOKEN, "aaaa", "abab-abab", "a-secret", "secret-b"]
    mask = Mask(values)
    for _ in range(300):
        parts = [rng.choice([*values, "a", "ab", "x\n", " ", "secre", TOKEN[:5]]) for _ in range(rng.randint(1, 12))]
        text = " ".join(parts).encode()
        sent, held, at = bytearray(), 0, 0
        while at < len(text) or held < len(text):
            at = min(len(text), at + rng.randint(1, 9))  # the file grows
            over = at == len(text)
            room = rng.randint(1, 64)
            piece = text[held : min(at, held + room + mask.longest)]
            end = held + len(piece) >= at
            found = mask.cut(piece, room, more=not (over and end))
            assert not over or found.data, "it always comes to an end"
            sent += found.data
            held += len(found.data)
        assert len(sent) == len(text)
        for value in values:
            assert value.encode() not in sent, (parts, bytes(sent))
        whole = hidden(mask, text)
        # Cut off at a boundary, overlapping values may hide less at their seam; what is hidden whole is hidden here.
        assert all(a == b or b == ord("*") or a == ord("*") for a, b in zip(sent, whole, strict=True))
        assert all(a in (b, ord("*")) for a, b in zip(sent, text, strict=True))


def test_the_beginning_of_a_value_waits_for_its_end() -> None:
    mask = Mask(["hf_0123456789"])
    first = mask.cut(b"token=hf_01234", 100, more=True)
    assert (first.data, first.is_all) == (b"token=", False)
    assert mask.cut(b"hf_0123456789\n", 100, more=True).data == b"*************\n"
    assert mask.cut(b"hf_01234", 100, more=False).data == b"hf_01234", "at the end of the job, it was none"
    assert mask.cut(b"nothing of it", 100, more=True).is_all


def test_a_value_larger_than_the_room_is_sent_whole() -> None:
    value = "k" + "v" * 5000
    mask = Mask([value])
    data = b"x" * 10 + value.encode() + b"y" * 10
    first = mask.cut(data, 100, more=True)
    assert first.data == b"x" * 10
    second = mask.cut(data[10:], 100, more=True)
    assert second.data == b"*" * len(value)


def test_everything_is_hidden_when_the_values_are_not_known() -> None:
    found = Mask(everything=True).cut(b"one\ntwo", 100, more=True)
    assert (found.data, found.is_all) == (b"***\n***", True)


def test_words_are_hidden_too() -> None:
    mask = Mask([TOKEN])
    assert mask.text(f"out/{TOKEN}/x \udcff") == f"out/{'*' * len(TOKEN.encode())}/x \udcff"
    assert Mask().text("as it is") == "as it is"


def test_a_file_is_washed_in_place(tmp_path: Path) -> None:
    path = tmp_path / "log"
    filler = b"line of a log\n" * 200_000
    path.write_bytes(filler + TOKEN.encode() + filler + TOKEN.encode())
    size, inode = path.stat().st_size, path.stat().st_ino
    wash(path, Mask([TOKEN]))
    data = path.read_bytes()
    assert (len(data), path.stat().st_ino) == (size, inode)
    assert TOKEN.encode() not in data and data.count(b"*") == 2 * len(TOKEN.encode())
    link = tmp_path / "link"
    link.symlink_to(path)
    cover(link, 0, [(0, 4)])  # nothing is written through a link
    assert path.read_bytes().startswith(b"line")
    os.mkfifo(tmp_path / "pipe")
    wash(tmp_path / "pipe", Mask([TOKEN]))
    wash(tmp_path / "absent", Mask([TOKEN]))


def test_large_values_and_long_logs_are_fast() -> None:
    rng = random.Random(1)
    values = ["".join(rng.choices("abcdefghijklmnop", k=64 * 1024)), "".join(rng.choices("0123456789", k=40))]
    mask = Mask(values)
    log = "".join(rng.choices("abcdefghijklmnop \n", k=3 * 1024 * 1024)).encode()
    began = time.monotonic()
    mask.cut(log, len(log), more=True)
    assert time.monotonic() - began < 3
