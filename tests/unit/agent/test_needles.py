"""Many strings in a text: all that a plain search finds and nothing else, and never more work than the text is long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.agent import needles as module
from diamond.agent.masking import Mask, forms
from diamond.agent.needles import Needles

REPETITIVE = st.builds(
    lambda unit, times, end: unit * times + end,
    st.binary(min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from([b"", b"a", b"ab", b"\0"]),
)
LETTERS = st.lists(st.sampled_from(b"ab"), min_size=1, max_size=60).map(bytes)
NEEDLE = st.one_of(REPETITIVE, LETTERS, st.binary(min_size=1, max_size=30))


def plain_spans(needles: list[bytes], data: bytes) -> tuple[tuple[int, int], ...]:
    """What `Needles.spans` is to find, in the simplest way."""
    covered = [(at, at + len(needle)) for needle in needles for at in range(len(data)) if data.startswith(needle, at)]
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(covered):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def plain_beginning(needles: list[bytes], data: bytes) -> int:
    for at in range(len(data)):
        end = data[at:]
        if any(len(needle) > len(end) and needle.startswith(end) for needle in needles):
            return at
    return len(data)


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    needles = draw(st.lists(NEEDLE, min_size=1, max_size=30))
    piece = st.one_of(
        st.sampled_from(needles),
        st.sampled_from(needles).map(lambda needle: needle[: len(needle) // 2]),
        st.sampled_from(needles).map(lambda needle: needle[len(needle) // 2 :]),
        REPETITIVE,
        LETTERS,
        st.binary(max_size=9),
    )
    return needles, b"".join(draw(st.lists(piece, max_size=12)))


@pytest.mark.parametrize(("few", "long"), [(1000, 2048), (0, 2048), (0, 20)], ids=["each", "table", "table-long"])
def test_it_finds_what_a_plain_search_finds(few: int, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", few)
    monkeypatch.setattr(module, "_LONG", long)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 64)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(searches())
    def check(search: tuple[list[bytes], bytes]) -> None:
        needles, data = search
        looked_for = Needles(needles)
        assert looked_for.spans(data) == plain_spans(needles, data)
        assert looked_for.beginning(data) == plain_beginning(needles, data)

    check()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.text(st.sampled_from('ab/+ "é%\n'), min_size=4, max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(0, 7), max_size=20),
    st.lists(st.integers(1, 90), min_size=1, max_size=9),
)
def test_any_cutting_of_a_stream_hides_every_form(values: list[str], order: list[int], cuts: list[int]) -> None:
    """Whatever the pieces and the forms (plain, lines, base64, URL, JSON) and however these overlap."""
    mask = Mask(values)
    shown = sorted({form for value in values for form in forms(value.encode())})
    data = b" ".join(shown[number * 31 % len(shown)] if number % 2 else b"ab" * number for number in order)
    sent, at, turn = bytearray(), 0, 0
    while at < len(data):
        room = cuts[turn % len(cuts)]
        piece = data[at : at + room + mask.longest]
        cut = mask.cut(piece, room, more=at + len(piece) < len(data))
        assert cut.data, "it always goes on"
        sent += cut.data
        at += len(cut.data)
        turn += 1
    assert len(sent) == len(data)
    assert all(given == told or told == ord("*") for given, told in zip(data, sent, strict=True))
    assert not any(form in sent for form in shown if form.strip(b"*"))


def measured(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best


@pytest.mark.parametrize(
    ("needle", "unit"),
    [
        (b"a" * 30_000, b"a"),
        (b"a" * 15_000 + b"b" + b"a" * 15_000, b"a"),
        (b"b" + b"a" * 30_000, b"a"),
        (b"a" * 30_000 + b"b", b"a"),
        (b"ab" * 15_000, b"ab"),
        ((b"a" * 170 + b"b") * 170, b"a" * 170 + b"b"),
        (b"a" * 64, b"a"),
    ],
    ids=["run", "odd-middle", "odd-start", "odd-end", "pairs", "long-period", "short"],
)
def test_work_grows_like_the_text_whatever_repeats(needle: bytes, unit: bytes) -> None:
    """Sixteen times the text is at most some sixteen times the work; with the square it would be 256 times."""
    looked_for = Needles([needle])
    small = unit * (60_000 // len(unit))
    large = small * 16

    def search(data: bytes) -> None:
        looked_for.spans(data)
        looked_for.beginning(data)

    search(small)
    assert measured(lambda: search(large)) < 60 * max(measured(lambda: search(small)), 1e-4)


def test_each_search_begins_far_behind_the_last() -> None:
    """Counted, not timed: how often a text is searched does not depend on how often the string is in it."""

    class Counting(bytes):
        searches = 0

        def find(self, *given: object) -> int:  # type: ignore[override]
            Counting.searches += 1
            return super().find(*given)  # type: ignore[arg-type]

    (single,) = Needles([b"a" * 3000])._single
    data = b"a" * 300_000
    assert single.spans(data, Counting(data)) == [(0, 300_000)]
    assert Counting.searches <= 2
    (single,) = Needles([b"ab" + b"a" * 3000])._single
    data = (b"ab" + b"a" * 3000) * 100
    Counting.searches = 0
    assert single.spans(data, Counting(data)) == [(0, len(data))]
    assert Counting.searches <= 2 * len(data) / 3002 + 1


def test_thousands_of_lines_cost_little_more_than_a_few() -> None:
    rng = random.Random(5)
    lines = ["".join(rng.choices("abcdefgh", k=12)) for _ in range(5000)]
    many = Mask(["\n".join(lines)])
    text = ("an ordinary line of a log, with nothing in it\n" * 20_000).encode()
    few = Mask(["\n".join(lines[:20])])
    cost = measured(lambda: few.cut(text, len(text), more=True))
    assert measured(lambda: many.cut(text, len(text), more=True)) < 40 * max(cost, 1e-4)
    masked = many.cut((lines[17] + " " + lines[4999]).encode(), 1000, more=False).data
    assert masked == b"*" * 12 + b" " + b"*" * 12
