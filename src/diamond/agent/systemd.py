"""A unit of the user's own systemd that keeps the agent running. The unit's text is one pure function."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path

from diamond.core.errors import InstallationProblem
from diamond.core.rundir import write_atomic

_TIMEOUT_S = 20.0


def unit_name(name: str, home: Path) -> str:
    """Endpoints of two servers may have the same name; their homes differ."""
    return f"diamond-agent-{name}-{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}.service"


def unit_text(name: str, home: Path, argv: list[str]) -> str:
    log = home / "agent.log"
    return f"""\
[Unit]
Description=Diamond agent of endpoint {name}
After=network-online.target

[Service]
ExecStart={" ".join(map(quoted, argv))}
StandardOutput=append:{_specifier(str(log))}
StandardError=append:{_specifier(str(log))}
Restart=on-failure
RestartSec=5
# Jobs are the agent's children's children on some machines; stopping the agent leaves them alone.
KillMode=process
TimeoutStopSec=30

[Install]
WantedBy=default.target
"""


def quoted(word: str) -> str:
    """One word of a command line as systemd reads it: no variables, no specifiers, nothing split."""
    if "\n" in word or "\r" in word:
        raise InstallationProblem("a path with a line break in it cannot stand in a unit", hint="use --via plain")
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_specifier(text)}"'


def _specifier(text: str) -> str:
    return text.replace("%", "%%")


def problem() -> str:
    """Why the user's systemd cannot be used here; empty when it can."""
    try:
        done = _run(["systemctl", "--user", "show", "--property=Version"])
    except FileNotFoundError:
        return "there is no systemd here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemd --user does not answer ({error})"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return f"systemd --user does not answer ({said[0][:200] if said else done.returncode})"


def lingers() -> bool:
    """Whether the user's units go on after logout."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = _run(["loginctl", "show-user", str(os.getuid()), "--property=Linger"])
        return done.returncode == 0 and done.stdout.strip() == "Linger=yes"
    return False


def install(unit: str, text: str) -> None:
    """Write, enable and start a unit. May be repeated."""
    path = _folder() / unit
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode(errors="surrogateescape"), mode=0o600)
    for argv in (["daemon-reload"], ["enable", unit], ["restart", unit]):
        done = _run(["systemctl", "--user", *argv])
        if done.returncode != 0:
            raise InstallationProblem(
                f"systemctl --user {' '.join(argv)}: {done.stderr.strip()[:300]}", hint="use --via plain"
            )


def remove(unit: str) -> None:
    """Stop, disable and forget a unit. May be repeated."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        _run(["systemctl", "--user", "disable", "--now", unit])
        (_folder() / unit).unlink(missing_ok=True)
        _run(["systemctl", "--user", "daemon-reload"])


def _folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "systemd" / "user"


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ)
    # A shell that came by `su` or cron lacks it, and systemctl finds nothing without.
    env.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    return subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env)
