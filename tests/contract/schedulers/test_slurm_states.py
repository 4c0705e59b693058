"""What Slurm does to jobs, done for real on a site: every state it can be brought to, and the words for it.

All jobs of the module live at once on one site, since the slow ones (a time limit, a dead node) take a minute or two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from diamond.agent.schedulers.base import Observed, Submission
from diamond.core.reasons import Reason
from diamond.core.slurm import SlurmOptions
from diamond.core.states import JobState
from testing.bench import QUICK, SlurmBench, eventually
from testing.minihpc import Node, Partition, Site
from testing.minihpc.fixtures import require
from testing.slurm_driver_host import BINDS

NODES = tuple(Node(name=f"c{number}", cpus=8, memory_mib=8192) for number in range(1, 6))
FREE = ("c1", "c2")
PARTITIONS = (
    Partition(name="debug", nodes=FREE, options={"Default": "YES", "MaxTime": "1-00:00:00", "PreemptMode": "OFF"}),
    Partition(name="fragile", nodes=("c4",), options={"MaxTime": "1:00:00", "PreemptMode": "OFF"}),
    Partition(name="high", nodes=("c3",), options={"MaxTime": "1:00:00", "PriorityTier": "9", "PreemptMode": "OFF"}),
    Partition(name="higher", nodes=("c5",), options={"MaxTime": "1:00:00", "PriorityTier": "9", "PreemptMode": "OFF"}),
    Partition(name="spot", nodes=("c3",), options={"MaxTime": "1:00:00", "PriorityTier": "1", "PreemptMode": "CANCEL"}),
    Partition(name="scavenger", nodes=("c5",), options={"MaxTime": "1:00:00", "PriorityTier": "1"}),
)  # fmt: skip
SLEEP = "echo up; sleep 300"
STATES_TIMEOUT_S = 150


class Scenes:
    """The site, its bench, and the slow jobs that were sent ahead."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.bench = SlurmBench(site)
        self.slow: dict[str, Submission] = {}

    def root(self, *argv: str) -> None:
        self.site.run(list(argv), user="root")

    def running(self, job: Submission) -> str:
        self.bench.until(job, JobState.RUNNING)
        return self.number(job)

    def number(self, job: Submission) -> str:
        return str(eventually(lambda: self.bench.seen(job).scheduler_id, f"{job.name} has a number"))

    def pending(self, job: Submission, words: str) -> Observed:
        def look() -> Observed | None:
            seen = self.bench.seen(job)
            return seen if seen.state == JobState.QUEUED and words in seen.pending_reason else None

        return eventually(look, f"{job.name} waits: {words}; now {self.bench.seen(job)}")


@pytest.fixture(scope="module")
def scenes() -> Iterator[Scenes]:
    require("trixie")
    with Site("states", nodes=NODES, partitions=PARTITIONS, conf=QUICK, binds=BINDS) as site:
        scenes = Scenes(site)
        bench = scenes.bench
        options = SlurmOptions(extra=("--hold", "--deadline=now+70"))
        scenes.slow = {
            "late": bench.submit(SLEEP, time_limit_s=60.0),
            # Slurm looks every 30 s who has so little time left, and is early rather than late.
            "warned": bench.submit(
                "trap 'echo warned; exit 0' USR1; echo up; while :; do sleep 0.2; done", time_limit_s=60.0, warn_s=20.0
            ),
            "dead": bench.submit(SLEEP, partition="fragile"),
            "deadline": bench.submit(SLEEP, time_limit_s=60.0, slurm=options),
        }
        scenes.running(scenes.slow["dead"])
        site.kill_node("c4")
        yield scenes
        bench.close()


def test_cancelled_by_hand(scenes: Scenes) -> None:
    job = scenes.bench.submit(SLEEP)
    scenes.site.run(["scancel", scenes.running(job)])
    seen = scenes.bench.result(job)
    assert (seen.state, seen.reason) == (JobState.CANCELLED, Reason.CANCELLED)
    assert "outside Diamond" in seen.detail and seen.started_at


def test_cancelled_by_hand_while_it_waits(scenes: Scenes) -> None:
    job = scenes.bench.submit(SLEEP, slurm=SlurmOptions(extra=("--begin=now+1hour",)))
    seen = scenes.pending(job, "BeginTime")
    assert seen.expected_start_at == pytest.approx(time.time() + 3600, abs=120)
    scenes.site.run(["scancel", str(seen.scheduler_id)])
    over = scenes.bench.result(job)
    assert (over.reason, over.started_at) == (Reason.CANCELLED, None)


