"""A task longer than one job may run: real processes, real time limits, and everybody is killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually

# Counts to 40 in about ten seconds of work, saving its place after every step.
BY_ITSELF = """
n=$(cat place 2>/dev/null || echo 0)
echo "resumed=$DIAMOND_RESUMED at $n"
while [ "$n" -lt 40 ]; do sleep 0.25; n=$((n + 1)); echo "$n" > place.new; mv place.new place
  echo "$n $DIAMOND_JOB_ID" >> ledger; done
echo done at "$n"
"""

# Saves its place only when it is warned, and says so with its exit code.
WHEN_WARNED = """
n=$(cat place 2>/dev/null || echo 0)
trap 'echo "$n" > place; echo saved "$n"; exit 85' USR1
while [ "$n" -lt 40 ]; do sleep 0.25; n=$((n + 1)); echo "$n $DIAMOND_JOB_ID" >> ledger; done
echo done at "$n"
"""


@pytest.fixture
def service(tmp_path: Path) -> Service:
    made = Service(tmp_path / "home")
    folder = made.home.agent("local")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.toml").write_text('max_walltime = "4s"\n')
    return made


@pytest.mark.parametrize("program", [BY_ITSELF, WHEN_WARNED], ids=["saves by itself", "saves when warned"])
def test_a_chain_ends_with_everything_done_once(service: Service, program: str) -> None:
    spec = {"name": "long", "run": program, "max_duration": "60s", "outputs": ["ledger"], "slurm": {"warning": "2s"}}
    with service, service.client() as client:
        task = client.tasks.create(spec)
        eventually(lambda: client.tasks.get(task.id).attempt >= 2, within_s=30, what="the second link")
        service.kill(service.agent)
        service.kill(service.server)
        service.start_server()
        service.start_agent()
        done = client.tasks.wait(task.id, timeout_s=60)
        assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), done
        assert len(done.jobs) >= 3
        assert {job.reason for job in done.jobs[:-1]} <= {Reason.TIME_LIMIT, Reason.CONTINUED}
        lost: list[str] = []
        if program == WHEN_WARNED:
            # The one that ran while nobody was there to warn it may have run out of time, and all that it did is lost.
            lost = [job.id for job in done.jobs[:-1] if job.reason is not Reason.CONTINUED]
            assert len(lost) <= 1 and lost != [done.jobs[0].id]
        assert [job.continues for job in done.jobs] == [None, *[job.id for job in done.jobs[:-1]]]
        client.tasks.download(task.id, service.home.path / "results")
        ledger = [line.split() for line in (service.home.path / "results" / "ledger").read_text().splitlines()]
        kept = [int(step) for step, job in ledger if job not in lost]
        # The step under way when the time was up is done again; none is left out.
        assert sorted(set(kept)) == list(range(1, 41))
        assert len(kept) <= 40 + len(done.jobs)


def test_max_duration_ends_a_chain(service: Service) -> None:
    with service, service.client() as client:
        task = client.tasks.create({"run": "sleep 60", "max_duration": "6s"})
        done = client.tasks.wait(task.id, timeout_s=60)
        assert (done.state, done.reason, len(done.jobs)) == (TaskState.FAILED, Reason.TIME_LIMIT, 2)
