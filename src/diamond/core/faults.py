"""Named places where a test may end this process with SIGKILL, to prove that nothing is lost there.

Off unless DIAMOND_FAULT is set, e.g. ``DIAMOND_FAULT=agent.submitted:3``: die at the third passage.
"""

from __future__ import annotations

import os
import signal
import threading

_spec = os.environ.get("DIAMOND_FAULT", "")
_point, _, _nth = _spec.partition(":")
_left = int(_nth or 1)
_lock = threading.Lock()

FAULT_POINTS = (
    "agent.accepted",  # order journaled, nothing staged
    "agent.staged",  # files in place, submission not yet journaled
    "agent.submitting",  # submission journaled, scheduler not yet asked
    "agent.submitted",  # scheduler has the job, journal does not say so yet
    "agent.reporting",  # report built, not sent
    "agent.reported",  # report answered, answer not yet journaled
    "local.spooled",  # the local scheduler remembers the job, the agent does not know
    "local.started",  # the process runs, nothing about it is recorded yet
    "server.creating",  # task rows written, not committed
    "server.created",  # task committed, not answered
    "server.ordering",  # desired state read, not answered
    "server.receiving",  # log bytes stored, states not yet committed
    "server.committing",  # report rows written, not committed
    "server.received",  # report committed, not answered
)


def fault_point(name: str) -> None:
    """Die here if the test asked for it; otherwise cost one string comparison."""
    if name != _point:
        return
    global _left
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
