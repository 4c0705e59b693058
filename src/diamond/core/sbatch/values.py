"""Values of sbatch's options that are small languages of their own: times, signals, variables, array indices."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# What becomes of a part of a script.
KEPT, CHANGED, LEFT_OUT, ADVICE = "kept", "changed", "left out", "note"

_SIGNAL = re.compile(r"(?:(?:R|B|RB|BR):)?([A-Za-z0-9]+)(?:@(\d{1,5}))?", re.IGNORECASE)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_INDEX = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")
_ENV = re.compile(r"""\s*([^=,]+)(?:=((?:"[^"]*"|'[^']*'|[^,])*))?(?:,|$)""")
_DEFAULT_WARNING_S = 60


def walltime_s(text: str | None) -> int | None:
    """Seconds of a limit as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S. 0: no limit; None: neither."""
    raw = (text or "").strip()
    if raw.lower() in ("infinite", "unlimited", "-1"):
        return 0
    found = _CLOCK.fullmatch(raw)
    if not found or len(raw) > 40:
        return None
    days, *rest = found.groups()
    first, second, third = (int(part or 0) for part in rest)
    if days is not None:
        return int(days) * 86400 + first * 3600 + second * 60 + third
    if found[3] is None:
        return first * 60
    return first * 60 + second if found[4] is None else first * 3600 + second * 60 + third


def show_time(seconds: int) -> str:
    """In the form both Slurm's users and `parse_duration` know."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def signal_warning(text: str | None) -> tuple[str, int] | None:
    """The signal's name without SIG, and how many seconds before the end it is sent; None when neither makes sense."""
    found = _SIGNAL.fullmatch((text or "").strip())
    if not found:
        return None
    seconds = int(found[2]) if found[2] else _DEFAULT_WARNING_S
    return (found[1].upper().removeprefix("SIG"), seconds) if seconds else None


@dataclass(frozen=True)
class Exports:
    """What --export lists: variables with values, and variables that have theirs in the submitting shell."""

    values: dict[str, str] = field(default_factory=dict)
    from_shell: tuple[str, ...] = ()


def exports(text: str) -> Exports:
    values: dict[str, str] = {}
    names: list[str] = []
    for found in _ENV.finditer(text):
        name, value = found[1].strip(), found[2]
        if value is not None:
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            values[name] = value[1:-1] if quoted else value
        elif name.upper() not in ("ALL", "NONE", "NIL", ""):
            names.append(name)
    return Exports(values, tuple(names))


@dataclass(frozen=True)
class Indices:
    """The indices of a job array, as ranges of first, last and step. `at_once` is 0 where any number may run."""

    ranges: tuple[tuple[int, int, int], ...]
    at_once: int = 0

    @property
    def envs(self) -> dict[str, str]:
        """What Slurm sets in the first element."""
        last = max(first + (end - first) // step * step for first, end, step in self.ranges)
        number = sum((end - first) // step + 1 for first, end, step in self.ranges)
        lowest = min(first for first, _, _ in self.ranges)
        return {
            "SLURM_ARRAY_TASK_ID": str(lowest),
            "SLURM_ARRAY_TASK_MIN": str(lowest),
            "SLURM_ARRAY_TASK_MAX": str(last),
            "SLURM_ARRAY_TASK_STEP": str(self.ranges[0][2]),
            "SLURM_ARRAY_TASK_COUNT": str(number),
        }

    @property
    def braces(self) -> str:
        """As bash expands them."""
        shown = []
        for first, end, step in self.ranges:
            by = f"..{step}" if step > 1 else ""
            shown.append(str(first) if first == end else f"{{{first}..{end}{by}}}")
        return " ".join(shown)


def parse_array(text: str) -> Indices | None:
    """``0-15``, ``1,3,5-9:2``, ``0-99%4``; None when it is none."""
    listed, limited, at_once = text.strip().strip("[]").partition("%")
    ranges = []
    for part in listed.split(","):
        found = _INDEX.fullmatch(part.strip())
        if not found or len(part) > 30:
            return None
        first, step = int(found[1]), int(found[3] or 1)
        end = int(found[2] or found[1])
        if end < first or not step:
            return None
        ranges.append((first, end, step))
    if limited and not at_once.isdecimal():
        return None
    return Indices(tuple(ranges), int(at_once or 0))


def array_text(indices: Indices) -> str:
    """What to do instead of an array, for people."""
    loop = f"for i in {indices.braces}; do diamond launch TASK.YAML -d --env SLURM_ARRAY_TASK_ID=$i; done"
    limit = f" (the endpoint's max_concurrent_jobs stands for %{indices.at_once})" if indices.at_once else ""
    return f"Diamond has no job arrays: the task is the first of them, by envs. All of them{limit}:  {loop}"
