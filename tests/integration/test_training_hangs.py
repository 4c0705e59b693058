"""A training whose rank stands still, as its user sees it: named, with its stack, tried again as the policy says."""

from __future__ import annotations

import sys
from pathlib import Path

from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually

ROOT = Path(__file__).parents[2]
SCRIPT = (
    ROOT / "tests" / "train" / "paced.py"
)  # what hangs is told by launcher and job: no matter whether torch is in it


def test_the_reason_names_the_rank_and_where_it_stood_and_the_policy_tries_again(tmp_path: Path) -> None:
    """It hangs in every job: once brought back inside of each, then the next job, then it has failed."""
    run = f"PYTHONPATH={ROOT}/src:{ROOT} {sys.executable} {SCRIPT} . 100000 hang"
    with Service(tmp_path / "home") as service, service.client() as client:
        spec = {"run": run, "ranks_per_node": 2, "retry": {"max_retries": 1, "backoff": 1}}
        task_id = client.tasks.create(spec).id
        eventually(lambda: client.tasks.get(task_id).state.is_final, within_s=180, what="it is given up")
        task = client.tasks.get(task_id)
        assert (task.state, task.reason, len(task.jobs)) == (TaskState.FAILED, Reason.HUNG, 2)
        for job in task.jobs:
            assert job.reason is Reason.HUNG
            assert "rank 1 gave no sign of life for" in job.detail and "paced.py" in job.detail
        log = b"".join(client.tasks.logs(task_id)).decode()
        assert "going on with 2 ranks on 1 node (restart 1)" in log
