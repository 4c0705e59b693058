"""A full disk, filled for real: the reason is told, and the exit status fits all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diamond.core.reasons import Reason
from diamond.core.states import JobState
from testing import disks


@pytest.mark.root
def test_a_job_that_fills_the_disk(bench: Any, tmp_path: Path) -> None:
    if reason := disks.why_not():
        pytest.skip(reason)
    with disks.small_disk(bench.jobs_dir, 4):
        job = bench.submit("cat /dev/zero > zeros")
        seen = bench.result(job)
        assert (seen.state, seen.reason) == (JobState.FAILED, Reason.DISK_FULL)
        assert str(bench.jobs_dir) in seen.detail
        (job.run_dir / "work/zeros").unlink()
        after = bench.submit("true")
        assert bench.result(after).reason == Reason.COMPLETED
        bench.scheduler.forget(bench.scheduler.observe())
