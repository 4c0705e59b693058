"""With which code a training ends, and what it leaves for whoever reads the code."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from diamond.core.rundir import RunDir
from diamond.train.ending import CONTINUE, exit_code


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A job that ends in a minute, with none behind it."""
    monkeypatch.delenv("DIAMOND_CONTINUE_FILE", raising=False)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setenv("DIAMOND_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("DIAMOND_ENDS_AT", str(time.time() + 60))
    return RunDir(tmp_path)


def test_out_of_time_without_a_chain(job: RunDir) -> None:
    assert exit_code(signal.SIGUSR1, is_main=False) == 128 + signal.SIGUSR1
    assert not job.out_of_time.exists(), "the first rank says it for all"
    assert exit_code(signal.SIGUSR1, is_main=True) == 128 + signal.SIGUSR1
    assert job.out_of_time.exists()


def test_stopped_for_another_reason(job: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(signal.SIGTERM, is_main=True) == 128 + signal.SIGTERM
    monkeypatch.delenv("DIAMOND_ENDS_AT")
    assert exit_code(signal.SIGUSR1, is_main=True) == 128 + signal.SIGUSR1
    assert list(job.path.iterdir()) == []


def test_in_a_chain_the_next_job_goes_on(job: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAMOND_CONTINUE_FILE", str(job.path / "continue"))
    assert exit_code(signal.SIGUSR1, is_main=True) == CONTINUE
    assert [path.name for path in job.path.iterdir()] == ["continue"]


def test_a_job_directory_that_is_gone_changes_no_code(job: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAMOND_RUN_DIR", str(job.path / "gone"))
    assert exit_code(signal.SIGUSR1, is_main=True) == 128 + signal.SIGUSR1
