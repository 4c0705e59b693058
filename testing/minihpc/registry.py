"""The sites that run on this machine: found by name from another terminal, cleared away when their owner is gone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from testing.minihpc import memory


@dataclass(frozen=True, kw_only=True)
class Record:
    """One site. A process is named by id and start time: ids are used again."""

    id: str
    name: str
    release: str
    folder: str
    interface: str
    network: str
    owner: tuple[int, int]
    init: tuple[int, int] = (0, 0)
    wire: tuple[int, int] = (0, 0)
    numbering: str = field(default_factory=lambda: os.readlink("/proc/self/ns/pid"))  # where those ids mean something


def folder() -> Path:
    # Not the caller's TMPDIR: every user of the machine's network must see the same addresses taken.
    path = Path("/run/diamond-minihpc")
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    return path


@contextmanager
def locked() -> Iterator[None]:
    with (folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def mark(pid: int) -> tuple[int, int]:
    """A process id and when that process began."""
    return pid, _began(pid) or 0


def is_alive(process: tuple[int, int]) -> bool:
    pid, began = process
    return pid > 0 and _began(pid) == began


def save(record: Record) -> None:
    path = folder() / f"{record.id}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(record)))
    part.rename(path)


def forget(record: Record) -> None:
    (folder() / f"{record.id}.json").unlink(missing_ok=True)


def running() -> list[Record]:
    """Every known site, the newest last. Some may have lost their owner."""
    found: list[tuple[float, Record]] = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # gone since it was listed
            data = json.loads(path.read_text())
            record = Record(**data | {key: tuple(data[key]) for key in ("owner", "init", "wire")})
            found.append((path.stat().st_mtime, record))
    return [record for _, record in sorted(found, key=lambda entry: entry[0])]


def find(name: str) -> Record | None:
    """The newest running site of that name or id."""
    matching = [record for record in running() if name in (record.name, record.id) and is_alive(record.init)]
    return matching[-1] if matching else None


def clear(record: Record) -> None:
    """Everything a site leaves on the machine, ended and removed. Safe to repeat."""
    for process in (record.init, record.wire):
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[0], signal.SIGKILL)
    # It goes with the namespaces as well, but only some time after the last process.
    subprocess.run(["ip", "link", "delete", record.interface], capture_output=True, check=False)
    shutil.rmtree(record.folder, ignore_errors=True)
    memory.remove_groups(record.id)
    forget(record)


def sweep() -> None:
    """Clear sites whose owner is gone: a killed test run leaves folders, at worst.

    Only among processes counted as ours are: from another PID namespace, every owner would seem gone.
    """
    here = os.readlink("/proc/self/ns/pid")
    for record in running():
        if record.numbering == here and not is_alive(record.owner):
            clear(record)


def new_folder(name: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"diamond-site-{name}-"))
    path.chmod(0o755)
    return path


def _began(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
