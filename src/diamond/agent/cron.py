"""Two lines in the user's crontab that bring the agent back: after a reboot, and every five minutes if it is gone.

Only the lines between its own marks are ever touched.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
from pathlib import Path

from diamond.core.errors import InstallationProblem

_TIMEOUT_S = 20.0


def problem() -> str:
    """Why crontab cannot be used here; empty when it can."""
    try:
        _read()
    except InstallationProblem as error:
        return error.message
    return ""


def install(home: Path, argv: list[str]) -> None:
    """Add or replace this home's lines. May be repeated."""
    _write(with_lines(_read(), home, argv))


def remove(home: Path) -> None:
    """Take this home's lines out. May be repeated."""
    before = _read()
    after = without_lines(before, home)
    if after != before:
        _write(after)


def with_lines(text: str, home: Path, argv: list[str]) -> str:
    command = _escaped(shlex.join(argv)) + " >/dev/null 2>&1"
    begin, end = _marks(home)
    kept = without_lines(text, home)
    if kept and not kept.endswith("\n"):
        kept += "\n"
    return f"{kept}{begin}\n@reboot {command}\n*/5 * * * * {command}\n{end}\n"


def without_lines(text: str, home: Path) -> str:
    begin, end = _marks(home)
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if line.strip() == begin:
            inside = True
        if not inside:
            kept.append(line)
        if line.strip() == end:
            inside = False
    return "".join(kept) if not inside else text


def _marks(home: Path) -> tuple[str, str]:
    key = hashlib.sha256(str(home).encode(errors="surrogateescape")).hexdigest()[:12]
    return f"# begin Diamond agent {key}", f"# end Diamond agent {key}"


def _escaped(command: str) -> str:
    # To cron a percent sign is a line break, also inside quotes.
    if "\n" in command or "\r" in command:
        raise InstallationProblem("a path with a line break in it cannot stand in a crontab", hint="use --via plain")
    return command.replace("%", r"\%")


def _read() -> str:
    done = _crontab(["crontab", "-l"])
    if done.returncode == 0:
        return done.stdout
    if "no crontab" in done.stderr.lower():
        return ""
    said = done.stderr.strip().splitlines()
    raise InstallationProblem(f"crontab is not allowed here ({said[0][:200] if said else done.returncode})")


def _write(text: str) -> None:
    done = _crontab(["crontab", "-"], text)
    if done.returncode != 0:
        raise InstallationProblem(f"crontab was not changed: {done.stderr.strip()[:200]}", hint="use --via plain")


def _crontab(argv: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, errors="surrogateescape"
        )
    except FileNotFoundError as error:
        raise InstallationProblem("there is no crontab here") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallationProblem(f"crontab does not work here ({error})") from error
