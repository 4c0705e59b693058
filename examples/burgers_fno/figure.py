"""Draws truth against prediction as a plain SVG file: no plotting library needed on the cluster."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 300, 210  # one panel
LEFT, TOP, GAP, BOTTOM = 56, 78, 34, 84  # margins around and between the panels
STYLES = (  # name, colour, extra attributes of the line
    ("start, t = 0", "#9aa5b1", 'stroke-width="1.5"'),
    ("truth, t = T", "#1f2933", 'stroke-width="2.5"'),
    ("prediction", "#e8590c", 'stroke-width="2" stroke-dasharray="6 4"'),
)
Curves = tuple[Sequence[float], Sequence[float], Sequence[float]]


def draw(path: Path, title: str, panels: Sequence[tuple[str, Curves]]) -> None:
    """Write one panel per (caption, (start, truth, prediction)); each curve covers 0 <= x < 1 evenly."""
    largest = max(abs(value) for _, curves in panels for curve in curves for value in curve)
    limit = max(1, int(largest + 0.999))  # one scale for all panels, so that they can be compared
    total_width = LEFT + len(panels) * (WIDTH + GAP)
    total_height = TOP + HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total_width} {total_height}" '
        f'width="{total_width}" height="{total_height}" font-family="sans-serif" font-size="13" fill="#1f2933" '
        f'role="img" aria-label="{escape(title)}">',
        f'<rect width="{total_width}" height="{total_height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="32" font-size="17" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (caption, curves) in enumerate(panels):
        parts += _panel(LEFT + number * (WIDTH + GAP), caption, curves, limit, first=number == 0)
    for number, (name, colour, style) in enumerate(STYLES):
        x, y = LEFT + number * 150, total_height - 20
        parts.append(f'<path d="M{x} {y - 4}h30" fill="none" stroke="{colour}" {style}/>')
        parts.append(f'<text x="{x + 38}" y="{y}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _panel(left: float, caption: str, curves: Curves, limit: int, first: bool) -> list[str]:
    def at(x: float, u: float) -> str:
        return f"{left + x * WIDTH:.1f},{TOP + (1 - u / limit) * HEIGHT / 2:.1f}"

    bottom = TOP + HEIGHT
    parts = [
        f'<text x="{left + WIDTH / 2}" y="{TOP - 12}" text-anchor="middle">{escape(caption)}</text>',
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#cbd2d9"/>',
        f'<text x="{left + WIDTH / 2}" y="{bottom + 36}" text-anchor="middle" font-style="italic">x</text>',
    ]
    for x in (0, 0.5, 1):
        parts.append(f'<text x="{left + x * WIDTH}" y="{bottom + 18}" text-anchor="middle">{x:g}</text>')
    for u in (-limit, 0, limit):
        y = TOP + (1 - u / limit) * HEIGHT / 2
        parts.append(f'<path d="M{left} {y}h{WIDTH}" stroke="#e4e7eb"/>')
        if first:
            parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{u:g}</text>')
    if first:
        x, y = left - 36, TOP + HEIGHT / 2
        parts.append(
            f'<text x="{x}" y="{y}" text-anchor="middle" font-style="italic" '
            f'transform="rotate(-90 {x} {y})">u(x, t)</text>'
        )
    for curve, (_, colour, style) in zip(curves, STYLES, strict=True):
        points = " ".join(at(i / len(curve), u) for i, u in enumerate([*curve, curve[0]]))  # periodic: close it
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" {style}/>')
    return parts
