"""Slurm's own programs misbehave: they hang, fail, answer late, or lie. No job is lost, none runs twice, no storm.

A folder first on the driver's PATH holds stand-ins that do what a file beside them says, and else call the real one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.schedulers.base import Observed, Submission
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.slurm import SlurmOptions
from diamond.core.states import JobState
from testing.bench import SlurmBench, eventually
from testing.minihpc import Site

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol")
STAND_IN = """\
#!/bin/bash
name=${0##*/}; folder=${0%/*}
printf '%s\\n' "$*" >> "$folder/$name.calls"
mode=$(cat "$folder/$name.mode" 2>/dev/null)
case $mode in
  hang) exec sleep 600 ;;
  slow) sleep 4 ;;
  fail) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
  timeout) echo "$name: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1 ;;
  limit) echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
         echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit," \\
              "user's size and/or time limits)" >&2; exit 1 ;;
  lost) "/usr/bin/$name" "$@" > /dev/null; exec sleep 600 ;;
  killed) "/usr/bin/$name" "$@" > /dev/null; kill -9 $$ ;;
  garbage) echo "scheduled maintenance tonight"; exit 0 ;;
esac
exec "/usr/bin/$name" "$@"
"""


class Trouble:
    def __init__(self, site: Site) -> None:
        self.bench = SlurmBench(site)
        self._site = site
        self._folder = f"{self.bench.home}/bin"
        site.run(["mkdir", self._folder])
        for name in PROGRAMS:
            site.write(f"{self._folder}/{name}", STAND_IN, mode=0o755)
        self.bench.env |= {"PATH": f"{self._folder}:/usr/local/bin:/usr/bin:/bin", "COMMAND_TIMEOUT_S": "2"}

    def make(self, name: str, mode: str) -> None:
        self._site.write(f"{self._folder}/{name}.mode", mode)

    def calls(self, name: str, word: str = "") -> list[str]:
        path = self.bench.outside(Path(self._folder, f"{name}.calls"))
        return [line for line in path.read_text().splitlines() if word in line] if path.exists() else []

    def waits(self, job: Submission, words: str) -> Observed:
        def look() -> Observed | None:
            seen = self.bench.seen(job)
            return seen if seen.state == JobState.QUEUED and words in seen.pending_reason else None

        return eventually(look, f"{job.name} waits: {words}; now {self.bench.seen(job)}")


@pytest.fixture
def trouble(contract_sites: Callable[[str], Site]) -> Iterator[Trouble]:
    trouble = Trouble(contract_sites("trixie"))
    yield trouble
    for name in PROGRAMS:
        trouble.make(name, "")
    trouble.bench.close()


@pytest.mark.parametrize("mode", ["lost", "killed"])
def test_an_sbatch_of_unknown_outcome_that_went_through(trouble: Trouble, mode: str) -> None:
    trouble.make("sbatch", mode)
    job = trouble.bench.submit("echo once; sleep 1")
    eventually(lambda: trouble.calls("sbatch", job.name), "sbatch was called")
    trouble.make("sbatch", "")
    assert trouble.bench.result(job).reason == Reason.COMPLETED
    assert (trouble.bench.log(job), len(trouble.bench.ids(job))) == ("once\n", 1)
    assert len(trouble.calls("sbatch", job.name)) == 1, "it was found in the queue"


@pytest.mark.parametrize("mode", ["hang", "timeout"])
def test_an_sbatch_of_unknown_outcome_that_did_not_go_through(trouble: Trouble, mode: str) -> None:
    trouble.make("squeue", "fail")
    trouble.make("sbatch", mode)
    job = trouble.bench.submit("echo once")
    trouble.waits(job, "looking in Slurm's queue")
    trouble.make("sbatch", "")
    time.sleep(2)
    assert len(trouble.calls("sbatch", job.name)) == 1, "never again before a look at the queue"
    trouble.make("squeue", "")
    assert trouble.bench.result(job).reason == Reason.COMPLETED
    assert (trouble.bench.log(job), len(trouble.bench.ids(job))) == ("once\n", 1)
    assert len(trouble.calls("sbatch", job.name)) == 2


def test_the_driver_dies_with_an_sbatch_under_way(trouble: Trouble) -> None:
    """The orphan goes on without it; as long as it does, the queue's answer means nothing."""
    trouble.make("sbatch", "slow")
    job = trouble.bench.prepare("echo once; sleep 0.5")
    driver = trouble.bench.spool_in_another_process([job])
    eventually(lambda: trouble.calls("sbatch", job.name), "sbatch was called")
    driver.kill()
    trouble.make("sbatch", "")
    trouble.bench.scheduler.submit(job)
    assert trouble.bench.result(job).reason == Reason.COMPLETED
    assert (trouble.bench.log(job), len(trouble.bench.ids(job))) == ("once\n", 1)
    assert len(trouble.calls("sbatch", job.name)) == 1


