"""The file systems a user of this machine works with: which, of what kind, how full, and how much of them is theirs.

Every look at a path happens in a child process with a deadline: a file server that is gone makes whoever looks hang,
and the agent must not.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diamond.agent import programs, quotas
from diamond.core.endpoints import FileSystem

MAX_PLACES = 16
# Variables that centres set for their users, and what the place is for.
_VARIABLES = (
    (re.compile(r"(P|C|LOCAL_?)?SCRATCH(_?DIR|\d)?"), "scratch"),
    (re.compile(r"(MEMBER|PROJ|WORLD)?WORK(_?DIR|\d)?|PROJECTS?(_?DIR|_HOME)?|STOCKYARD|CFS"), "project"),
)
# Nothing but the standard library, and as little of it as will do: this runs once for each place.
_LOOK = """\
import json, os, sys
real = os.path.realpath(sys.argv[1])
if os.path.isdir(real):
    found = os.statvfs(real)
    print(json.dumps([real, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize]))
"""


@dataclass(frozen=True)
class Candidate:
    """A place that may be there: the first of `paths` that is a directory."""

    role: str
    paths: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Mount:
    device: str
    point: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class _Seen:
    real: str = ""  # empty: no such directory
    total_bytes: int = 0
    free_bytes: int = 0
    is_silent: bool = False  # no answer in time


def places(
    *, home: str, run_root: str, environ: Mapping[str, str], user: str, more: Iterable[Candidate] = ()
) -> list[Candidate]:
    """Where a user's files may be: home, what variables name, what the catalogue knows, where jobs run."""
    found = [Candidate("home", (home,))]
    for pattern, role in _VARIABLES:
        named = [value for name, value in sorted(environ.items()) if pattern.fullmatch(name) and _is_plain(value)]
        found += [Candidate(role, (value,)) for value in named]
    found += more
    found.append(Candidate("scratch", (f"/scratch/{user}", "/scratch")))
    found.append(Candidate("runs", (run_root,)))
    return found


def look(candidates: Sequence[Candidate], mounts: Sequence[Mount] | None = None) -> tuple[list[FileSystem], list[str]]:
    """The places that are there, and warnings about those that do not answer."""
    mounts = read_mounts() if mounts is None else mounts
    paths = list(dict.fromkeys(path for each in candidates for path in each.paths if path))
    seen = dict(zip(paths, _look_at(paths), strict=True))
    reader = quotas.Reader()
    found: dict[str, FileSystem] = {}
    warnings: list[str] = []
    for each in candidates:
        path = next((path for path in each.paths if path and (seen[path].real or seen[path].is_silent)), None)
        if path is None or len(found) >= MAX_PLACES:
            continue
        if seen[path].is_silent:
            warnings.append(f"{path} does not answer")
            # Under the name it was asked for: what it leads to cannot be found out now.
            found.setdefault(path, FileSystem(path=path, role=each.role, kind=_mount_of(path, mounts).kind))
            continue
        real = seen[path].real
        if each.role == "runs" and any(_is_inside(real, other) for other in found):
            continue
        if real not in found:
            found[real] = _file_system(path, each.role, seen[path], mounts, reader)
    return list(found.values()), list(dict.fromkeys(warnings))


def _file_system(path: str, role: str, seen: _Seen, mounts: Sequence[Mount], reader: quotas.Reader) -> FileSystem:
    mount = _mount_of(seen.real, mounts)
    quota = reader.of(seen.real, kind=mount.kind, device=mount.device)
    return FileSystem(
        path=path,
        role=role,
        kind=mount.kind,
        total_bytes=seen.total_bytes,
        free_bytes=seen.free_bytes,
        quota_bytes=quota.limit_bytes if quota else 0,
        quota_used_bytes=quota.used_bytes if quota else 0,
    )


def _look_at(paths: Sequence[str]) -> list[_Seen]:
    # -S and -I: no site packages, no variables of the user's, and a third of the time.
    argvs = [[sys.executable, "-I", "-S", "-c", _LOOK, path] for path in paths]
    return [_parse_look(said) for said in programs.ask_all(argvs)]


def _parse_look(said: programs.Said) -> _Seen:
    if said.status is None:
        return _Seen(is_silent=True)
    try:
        real, total, free = json.loads(said.out)
        return _Seen(real=str(real), total_bytes=int(total), free_bytes=int(free))
    except ValueError:  # nothing printed: not there, or not for us
        return _Seen()


def read_mounts(text: str | None = None) -> list[Mount]:
    """What is mounted where, in the order it was mounted."""
    if text is None:
        try:
            with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            return []
    lines = [line.split(" ") for line in text.splitlines()]
    return [
        Mount(device=_unescape(words[0]), point=_unescape(words[1]), kind=words[2]) for words in lines if len(words) > 2
    ]


def _mount_of(path: str, mounts: Sequence[Mount]) -> Mount:
    """The mount a path lies on: the deepest one, and of several on top of each other the last."""
    best = Mount(device="", point="", kind="")
    for mount in mounts:
        if _is_inside(path, mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def _is_inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_plain(value: str) -> bool:
    return os.path.isabs(value) and value != "/" and "\n" not in value and "\0" not in value and len(value) < 1024


def _unescape(text: str) -> str:
    """The kernel writes blanks, tabs, line feeds and backslashes as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
