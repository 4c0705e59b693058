"""Pictures of pages have few colours: with a palette they are a third as large, and look the same."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from pathlib import Path

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_CHANNELS = {2: 3, 6: 4}  # colour types of what a browser writes: RGB, and RGB with transparency


def shrink(path: Path) -> None:
    """Rewrite a PNG of 8 bits a channel with its 256 most frequent colours, and the nearest of them for others."""
    chunks = list(_chunks(path.read_bytes()))
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    assert depth == 8 and kind in _CHANNELS and not interlaced, f"{path} is no PNG of a browser"
    step = _CHANNELS[kind]
    data = zlib.decompress(b"".join(body for name, body in chunks if name == b"IDAT"))
    pixels = [
        bytes(row[at : at + 3]) for row in _rows(data, width * step, height, step) for at in range(0, len(row), step)
    ]
    counted = Counter(pixels)
    palette = [colour for colour, _ in counted.most_common(256)]
    index = {colour: at for at, colour in enumerate(palette)}
    for colour in counted.keys() - index.keys():
        index[colour] = min(
            range(256), key=lambda at: sum((a - b) ** 2 for a, b in zip(palette[at], colour, strict=True))
        )
    numbers = bytes(index[pixel] for pixel in pixels)
    lines = b"".join(b"\0" + numbers[at : at + width] for at in range(0, len(numbers), width))
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", b"".join(palette)), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    path.write_bytes(_SIGNATURE + b"".join(_chunk(name, body) for name, body in parts))


def _chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(_SIGNATURE)
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += size + 12
    return found


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _rows(data: bytes, width: int, height: int, step: int) -> list[bytearray]:
    """Undo the filter of each line (PNG, section 9)."""
    rows, above = [], bytearray(width)
    for number in range(height):
        start = number * (width + 1)
        kind, row = data[start], bytearray(data[start + 1 : start + 1 + width])
        if kind:
            for at in range(width):
                left, up, corner = (row[at - step], above[at], above[at - step]) if at >= step else (0, above[at], 0)
                row[at] = (row[at] + _guess(kind, left, up, corner)) & 255
        rows.append(row)
        above = row
    return rows


def _guess(kind: int, left: int, up: int, corner: int) -> int:
    if kind < 4:
        return (0, left, up, (left + up) // 2)[kind]
    near = left + up - corner
    return min((left, up, corner), key=lambda each: abs(near - each))
