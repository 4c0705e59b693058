"""Every state Slurm knows, and what it means here: one table. Pure.

Slurm has base states (what a job is) and flags (what is just being done with it); squeue shows the most telling one.
What a job's *end* means also depends on what it left behind: see `result`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diamond.core.reasons import Reason


class Stage(Enum):
    """Where a job in some Slurm state stands."""

    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"
    UNKNOWN = "unknown"  # a word this version has never seen: what was known before still holds


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What one Slurm state says.

    Attributes:
        reason: for states that end a job, why; None where what the job left behind decides.
        text: for people: why it waits or stands still, or how it ended. May be empty.
    """

    stage: Stage
    reason: Reason | None = None
    text: str = ""


def _waiting(text: str = "") -> Meaning:
    return Meaning(stage=Stage.WAITING, text=text)


def _running(text: str = "") -> Meaning:
    return Meaning(stage=Stage.RUNNING, text=text)


def _over(reason: Reason | None, text: str = "") -> Meaning:
    return Meaning(stage=Stage.OVER, reason=reason, text=text)


_REQUEUED = "Slurm put it back into the queue"

STATES: dict[str, Meaning] = {
    # Base states
    "PENDING": _waiting(),
    "RUNNING": _running(),
    "SUSPENDED": _running("suspended by Slurm or an administrator; its time stands still until it is resumed"),
    "COMPLETED": _over(None),
    "FAILED": _over(None),
    "CANCELLED": _over(Reason.CANCELLED, "cancelled outside Diamond, with scancel or by an administrator"),
    "TIMEOUT": _over(Reason.TIME_LIMIT, "Slurm ended it at its time limit"),
    "DEADLINE": _over(Reason.TIME_LIMIT, "Slurm ended it because it could not be done by its --deadline"),
    "NODE_FAIL": _over(Reason.NODE_FAIL, "a node of the job went down"),
    "BOOT_FAIL": _over(Reason.NODE_FAIL, "a node could not be started for the job"),
    "PREEMPTED": _over(Reason.PREEMPTED, "Slurm gave its resources to a job of higher priority"),
    "OUT_OF_MEMORY": _over(Reason.OUT_OF_MEMORY, "Slurm ended it for using more memory than it asked for"),
    # Flags that squeue shows in place of the base state
    "COMPLETING": _running("it ended; Slurm is cleaning up its nodes"),
    "CONFIGURING": _waiting("its nodes are being started for it"),
    "POWER_UP_NODE": _waiting("its nodes are being switched on"),
    "RESIZING": _running("its size is being changed"),
    "SIGNALING": _running(),
    "STAGE_OUT": _running("it ended; Slurm is copying its files out of the burst buffer"),
    "STOPPED": _running("stopped with SIGSTOP; it keeps its nodes and waits to be continued"),
    "EXPEDITING": _waiting(f"{_REQUEUED} in front of others"),
    "REQUEUED": _waiting(_REQUEUED),
    "REQUEUE_FED": _waiting("being sent to another cluster of the federation"),
    "REQUEUE_HOLD": _waiting(f"{_REQUEUED} and holds it there; release it with: scontrol release ID"),
    "SPECIAL_EXIT": _waiting(
        f"{_REQUEUED} after a special exit code and holds it; release it with: scontrol release ID"
    ),
    "RESV_DEL_HOLD": _waiting("held because its reservation was removed; release it with: scontrol release ID"),
    "REVOKED": _over(Reason.LOST, "another cluster of the federation took the job"),
    # Flags that only some versions write, alone or behind a base state
    "LAUNCH_FAILED": _over(Reason.LAUNCH_FAILED, "Slurm could not start it on its nodes"),
    "RECONFIG_FAIL": _over(Reason.NODE_FAIL, "a node could not be configured for the job"),
    "UPDATE_DB": Meaning(stage=Stage.UNKNOWN),
    "OOM": _over(Reason.OUT_OF_MEMORY, "Slurm ended it for using more memory than it asked for"),
}

# In a list such as FAILED,LAUNCH_FAILED these say more than the base state.
_TELLING = ("COMPLETING", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED", "SPECIAL_EXIT", "REQUEUE_HOLD", "STAGE_OUT")


def meaning(state: str) -> Meaning:
    """What a state word (or a list of them) means."""
    words = [word for word in state.upper().replace("+", ",").split(",") if word]
    for word in _TELLING:
        if word in words and len(words) > 1:
            return STATES[word]
    for word in words:
        if word in STATES:
            return STATES[word]
    return Meaning(stage=Stage.UNKNOWN, text=f"Slurm calls its state {state}" if state else "")
