"""Draws the curves of benchmarks/optim_training.py: the metric against training time, both by powers of ten.

python -m benchmarks.optim_plots    draws all of them again from benchmarks/results
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from html import escape
from typing import Any

from benchmarks.harness import RESULTS

PLOTS = RESULTS.parents[1] / "docs" / "figures"
WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 50, 55
COLOURS = {
    "kfac": "#2563c9", "kfac-auto": "#0b3d91", "adamw": "#c2410c", "adamw-short": "#f0a06a",
    "muon": "#15803d", "soap": "#a21caf", "sgd": "#6b7280", "lbfgs": "#0f766e", "kfac-pytorch": "#111827",
    "adamw, equal time": "#e0c25b",
}  # fmt: skip

Curve = list[tuple[float, float]]


class Axis:
    """Powers of ten to pixels."""

    def __init__(self, values: list[float], first: float, last: float) -> None:
        self.low, self.high = math.log10(min(values)), math.log10(max(values))
        if self.high - self.low < 0.1:
            self.low, self.high = self.low - 0.1, self.high + 0.1
        self.first, self.last = first, last

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten, or the powers alone where there are many."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        digits = (1,) if self.high - self.low > 3 else (1, 2, 5)
        found = [digit * 10.0**power for power in powers for digit in digits]
        return [value for value in found if self.low <= math.log10(value) <= self.high]


def curves(document: dict[str, Any]) -> str:
    """A thin line for each seed; the names stand at the right, best at the top."""
    runs: dict[str, list[Curve]] = defaultdict(list)
    for run in document["training"]:
        curve = [(wall, metric) for _, wall, _, metric in run["curve"] if wall and metric]
        if len(curve) > 1:
            runs[run["method"]].append(curve)
    points = [point for many in runs.values() for curve in many for point in curve]
    title = f"{document['problem']['name']}: {document['problem']['metric']} against training time"
    x = Axis([wall for wall, _ in points], LEFT, WIDTH - RIGHT)
    y = Axis([metric for _, metric in points], HEIGHT - BOTTOM, TOP)
    parts = [*_frame(title, x, y), *_target(document["target"], y)]
    ordered = sorted(runs, key=lambda name: sum(curve[-1][1] for curve in runs[name]) / len(runs[name]))
    for place, name in enumerate(ordered):
        colour = COLOURS.get(name, "#9ca3af")
        for curve in runs[name]:
            path = " ".join(f"{x(wall):.1f},{y(metric):.1f}" for wall, metric in curve)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.3" opacity="0.8"/>')
        at = TOP + 14 + 20 * place
        parts += [
            f'<rect x="{WIDTH - RIGHT + 14}" y="{at - 9}" width="16" height="4" fill="{colour}"/>',
            f'<text x="{WIDTH - RIGHT + 36}" y="{at - 2}" fill="#1f2933">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _frame(title: str, x: Axis, y: Axis) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
        f'<text x="16" y="30" font-size="16" font-weight="bold" fill="#1f2933">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle" fill="#1f2933">'
        "seconds of training</text>",
    ]
    for value in x.ticks():
        at = x(value)
        parts += [
            f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>',
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#1f2933">{value:g}</text>',
        ]
    for value in y.ticks():
        at = y(value)
        parts += [
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e5e7eb"/>',
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#1f2933">{value:g}</text>',
        ]
    return parts


def _target(target: float, y: Axis) -> list[str]:
    at = y(target)
    return [
        f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#c2410c" stroke-dasharray="5 4"/>'
    ]


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    for path in sorted(RESULTS.glob("optim_training_*.json")):
        picture = PLOTS / f"{path.stem.replace('_', '-')}.svg"
        picture.write_text(curves(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
