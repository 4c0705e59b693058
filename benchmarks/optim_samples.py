"""Data that is no differential equation: drawings of digits, and the source text of Python's standard library."""

from __future__ import annotations

import itertools
import math
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SIDE = 28
SPLITS = ("train", "validation", "test")
_SEGMENTS = 24  # of every digit, the last one repeated
_AT_ONCE = 250

Line = list[tuple[float, float]]


def _arc(x: float, y: float, width: float, height: float, first: int, last: int, pieces: int = 10) -> Line:
    """Part of an ellipse, in degrees, clockwise from the right: y grows downwards."""
    angles = [math.radians(first + (last - first) * step / pieces) for step in range(pieces + 1)]
    return [(x + width * math.cos(angle), y + height * math.sin(angle)) for angle in angles]


_DIGITS: tuple[tuple[Line, ...], ...] = (
    (_arc(0.5, 0.5, 0.3, 0.45, 0, 360, 20),),
    ([(0.3, 0.25), (0.55, 0.05), (0.55, 0.95)],),
    ([*_arc(0.5, 0.3, 0.3, 0.25, 190, 400), (0.2, 0.95), (0.82, 0.95)],),
    ([*_arc(0.48, 0.27, 0.28, 0.22, 200, 450), *_arc(0.48, 0.72, 0.3, 0.23, 270, 520)],),
    ([(0.65, 0.95), (0.65, 0.05), (0.15, 0.65), (0.88, 0.65)],),
    ([(0.78, 0.05), (0.28, 0.05), (0.24, 0.45), *_arc(0.48, 0.67, 0.3, 0.28, 230, 500)],),
    ([(0.7, 0.08), (0.4, 0.3), (0.24, 0.62)], _arc(0.5, 0.7, 0.27, 0.25, 0, 360, 16)),
    ([(0.18, 0.05), (0.82, 0.05), (0.4, 0.95)],),
    (_arc(0.5, 0.27, 0.23, 0.22, 0, 360, 12), _arc(0.5, 0.72, 0.29, 0.23, 0, 360, 12)),
    (_arc(0.5, 0.3, 0.27, 0.25, 0, 360, 16), [(0.77, 0.32), (0.7, 0.65), (0.5, 0.95)]),
)


@cache
def _strokes() -> Tensor:
    """(digit, segment, end, x and y), centred."""
    found = []
    for lines in _DIGITS:
        segments = [list(pair) for line in lines for pair in itertools.pairwise(line)]
        found.append(segments + segments[-1:] * (_SEGMENTS - len(segments)))
    return torch.tensor(found) - 0.5


def digits(count: int, seed: int) -> Tensor:
    """Images (count, 784) with values in [0, 1], white on black: every one drawn with its own shape and pen."""
    generator = torch.Generator().manual_seed(seed)
    parts = [_draw(min(_AT_ONCE, count - first), generator) for first in range(0, count, _AT_ONCE)]
    return torch.cat(parts)


def _draw(count: int, generator: torch.Generator) -> Tensor:
    strokes = _strokes()[torch.randint(len(_DIGITS), (count,), generator=generator)]
    strokes = _bent(strokes, generator) @ _affine(count, generator)[:, None] + _uniform(count, 2, 0.06, generator)
    along = (torch.arange(SIDE) + 0.5) / SIDE * 1.3 - 0.65
    pixels = torch.stack(torch.meshgrid(along, along, indexing="xy"), dim=-1).reshape(-1, 1, 2)
    first, way = strokes[:, None, :, 0], (strokes[:, :, 1] - strokes[:, :, 0])[:, None]
    offset = pixels - first
    share = ((offset * way).sum(-1) / way.square().sum(-1).clamp_min(1e-9)).clamp(0, 1)
    distance = (offset - share[..., None] * way).norm(dim=-1).amin(dim=-1)
    pen = 0.045 + 0.02 * (2 * torch.rand(count, 1, generator=generator) - 1)
    noise = 0.02 * torch.randn(count, SIDE * SIDE, generator=generator)
    return (((pen - distance) / 0.02).sigmoid() + noise).clamp(0, 1)


def _bent(strokes: Tensor, generator: torch.Generator) -> Tensor:
    """Moved by a smooth random field, so that no two hands write alike and strokes stay connected."""
    waves = 3.0 * torch.randn(len(strokes), 1, 1, 2, 2, generator=generator)
    phase = 6.3 * torch.rand(len(strokes), 1, 1, 2, generator=generator)
    return strokes + 0.04 * torch.sin((strokes[..., None, :] * waves).sum(-1) + phase)


def _affine(count: int, generator: torch.Generator) -> Tensor:
    """Turned, slanted and stretched, as (count, 2, 2) to multiply rows with."""
    angle, shear = _uniform(count, 2, 0.25, generator).reshape(count, 2).unbind(1)
    size = 0.88 + _uniform(count, 2, 0.14, generator).reshape(count, 1, 2)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).reshape(count, 2, 2)
    slant = torch.eye(2).repeat(count, 1, 1)
    slant[:, 1, 0] = shear
    return slant @ turn * size


def _uniform(count: int, width: int, most: float, generator: torch.Generator) -> Tensor:
    return most * (2 * torch.rand(count, 1, 1, width, generator=generator) - 1)


# ---- text ----------------------------------------------------------------------------------------------------------


@cache
def source_files() -> tuple[Path, ...]:
    """The standard library's modules, without its tests: not every installation has them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = (path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    return tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def source_split(split: str) -> list[Path]:
    """Of twenty files one is for validation and one for testing."""
    wanted = {"validation": {10}, "test": {0}}.get(split, set(range(20)) - {0, 10})
    return [path for place, path in enumerate(source_files()) if place % 20 in wanted]


@cache
def source_text(split: str) -> Tensor:
    """All bytes of a split, files divided by a form feed."""
    whole = b"\n\f\n".join(path.read_bytes() for path in source_split(split))
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)
