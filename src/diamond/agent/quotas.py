"""How much of a file system one user may fill: `quota`, `lfs quota`, `mmlsquota` and `xfs_quota`, and what they print.

Best effort: a tool that is missing, slow or prints something else means that no quota is known. The parsers are pure.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from diamond.agent import programs

_NUMBER = re.compile(r"\[?(\d+)\]?\*?")


@dataclass(frozen=True, kw_only=True)
class Quota:
    """In bytes. `limit_bytes` is the hard limit, or the soft one where there is no other."""

    used_bytes: int
    limit_bytes: int


class Reader:
    """Asks each tool once: `quota` and `mmlsquota` tell of every file system at a time, and may be slow."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, ...], str] = {}

    def of(self, path: str, *, kind: str, device: str) -> Quota | None:
        """This user's quota where `path` lies. `device`: what is mounted there, as /proc/self/mounts has it."""
        user = str(os.getuid())
        if kind == "lustre":
            return parse_lfs(self._ask("lfs", "quota", "-q", "-u", user, path))
        if kind == "gpfs":
            return parse_mmlsquota(self._ask("mmlsquota", "-Y", "--block-size", "1K"), device)
        found = parse_quota(self._ask("quota", "-w", "-p"), device)
        if found is None and kind == "xfs":
            # One text, since that is how xfs_quota takes its commands; nothing in it comes from anybody.
            found = parse_xfs(self._ask("xfs_quota", "-c", "quota -N -b -u", path))
        return found

    def _ask(self, name: str, *arguments: str) -> str:
        argv = (name, *arguments)
        if argv not in self._said:
            program = programs.find(name)
            # No look at the exit status: `quota` gives 1 to those who are over theirs.
            self._said[argv] = programs.ask([program, *arguments]).out if program else ""
        return self._said[argv]


def parse_quota(text: str, device: str) -> Quota | None:
    """`quota -w -p`: a line for each file system: device, used, soft, hard, grace, then the same for files; in KiB."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == device:
            return _quota(words[1:4])
    return None


def parse_lfs(text: str) -> Quota | None:
    """`lfs quota -q`: the path, on a line of its own if it is long, then used, soft, hard; in KiB.

    A path may have blanks and digits, so the numbers are the three right before the first grace time, which is a dash
    or a length of time.
    """
    words = text.split()
    for index in range(1, len(words) - 3):
        three, grace = words[index : index + 3], words[index + 3]
        if all(map(_NUMBER.fullmatch, three)) and not _NUMBER.fullmatch(grace):
            return _quota(three)
    return None


def parse_mmlsquota(text: str, device: str) -> Quota | None:
    """`mmlsquota -Y`: colons between fields, a header that names them; in KiB. Quotas of a user come before others."""
    names: list[str] = []
    best: Quota | None = None
    name = device.rsplit("/", 1)[-1]
    for line in text.splitlines():
        values = line.split(":")
        if len(values) > 2 and values[2] == "HEADER":
            names = values
            continue
        row = dict(zip(names, values, strict=False))
        if row.get("filesystemName") != name or row.get("quotaType") not in ("USR", "FILESET"):
            continue
        found = _quota([row.get("blockUsage", ""), row.get("blockQuota", ""), row.get("blockLimit", "")])
        if found and (row["quotaType"] == "USR" or best is None):
            best = found
    return best


def parse_xfs(text: str) -> Quota | None:
    """`quota -N -b` of xfs_quota: device, used, soft, hard, warnings, grace, mount point; in KiB."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4 and (found := _quota(words[1:4])):
            return found
    return None


def _quota(words: list[str]) -> Quota | None:
    """From used, soft and hard in KiB. A limit of 0 is none; an asterisk marks what is exceeded."""
    numbers = [_NUMBER.fullmatch(word) for word in words]
    if len(numbers) != 3 or not all(numbers):
        return None
    used, soft, hard = (int(found[1]) * 1024 for found in numbers if found)
    limit = hard or soft
    return Quota(used_bytes=used, limit_bytes=limit) if limit else None
