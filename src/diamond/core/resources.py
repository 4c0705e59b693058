"""What a task needs of a machine, in the words SkyPilot users know.

``cpus: 4+``, ``memory: 32+``, ``accelerators: H100:4``.

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
_ACCELERATOR = re.compile(r"([A-Za-z][A-Za-z0-9._-]{0,63})(?::(\d{1,4}))?")
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
    """``"H100:4"``, ``"H100"`` or ``{"H100": 4}``, all to ``"H100:4"``; ``"gpu:2"`` takes any type."""
    if isinstance(raw, Mapping) and len(raw) == 1:
        (name, count) = next(iter(raw.items()))
        raw = f"{name}:{count}"
    text = raw.strip() if isinstance(raw, str) else ""
    found = _ACCELERATOR.fullmatch(text)
    if not found or int(found[2] or 1) < 1:
        raise ValueError(
            f'{str(raw)[:40]!r} is not an accelerator; write "H100:4" (four H100s a node) or "gpu:1" for any type'
        )
    return f"{found[1]}:{int(found[2] or 1)}"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Needs of one node of the task."""

    infra: str | None = None  # endpoint name; None lets Diamond choose
    accelerators: str | None = field(default=None, metadata={"parse": parse_accelerators})
    cpus: str | None = field(default=None, metadata={"parse": parse_cpus})
    memory: str | None = field(default=None, metadata={"parse": parse_memory})
    image_id: str | None = None

    @property
    def gpu_type(self) -> str | None:
        """The model asked for, or None when any will do (or none is wanted)."""
        name = self.accelerators.partition(":")[0] if self.accelerators else None
        return None if name is None or name.lower() == "gpu" else name

    @property
    def gpus(self) -> int:
        return int(self.accelerators.partition(":")[2]) if self.accelerators else 0

    @property
    def cpus_min(self) -> int:
        """Whole cores; one when nothing was asked."""
        return max(1, math.ceil(float(self.cpus.rstrip("+")))) if self.cpus else 1

    @property
    def mem_bytes_min(self) -> int:
        """Bytes; 0 when nothing was asked."""
        return int(float(self.memory.rstrip("+")) * _GIB) if self.memory else 0
