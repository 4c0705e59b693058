"""Which files the `outputs` patterns of a task name, and what is to be said about those that cannot be kept.

Only files inside the job's work directory; links that lead out of it are refused with a note, as is everything else
a job can leave there that cannot be read or named. Changes nothing.
"""

from __future__ import annotations

import errno
import fnmatch
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from diamond.agent.work_tree import LeadsOut, WorkTree
from diamond.core.bundles import check_relative_path
from diamond.core.errors import InvalidInput

MAX_OUTPUTS = 10_000
_MAX_COUNTED = 100_000  # of the files beyond those: more are not told apart
_MAX_KINDS = 8
_SHOWN_CHARS = 80
_MAGIC = re.compile(r"[*?\[]")
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


class Notes:
    """What happened to outputs: a line for each kind of thing, with a count and an example, however many files."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}
        self._others = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self.lines())

    def add(self, kind: str, path: str) -> None:
        """`kind` says what became of the output, as the rest of a sentence."""
        self.total += 1
        if kind in self._counts:
            self._counts[kind] += 1
        elif len(self._counts) < _MAX_KINDS:
            self._counts[kind], self._examples[kind] = 1, path[:_SHOWN_CHARS]
        else:
            self._others += 1

    def lines(self) -> list[str]:
        lines = []
        for kind, count in self._counts.items():
            more = f" (and {count - 1} more)" if count > 1 else ""
            lines.append(f"output {self._examples[kind]!r} {kind}{more}")
        return lines + [f"{self._others} further outputs could not be kept"] * bool(self._others)

    def text(self) -> str:
        return "; ".join(self.lines())


@dataclass(frozen=True, kw_only=True)
class Found:
    """Files to keep, by their path below work/: where there they are without links; and what to say of the rest."""

    files: dict[str, str] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)


def find(tree: WorkTree, patterns: tuple[str, ...], check_stop: Callable[[], None] = lambda: None) -> Found:
    """Resolve `outputs` patterns. A pattern that names a folder means everything in it; ``**`` crosses folders.

    `check_stop` is called now and then, and may raise.
    """
    found = Found()
    beyond: set[int] = set()
    if tree.is_link:  # else every file of this machine would be inside
        for raw in patterns:
            found.notes.add("is not kept: the job put a link in the place of its work directory", raw)
        return found
    for raw in patterns:
        try:
            pattern = check_relative_path(raw, "output")
            steps = Steps(pattern)
        except (InvalidInput, re.error) as error:
            found.notes.add(_kind_of(error, raw), raw)
            continue
        kept = False
        said = found.notes.total
        for relative in _matches(tree, pattern, steps, found.notes, check_stop):
            real = found.files.get(relative) or _resolve(tree, relative, found.notes)
            if real is None:
                continue
            kept = True
            if len(found.files) < MAX_OUTPUTS:
                found.files[relative] = real
            elif relative not in found.files and len(beyond) < _MAX_COUNTED:
                beyond.add(hash(relative))
        if not kept and found.notes.total == said:
            found.notes.add("matches no file", pattern)
    if beyond:
        least = "at least " if len(beyond) == _MAX_COUNTED else ""
        kind = f"is the last that is kept: {MAX_OUTPUTS} are, {least}{len(beyond)} more are left on the endpoint"
        found.notes.add(kind, next(reversed(found.files)))
    return Found(files=dict(sorted(found.files.items())), notes=found.notes)


def _resolve(tree: WorkTree, relative: str, notes: Notes) -> str | None:
    """The plain file behind a match; None, with a note where somebody may miss it, when it cannot be kept."""
    try:
        check_relative_path(relative, "output")
        real, mode = tree.resolve(relative)
        return real if stat.S_ISREG(mode) else None
    except LeadsOut:
        notes.add("is left out, being a link that leads out of the work directory", relative)
    except InvalidInput as error:
        notes.add(_kind_of(error, relative), relative)
    except OSError as error:
        if error.errno not in _ABSENT:
            notes.add(f"cannot be read: {error.strerror}", relative)
    return None


def _kind_of(error: InvalidInput | re.error, path: object) -> str:
    if isinstance(error, re.error):
        return "is no pattern"
    return error.message.removeprefix(f"output {str(path)[:80]!r} ").removeprefix("output ")


# Patterns


class Steps:
    """A shell pattern, taken one component of a path at a time: ``*`` stays within one, ``**`` takes any number.

    A set of positions in the pattern is carried along, so the work grows with the length of path and pattern, and not
    with the number of ways in which they may fit together.
    """

    def __init__(self, pattern: str) -> None:
        parts: list[str] = []
        for part in pattern.split("/"):
            if part != "**" or not parts or parts[-1] != "**":
                parts.append(part)
        if parts[-1] == "**":
            parts.append("*")  # everything below, but not the folder itself
        self._parts = [None if part == "**" else part for part in parts]
        self._fits = {part: re.compile(fnmatch.translate(part)).match for part in parts if part != "**"}
        self.start = self._closed({0})

    def _closed(self, positions: set[int]) -> frozenset[int]:
        """A ``**`` may also take nothing."""
        last = len(self._parts)
        return frozenset(positions | {at + 1 for at in positions if at < last and self._parts[at] is None})

    def take(self, positions: frozenset[int], name: str) -> frozenset[int]:
        """The positions after one more component; empty when nothing below can match."""
        fits: dict[str, bool] = {}
        after: set[int] = set()
        for at in positions:
            if at == len(self._parts):
                continue
            part = self._parts[at]
            if part is None:
                after.add(at)
                continue
            if part not in fits:
                fits[part] = self._fits[part](name) is not None
            if fits[part]:
                after.add(at + 1)
        return self._closed(after)

    def is_match(self, positions: frozenset[int]) -> bool:
        return len(self._parts) in positions


def _matches(tree: WorkTree, pattern: str, steps: Steps, notes: Notes, check_stop: Callable[[], None]) -> Iterator[str]:
    if _MAGIC.search(pattern):
        yield from _walk(tree, "", steps, notes, check_stop)
        return
    try:
        _, mode = tree.resolve(pattern)
    except LeadsOut:
        mode = 0
    except OSError as error:
        if error.errno not in _ABSENT:
            notes.add(f"cannot be read: {error.strerror}", pattern)
        return
    if stat.S_ISDIR(mode):
        yield from _walk(tree, pattern, None, notes, check_stop)
    else:
        yield pattern


def _walk(tree: WorkTree, top: str, steps: Steps | None, notes: Notes, check_stop: Callable[[], None]) -> Iterator[str]:
    """The paths below `top` that match; without `steps`, all. Links are named, not followed: one may lead to /."""
    todo: list[tuple[str, frozenset[int] | None]] = [(top, steps.start if steps is not None else None)]
    while todo:
        check_stop()
        folder, positions = todo.pop()
        try:
            inside = tree.entries(folder)
        except LeadsOut:
            notes.add("is left out, being a link that leads out of the work directory", folder)
            continue
        except OSError as error:
            if folder or error.errno not in _ABSENT:
                notes.add(f"cannot be read: {error.strerror}", folder or ".")
            continue
        for name, is_folder in inside:
            path = f"{folder}/{name}" if folder else name
            after = steps.take(positions, name) if steps is not None and positions is not None else None
            if steps is not None and after is not None and steps.is_match(after):
                after = None  # a folder that matches means everything in it
            elif after is not None and not after:
                continue
            if is_folder:
                todo.append((path, after))
            elif after is None:
                yield path
