"""This process among those its launcher started: it says that it is here, gives signs of life, and may be a standby.

A standby has done all that comes before `run()` in the script (imports above all, which take seconds) and waits there,
to take the place of a rank that is lost. Without a launcher of Diamond's, nothing of this does anything.
Standard library only, Python 3.8 syntax.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import mmap
import os
import signal
import stat
import sys
import threading
import time
from typing import Any

from diamond.train.lines import PEER_LOST, PHASES, PULSE, STACK_SIGNAL
from diamond.train.watch import Watch

_ORPHAN_S = 60.0
STARTING, SAVING, DATA, LOOP, BACKWARD, STEP = range(len(PHASES))


class Pulse:
    """Signs of life, in memory that the launcher looks at. A sign costs about a microsecond.

    Attributes:
        limit_s: after how long without one the process counts as hung; 0 leaves it to whoever looks.
        steps: that this process has done.
    """

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self._pid = os.getpid()
        self.limit_s = 0.0
        self.steps = 0

    def rest(self) -> None:
        """The run is over; whatever the process does now may take as long as it likes."""
        self.steps = 0
        self.at(STARTING, 0)

    def at(self, phase: int, step: int) -> None:
        PULSE.pack_into(self.memory, 0, self._pid, step, phase, time.monotonic(), self.limit_s, self.steps)


class Cohort:
    """`is_led`: whether a launcher of Diamond's looks after this process and brings it back."""

    def __init__(self, pulse: Pulse, line: int = -1) -> None:
        self.pulse = pulse
        self.is_led = line >= 0
        self._line = line
        self._told_of_save = False
        self._watch: Watch | None = None

    def look_after(self, hang_after_s: float | None) -> None:
        """Have it noticed when this process stands still: by the launcher, or else by a thread."""
        self.pulse.limit_s = hang_after_s or 0.0
        if not self.is_led and self._watch is None:
            self._watch = Watch(self.pulse.memory)
            self._watch.start()

    def saved(self) -> None:
        """Tell the launcher, once, that there is a checkpoint to go on from."""
        if self.is_led and not self._told_of_save:
            self._told_of_save = True
            with contextlib.suppress(OSError):
                os.write(self._line, b"saved\n")

    def leave(self) -> None:
        """End at once because another rank is gone; the launcher starts all anew."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(PEER_LOST)


_joined: Cohort | None = None


def join() -> Cohort:
    """Say that this process uses `run`; a standby comes back from here when it is needed, with its place in the
    environment."""
    global _joined
    if _joined is None:
        _joined = _join()
    return _joined


def _join() -> Cohort:
    is_standby = bool(os.environ.pop("DIAMOND_STANDBY", ""))
    try:
        line, pulse, stack = (int(one) for one in os.environ.pop("DIAMOND_LAUNCH_FDS", "").split(","))
        _check(line, pulse, stack)
        memory = mmap.mmap(pulse, PULSE.size)
        said = b"here cuda\n" if _has_gpu() else b"here\n"
        os.write(line, said)
    except (OSError, ValueError):  # none given, or something in between has closed them
        if is_standby:  # nobody will ever need it
            os._exit(0)
        return Cohort(Pulse(bytearray(PULSE.size)))
    if is_standby:
        _wait(line)
    if STACK_SIGNAL:
        # The file stays open as long as the process: the signal may come at any time.
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    _tell_of_errors(line)
    threading.Thread(target=_end_with_launcher, args=(line,), name="diamond-line", daemon=True).start()
    return Cohort(Pulse(memory), line)


def _check(line: int, *memory: int) -> None:
    """Something in between may have closed them, and their numbers may be of other files by now."""
    names = [os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in memory]
    ours = all(name.startswith(("memfd:diamond", "diamond-")) for name in names)
    if not ours or not stat.S_ISSOCK(os.fstat(line).st_mode) or os.fstat(memory[0]).st_size != PULSE.size:
        raise ValueError("not ours")


def _tell_of_errors(line: int) -> None:
    """A process that ends with an error of its own takes a while to end. The others notice at once, and end for want of
    it: the launcher must know whose fault it is."""
    before = sys.excepthook

    def hook(*error: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(line, b"failed\n")
        before(*error)

    sys.excepthook = hook


def _end_with_launcher(line: int) -> None:
    """A rank whose launcher was killed would train on unseen, and write checkpoints into those of the next job."""
    with contextlib.suppress(OSError):
        while os.read(line, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)  # it saves, if it can
    time.sleep(_ORPHAN_S)
    os._exit(128 + signal.SIGTERM)


def _has_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _wait(line: int) -> None:
    if "torch" in sys.modules:
        with contextlib.suppress(Exception):  # every optimizer imports it, and it takes longer than the rest together
            importlib.import_module("torch._dynamo")
    heard = b""
    while not heard.endswith(b"\n"):
        more = os.read(line, 65536)
        if not more:  # the launcher is gone, and with it the job
            os._exit(0)
        heard += more
    os.environ.update(json.loads(heard))
