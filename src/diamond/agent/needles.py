"""Finds many byte strings in a text, in time linear in the text whatever the strings and the text are.

A string of its own is looked for with `bytes.find`, which is linear for one search; how strings overlap themselves is
taken into account, so that each search begins far behind the last. Many strings share one pass instead: words at
fixed distances are looked up in a table of all words that could stand there, and only around those is anything
compared. Pure; must not know what the strings mean.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator

Span = tuple[int, int]

_FEW = 16  # so many are looked for one by one: faster than the table
_LONG = 2048  # longer ones as well, once their beginning was seen
_BLOCK_BYTES = 16 * 1024
# Below 30,000 bytes CPython (3.10 and later) searches with a method that is not linear. No match reaches into these.
_PADDING = bytes(32 * 1024)
_SEARCHED_OTHERWISE = 100  # strings shorter than this are not
_HEAD_BYTES = 15  # as much of a string as is compared before more of it is


class Needles:
    """A set of byte strings to look for. Not empty ones; may be used by several threads."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        self._sorted = sorted({needle for needle in needles if needle})
        self.longest = max(map(len, self._sorted), default=0)
        shared = [needle for needle in self._sorted if _Table.fits(needle)]
        self._table = _Table(shared) if len(self._sorted) > _FEW and shared else None
        single = [needle for needle in self._sorted if not self._table or not _Table.fits(needle)]
        self._single = [_Single(needle) for needle in single]

    def __bool__(self) -> bool:
        return bool(self._sorted)

    def spans(self, data: bytes) -> tuple[Span, ...]:
        """Where any of them is, in order; those that overlap or touch are one."""
        padded = data + _PADDING if self.longest >= _SEARCHED_OTHERWISE else data
        parts = [single.spans(data, padded) for single in self._single if len(single.needle) <= len(data)]
        if self._table is not None:
            medium, long = self._table.spans(data)
            parts.append(medium)
            parts += [single.spans(data, padded, since) for single, since in long]
        parts = [part for part in parts if part]
        if len(parts) == 1:
            return tuple(parts[0])
        return tuple(_merged(sorted(span for part in parts for span in part)))

    def beginning(self, data: bytes) -> int:
        """Where the longest end of `data` begins that one of them begins with and goes on from; else its length."""
        at = len(data)
        for size in range(1, min(_HEAD_BYTES, len(data)) + 1):
            if _goes_on(self._sorted, data[-size:]):
                at = len(data) - size
        tail = max(0, len(data) - self.longest + 1)
        for single in self._single:
            at = min(at, single.beginning(data, tail))
        if self._table is not None:
            at = min(at, self._table.beginning(data, tail))
        return at


class _Single:
    """One string, looked for by itself."""

    def __init__(self, needle: bytes) -> None:
        self.needle = needle
        self._known_period = 0

    @property
    def _period(self) -> int:
        """The smallest distance at which two matches can overlap; computed when the first match is met."""
        if not self._known_period:
            self._known_period = len(self.needle) - _borders(self.needle)[-1]
        return self._known_period

    def spans(self, data: bytes, padded: bytes, since: int = 0) -> list[Span]:
        """Where it is, from `since` on. `padded`: the data, and behind it what keeps the search linear."""
        size = len(self.needle)
        spans: list[Span] = []
        at = padded.find(self.needle, since)
        while 0 <= at <= len(data) - size:
            last = self._end_of_run(data, at)
            if spans and at <= spans[-1][1]:
                spans[-1] = (spans[-1][0], last + size)
            else:
                spans.append((at, last + size))
            # A match nearer than the second of these would be a whole number of periods away: part of the run.
            at = padded.find(self.needle, last + max(self._period, size - self._period + 1))
        return spans

    def _end_of_run(self, data: bytes, at: int) -> int:
        """The last of the matches from `at` on, each of which begins one period behind the one before."""
        size, period = len(self.needle), self._period
        if 2 * period > size:
            return at
        # Within a run every byte is that of one period before: first in growing steps, then in ever smaller ones.
        end, step, grows = at + size, period, True
        while step >= period:
            goes_on = end + step <= len(data) and data[end : end + step] == data[end - period : end - period + step]
            end += step if goes_on else 0
            grows = grows and goes_on
            step = 2 * step if grows else step // 2
        return end - size

    def beginning(self, data: bytes, tail: int) -> int:
        """As of `Needles`, for ends longer than a head."""
        tail = max(tail, len(data) - len(self.needle) + 1)
        if len(self.needle) <= _HEAD_BYTES or len(data) - tail <= _HEAD_BYTES:
            return len(data)
        begin = data.find(self.needle[:_HEAD_BYTES], tail)
        if begin < 0:
            return len(data)
        borders, matched = _borders(self.needle), 0
        for byte in memoryview(data)[begin:]:
            while matched and byte != self.needle[matched]:
                matched = borders[matched - 1]
            matched += byte == self.needle[matched]
        return len(data) - matched


