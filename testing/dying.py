"""Child processes that die at a chosen system call, to see what a crash leaves behind."""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Callable

FILE_CALLS = ("open", "write", "rename", "unlink", "truncate", "ftruncate", "mkdir", "rmdir", "fsync")


def in_child(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def killed_at(nth: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that gets SIGKILL at its nth file system call (a write: half done); False if it ended."""

    def dying() -> None:
        calls = itertools.count(1)

        def wrap(name: str, real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **options: object) -> object:
                if next(calls) == nth:
                    if name == "write":
                        real(args[0], args[1][: len(args[1]) // 2])  # type: ignore[index, arg-type]
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)

            return call

        for name in FILE_CALLS:
            setattr(os, name, wrap(name, getattr(os, name)))
        action()

    status = os.waitpid(in_child(dying), 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0
    return killed


def finish(pids: list[int]) -> None:
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
