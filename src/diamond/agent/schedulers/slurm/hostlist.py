"""Slurm's short way of writing many host names, `c[1-3,7],login1`, to and from the names. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

MAX_HOSTS = 100_000  # more than any cluster has; a slip such as c[1-99999999999] must not fill the memory

_NUMBERED = re.compile(r"(.*?)(\d+)$", re.DOTALL)
_EMPTY = {"", "(null)", "None assigned", "n/a", "N/A"}


def expand(text: str) -> tuple[str, ...]:
    """The names in a host list, in its order; what does not look like one is a name by itself."""
    text = text.strip()
    if text in _EMPTY:
        return ()
    hosts: list[str] = []
    for part in _split(text):
        for host in _expand_one(part):
            hosts.append(host)
            if len(hosts) >= MAX_HOSTS:
                return tuple(hosts)
    return tuple(hosts)


def _split(text: str) -> Iterator[str]:
    """At commas outside brackets."""
    depth, begin = 0, 0
    for place, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _expand_one(part: str) -> Iterator[str]:
    before, opening, rest = part.partition("[")
    inside, closing, after = rest.partition("]")
    if not opening or not closing:
        if part:
            yield part
        return
    for piece in inside.split(","):
        low, dash, high = piece.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            numbers: Iterable[str] = (piece,)
        elif not dash:
            numbers = (low,)
        else:
            numbers = (str(number).zfill(len(low)) for number in range(int(low), int(high) + 1))
        for number in numbers:
            # Names of several dimensions (rack[1-2]node[1-4]) go on after the bracket.
            for tail in _expand_one(after) if after else ("",):
                yield f"{before}{number}{tail}"


def compress(names: Iterable[str]) -> str:
    """The short form of these names; each run of numbers with one prefix and one width becomes a range."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in dict.fromkeys(names):
        found = _NUMBERED.match(name)
        if not found:
            plain.append(name)
            continue
        prefix, digits = found.groups()
        # c1 … c10 belong together; c01 does not belong to c1.
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups.setdefault((prefix, width), []).append(int(digits))
    _join_padded(groups)
    written = []
    for (prefix, width), numbers in groups.items():
        ranges = [
            str(low).zfill(width) + (f"-{str(high).zfill(width)}" if high > low else "") for low, high in _runs(numbers)
        ]
        single = len(ranges) == 1 and "-" not in ranges[0]
        written.append(prefix + (ranges[0] if single else f"[{','.join(ranges)}]"))
    return ",".join(written + plain)


def _join_padded(groups: dict[tuple[str, int], list[int]]) -> None:
    """n010 has the width of n009: numbers without a leading zero join the padded ones of their width."""
    for prefix, width in [key for key in groups if key[1]]:
        loose = groups.get((prefix, 0), [])
        fitting = [number for number in loose if len(str(number)) == width]
        if fitting:
            groups[prefix, width] += fitting
            kept = [number for number in loose if len(str(number)) != width]
            if kept:
                groups[prefix, 0] = kept
            else:
                del groups[prefix, 0]


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    ordered = sorted(set(numbers))
    begin = last = ordered[0]
    for number in ordered[1:]:
        if number != last + 1:
            yield begin, last
            begin = number
        last = number
    yield begin, last
