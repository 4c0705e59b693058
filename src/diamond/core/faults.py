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
    "server.charging",  # what an ended job used is added up, not committed
)

# Only an agent on a Slurm cluster passes these.
SLURM_FAULT_POINTS = (
    "slurm.spooled",  # the Slurm driver remembers the job, the agent does not know
    "slurm.sbatch",  # sbatch is about to be run
    "slurm.submitted",  # sbatch ended, its answer is not recorded
)

# On the way of a token instead of a task.
ENROLMENT_FAULT_POINTS = (
    "server.enrolling",  # an agent's token written, not committed
    "server.enrolled",  # an agent's token committed, not answered
    "server.token_accepted",  # a new token committed beside the old one, not answered
    "agent.token_made",  # a new token is in its file, the server does not know it
    "agent.token_told",  # the server knows the new token, the agent does not use it yet
    "agent.token_taken",  # the agent uses the new token, the old one still works
)

# On the way of a point of a curve, from a line of a log.
CURVE_FAULT_POINTS = (
    "agent.curves_promised",  # curves.json names lines, metrics.jsonl does not have them
    "agent.curves_told",  # metrics.jsonl has them
)

# On the way of an image.
IMAGE_FAULT_POINTS = (
    "server.settling",  # a finished build judged, not committed
)

# On the way of a notice.
NOTICE_FAULT_POINTS = (
    "server.notices_made",  # notices written and the cursor moved, not committed
    "server.notices_claimed",  # a notice is this process's to send, nothing is sent
    "server.notice_sent",  # it was sent, nothing says so yet
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
