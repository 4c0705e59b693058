"""The ranks of a run, forked from a process that has torch loaded: what the programs of these tests have in common."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from diamond.train.launch import free_port

TOGETHER_S = 20.0  # for the other ranks to end, once one has failed
LONGEST_S = 240.0


def fork_ranks(world: int, work: Callable[[int], int | None], **env: str) -> list[int]:
    """A process for each rank, which ends with what `work(rank)` returns (nothing: 0), or with 1 where it fails."""
    port = free_port()
    sys.stderr.flush()
    return [_fork(rank, world, work, {"MASTER_PORT": str(port), **env}) for rank in range(world)]


def _fork(rank: int, world: int, work: Callable[[int], int | None], env: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        faulthandler.register(signal.SIGQUIT)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
            DIAMOND_TRAIN_QUIET="1", **env,
        )  # fmt: skip
        code = work(rank) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for(ranks: list[int]) -> list[int]:
    """How each rank ended; negative: of a signal.

    Ranks that wait in vain for one that failed, or for each other, say where they stand and are ended: whoever asked
    is to hear of a failure instead of waiting, too.
    """
    ends = time.monotonic() + LONGEST_S
    running, failed = list(ranks), False
    codes: dict[int, int] = {}
    while running and time.monotonic() < ends:
        for pid in [one for one in running if has_ended(one)]:
            running.remove(pid)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if codes[pid] and not failed:
                failed, ends = True, time.monotonic() + TOGETHER_S
        time.sleep(0.002)
    for number in (signal.SIGQUIT, signal.SIGKILL) if running else ():
        for pid in running:
            os.kill(pid, number)
        time.sleep(0.5)
    codes.update({pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running})
    return [codes[pid] for pid in ranks]
