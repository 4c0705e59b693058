"""Runs a program so that nothing of it is left when it ends, when it is stopped, or when whoever started it dies.

A build's commands may start what they like, and not every container takes its processes with it when the program that
started it is ended. The keeper stands between: orphans below it become its own children (PR_SET_CHILD_SUBREAPER), and
the kernel tells it when its parent is gone (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_KEEPER = r"""
import ctypes, os, signal, sys

# A signal that comes before the handler stands would end the keeper, and leave the program behind.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
prctl = ctypes.CDLL(None).prctl
parent = os.getppid()
prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


def kill_children():
    # Their children are ours after that, and are found the next time.
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    of = int(file.read().rpartition(b")")[2].split()[1])
                if of == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
            except (OSError, ValueError, IndexError):
                pass


stopped = []


def stop(number, frame):
    stopped.append(number)
    kill_children()


if os.getppid() != parent:
    sys.exit(143)
child = os.fork()
if child == 0:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        os.write(2, ("%s: %s\n" % (sys.argv[1], error.strerror)).encode())
        os._exit(127)
signal.signal(signal.SIGTERM, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
code = 1
while True:
    try:
        pid, status = os.wait()
    except ChildProcessError:
        break
    if pid == child:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        child = 0
    if stopped or not child:
        kill_children()
sys.exit(143 if stopped else code)
"""


def kept(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` so. Its exit code is the program's; 128 + n when signal n ended it."""
    return [sys.executable, "-I", "-c", _KEEPER, *argv]
