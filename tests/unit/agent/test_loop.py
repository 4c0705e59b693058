"""The agent as a whole, against a server that is only a Python object; the jobs are real."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import Forbidden, ServerUnreachable, StorageFull
from diamond.core.reasons import Reason
from diamond.core.states import JobState

Start = Callable[[], Any]
Until = Callable[..., Any]


def test_runs_what_is_ordered(server: Any, start: Start) -> None:
    start()
    job = server.order("echo hello; echo $GREETING", envs={"GREETING": "it's $me"})
    result = server.result(job)
    assert (result.state, result.reason, result.exit_code) == (JobState.SUCCEEDED, Reason.COMPLETED, 0)
    assert server.log_at_final[job] == b"hello\nit's $me\n"
    assert result.run_dir.endswith(job) and result.started_at and result.ended_at and result.hosts


def test_says_hello_with_facts(server: Any, start: Start, home: Path, until: Until) -> None:
    home.mkdir()
    (home / "policy.toml").write_text('max_nodes = 1\nmax_walltime = "2h"\n')
    start()
    facts = until(lambda: server.hellos)[0]["facts"]
    assert (facts["scheduler"], facts["cpus_per_node"], facts["max_walltime_s"]) == ("local", 2, 7200)
    assert facts["policy"]["max_walltime"] == "2h 00m"
    usage = until(lambda: [one.usage for one in server.reports if one.usage])[0]
    assert usage.disk_total_bytes > 0


def test_many_orders_at_once(server: Any, start: Start) -> None:
    jobs = [server.order(f"echo {number}") for number in range(60)]
    start()
    for number, job in enumerate(jobs):
        assert server.result(job).state == JobState.SUCCEEDED
        assert server.log_at_final[job] == f"{number}\n".encode()
    assert len(server.finals) == 60


def test_a_large_log_is_whole_before_the_end_is_told(server: Any, start: Start) -> None:
    job = server.order("head -c 10000000 /dev/zero | tr '\\0' x; echo end")
    start()
    server.result(job)
    assert len(server.log_at_final[job]) == 10_000_004
    assert server.log_at_final[job].endswith(b"xend\n")


def test_log_lines_arrive_while_the_job_runs(server: Any, start: Start, until: Until) -> None:
    job = server.order("echo first; sleep 60")
    start()
    until(lambda: server.log(job) == "first\n")
    assert server.jobs[job].state == JobState.RUNNING
    server.cancel(job)
    assert server.result(job).reason == Reason.CANCELLED


def test_an_order_cancelled_before_it_was_heard_never_runs(server: Any, start: Start) -> None:
    job = server.order("echo never")
    server.cancel(job)
    start()
    result = server.result(job)
    assert (result.state, result.started_at) == (JobState.CANCELLED, None)
    assert server.log(job) == ""


def test_policy_refuses(server: Any, start: Start, home: Path) -> None:
    home.mkdir()
    (home / "policy.toml").write_text("max_nodes = 1\n")
    start()
    result = server.result(server.order("true", num_nodes=2))
    assert (result.state, result.reason) == (JobState.FAILED, Reason.REJECTED)
    assert result.detail == "policy.toml: max_nodes = 1, the task asks for 2"


def test_policy_changes_while_running(server: Any, start: Start, home: Path, until: Until) -> None:
    agent = start()
    assert server.result(server.order("true")).state == JobState.SUCCEEDED
    told = server.hellos[-1]["facts"]["policy"]
    (home / "policy.toml").write_text("max_cpus = 0\n")
    agent.agent._loop._tidy_at = 0.0
    agent.agent._loop.wake()
    until(lambda: server.hellos[-1]["facts"]["policy"] != told, "the new rules are told")
    assert "max_cpus = 0" in server.result(server.order("true")).detail


def test_max_concurrent_jobs(server: Any, start: Start, home: Path, until: Until) -> None:
    home.mkdir()
    (home / "policy.toml").write_text("max_concurrent_jobs = 1\n")
    start()
    first, second = server.order("sleep 0.3"), server.order("true")
    until(lambda: second in server.jobs and "max_concurrent_jobs" in server.jobs[second].pending_reason)
    assert server.result(second).started_at >= server.result(first).ended_at


def test_files_come_and_outputs_go(server: Any, start: Start) -> None:
    ref = server.bundle({"train.sh": b"cat data/x.txt; mkdir out; echo 42 > out/score; echo - > model.pt\n"})
    data = server.bundle({"x.txt": b"the data\n"})
    big = "head -c 6000000 /dev/zero > big.bin"
    job = server.order(
        f"bash train.sh; {big}; exit 7",
        workdir=ref,
        file_mounts={"data": data},
        outputs=["out", "*.pt", "big.bin", "none"],
    )
    start()
    result = server.result(job)
    assert server.log_at_final[job] == b"the data\n"
    assert (result.reason, result.exit_code) == (Reason.EXIT_NONZERO, 7)
    assert {one.path: (one.size_bytes, one.stored) for one in result.outputs} == {
        "big.bin": (6_000_000, True),
        "model.pt": (2, True),
        "out/score": (3, True),
    }
    assert all(f"sha256:{one.sha256}" in server.blobs for one in result.outputs)
    assert "'none' matches no file" in result.detail


def test_a_missing_blob_fails_the_job_and_names_it(server: Any, start: Start) -> None:
    ref = server.bundle({"a.txt": b"abc"})
    digest = next(iter(server.blobs))
    server.problem[f"/blobs/{digest}"] = Forbidden(f"blob {digest} is not yours")
    start()
    result = server.result(server.order("true", workdir=ref))
    assert result.reason == Reason.STAGING_FAILED
    assert digest in result.detail


def test_ranks(server: Any, start: Start) -> None:
    start()
    job = server.order("echo rank $RANK of $WORLD_SIZE", ranks_per_node=2)
    assert server.result(job).state == JobState.SUCCEEDED
    assert sorted(server.log(job).splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


def test_a_restart_loses_nothing_and_repeats_nothing(server: Any, start: Start, until: Until) -> None:
    start()
    running = server.order("echo up; sleep 0.8; echo done")
    queued = [server.order("echo q; sleep 0.2") for _ in range(4)]
    until(lambda: server.log(running) == "up\n")
    start()
    for job in queued:
        server.result(job)
    assert server.result(running).state == JobState.SUCCEEDED
    assert server.log_at_final[running] == b"up\ndone\n"
    assert [server.log(job) for job in queued] == ["q\n"] * 4
    assert sorted(server.finals) == sorted([running, *queued])


def test_jobs_end_while_no_agent_is_there(server: Any, start: Start, until: Until) -> None:
    agent = start()
    job = server.order("echo up; sleep 0.3; echo done; exit 9")
    until(lambda: server.log(job) == "up\n")
    agent.stop()
    run_dir = Path(server.jobs[job].run_dir)
    until(lambda: (run_dir / "exit.json").exists())
    start()
    assert server.result(job).exit_code == 9
    assert server.log_at_final[job] == b"up\ndone\n"


@pytest.mark.parametrize("error", [ServerUnreachable("gone"), StorageFull("the server's disk is full")])
def test_waits_for_a_server_that_cannot_take_reports(
    server: Any, start: Start, until: Until, home: Path, error: Exception
) -> None:
    start()
    until(lambda: server.reports)
    server.problem["/agent/reports"] = error
    job = server.order("echo meanwhile")
    until(lambda: (home / "jobs" / job / "exit.json").exists(), "the job runs regardless")
    assert job not in server.jobs
    server.problem.clear()
    assert server.result(job).state == JobState.SUCCEEDED
    assert server.log(job) == "meanwhile\n"


def test_a_restored_server_is_told_everything_again(server: Any, start: Start, until: Until) -> None:
    start()
    running, done = server.order("echo up; sleep 60"), server.order("echo result")
    server.result(done)
    until(lambda: server.log(running) == "up\n")
    until(lambda: server.hellos[-1]["facts"]["filesystems"], "it has looked at the machine", 90)
    told = len(server.hellos)
    # A backup from before it heard of either's log and end.
    server.epoch = "epoch-2"
    server.streams.clear()
    server.jobs.clear()
    assert server.result(done).state == JobState.SUCCEEDED
    until(lambda: server.log(running) == "up\n" and running in server.jobs)
    assert server.jobs[running].state == JobState.RUNNING
    assert server.log(done) == "result\n"
    assert len(server.hellos) == told + 1


def test_a_job_the_server_does_not_know_goes_on(server: Any, start: Start, until: Until, home: Path) -> None:
    start()
    job = server.order("echo up; sleep 0.5; echo done")
    until(lambda: server.log(job) == "up\n")
    order = server.orders.pop(job)
    until(lambda: (home / "jobs" / job / "exit.json").exists())
    assert (home / "jobs" / job / "log").read_text() == "up\ndone\n"
    until(lambda: '"delivered"' in (home / "journal.jsonl").read_text(), "the agent lets it go")
    server.orders[job] = order


def test_one_refused_report_does_not_silence_the_others(server: Any, start: Start) -> None:
    server.refuse_job = server.order("echo refused")
    others = [server.order("true") for _ in range(5)]
    start()
    for job in others:
        assert server.result(job).state == JobState.SUCCEEDED
    assert server.refuse_job not in server.jobs


def test_the_journal_says_what_happened(server: Any, start: Start, home: Path, until: Until) -> None:
    start()
    job = server.order("true")
    server.result(job)
    journal = home / "journal.jsonl"
    until(lambda: '"delivered"' in journal.read_text())
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["phase"] for line in lines if line["job"] == job] == [
        "accepted",
        "submitting",
        "submitted",
        "finished",
        "delivered",
    ]


def test_an_order_that_is_no_order(server: Any, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    real = server.call

    def call(method: str, path: str, body: Any = None, **options: Any) -> Any:
        answer = real(method, path, body, **options)
        if path == "/agent/desired":
            for order in answer["orders"]:
                if order["job_id"] == odd:
                    order["spec"]["num_nodes"] = "many"
            answer["orders"].append({**answer["orders"][0], "job_id": "../../evil"})
        return answer

    odd, good = server.order("true"), server.order("true")
    monkeypatch.setattr(server, "call", call)
    start()
    assert server.result(good).state == JobState.SUCCEEDED
    result = server.result(odd)
    assert result.reason == Reason.REJECTED
    assert "num_nodes" in result.detail
    monkeypatch.undo()


def test_a_job_that_tampers_costs_only_itself(server: Any, start: Start) -> None:
    start()
    named = server.order("printf hi > $'res-\\xe9.csv'; printf ok > good.csv", outputs=["*.csv"])
    slow = server.order("d=a; for i in $(seq 30); do d=$d/a; done; mkdir -p $d", outputs=["**/" * 12 + "zzz"])
    piped = server.order("mkfifo ../exit.node0.json ../kill.json; rm ../exit.tmp; mkfifo ../exit.tmp; exit 3")
    result = server.result(named)
    assert [one.path for one in result.outputs] == ["good.csv"]
    assert "is not valid Unicode" in result.detail
    assert "matches no file" in server.result(slow).detail
    assert (server.result(piped).reason, server.result(piped).exit_code) == (Reason.EXIT_NONZERO, 3)
    start()
    assert server.result(server.order("true")).state == JobState.SUCCEEDED
