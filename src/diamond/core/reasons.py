"""Why a job ended (or could not begin). One table says what each reason means for the task.

A failed task is data: the reason decides whether another attempt makes sense and which sentence tells the
user what to do next. Nothing else in Diamond decides those two things.
"""

from __future__ import annotations

from dataclasses import dataclass

from diamond.core.compat import StrEnum


class Reason(StrEnum):
    COMPLETED = "COMPLETED"
    EXIT_NONZERO = "EXIT_NONZERO"
    SETUP_FAILED = "SETUP_FAILED"
    SIGNALLED = "SIGNALLED"
    HUNG = "HUNG"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIME_LIMIT = "TIME_LIMIT"
    DISK_FULL = "DISK_FULL"
    STAGING_FAILED = "STAGING_FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    SECRET_MISSING = "SECRET_MISSING"  # noqa: S105 - a reason
    IMAGE_MISSING = "IMAGE_MISSING"
    IMAGE_FAILED = "IMAGE_FAILED"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    REJECTED = "REJECTED"
    LOST = "LOST"
    CONTINUED = "CONTINUED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What a reason implies.

    Attributes:
        outcome: the final task state when no attempt is left ("SUCCEEDED", "FAILED" or "CANCELLED").
        retryable: whether the same task may do better when run again unchanged.
        sentence: what happened and what to do next, for a person.
        resumes: whether the next job goes on in the same work directory: the program did nothing wrong, it was stopped.
    """

    outcome: str
    retryable: bool
    sentence: str
    resumes: bool = False


MEANINGS: dict[Reason, Meaning] = {
    Reason.COMPLETED: Meaning(outcome="SUCCEEDED", retryable=False, sentence="Finished with exit code 0."),
    Reason.EXIT_NONZERO: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The command ended with an error; the last lines of the log say why.",
    ),
    Reason.SETUP_FAILED: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The setup commands ended with an error, so run was not started; see the log, "
        "mend `setup` and launch again.",
    ),
    Reason.SIGNALLED: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The program was ended by a signal that Diamond did not send (a crash such as a "
        "segmentation fault, or somebody's kill).",
    ),
    Reason.HUNG: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="A process of the training stood still for too long, and the job was ended instead of using up its "
        "time; the detail names the process and where it stood.",
        resumes=True,
    ),
    Reason.OUT_OF_MEMORY: Meaning(
        outcome="FAILED",
        retryable=False,
        sentence="The program needed more memory than it had; raise resources.memory, or use a smaller batch or model.",
    ),
    Reason.TIME_LIMIT: Meaning(
        outcome="FAILED",
        retryable=False,
        sentence="The time limit ended the program; raise max_duration, or save checkpoints and resume.",
        resumes=True,
    ),
    Reason.DISK_FULL: Meaning(
        outcome="FAILED",
        retryable=False,
        sentence="The disk (or quota) holding the run directory is full; free space on the endpoint and launch again.",
    ),
    Reason.STAGING_FAILED: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The task's files could not be put in place on the endpoint; the detail names the file.",
    ),
    Reason.LAUNCH_FAILED: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The scheduler accepted the job but its script could not be started on the node.",
    ),
    Reason.SECRET_MISSING: Meaning(
        outcome="FAILED",
        retryable=False,
        sentence="A secret that the task names was not to be had when its job should begin; the detail says which. Set "
        "it with `diamond secret set` and launch again.",
    ),
    Reason.IMAGE_MISSING: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The image the task runs in was not where it should be on the endpoint. If you named a path, check "
        "it; an image of Diamond's is built or copied there anew when you launch again.",
    ),
    Reason.IMAGE_FAILED: Meaning(
        outcome="FAILED",
        retryable=False,
        sentence="The image the task should run in could not be built or brought to the endpoint; the detail says why. "
        "Mend the recipe and launch again.",
    ),
    Reason.PREEMPTED: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The scheduler took the resources back for other work.",
        resumes=True,
    ),
    Reason.NODE_FAIL: Meaning(outcome="FAILED", retryable=True, sentence="A node of the job failed.", resumes=True),
    Reason.REJECTED: Meaning(
        outcome="FAILED",
        retryable=False,
        sentence="The endpoint refused the job; the detail names the rule. Change the task, or ask the "
        "endpoint's owner.",
    ),
    Reason.LOST: Meaning(
        outcome="FAILED",
        retryable=True,
        sentence="The job vanished without leaving an exit status (the machine may have restarted); launch again.",
    ),
    Reason.CONTINUED: Meaning(
        outcome="SUCCEEDED",
        retryable=False,
        sentence="The program saved its state and stopped before its time was up, to go on in the next job.",
        resumes=True,
    ),
    Reason.CANCELLED: Meaning(outcome="CANCELLED", retryable=False, sentence="Stopped on request."),
}

DEFAULT_RETRY_ON = tuple(reason for reason, meaning in MEANINGS.items() if meaning.retryable)