def test_a_controller_that_takes_no_jobs(trouble: Trouble) -> None:
    trouble.make("sbatch", "fail")
    jobs = [trouble.bench.submit("true") for _ in range(10)]
    trouble.waits(jobs[0], "Unable to contact slurm controller")
    time.sleep(5)
    assert len(trouble.calls("sbatch")) <= 4 + 3, "one tries for all"
    trouble.make("sbatch", "")
    for job in jobs:
        assert trouble.bench.result(job, within_s=60).reason == Reason.COMPLETED


def test_as_many_jobs_as_one_may_have(trouble: Trouble) -> None:
    trouble.make("sbatch", "limit")
    jobs = [trouble.bench.submit("true") for _ in range(6)]
    trouble.waits(jobs[0], "as many jobs in Slurm's queue as you may (QOSMaxSubmitJobPerUserLimit")
    trouble.make("sbatch", "")
    for job in jobs:
        assert trouble.bench.result(job, within_s=40).reason == Reason.COMPLETED


def test_refusals_in_slurms_words_and_plain_ones(trouble: Trouble) -> None:
    asked = {
        "Invalid partition name specified": SlurmOptions(partition="nope"),
        "Invalid feature specification": SlurmOptions(constraint="nope"),
        "Requested reservation is invalid": SlurmOptions(reservation="nope"),
        "Invalid node name specified": SlurmOptions(nodelist="nope"),
        "unrecognized option '--nope'": SlurmOptions(extra=("--nope",)),
        "Invalid generic resource": SlurmOptions(gres="nope:1"),
    }
    jobs = {words: trouble.bench.submit("true", slurm=options) for words, options in asked.items()}
    for words, job in jobs.items():
        seen = trouble.bench.result(job)
        assert (seen.state, seen.reason) == (JobState.FAILED, Reason.REJECTED)
        assert re.fullmatch(rf"Slurm refused the job: .*{words}.*\. .+\.", seen.detail), seen.detail
        assert "sbatch: error" not in seen.detail
    trouble.bench.start()
    for job in jobs.values():
        assert trouble.bench.seen(job).reason == Reason.REJECTED, "also after a restart"
    assert len(trouble.calls("sbatch")) == len(jobs)


@pytest.mark.parametrize("mode", ["fail", "hang", "garbage"])
def test_a_queue_that_does_not_answer(trouble: Trouble, mode: str) -> None:
    job = trouble.bench.submit("echo up; sleep 4")
    trouble.bench.until(job, JobState.RUNNING)
    trouble.make("squeue", mode)
    called = len(trouble.calls("squeue"))
    if mode != "garbage":  # an answer without our job in it is no trouble to be told of
        warning = eventually(lambda: trouble.bench.scheduler.usage().warnings, "it is told")
        assert re.search(r"slurmctld does not answer since \d+s: (Unable to contact|no answer within)", warning[0])
        time.sleep(4)
        assert len(trouble.calls("squeue")) - called <= 4, "ever more rarely"
    else:
        time.sleep(4)
    assert trouble.bench.seen(job).state == JobState.RUNNING, "what was known stays"
    trouble.make("squeue", "")
    assert trouble.bench.result(job).reason == Reason.COMPLETED
    eventually(lambda: not trouble.bench.scheduler.usage().warnings, "and told no more")


def test_a_slow_queue_is_asked_rarely(trouble: Trouble) -> None:
    trouble.bench.env["COMMAND_TIMEOUT_S"] = "30"
    trouble.make("squeue", "slow")
    job = trouble.bench.submit("echo up; sleep 1")
    trouble.bench.until(job, JobState.RUNNING)
    began, called = time.monotonic(), len(trouble.calls("squeue"))
    assert trouble.bench.result(job).reason == Reason.COMPLETED
    assert len(trouble.calls("squeue")) - called <= 1 + (time.monotonic() - began) / 8 + 1
    assert trouble.bench.scheduler.counts()["most_at_once"] == 1


def test_a_cancel_is_repeated_until_it_holds(trouble: Trouble) -> None:
    job = trouble.bench.submit("echo up; sleep 300")
    trouble.bench.said(job, "up")
    trouble.make("scancel", "fail")
    trouble.bench.scheduler.cancel([job.name])
    eventually(lambda: len(trouble.calls("scancel")) >= 2, "it is tried again")
    trouble.bench.start()
    trouble.make("scancel", "")
    assert trouble.bench.result(job).reason == Reason.CANCELLED


