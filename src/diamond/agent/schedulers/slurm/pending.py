"""Why a job waits: Slurm's one-word reasons as sentences that say what to do. Pure and table-driven.

The word itself stays in the text, since that is what a site's documentation and its help desk know.
"""

from __future__ import annotations

import re

_LIMIT = "the task goes on by itself once your other jobs there end"
_RELEASE = "release it with: scontrol release {id}"
_ASK = "ask for less, or ask the site's support to raise it"

REASONS: dict[str, str] = {
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs of higher priority come first",
    "Resources": "it is next in line, and the nodes it needs are busy",
    "Dependency": "it waits for another job to end",
    "DependencyNeverSatisfied": "the job it depends on ended otherwise than it must; stop the task and launch it again",
    "BeginTime": "it may not start before a certain time (--begin, or a delay after it was put back into the queue)",
    "JobHeldUser": f"it is held; {_RELEASE}",
    "JobHeldAdmin": "an administrator holds it; ask the site's support",
    "JobHoldMaxRequeue": "it was put back into the queue too often and is held; stop the task and launch it again",
    "JobArrayTaskLimit": "only so many tasks of its array may run at once",
    "Licenses": "the licences it asks for are in use",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": "its reservation was removed; choose another slurm.reservation",
    "InvalidAccount": "its account is not valid any more; set slurm.account",
    "InvalidQOS": "its QoS is not valid any more; set slurm.qos",
    "BadConstraints": "no node has what it asks for; change slurm.constraint or resources",
    "AccountNotAllowed": "its account may not use this partition; set slurm.account or slurm.partition",
    "QOSNotAllowed": "its QoS may not be used in this partition; set slurm.qos or slurm.partition",
    "PartitionDown": "the partition takes no jobs at present; wait, or set another slurm.partition",
    "PartitionInactive": "the partition is switched off; wait, or set another slurm.partition",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows; lower num_nodes or set slurm.partition",
    "PartitionTimeLimit": "it asks for more time than the partition allows; lower slurm.time or set slurm.partition",
    "PartitionConfig": "it asks for more than the partition has or allows; ask for less or set slurm.partition",
    "NodeDown": "a node it needs is down; wait, or leave slurm.nodelist out",
    "Cleaning": "its nodes are being cleaned up after an earlier run",
    "Prolog": "the site's prolog program runs on its nodes",
    "JobLaunchFailure": "it could not be started on its nodes; an administrator may have to release it",
    "FrontEndDown": "the front-end node it needs is down",
    "SystemFailure": "Slurm, its file system or its network failed; the site's support has to look",
    "NonZeroExitCode": "the job ended with an error",
    "TimeLimit": "the job reached its time limit",
    "InactiveLimit": "the job was idle for too long",
    "FedJobLock": "it waits for the clusters of the federation to agree",
    "BurstBufferResources": "the burst buffer has no room for it yet",
    "BurstBufferStageIn": "its files are being copied into the burst buffer",
    "BurstBufferOperation": "a burst buffer operation failed or has to be finished; ask the site's support",
    "DeadLine": "it cannot be done by its --deadline",
    "MaxMemPerLimit": "it asks for more memory than the partition allows; lower resources.memory",
    "NoReserve": "it waits for resources that no reservation holds",
    "PowerNotAvail": "there is not enough electric power for it now",
    "PowerReserved": "power is kept for a reservation",
    "WaitForScheduling": "Slurm has not looked at it yet",
    "SchedDefer": "it asked to start at once, which Slurm put off",
    "JobDefault": "Slurm has not looked at it yet",
    "launch failed requeued held": f"it could not be started on its node and is held; {_RELEASE}",
    "job requeued in special exit state": f"it is held after a special exit code; {_RELEASE}",
    "Scheduling": "Slurm is looking for nodes",
}

# In this order: the first that fits. Slurm has some hundred of these, built from the same parts.
_OF_YOURS = r"^(QOS|Assoc)\w*"
_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"^ReqNodeNotAvail.*reserved for other job", "the node it names is kept for a job that comes first"),
    (r"^ReqNodeNotAvail", "a node it needs is down, drained or reserved (often for maintenance)"),
    (
        r"^Nodes required for job are DOWN",
        "the nodes it could run on are down, drained or kept for partitions of higher priority",
    ),
    (r"not in group permitted|group not permitted", "you may not use this partition; set another slurm.partition"),
    (_OF_YOURS + "Submit", f"you have as many jobs in the queue as you may; {_LIMIT}"),
    (_OF_YOURS + "RunMinutes", f"the time that running jobs of yours may still take is used up; {_LIMIT}"),
    (_OF_YOURS + "MaxJobs", f"you have as many jobs running as you may; {_LIMIT}"),
    (_OF_YOURS + "MaxWall", f"it asks for more time than your QoS or account allows; lower slurm.time, or {_ASK}"),
    (_OF_YOURS + r"Max\w*Per(Job|Node)", f"it asks for more than one job may have under your QoS or account; {_ASK}"),
    (_OF_YOURS + r"Max\w*Per(User|Acct|Account)", f"you use as much as your QoS or account allows at once; {_LIMIT}"),
    (_OF_YOURS + "Max", f"a limit of your QoS or account; {_LIMIT}, or {_ASK}"),
    (
        _OF_YOURS + r"Grp\w*(Minutes|Billing|Wall)",
        "the budget of your account is used up; choose another slurm.account, or ask for more",
    ),
    (_OF_YOURS + "Grp", "your group uses as much as it may at once; it goes on when jobs of the group end"),
    (_OF_YOURS, f"a limit of your QoS or account; {_ASK}"),
    (r"^burst_?buffer", "the burst buffer is not ready for it"),
)


def explain(reason: str, job_id: str = "") -> str:
    """What to tell a person of a job that waits for this reason; unknown ones as they are."""
    reason = reason.strip()
    word = reason.strip("()")
    if not word:
        return REASONS["None"]
    text = REASONS.get(word, "")
    if not text:
        text = next((found for pattern, found in _PATTERNS if re.search(pattern, word, re.IGNORECASE)), "")
    if not text:
        return word
    text = text.replace("{id}", job_id or "ID")
    return text if word == "None" else f"{text} (Slurm: {word})"