class _Table:
    """Many strings, each longer than two words but for one byte: wherever it begins, it holds one aligned word."""

    def __init__(self, needles: list[bytes]) -> None:
        wide = all(len(needle) >= _HEAD_BYTES for needle in needles)
        self._width, self._code = (8, "Q") if wide else (4, "I")
        self._head = 2 * self._width - 1
        self._reach: dict[bytes, int] = {}  # by head: the length of the longest that begins so, if it is not long
        self._long: dict[bytes, list[_Single]] = {}
        self._sorted = [needle for needle in needles if len(needle) <= _LONG]
        self._within = _prefixes(self._sorted)
        words: dict[int, set[int]] = {}
        for needle in needles:
            head = needle[: self._head]
            if len(needle) > _LONG:
                self._long.setdefault(head, []).append(_Single(needle))
            else:
                self._reach[head] = max(self._reach.get(head, 0), len(needle))
            for before in range(self._width):
                word = int.from_bytes(head[before : before + self._width], sys.byteorder)
                words.setdefault(word, set()).add(before)
        self._words = {word: tuple(sorted(befores, reverse=True)) for word, befores in words.items()}
        self._known = frozenset(words)
        self._longest = max((len(needle) for needle in self._sorted), default=0)

    @staticmethod
    def fits(needle: bytes) -> bool:
        return len(needle) >= 7

    def _heads(self, data: bytes, since: int = 0) -> Iterator[tuple[int, bytes]]:
        """Where something begins as one of them does, in order, and how."""
        for start in range(since, len(data), _BLOCK_BYTES):
            block = data[start : start + _BLOCK_BYTES]
            words = array(self._code, block[: len(block) // self._width * self._width])
            if self._known.isdisjoint(words):
                continue
            for number, word in enumerate(words):
                for before in self._words.get(word, ()):
                    at = start + number * self._width - before
                    head = data[at : at + self._head]
                    if at >= since and (head in self._reach or head in self._long):
                        yield at, head

    def spans(self, data: bytes) -> tuple[list[Span], list[tuple[_Single, int]]]:
        """Where those are that are not long, and which long ones begin somewhere, with the first place."""
        spans: list[Span] = []
        long: dict[bytes, int] = {}
        covered = 0
        for at, head in self._heads(data):
            if head in self._long:
                long.setdefault(head, at)
            reach = self._reach.get(head, 0)
            if at + reach <= covered or not (size := self._longest_at(data[at : at + reach])):
                continue
            if spans and at <= covered:
                spans[-1] = (spans[-1][0], max(covered, at + size))
            else:
                spans.append((at, at + size))
            covered = spans[-1][1]
        return spans, [(single, at) for head, at in long.items() for single in self._long[head]]

    def _longest_at(self, text: bytes) -> int:
        """The length of the longest that `text` begins with; 0 for none."""
        place = bisect_right(self._sorted, text) - 1
        if place < 0:
            return 0
        nearest = self._sorted[place]
        if text.startswith(nearest):
            return len(nearest)
        # Whatever `text` begins with lies before `nearest`, which begins with it as well.
        within = self._within[place]
        fits = bisect_right(within, _num_shared(nearest, text))
        return within[fits - 1] if fits else 0

    def beginning(self, data: bytes, tail: int) -> int:
        """As of `Needles`, for ends at least as long as a head."""
        at = len(data)
        long: set[bytes] = set()
        for place, head in self._heads(data, tail):
            if head in self._long:
                long.add(head)
            # Of several the first is the longest.
            if place < at and len(data) - place < self._reach.get(head, 0) and _goes_on(self._sorted, data[place:]):
                at = place
        return min([at, *(single.beginning(data, tail) for head in long for single in self._long[head])])


def _goes_on(ordered: list[bytes], end: bytes) -> bool:
    """Whether a string of a sorted list begins with `end` and is longer."""
    place = bisect_right(ordered, end)
    return place < len(ordered) and ordered[place].startswith(end)


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _borders(needle: bytes) -> array[int]:
    """For each beginning of it: how long the longest shorter beginning is that it also ends with."""
    borders, size = array("I", [0]), 0
    for byte in memoryview(needle)[1:]:
        while size and byte != needle[size]:
            size = borders[size - 1]
        size += byte == needle[size]
        borders.append(size)
    return borders


def _prefixes(ordered: list[bytes]) -> list[tuple[int, ...]]:
    """For each string of a sorted list: the lengths of the others that it begins with, ascending."""
    found: list[tuple[int, ...]] = []
    open_: list[bytes] = []  # those that the one before begins with, and itself
    for needle in ordered:
        while open_ and not needle.startswith(open_[-1]):
            open_.pop()
        found.append(tuple(map(len, open_)))
        open_.append(needle)
    return found


def _num_shared(a: bytes, b: bytes) -> int:
    """How many bytes two strings begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
