"""Notices from inside that a process which no launcher looks after stands still: then it ends, saying where it stood.

A thread, since the one that trains is the one that hangs. Standard library only, Python 3.8 syntax.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

from diamond.train.lines import HANG_S, HANG_TIMES, HUNG, PHASES, PULSE, START_S, Sign

_LOOK_S = 5.0


class Watch(threading.Thread):
    """Over the main thread, by the signs of life in `memory`."""

    def __init__(self, memory: Any) -> None:
        super().__init__(name="diamond-watch", daemon=True)
        self._memory = memory
        self._longest_s = 0.0

    def run(self) -> None:
        last = Sign(*PULSE.unpack_from(self._memory, 0))
        while True:
            limit = last.limit_s or max(HANG_S, HANG_TIMES * self._longest_s)
            time.sleep(min(_LOOK_S, limit / 4))
            now = Sign(*PULSE.unpack_from(self._memory, 0))
            if last.steps and now.steps > last.steps:
                self._longest_s = max(self._longest_s, (now.since - last.since) / (now.steps - last.steps))
            if now.phase and time.monotonic() - now.since > limit + (0.0 if now.steps else START_S):
                _end(now)
            last = now


def _end(sign: Sign) -> None:
    rank = os.environ.get("RANK", "0")
    where = PHASES[sign.phase] if 0 <= sign.phase < len(PHASES) else "somewhere"
    waited = time.monotonic() - sign.since
    text = f"rank {rank} gave no sign of life for {waited:.0f} s, at step {sign.step}, {where}"
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)[-12:] if frame is not None else []
    stack = "\n".join(f'File "{one.filename}", line {one.lineno} in {one.name}' for one in reversed(frames))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"diamond.train: {text}\n{stack}\n")
        sys.stderr.flush()
    folder = os.environ.get("DIAMOND_RUN_DIR")
    if folder:
        record = {"rank": int(rank), "step": sign.step, "phase": sign.phase, "text": text, "stack": stack[:4000]}
        path = os.path.join(folder, f"hung.node{os.environ.get('NODE_RANK', '0')}.json")
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({**record, "final": True}, file)
    os._exit(HUNG)