def test_held_and_released(scenes: Scenes) -> None:
    job = scenes.bench.submit("echo free", slurm=SlurmOptions(extra=("--hold",)))
    seen = scenes.pending(job, "scontrol release")
    assert f"scontrol release {seen.scheduler_id} (Slurm: JobHeldUser)" in seen.pending_reason
    scenes.root("scontrol", "hold", str(seen.scheduler_id))
    scenes.pending(job, "administrator holds it")
    scenes.root("scontrol", "release", str(seen.scheduler_id))
    assert scenes.bench.result(job).reason == Reason.COMPLETED
    assert scenes.bench.log(job) == "free\n"


def test_suspended_and_resumed(scenes: Scenes) -> None:
    job = scenes.bench.submit("echo up; sleep 1; echo done")
    number = scenes.running(job)
    scenes.root("scontrol", "suspend", number)
    eventually(lambda: "suspended" in scenes.bench.seen(job).pending_reason, "it is shown as suspended")
    assert scenes.bench.seen(job).state == JobState.RUNNING
    scenes.root("scontrol", "resume", number)
    assert scenes.bench.result(job).reason == Reason.COMPLETED


def test_preempted(scenes: Scenes) -> None:
    victim = scenes.bench.submit(SLEEP, partition="spot", slurm=SlurmOptions(exclusive=True))
    other = scenes.bench.submit(SLEEP, partition="scavenger", slurm=SlurmOptions(exclusive=True))
    scenes.running(victim)
    scenes.running(other)
    winners = [
        scenes.bench.submit("echo mine", partition=name, slurm=SlurmOptions(exclusive=True))
        for name in ("high", "higher")
    ]
    for job in (victim, other):  # a partition that puts jobs back into the queue must end ours instead
        seen = scenes.bench.result(job)
        assert (seen.state, seen.reason) == (JobState.FAILED, Reason.PREEMPTED), seen
    for job in winners:
        assert scenes.bench.result(job).reason == Reason.COMPLETED


def test_put_back_into_the_queue_by_hand(scenes: Scenes) -> None:
    job = scenes.bench.submit(SLEEP)
    number = scenes.running(job)
    scenes.bench.said(job, "up")
    scenes.root("scontrol", "update", f"JobId={number}", "Requeue=1")
    scenes.root("scontrol", "requeue", number)
    seen = scenes.pending(job, "put it back into the queue")
    assert seen.scheduler_id == number
    scenes.root("scontrol", "update", f"JobId={number}", "StartTime=now")
    eventually(lambda: scenes.bench.log(job).count("up\n") == 2, "it runs again")  # Slurm puts in a word of its own
    scenes.bench.until(job, JobState.RUNNING)
    scenes.bench.scheduler.cancel([job.name])
    assert scenes.bench.result(job).reason == Reason.CANCELLED


def test_follows_another_job(scenes: Scenes) -> None:
    first = scenes.bench.submit("sleep 6; echo $(date +%s.%N) > ../mark; exit 3")
    second = scenes.bench.submit("echo then", after=first.name)
    third = scenes.bench.submit("echo last", after="job_nobody_knows")
    assert scenes.bench.result(third).reason == Reason.COMPLETED
    scenes.pending(second, "another job to end")
    assert scenes.bench.result(second).started_at >= scenes.bench.result(first).ended_at
    late = scenes.bench.submit("echo late", after=first.name)
    assert scenes.bench.result(late).reason == Reason.COMPLETED, "what is over is not waited for"


def test_a_dependency_that_cannot_come_true(scenes: Scenes) -> None:
    failed = scenes.bench.submit("exit 1")
    number = scenes.bench.result(failed).scheduler_id
    job = scenes.bench.submit("true", slurm=SlurmOptions(extra=("--hold",)))
    held = scenes.number(job)
    scenes.root("scontrol", "update", f"JobId={held}", f"Dependency=afterok:{number}")
    scenes.root("scontrol", "release", held)
    scenes.pending(job, "DependencyNeverSatisfied")
    scenes.bench.scheduler.cancel([job.name])
    assert scenes.bench.result(job).reason == Reason.CANCELLED


