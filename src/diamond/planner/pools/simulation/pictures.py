"""Pictures of a simulation, as SVG: who held which GPUs when, how soon tasks were done, how busy the pool was."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from diamond.planner.pools.simulation.outcomes import Placed

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 860, 70, 150, 50, 50
HEIGHT = 400
LANE = 6  # pixels a GPU
COLOURS = ("#2563c9", "#c2410c", "#15803d", "#a21caf", "#0f766e", "#b45309", "#6b7280", "#be123c", "#4338ca", "#4d7c0f")
_NO_TEXT = re.compile("[^\t\n\r -\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML forbids, or that nobody sees."""


class Bar(NamedTuple):
    """GPUs of one node (so many, from the first of them on) that a task held for a while."""

    node: str
    first: int
    gpus: int
    begin: float
    end: float
    task: str


def bars_of(timeline: Sequence[Placed], nodes: Mapping[str, int]) -> list[Bar]:
    """What a timeline looks like, with a lane for every GPU."""
    free = {name: list(range(gpus)) for name, gpus in nodes.items()}
    held: dict[str, tuple[float, list[tuple[str, list[int]]]]] = {}
    found: list[Bar] = []
    for at, group in groupby(timeline, key=lambda one: one.at):
        changes = list(group)
        for change in changes:  # all that leave make room before anybody comes
            since, lanes = held.pop(change.task, (at, []))
            for node, taken in lanes:
                free[node] = sorted([*free[node], *taken])
                found += [Bar(node, first, number, since, at, change.task) for first, number in _runs(taken)]
        for change in changes:
            lanes = []
            for node, gpus in change.placement:
                taken, free[node] = free[node][:gpus], free[node][gpus:]
                lanes.append((node, taken))
            if lanes:
                held[change.task] = (at, lanes)
    return [bar for bar in found if bar.end > bar.begin]


def _runs(lanes: Sequence[int]) -> list[tuple[int, int]]:
    """Lanes beside each other: the first, and how many."""
    found: list[tuple[int, int]] = []
    for lane in lanes:
        if found and found[-1][0] + found[-1][1] == lane:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((lane, 1))
    return found


def busy_of(timeline: Sequence[Placed]) -> list[tuple[float, int]]:
    """From when on how many GPUs were in use."""
    held: dict[str, int] = {}
    found: list[tuple[float, int]] = [(0.0, 0)]
    for change in timeline:
        gpus = sum(number for _, number in change.placement)
        found.append((change.at, found[-1][1] + gpus - held.pop(change.task, 0)))
        if gpus:
            held[change.task] = gpus
    return found


class Axis(NamedTuple):
    """Numbers to pixels, evenly or by powers of ten."""

    low: float
    high: float
    first: float
    last: float
    powers: bool = False

    def at(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / ((high - low) or 1.0)
        return self.first + min(max(share, 0.0), 1.0) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.powers:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**one for one in exponents for digit in (1, 3)]
        else:
            step = _round_step((self.high - self.low) / 6)
            found = [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [one for one in found if self.low <= one <= self.high]

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-9)) if self.powers else value


def _round_step(wished: float) -> float:
    power = 10.0 ** math.floor(math.log10(wished)) if wished > 0 else 1.0
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= wished)


def completion(times: Mapping[str, Sequence[float]]) -> str:
    """The share of tasks that were finished so soon after they were submitted, a curve for each policy."""
    known = {name: sorted(one for one in many if one > 0) for name, many in times.items()}
    every = [one for many in known.values() for one in many] or [1.0, 10.0]
    x = Axis(min(every) / 3600, max(max(every), 1.01 * min(every)) / 3600, LEFT, WIDTH - RIGHT, powers=True)
    y = Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    parts = _frame("Tasks finished, by time since they were submitted", x, y, "hours", HEIGHT)
    for place, (name, many) in enumerate(known.items()):
        points = [(x.at(one / 3600), y.at((number + 1) / len(many))) for number, one in enumerate(many)]
        parts += _line(points, place) + _legend(name, place)
    return _done(parts)


def utilisation(busy: Mapping[str, Sequence[tuple[float, int]]], total: int) -> str:
    """GPUs in use against time: (since when, how many), a curve for each policy."""
    end = max((when for many in busy.values() for when, _ in many), default=1.0) or 1.0
    x, y = Axis(0.0, end / 3600, LEFT, WIDTH - RIGHT), Axis(0.0, float(max(total, 1)), HEIGHT - BOTTOM, TOP)
    parts = _frame("GPUs in use", x, y, "hours", HEIGHT)
    for place, (name, many) in enumerate(busy.items()):
        points: list[tuple[float, float]] = []
        for when, number in many:
            if points:
                points.append((x.at(when / 3600), points[-1][1]))
            points.append((x.at(when / 3600), y.at(number)))
        parts += _line(points, place) + _legend(name, place)
    return _done(parts)


