"""What a computing centre says to every agent on a machine: files in /etc/diamond, which only root can write.

`/etc/diamond/stop` ends every agent that runs and lets none start; what stands in it is shown to users as the reason.
Jobs go on. An agent that something keeps running comes back soon after the file is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from diamond.core.errors import InstallationProblem

log = logging.getLogger(__name__)

CENTRE = Path("/etc/diamond")
STOP_FILE = "stop"
_MAX_BYTES = 2000
LOOK_EVERY_S = 5.0
_WAIT_S = 10.0


def stop_reason(folder: Path = CENTRE) -> str:
    """Why this centre lets no agent run; empty when it does. A file that cannot be read counts as well."""
    path = folder / STOP_FILE
    try:
        with open(path, "rb") as file:
            said = file.read(_MAX_BYTES).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        said = error.strerror or ""
    text = " ".join("".join(char if char.isprintable() else " " for char in said).split())
    return f"{path}: {text}" if text else f"{path} exists"


def refuse_stopped(folder: Path = CENTRE) -> None:
    """Raises InstallationProblem while this centre lets no agent run."""
    if why := stop_reason(folder):
        raise InstallationProblem(
            f"this centre has stopped all Diamond agents ({why})",
            hint="ask its administrators; jobs that run go on, and the agent finds them again",
        )


def wait_while_stopped(folder: Path = CENTRE, *, every_s: float = _WAIT_S) -> None:
    """Return once agents may run here. Connects to nothing meanwhile, and says so once."""
    is_told = False
    while why := stop_reason(folder):
        if not is_told:
            log.error("this centre has stopped all Diamond agents (%s); waiting until it lets them run", why)
            is_told = True
        time.sleep(every_s)


class StopWatch:
    """Ends a running agent when its centre says so."""

    def __init__(self, folder: Path, stop: threading.Event, on_stop: Callable[[str], None]) -> None:
        self.reason = ""
        self._folder = folder
        self._stop = stop
        self._on_stop = on_stop
        self._thread = threading.Thread(target=self._run, name="centre", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if why := stop_reason(self._folder):
                self.reason = why
                log.error("this centre has stopped all Diamond agents (%s); stopping, jobs go on", why)
                self._on_stop(why)
                return
            self._stop.wait(LOOK_EVERY_S)
