"""What every scheduler promises, tried on every one there is. See `diamond.agent.schedulers.base.Scheduler`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.schedulers.base import Submission
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.states import JobState

EVERY_SCHEDULER = True
Wait = Callable[..., Any]


def local_only(because: str) -> Callable[[Any], Any]:
    """For what is this machine's own scheduler's business; `because` says who sees to it elsewhere."""
    assert because

    def mark(test: Any) -> Any:
        test.local_only = True
        return test

    return mark


def pid_in(text: str, word: str = "pid") -> int:
    return int(text.split(f"{word}=")[1].split()[0])


class TestScheduler:
    # One job

    def test_runs_a_job_to_its_end(self, bench: Any) -> None:
        job = bench.submit("echo hello; echo oops >&2; pwd")
        seen = bench.result(job)
        assert (seen.state, seen.reason, seen.exit_code) == (JobState.SUCCEEDED, Reason.COMPLETED, 0)
        assert seen.hosts and seen.scheduler_id
        assert seen.queued_at <= seen.started_at + 0.05 <= seen.ended_at + 0.1
        assert bench.log(job) == f"hello\noops\n{job.run_dir}/work\n"

    def test_shows_a_running_job(self, bench: Any) -> None:
        job = bench.submit("sleep 60")
        seen = bench.until(job, JobState.RUNNING)
        assert seen.started_at == pytest.approx(time.time(), abs=5)
        assert bench.seen(job) is bench.seen(job), "an unchanged job is the same object"
        usage = bench.scheduler.usage()
        assert (usage.cpus_used, usage.jobs_running) == (1, 1)

    def test_calls_wake_when_there_is_news(self, bench: Any, wait_for: Wait) -> None:
        calls: list[float] = []
        bench.scheduler.wake = lambda: calls.append(time.time())
        bench.result(bench.submit("true"))
        wait_for(lambda: calls, "wake was called")

    @pytest.mark.parametrize("code", [1, 2, 75, 73, 255])
    def test_tells_the_exit_code(self, bench: Any, code: int) -> None:
        seen = bench.result(bench.submit(f"exit {code}"))
        assert (seen.state, seen.reason, seen.exit_code) == (JobState.FAILED, Reason.EXIT_NONZERO, code)
        assert str(code) in seen.detail

    def test_tells_a_failed_setup(self, bench: Any) -> None:
        job = bench.submit("echo never", setup="echo preparing; exit 4")
        seen = bench.result(job)
        assert (seen.reason, seen.exit_code) == (Reason.SETUP_FAILED, 4)
        assert bench.log(job) == "preparing\n"

    def test_tells_a_signal(self, bench: Any) -> None:
        seen = bench.result(bench.submit("kill -SEGV $$"))
        assert (seen.reason, seen.signal) == (Reason.SIGNALLED, signal.SIGSEGV)
        assert "SIGSEGV" in seen.detail

    def test_tells_when_the_jobs_own_shell_was_killed(self, bench: Any) -> None:
        seen = bench.result(bench.submit("kill -KILL $PPID; sleep 60"))
        assert (seen.state, seen.reason, seen.signal) == (JobState.FAILED, Reason.SIGNALLED, signal.SIGKILL)

    def test_hostile_names_and_paths(self, bench: Any) -> None:
        for name in ('it\'s a "job" $(touch /tmp/diamond-pwned)', "ünï cödé ; rm -rf *", "-rf"):
            job = bench.submit('echo "in $PWD"', name=name)
            assert bench.result(job).reason == Reason.COMPLETED
            assert bench.log(job) == f"in {job.run_dir}/work\n"
        assert not os.path.exists("/tmp/diamond-pwned")

    def test_the_agents_own_variables_stay_outside(self, bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DIAMOND_TOKEN", "secret")
        bench.start(**({"env": {"DIAMOND_TOKEN": "secret"}} if bench.kind == "slurm" else {}))
        job = bench.submit("env", envs={"EXTRA": "x y"})
        bench.result(job)
        log = bench.log(job)
        assert "secret" not in log and "EXTRA=x y\n" in log and f"DIAMOND_JOB_ID={job.name}\n" in log
        assert "DIAMOND_CPUS=1\n" in log

    # Submitting twice, forgetting

    def test_submitting_twice_runs_once(self, bench: Any) -> None:
        job = bench.submit("echo once; sleep 0.2")
        bench.scheduler.submit(job)
        bench.until(job, JobState.RUNNING)
        bench.scheduler.submit(job)
        bench.result(job)
        bench.scheduler.submit(job)
        assert bench.seen(job).state == JobState.SUCCEEDED
        assert bench.log(job) == "once\n"

    def test_forgets_ended_jobs_only(self, bench: Any) -> None:
        done, running = bench.submit("true"), bench.submit("sleep 60")
        bench.result(done)
        bench.until(running, JobState.RUNNING)
        bench.scheduler.forget([done.name, running.name, "nobody"])
        assert set(bench.scheduler.observe()) == {running.name}
        bench.start()
        assert set(bench.scheduler.observe()) == {running.name}

    def test_a_forgotten_job_submitted_again_does_not_run_again(self, bench: Any) -> None:
        job = bench.submit("echo once; exit 3")
        bench.result(job)
        bench.scheduler.forget([job.name])
        bench.scheduler.submit(job)
        assert bench.result(job).exit_code == 3
        assert bench.log(job) == "once\n"

    # Queue and slots

    def test_no_more_jobs_than_slots(self, bench: Any) -> None:
        jobs = [bench.submit("sleep 0.4; echo done") for _ in range(5)]
        ended = [bench.result(job) for job in jobs]
        assert all(seen.reason == Reason.COMPLETED for seen in ended)
        most = max(sum(other.started_at <= seen.started_at < other.ended_at for other in ended) for seen in ended)
        assert most == 2

    @local_only("users may only lower a priority in Slurm, which weighs much else")
    def test_higher_priority_goes_first(self, bench: Any) -> None:
        blocker = bench.submit("sleep 60", cpus=2)
        bench.until(blocker, JobState.RUNNING)
        jobs = [bench.submit("true", cpus=2, priority=priority) for priority in (0, -5, 10, 0)]
        assert all(bench.seen(job).pending_reason for job in jobs)
        bench.scheduler.cancel([blocker.name])
        started = [bench.result(job).started_at for job in jobs]
        assert started[2] < started[0] < started[3] < started[1]

    @local_only("backfill is Slurm's own affair")
    def test_a_small_job_may_pass_a_blocked_large_one(self, bench: Any) -> None:
        bench.until(bench.submit("sleep 60"), JobState.RUNNING)
        large, small = bench.submit("true", cpus=2), bench.submit("true")
        assert bench.result(small).reason == Reason.COMPLETED
        assert bench.seen(large).state == JobState.QUEUED

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            ({"cpus": 64}, ["64", "2"]),
            ({"gpus": 512}, ["512"]),
            ({"mem_bytes": 2**60}, ["GiB"]),
            ({"num_nodes": 3}, ["3 nodes"]),
        ],
    )
    def test_refuses_what_can_never_fit(self, bench: Any, asked: dict[str, Any], words: list[str]) -> None:
        seen = bench.result(bench.submit("true", **asked))
        assert (seen.state, seen.reason) == (JobState.FAILED, Reason.REJECTED)
        assert all(word in seen.detail for word in words)

    # Cancelling

    def test_cancels_a_queued_job(self, bench: Any) -> None:
        bench.until(bench.submit("sleep 60", cpus=2), JobState.RUNNING)
        job = bench.submit("echo never")
        bench.scheduler.cancel([job.name])
        seen = bench.result(job)
        assert (seen.state, seen.reason, seen.started_at) == (JobState.CANCELLED, Reason.CANCELLED, None)
        bench.start()
        assert bench.result(job).reason == Reason.CANCELLED
        assert bench.log(job) == ""

    def test_cancels_a_running_job(self, bench: Any) -> None:
        job = bench.submit("echo up; sleep 60")
        bench.said(job, "up")
        bench.scheduler.cancel([job.name, "nobody"])
        assert bench.result(job).reason == Reason.CANCELLED
        bench.scheduler.cancel([job.name])
        assert bench.seen(job).reason == Reason.CANCELLED

    def test_cancels_a_job_that_starts_this_moment(self, bench: Any) -> None:
        began = time.monotonic()
        for _ in range(bench.repeats):
            job = bench.submit("sleep 60")
            bench.scheduler.cancel([job.name])
            assert bench.result(job).reason == Reason.CANCELLED
        assert time.monotonic() - began < bench.repeats * bench.quick_s, "none of them needed SIGKILL"

    def test_a_program_may_end_well_after_a_cancel(self, bench: Any) -> None:
        # The shell around it dies of SIGTERM at once; the program itself saves its state first.
        script = f"""{bench.python} -c '