def gantt(title: str, bars: Sequence[Bar], nodes: Mapping[str, int]) -> str:
    """A lane for every GPU, nodes (with their number of GPUs) from top to bottom; a bar says whose it is."""
    height = TOP + BOTTOM + LANE * sum(nodes.values())
    x = Axis(0.0, (max((bar.end for bar in bars), default=1.0) or 1.0) / 3600, LEFT, WIDTH - 20)
    parts = _frame(title, x, None, "hours", height)
    top, begins = TOP, {}
    for name, gpus in nodes.items():
        begins[name] = top
        parts.append(
            f'<text x="{LEFT - 8}" y="{top + LANE * gpus / 2 + 4:.0f}" text-anchor="end" font-size="10" '
            f'fill="#1f2933">{_text(name)}</text>'
            f'<line x1="{LEFT}" y1="{top}" x2="{WIDTH - 20}" y2="{top}" stroke="#d1d5db"/>'
        )
        top += LANE * gpus
    colours = {
        task: COLOURS[place % len(COLOURS)] for place, task in enumerate(dict.fromkeys(bar.task for bar in bars))
    }
    for bar in bars:
        left, right = x.at(bar.begin / 3600), x.at(bar.end / 3600)
        told = f"{bar.task}: {bar.gpus} GPUs, {bar.begin / 3600:.2f} to {bar.end / 3600:.2f} h"
        parts.append(
            f'<rect x="{left:.1f}" y="{begins[bar.node] + LANE * bar.first}" width="{max(right - left, 0.3):.1f}" '
            f'height="{LANE * bar.gpus}" fill="{colours[bar.task]}" stroke="#ffffff" stroke-width="0.4">'
            f"<title>{_text(told)}</title></rect>"
        )
    return _done(parts)


def _frame(title: str, x: Axis, y: Axis | None, unit: str, height: int) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{_text(title)}">',
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="16" y="30" font-size="16" font-weight="bold" fill="#1f2933">{_text(title)}</text>',
        f'<text x="{(x.first + x.last) / 2:.0f}" y="{height - 12}" text-anchor="middle" fill="#1f2933">{unit}</text>',
    ]
    for value in x.ticks():
        at = x.at(value)
        parts.append(
            f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{height - BOTTOM}" stroke="#e5e7eb"/>'
            f'<text x="{at:.1f}" y="{height - BOTTOM + 18}" text-anchor="middle" fill="#1f2933">{value:g}</text>'
        )
    for value in y.ticks() if y is not None else ():
        assert y is not None
        at = y.at(value)
        parts.append(
            f'<line x1="{x.first}" y1="{at:.1f}" x2="{x.last}" y2="{at:.1f}" stroke="#e5e7eb"/>'
            f'<text x="{x.first - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#1f2933">{value:g}</text>'
        )
    return parts


def _line(points: Sequence[tuple[float, float]], place: int) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(points))
    return [f'<polyline points="{path}" fill="none" stroke="{COLOURS[place % len(COLOURS)]}" stroke-width="1.5"/>']


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same line to the eye: of what lies in one tenth of a pixel from left to right, its ends and extremes."""
    found: list[tuple[float, float]] = []
    for _, group in groupby(points, key=lambda one: round(one[0], 1)):
        here = list(group)
        if len(here) > 4:
            by_height = sorted(here[1:-1], key=lambda one: one[1])
            here = [here[0], by_height[0], by_height[-1], here[-1]]
        found += here
    return found


def _text(text: str) -> str:
    return escape(_NO_TEXT.sub("\ufffd", text))


def _legend(name: str, place: int) -> list[str]:
    at = TOP + 14 + 20 * place
    return [
        f'<rect x="{WIDTH - RIGHT + 14}" y="{at - 9}" width="16" height="4" fill="{COLOURS[place % len(COLOURS)]}"/>'
        f'<text x="{WIDTH - RIGHT + 36}" y="{at - 2}" fill="#1f2933">{_text(name)}</text>'
    ]


def _done(parts: list[str]) -> str:
    return "\n".join([*parts, "</svg>", ""])
