"""What every scheduler's spool does alike: find again, after a restart, what was written down in run directories."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from diamond.agent.schedulers.base import Submission

log = logging.getLogger(__name__)


class Kept(Protocol):
    @property
    def submission(self) -> Submission: ...

    @property
    def order(self) -> int: ...


K = TypeVar("K", bound=Kept)


def load_all(jobs_dir: Path, load: Callable[[Path], K | None]) -> list[K]:
    """What `load` finds below this directory, in the order of the submissions. Raises nothing, whatever is there."""
    found: list[K] = []
    with contextlib.suppress(OSError):
        for folder in list(jobs_dir.iterdir()):
            try:
                spooled = load(folder)
            except Exception:  # one bad directory must not keep the agent from starting
                log.exception("%s cannot be taken up", folder)
                continue
            if spooled is not None:
                found.append(spooled)
    return sorted(found, key=lambda one: (one.order, one.submission.name))