import signal, time
def end(*_):
    time.sleep(0.4)
    print("saved", flush=True)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)'
echo after"""
        job = bench.submit(script)
        bench.said(job, "up")
        bench.scheduler.cancel([job.name])
        assert bench.result(job).reason == Reason.CANCELLED
        assert "saved" in bench.log(job)

    def test_kills_a_stubborn_job(self, bench: Any) -> None:
        job = bench.submit("trap '' TERM INT HUP; echo pid=$$; while :; do sleep 0.1; done")
        pid = pid_in(bench.said(job, "pid="))
        bench.scheduler.cancel([job.name])
        assert bench.result(job).reason == Reason.CANCELLED
        assert not bench.alive(pid)

    @local_only("what a site's process tracking sees")
    def test_kills_everything_a_job_started(self, bench: Any, alive: Wait, wait_for: Wait) -> None:
        job = bench.submit(
            "(trap '' TERM; sleep 1000) & echo plain=$!\n"
            f"{bench.python} -c 'import os, time\n"
            "if os.fork(): os._exit(0)\n"
            "os.setsid()\n"
            "if os.fork(): os._exit(0)\n"
            'print(f"daemon={os.getpid()} ", flush=True); time.sleep(1000)\'\n'
            "echo ready; sleep 1000"
        )
        bench.said(job, "ready")
        log = bench.said(job, "daemon=")
        bench.scheduler.cancel([job.name])
        assert bench.result(job).reason == Reason.CANCELLED
        for word in ("plain", "daemon"):
            wait_for(lambda word=word: not alive(pid_in(log, word)), f"the {word} process is gone")

    @local_only("what a site's process tracking sees")
    def test_nothing_outlives_a_job_that_ended_by_itself(self, bench: Any, alive: Wait, wait_for: Wait) -> None:
        job = bench.submit("sleep 1000 & echo plain=$!; setsid sleep 1001 & echo session=$!; exit 0")
        assert bench.result(job).reason == Reason.COMPLETED
        log = bench.log(job)
        for word in ("plain", "session"):
            wait_for(lambda word=word: not alive(pid_in(log, word)), f"the {word} process is gone")

    def test_a_job_that_was_over_stays_completed(self, bench: Any) -> None:
        job = bench.submit("true")
        bench.result(job)
        bench.scheduler.cancel([job.name])
        bench.start()
        assert bench.seen(job).reason == Reason.COMPLETED

    # Limits

    @local_only("Slurm counts in minutes: see test_slurm_states")
    def test_time_limit_ends_a_job_that_does_not_care(self, bench: Any) -> None:
        job = bench.submit("echo up; sleep 60", time_limit_s=1.0, warn_s=0.5)
        seen = bench.result(job)
        assert (seen.state, seen.reason) == (JobState.FAILED, Reason.TIME_LIMIT)
        assert 0.8 < seen.ended_at - seen.started_at < 1.9
        assert "1s" in seen.detail

    @local_only("Slurm counts in minutes: see test_slurm_states")
    def test_time_limit_warns_those_who_listen(self, bench: Any) -> None:
        job = bench.submit("trap 'echo warned; exit 0' USR1; echo up; while :; do sleep 0.05; done",
                           time_limit_s=5.0, warn_s=4.5)  # fmt: skip
        seen = bench.result(job)
        assert (seen.reason, seen.exit_code) == (Reason.COMPLETED, 0)
        assert bench.log(job).endswith("warned\n")

    @local_only("Slurm counts in minutes: see test_slurm_result")
    def test_who_dies_of_the_warning_ran_out_of_time(self, bench: Any) -> None:
        job = bench.submit("trap 'trap - USR1; kill -USR1 $$' USR1; echo up; while :; do sleep 0.05; done",
                           time_limit_s=5.0, warn_s=4.0)  # fmt: skip
        seen = bench.result(job)
        assert (seen.state, seen.reason, seen.exit_code) == (JobState.FAILED, Reason.TIME_LIMIT, 138)
        assert "the limit was 5s" in seen.detail

    def test_who_dies_of_such_a_signal_otherwise_did_not(self, bench: Any) -> None:
        seen = bench.result(bench.submit("kill -USR1 $$", time_limit_s=60.0))
        assert (seen.reason, seen.signal) == (Reason.SIGNALLED, signal.SIGUSR1)

    @local_only("Slurm keeps it")
    def test_time_limit_holds_across_a_restart(self, bench: Any) -> None:
        job = bench.submit("echo up; sleep 60", time_limit_s=2.0)
        bench.said(job, "up")
        bench.start()
        seen = bench.result(job)
        assert seen.reason == Reason.TIME_LIMIT
        assert 1.5 < seen.ended_at - seen.started_at < 3.5

    @local_only("the sites have no cgroups")
    def test_memory_limit(self, bench: Any) -> None:
        script = f"{bench.python} -c 'x = bytearray(300 << 20); print(\"up\", flush=True); import time; time.sleep(60)'"
        job = bench.submit(script, mem_bytes=100 << 20)
        seen = bench.result(job)
        assert (seen.state, seen.reason) == (JobState.FAILED, Reason.OUT_OF_MEMORY)
        assert "100 MiB" in seen.detail

    @local_only("the sites have no cgroups")
    def test_shared_memory_is_counted_once(self, bench: Any) -> None:
        script = f"""{bench.python} -c '