def test_waits_for_room_and_says_where_it_stands(scenes: Scenes) -> None:
    alone = SlurmOptions(exclusive=True)
    blocker = scenes.bench.submit(SLEEP, partition="high", slurm=alone)
    scenes.running(blocker)
    jobs = [scenes.bench.submit("true", partition="high", slurm=alone) for _ in range(3)]
    for words in ("nodes it needs are busy (Slurm: Resources)", "higher priority come first (Slurm: Priority)"):
        eventually(lambda words=words: any(words in scenes.bench.seen(job).pending_reason for job in jobs), words)

    def places() -> set[str]:
        reasons = [scenes.bench.seen(job).pending_reason for job in jobs]
        return {place for place in ("1st", "2nd", "3rd") for why in reasons if f"; {place} of 3 waiting in high" in why}

    eventually(lambda: places() == {"1st", "2nd", "3rd"}, "each knows its place", 60)
    seen = scenes.bench.seen(jobs[1])
    assert seen.partition == "high" and seen.expected_start_at > time.time()
    scenes.bench.scheduler.cancel([blocker.name, *[job.name for job in jobs]])


def test_the_controller_is_restarted_while_jobs_run(scenes: Scenes) -> None:
    jobs = [scenes.bench.submit("echo up; sleep 3; echo done") for _ in range(3)]
    for job in jobs:
        scenes.bench.said(job, "up")
    scenes.site.restart_controller()
    for job in jobs:
        assert scenes.bench.result(job, within_s=60).reason == Reason.COMPLETED
        assert scenes.bench.log(job) == "up\ndone\n"


def test_a_directory_that_is_gone(scenes: Scenes) -> None:
    job = scenes.bench.submit("true", slurm=SlurmOptions(extra=("--hold",)))
    number = scenes.number(job)
    # In place of a directory that is merely missing, newer versions make one, for the log.
    scenes.site.run(["sh", "-ec", 'rm -rf "$1"; touch "$1"', "sh", str(job.run_dir)])
    scenes.root("scontrol", "release", number)
    seen = scenes.bench.result(job)
    assert (seen.state, seen.reason) == (JobState.FAILED, Reason.LAUNCH_FAILED), seen
    assert str(job.run_dir) in seen.detail


def test_a_job_of_several_nodes(scenes: Scenes) -> None:
    job = scenes.bench.submit("echo rank $RANK of $WORLD_SIZE on $(hostname)", num_nodes=2, cpus=2)
    seen = scenes.bench.result(job)
    assert (seen.reason, seen.hosts) == (Reason.COMPLETED, FREE)
    assert sorted(scenes.bench.log(job).split("\n")[:2]) == ["rank 0 of 2 on c1", "rank 1 of 2 on c2"] or (
        "rank 1 of 2" in scenes.bench.log(job)
    )


def test_warned_before_the_time_limit(scenes: Scenes) -> None:
    seen = scenes.bench.result(scenes.slow["warned"], within_s=STATES_TIMEOUT_S)
    assert (seen.reason, seen.exit_code) == (Reason.COMPLETED, 0), scenes.bench.log(scenes.slow["warned"])
    assert scenes.bench.log(scenes.slow["warned"]).endswith("warned\n")


def test_a_dead_node(scenes: Scenes) -> None:
    seen = scenes.bench.result(scenes.slow["dead"], within_s=STATES_TIMEOUT_S)
    assert (seen.state, seen.reason) == (JobState.FAILED, Reason.NODE_FAIL)
    assert "c4" in seen.detail


def test_a_deadline_that_cannot_be_kept(scenes: Scenes) -> None:
    seen = scenes.bench.result(scenes.slow["deadline"], within_s=STATES_TIMEOUT_S)
    assert (seen.state, seen.reason) == (JobState.FAILED, Reason.TIME_LIMIT)
    assert "--deadline" in seen.detail and seen.started_at is None


def test_the_time_limit(scenes: Scenes) -> None:
    seen = scenes.bench.result(scenes.slow["late"], within_s=STATES_TIMEOUT_S)
    assert (seen.state, seen.reason) == (JobState.FAILED, Reason.TIME_LIMIT)
    assert "1m" in seen.detail
    assert scenes.bench.log(scenes.slow["late"]).startswith("up\n")


def test_few_queries_and_never_two_at_once(scenes: Scenes) -> None:
    before, began = scenes.bench.scheduler.counts(), time.monotonic()
    jobs: list[Any] = [scenes.bench.submit(f"sleep {second}") for second in (3, 6, 9, 300)]
    for job in jobs[:3]:
        scenes.bench.result(job, within_s=40)
    counts = scenes.bench.scheduler.counts()
    minutes = (time.monotonic() - began) / 60
    assert (counts["queries"] - before["queries"]) / minutes <= 42, (
        counts
    )  # a fraction of a minute, plus one at its edge
    assert counts["most_at_once"] == 1
    assert counts["sbatch"] - before["sbatch"] == len(jobs)