def test_a_cancelled_job_is_never_submitted(trouble: Trouble) -> None:
    trouble.make("sbatch", "fail")
    job = trouble.bench.submit("echo never")
    trouble.waits(job, "Unable to contact")
    trouble.bench.scheduler.cancel([job.name])
    seen = trouble.bench.result(job)
    assert (seen.reason, seen.started_at) == (Reason.CANCELLED, None)
    called = len(trouble.calls("sbatch"))
    trouble.make("sbatch", "")
    time.sleep(4)
    trouble.bench.start()
    time.sleep(1)
    assert (len(trouble.calls("sbatch")), trouble.bench.ids(job)) == (called, [])


def test_a_job_in_the_queue_twice(trouble: Trouble) -> None:
    """As a crash between two sbatch would leave it: the newer one is taken out again."""
    job = trouble.bench.submit("echo once; sleep 3", cpus=2)
    trouble.bench.until(job, JobState.RUNNING)
    argv = ["sbatch", "--parsable", f"--job-name={job.name}", f"--chdir={job.run_dir}", "--output=log",
            "--open-mode=append", "--cpus-per-task=2", "--no-requeue", str(job.script)]  # fmt: skip
    second = trouble.bench.site.run(argv).stdout.strip()
    assert trouble.bench.result(job).reason == Reason.COMPLETED
    assert trouble.bench.log(job) == "once\n"
    state = trouble.bench.site.run(["squeue", "--all", "--states=all", "--noheader", f"--jobs={second}", "--format=%T"])
    assert state.stdout.strip() == "CANCELLED"


def test_paths_that_mean_something_to_slurm(trouble: Trouble) -> None:
    """Slurm replaces %j and the like in file names, and its batch scripts pass through a shell."""
    bench = trouble.bench
    bench.jobs_dir = Path(bench.home) / "a b%j%u 'quo\"tes' \\t ünï;$HOME/jobs"
    bench.site.run(["mkdir", "-p", str(bench.jobs_dir)])
    bench.start()
    job = bench.submit('printf "%s\\n" "$PWD" "$VALUE"', envs={"VALUE": "two\nlines, 'and' $more"})
    assert bench.result(job).reason == Reason.COMPLETED
    assert bench.log(job) == f"{job.run_dir}/work\ntwo\nlines, 'and' $more\n"
    assert sorted(path.name for path in bench.outside(job.run_dir).iterdir() if "slurm-" in path.name) == []


def test_a_job_that_slurm_forgot(trouble: Trouble) -> None:
    """Nothing in the queue and no record: lost, but only after some patience."""
    job = trouble.bench.submit("echo up; sleep 300")
    trouble.bench.said(job, "up")
    trouble.make("squeue", "garbage")
    seen = trouble.bench.result(job, within_s=40)
    assert (seen.state, seen.reason) == (JobState.FAILED, Reason.LOST)
    assert "does not know the job any more" in seen.detail
    trouble.bench.site.run(["scancel", str(seen.scheduler_id)])


def test_what_slurm_forgot_but_the_job_wrote_down(trouble: Trouble) -> None:
    job = trouble.bench.submit("echo up; sleep 1; exit 7")
    trouble.bench.said(job, "up")
    trouble.make("squeue", "garbage")
    seen: Any = trouble.bench.result(job)
    assert (seen.reason, seen.exit_code) == (Reason.EXIT_NONZERO, 7)
    assert RunDir(trouble.bench.outside(job.run_dir)).exit.exists()


@pytest.mark.parametrize("release", ["trixie", "bookworm"])
def test_what_the_cluster_has(contract_sites: Callable[[str], Site], release: str) -> None:
    trouble = Trouble(contract_sites(release))
    driver = trouble.bench.start()
    facts = driver.capacity()
    assert (facts.scheduler, facts.scheduler_version) == ("slurm", trouble.bench.site.facts.slurm)
    assert (facts.nodes, facts.cpus_per_node, facts.mem_bytes_per_node) == (1, 2, 8 * 1024**3)
    (debug,) = facts.partitions
    assert (debug.name, debug.is_default, debug.max_walltime_s, debug.nodes) == ("debug", True, 86400, 1)
    assert [(gpu.model, gpu.count) for gpu in debug.groups[0].gpus] == [("a100", 2)]
    job = trouble.bench.submit("echo $CUDA_VISIBLE_DEVICES; sleep 60", gpus=2, gpu_type="a100")
    trouble.bench.until(job, JobState.RUNNING)
    eventually(lambda: driver.usage().cpus_used == 1, "its core is counted")
    assert (driver.usage().gpus_used, driver.usage().jobs_running) == ({"a100": 2}, 1)
    trouble.bench.said(job, "0,1")
    trouble.make("scontrol", "fail")
    assert trouble.bench.start().capacity() == facts, "known from the start before"
    trouble.make("scontrol", "")
    trouble.bench.close()


def test_an_idle_driver_asks_nothing(trouble: Trouble) -> None:
    trouble.bench.result(trouble.bench.submit("true"))
    before = len(trouble.calls("squeue"))
    time.sleep(4)
    assert len(trouble.calls("squeue")) == before