import os, time
block = bytearray(os.urandom(1 << 20) * 60)
for _ in range(4):
    if not os.fork():
        time.sleep(3); os._exit(0)
time.sleep(3.5)'"""
        assert bench.result(bench.submit(script, mem_bytes=150 << 20)).reason == Reason.COMPLETED

    # Restarts

    def test_takes_up_queued_running_and_ended_jobs(self, bench: Any) -> None:
        ended = bench.submit("exit 5")
        bench.result(ended)
        running = bench.submit("echo up; sleep 0.7; echo done", cpus=2)
        bench.said(running, "up")
        queued = bench.submit("echo later", cpus=2)
        bench.start()
        assert bench.seen(ended).exit_code == 5
        assert bench.seen(running).state == JobState.RUNNING
        assert bench.seen(queued).state == JobState.QUEUED
        assert bench.result(queued).started_at >= bench.result(running).ended_at - 0.05
        assert bench.log(running) == "up\ndone\n"

    def test_a_killed_scheduler_loses_nothing(self, bench: Any) -> None:
        jobs = [bench.prepare("echo up; sleep 0.5; echo done") for _ in range(4)]
        helper = bench.spool_in_another_process(jobs)
        bench.said(jobs[0], "up")
        helper.kill()
        for job in jobs:
            assert bench.result(job).reason == Reason.COMPLETED
            assert bench.log(job) == "up\ndone\n"

    def test_dying_at_the_worst_moment_runs_nothing_twice(self, bench: Any) -> None:
        for fault in bench.faults:
            jobs = [bench.prepare("echo up; sleep 0.3; echo done") for _ in range(3)]
            helper = bench.spool_in_another_process(jobs, fault)
            assert helper.wait(20) == -signal.SIGKILL
            bench.start()
            for job in jobs:
                bench.scheduler.submit(job)
            for job in jobs:
                assert bench.result(job).reason == Reason.COMPLETED
                assert bench.log(job) == "up\ndone\n"

    def test_a_cancel_holds_though_the_scheduler_died(self, bench: Any) -> None:
        job = bench.prepare("trap '' TERM; echo up; while :; do sleep 0.1; done")
        helper = bench.spool_in_another_process([job])
        bench.said(job, "up")
        helper.kill()
        bench.scheduler.cancel([job.name])
        bench.start()  # dies, as it were, right after the cancel was recorded
        assert bench.result(job).reason == Reason.CANCELLED

    @local_only("processes are Slurm's")
    def test_a_job_that_vanished_is_lost(self, bench: Any) -> None:
        job = bench.prepare("echo pid=$PPID; sleep 60")
        helper = bench.spool_in_another_process([job])
        pid = pid_in(bench.said(job, "pid="))
        helper.kill()
        os.killpg(pid, signal.SIGKILL)
        assert bench.result(job).reason == Reason.LOST

    @local_only("a mark of another machine says nothing there")
    def test_a_job_from_before_a_reboot_is_lost(self, bench: Any) -> None:
        job = bench.prepare("true")
        RunDir(job.run_dir).started.write_text("4711 1 another-boot\n")
        bench.scheduler.submit(job)
        seen = bench.result(job)
        assert seen.reason == Reason.LOST
        assert "restart" in seen.detail

    @local_only("pids say nothing there")
    def test_pids_are_not_taken_for_processes(self, bench: Any) -> None:
        """The number of a process that ended may belong to anybody by now."""
        job = bench.prepare("true")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        RunDir(job.run_dir).started.write_text(f"{os.getpid()} 12345 {boot}\n")
        bench.scheduler.submit(job)
        assert bench.result(job).reason == Reason.LOST

    def test_a_script_that_cannot_start(self, bench: Any) -> None:
        job = bench.prepare("true")
        bench.outside(job.script).unlink()
        bench.scheduler.submit(job)
        seen = bench.result(job)
        assert (seen.state, seen.reason) == (JobState.FAILED, Reason.LAUNCH_FAILED)

    # Many

    def test_many_short_jobs(self, bench: Any) -> None:
        jobs: list[Submission] = [bench.prepare("true") for _ in range(bench.many)]
        began = time.monotonic()
        for job in jobs:
            bench.scheduler.submit(job)
        for job in jobs:
            assert bench.result(job, within_s=bench.many_s).reason == Reason.COMPLETED
        assert time.monotonic() - began < bench.many_s
        assert bench.scheduler.usage().cpus_used == 0
