from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from diamond.agent.journal import KEEP_DELIVERED_S, Journal, Record
from diamond.core.errors import StorageFull
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder, JobReport


def order(job_id: str) -> JobOrder:
    spec = TaskSpec.parse({"run": "true", "outputs": ["a"], "resources": {"memory": "2"}})
    return JobOrder(job_id=job_id, task_id="tsk_1", task_name="t", attempt=1, desired=Desired.RUN, spec=spec)


def result(job_id: str) -> JobReport:
    return JobReport(job_id=job_id, state=JobState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0)


def reopened(path: Path) -> Journal:
    return Journal(path)


def test_remembers_across_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append([Record(job_id="a", phase="accepted", order=order("a"))])
    journal.append([Record(job_id="a", phase="submitting")], sync=False)
    journal.append([Record(job_id="b", phase="accepted", order=order("b"))])
    journal.append([Record(job_id="b", phase="finished", result=result("b"))])
    journal.close()
    found = reopened(path).remembered()
    assert (found["a"].phase, found["a"].order) == ("submitting", order("a"))
    assert (found["b"].phase, found["b"].result) == ("finished", result("b"))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_ignored_and_written_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append([Record(job_id="a", phase="accepted", order=order("a"))])
    good = path.read_bytes()
    journal.append([Record(job_id="b", phase="accepted", order=order("b"))])
    journal.close()
    path.write_bytes(path.read_bytes()[: len(good) + cut])
    journal = reopened(path)
    assert set(journal.remembered()) == {"a"}
    journal.append([Record(job_id="c", phase="accepted", order=order("c"))])
    journal.close()
    assert set(reopened(path).remembered()) == {"a", "c"}


def test_nonsense_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append([Record(job_id="a", phase="accepted", order=order("a"))])
    journal.close()
    noise = b'\0\0\0\n[]\n{"job": 1}\n{"job":"x","phase":"accepted","at":1,"order":{"job_id":1}}\n\xff\xfe\n'
    path.write_bytes(noise + path.read_bytes() + noise)
    assert set(reopened(path).remembered()) == {"a"}


def test_starting_forgets_what_was_delivered_long_ago(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for job in ("old", "new"):
        journal.append([Record(job_id=job, phase="accepted", order=order(job))])
        journal.append([Record(job_id=job, phase="finished", result=result(job))])
        journal.append([Record(job_id=job, phase="delivered")])
    journal._jobs["old"] = journal._jobs["old"].__class__(
        **{**journal._jobs["old"].__dict__, "at": journal._jobs["old"].at - KEEP_DELIVERED_S - 1}
    )
    journal.compact(force=True)
    journal.close()
    found = reopened(path).remembered()
    assert set(found) == {"new"}
    assert (found["new"].result, found["new"].order) == (result("new"), None)
    assert len(path.read_bytes().splitlines()) == 1


def test_a_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append([Record(job_id="a", phase="accepted", order=order("a"))])
    real = os.write
    calls = []

    def full(fd: int, data: bytes) -> int:
        if fd != journal._fd:
            return real(fd, data)
        calls.append(data)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:10])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFull):
        journal.append([Record(job_id="b", phase="accepted", order=order("b"))])
    monkeypatch.undo()
    assert set(journal.remembered()) == {"a"}
    journal.append([Record(job_id="c", phase="accepted", order=order("c"))])
    journal.close()
    assert set(reopened(path).remembered()) == {"a", "c"}
