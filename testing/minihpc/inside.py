"""Doing things inside a running site: commands as one of its users, files in and out.

Needs the host's process id of the site's process 1 and nothing else, so a second terminal can do it too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any


@dataclass(frozen=True)
class Account:
    name: str
    uid: int

    @property
    def home(self) -> str:
        return "/root" if self.uid == 0 else f"/home/{self.name}"


ACCOUNTS = {account.name: account for account in (Account("root", 0), Account("user1", 1000), Account("user2", 1001))}


@dataclass(frozen=True)
class ProcessInfo:
    """A process of the site, seen from outside. `uts` tells the nodes apart: each has a host name of its own."""

    pid: int
    argv: tuple[str, ...]
    uts: str


class SiteProcess(subprocess.Popen[str]):
    """A program inside a site. Signals reach the program itself, and its end is reported as it ended."""

    @property
    def inner_pid(self) -> int | None:
        """The program's process id on the host; None when it has ended or not begun."""
        return child_of(self.pid)

    def send_signal(self, sig: int) -> None:
        # What was started here is nsenter, which waits for the program and passes no signal on.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.inner_pid or self.pid, sig)

    def kill_all(self) -> None:
        """SIGKILL the program and every process it started that did not leave its group."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Inside:
    """A running site, by the process id of its process 1."""

    def __init__(self, init_pid: int) -> None:
        self.init_pid = init_pid
        self._processes: weakref.WeakSet[SiteProcess] = weakref.WeakSet()

    def argv(
        self, argv: Sequence[str], *, user: str = "user1", cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """What to execute on the host so that `argv` runs inside, in an environment as after a login."""
        account = ACCOUNTS[user]
        variables = {
            "HOME": account.home,
            "USER": account.name,
            "LOGNAME": account.name,
            "SHELL": "/bin/bash",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            if user == "root"
            else "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
        } | dict(env or {})
        enter = ["nsenter", f"--target={self.init_pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        become = ["setpriv", f"--reuid={account.uid}", f"--regid={account.uid}", "--init-groups", "--"]
        clean = ["env", "-i", f"--chdir={cwd or account.home}", *(f"{key}={value}" for key, value in variables.items())]
        return [*enter, *become, *clean, *argv]

    def popen(
        self,
        argv: Sequence[str],
        *,
        user: str = "user1",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = subprocess.DEVNULL,
        stderr: int | IO[Any] | None = subprocess.DEVNULL,
    ) -> SiteProcess:
        """Start a program inside; it ends with the site at the latest."""
        process = SiteProcess(
            self.argv(argv, user=user, cwd=cwd, env=env),
            stdin=stdin, stdout=stdout, stderr=stderr, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._processes.add(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "user1",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside and wait for it.

        Raises:
            AssertionError: it failed and `check` is set; the message carries what it said.
            subprocess.TimeoutExpired: it took longer than `timeout` seconds; it is then killed with its children.
        """
        process = self.popen(
            argv, user=user, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        )  # fmt: skip
        with process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill_all()
                raise
        assert not check or process.returncode == 0, f"{list(argv)} as {user}: {process.returncode}\n{out}{err}"
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def path(self, inside: str) -> Path:
        """Where a path of the site is on the host, to read and write. Absolute symbolic links in it do not resolve."""
        return Path(f"/proc/{self.init_pid}/root") / inside.lstrip("/")

    def put(self, local: Path, inside: str, user: str = "user1") -> None:
        """Copy a file or a folder into the site; it belongs to `user`, as do folders made on the way."""
        uid = ACCOUNTS[user].uid
        for parent in reversed(PurePosixPath(inside).parents):
            if not (made := self.path(str(parent))).exists():
                made.mkdir()
                os.chown(made, uid, uid)
        target = self.path(inside)
        if local.is_dir():
            shutil.copytree(local, target, symlinks=True, dirs_exist_ok=True)
            for folder, _, names in os.walk(target):
                for path in (folder, *(os.path.join(folder, name) for name in names)):
                    os.chown(path, uid, uid, follow_symlinks=False)
        else:
            shutil.copy(local, target)
            os.chown(target, uid, uid)

    def write(self, inside: str, text: str, *, user: str = "user1", mode: int = 0o644) -> None:
        """A file of `user` with this text."""
        target = self.path(inside)
        target.write_text(text)
        os.chown(target, ACCOUNTS[user].uid, ACCOUNTS[user].uid)
        target.chmod(mode)

    def sbatch(self, script: str, user: str = "user1", *options: str, cwd: str | None = None) -> int:
        """Submit a script given as text (`#!/bin/bash` is added where it is missing); the job's number."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}"
        done = self.run(["sbatch", "--parsable", *options], user=user, cwd=cwd, input=text)
        return int(done.stdout.split(";")[0])

    def processes(self) -> list[ProcessInfo]:
        """Every process of the site, those in containers of its users too: they share its network, not its numbers."""
        ours = os.readlink(f"/proc/{self.init_pid}/ns/net")
        found = []
        for entry in Path("/proc").iterdir():
            # A process that ends while it is looked at is simply not listed.
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/net") == ours:
                    argv = (entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
                    found.append(ProcessInfo(int(entry.name), tuple(argv), os.readlink(entry / "ns/uts")))
        return found

    def _end_processes(self) -> None:
        """What stood outside and waited for programs of the site is collected once the site is gone."""
        for process in list(self._processes):
            process.kill_all()
            process.wait(timeout=10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


def child_of(pid: int) -> int | None:
    """The one child of a process that only waits for it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None
