"""A real PostgreSQL server for the tests: own data directory, own port on loopback, gone afterwards."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def find_programs() -> Path | None:
    """The folder with initdb and pg_ctl, wherever the distribution keeps it."""
    for folder in [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), Path("/usr/local/pgsql/bin")]:
        if (folder / "pg_ctl").exists():
            return folder
    found = shutil.which("pg_ctl")
    return Path(found).resolve().parent if found else None


def why_not() -> str | None:
    """What keeps PostgreSQL tests from running here; None when nothing does."""
    if find_programs() is None:
        return "PostgreSQL's server programs are not installed (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and not _server_user():
        return "PostgreSQL refuses to run as root and there is no 'postgres' user to run it as"
    return None


def _server_user() -> str | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running_server() -> Iterator[str]:
    """Start a server and yield the URL of its maintenance database."""
    programs = find_programs()
    assert programs is not None, why_not()
    folder = Path(tempfile.mkdtemp(prefix="diamond-pg-", dir="/tmp"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        # PostgreSQL refuses root; the folder changes hands and the programs run as its owner.
        user = _server_user()
        assert user is not None, why_not()
        shutil.chown(folder, user)
        as_user = ["setpriv", f"--reuid={user}", "--clear-groups"]
    data, port = folder / "data", free_port()

    def call(*argv: str) -> None:
        done = subprocess.run([*as_user, *argv], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"

    call(str(programs / "initdb"), "-D", str(data), "-U", "diamond", "-A", "trust", "--no-sync", "-E", "UTF8")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    control = [str(programs / "pg_ctl"), "-D", str(data), "-w", "-t", "50"]
    call(*control, "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://diamond@127.0.0.1:{port}/postgres"
    finally:
        call(*control, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)
