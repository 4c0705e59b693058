"""A starting agent and run directories it cannot make sense of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diamond.agent.journal import Remembered
from diamond.agent.recovery import recover
from diamond.agent.table import Phase
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder


def submitting(folder: Path) -> tuple[Phase, Reason | None]:
    """What becomes of a job that was being submitted, and that the scheduler does not know."""
    order = JobOrder(
        job_id=folder.name, task_id="t", task_name="t", attempt=1, desired=Desired.RUN, spec=TaskSpec(run="true")
    )
    noted = {folder.name: Remembered(job_id=folder.name, phase="submitting", order=order)}
    (job,) = recover(noted, {}, lambda job_id: folder.parent / job_id).jobs
    return job.phase, job.result.reason if job.result is not None else None


def test_a_job_that_was_being_submitted(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "job")
    assert submitting(run_dir.path) == (Phase.ACCEPTED, None)
    run_dir.path.mkdir()
    run_dir.script.touch()
    assert submitting(run_dir.path) == (Phase.READY, None)
    run_dir.script.unlink()
    run_dir.started.touch()
    assert submitting(run_dir.path) == (Phase.OVER, Reason.LOST), "it ran, and removed its script"


def test_a_directory_that_cannot_be_looked_into(shared: Path, as_nobody: Callable[..., Any]) -> None:
    def try_it() -> tuple[Phase, Reason | None]:
        (shared / "job").mkdir(mode=0)
        return submitting(shared / "job")

    assert as_nobody(try_it) == (Phase.OVER, Reason.LOST), "it may have run: not a second time"
