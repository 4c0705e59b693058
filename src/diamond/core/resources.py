"""What a task needs of a machine, in the words SkyPilot users know.

``cpus: 4+``, ``memory: 32+``, ``accelerators: H100:4``; in a pool also ``accelerators: H100:1..8``.

Amounts keep their written form (normalised) so that a spec shown to the user is the spec they wrote; the `*_min`
properties give numbers to the planner and the schedulers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(\+)?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?(\+)?", re.IGNORECASE)
_ACCELERATOR = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,63}?)(?::(\d{1,4})(?:\.\.(\d{1,6}))?)?")
_RANGE = re.compile(r"(\d{1,6})(?:\.\.(\d{1,6}))?")
_GIB = 1024**3
_MEMORY_UNITS = {"B": 1 / _GIB, "K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0, "T": 1024.0}


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def parse_cpus(raw: object) -> str:
    text = str(raw).strip() if isinstance(raw, int | float | str) and not isinstance(raw, bool) else ""
    found = _AMOUNT.fullmatch(text)
    if not found or not 0 < float(found[1]) <= 100_000:
        raise ValueError(f'{str(raw)[:40]!r} is not a number of CPU cores; write 4, or "4+" for at least four')
    return _plain(float(found[1])) + (found[2] or "")


def parse_memory(raw: object) -> str:
    """GiB when no unit is given, as in SkyPilot; other units are converted to GiB."""
    text = str(raw).strip() if isinstance(raw, int | float | str) and not isinstance(raw, bool) else ""
    found = _MEMORY.fullmatch(text)
    if not found:
        raise ValueError(f'{str(raw)[:40]!r} is not an amount of memory; write 32 (GiB), "32+" or "500MB"')
    gib = float(found[1]) * _MEMORY_UNITS[(found[2] or "G")[0].upper()]
    if not 0 < gib <= 1_000_000:
        raise ValueError(f"must be more than 0 and at most 1000000 GiB, not {text[:40]}")
    return _plain(round(gib, 6)) + (found[3] or "")


def parse_accelerators(raw: object) -> str:
    """``"H100:4"``, ``"H100"`` or ``{"H100": 4}``, all to ``"H100:4"``; ``"gpu:2"`` takes any type.

    ``"H100:1..8"`` leaves the number to a pool.
    """
    if isinstance(raw, Mapping) and len(raw) == 1:
        (name, count) = next(iter(raw.items()))
        raw = f"{name}:{count}"
    text = raw.strip() if isinstance(raw, str) else ""
    found = _ACCELERATOR.fullmatch(text)
    low, high = (int(found[2] or 1), int(found[3] or found[2] or 1)) if found else (0, 0)
    if not found or not 1 <= low <= high:
        raise ValueError(
            f'{str(raw)[:40]!r} is not an accelerator; write "H100:4" (four H100s a node) or "gpu:1" for any type, '
            'in a pool also "H100:1..8"'
        )
    return f"{found[1]}:{low}" if low == high else f"{found[1]}:{low}..{high}"


def parse_one_accelerator(raw: object) -> str:
    """One that has a number of its own, as a pool's nodes have."""
    text = parse_accelerators(raw)
    if ".." in text:
        raise ValueError(f'{text!r} is no one number; write for example "A100:4"')
    return text


def parse_slots(raw: object) -> str:
    """``"1..8"`` or ``4``: of the slots of a pool."""
    text = str(raw).strip() if isinstance(raw, int | str) and not isinstance(raw, bool) else ""
    found = _RANGE.fullmatch(text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not found or not 1 <= low <= high:
        raise ValueError(f'{str(raw)[:40]!r} is not a number of slots; write 4, or "1..8" for from one to eight')
    return f"{low}..{high}" if low != high else str(low)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Needs of one node of the task."""

    infra: str | None = None  # endpoint name; None lets Diamond choose
    accelerators: str | None = field(default=None, metadata={"parse": parse_accelerators})
    cpus: str | None = field(default=None, metadata={"parse": parse_cpus})
    memory: str | None = field(default=None, metadata={"parse": parse_memory})
    image_id: str | None = None
    slots: str | None = field(default=None, metadata={"parse": parse_slots})  # of a pool, in all; see core.pools

    @property
    def gpu_type(self) -> str | None:
        """The model asked for, or None when any will do (or none is wanted)."""
        name = self.accelerators.partition(":")[0] if self.accelerators else None
        return None if name is None or name.lower() == "gpu" else name

    @property
    def gpus(self) -> int:
        """Of a range, the least."""
        return int(self.accelerators.partition(":")[2].partition("..")[0]) if self.accelerators else 0

    @property
    def range(self) -> tuple[int, int] | None:
        """At least and at most so many slots of a pool, in all; None where that is left open."""
        text = self.slots or (self.accelerators.partition(":")[2] if self.accelerators else "")
        low, _, high = text.partition("..")
        return (int(low), int(high or low)) if low else None

    @property
    def is_elastic(self) -> bool:
        """Whether it leaves its size to a pool, within bounds."""
        return ".." in (self.slots or "") or ".." in (self.accelerators or "")

    @property
    def cpus_min(self) -> int:
        """Whole cores; one when nothing was asked."""
        return max(1, math.ceil(float(self.cpus.rstrip("+")))) if self.cpus else 1

    @property
    def mem_bytes_min(self) -> int:
        """Bytes; 0 when nothing was asked."""
        return int(float(self.memory.rstrip("+")) * _GIB) if self.memory else 0
