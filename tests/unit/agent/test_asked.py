"""Whose endpoint it is, whose tasks it takes, and the record of others' jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import asked as asked_module
from diamond.agent.asked import LEDGER, Asked, forget_owner, plain_name
from diamond.agent.policy_files import PolicyFile
from diamond.agent.schedulers.base import Observed, Submission
from diamond.agent.schedulers.slurm.sbatch import sbatch_argv
from diamond.agent.table import Tracked
from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import Unavailable
from diamond.core.slurm import SlurmOptions
from diamond.core.states import Desired, JobState
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder


def order(user: str, number: int = 1) -> JobOrder:
    return JobOrder(
        job_id=f"job_0000000{number}", task_id="tsk_00000001", task_name="t", attempt=1, desired=Desired.RUN,
        spec=TaskSpec(run="true"), user=user,
    )  # fmt: skip


def lines(home: Path) -> list[dict[str, Any]]:
    path = home / LEDGER
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


ON_HOST = "allow_others_on_host = true"
NO_IMAGE = "containers_only = true, the task names no image (set resources.image_id)"


def policy(home: Path, text: str = "", owner: str = "alice") -> PolicyFile:
    (home / "policy.toml").write_text(text)
    found = PolicyFile(home / "policy.toml")
    found.asked.told(owner)
    return found


@pytest.mark.parametrize(
    ("text", "user", "refused"),
    [
        ("", "alice", ""),
        ("", "bob", "allow_others = false, the task is of user bob and this endpoint is alice's"),
        ("", "", "allow_others = false, the task is of user unknown and this endpoint is alice's"),
        ("allow_others = false", "bob", "allow_others = false"),
        ("allow_others = true", "bob", "allow_others_on_host = false, the task is of user bob: on the host they"),
        ("allow_others = true", "alice", ""),
        ('allowed_users = ["bob"]', "bob", "allow_others_on_host = false"),
        (f"allow_others = true\n{ON_HOST}", "bob", ""),
        (f'allowed_users = ["bob"]\n{ON_HOST}', "bob", ""),
        (f'allow_others = false\nallowed_users = ["bob"]\n{ON_HOST}', "bob", "allow_others = false"),
        ("allow_others = true\ncontainers_only = true", "bob", "containers_only = true, the task names no image"),
        ('allowed_users = ["bo*"]', "carol", "allowed_users = bo*, the task is of user carol"),
        ('allow_others = true\nallowed_users = ["alice"]', "bob", "allowed_users = alice, the task is of user bob"),
        ("", "bob\x1b[2J\n", "the task is of user bob??2J?"),
    ],
)
def test_whose_tasks_are_taken(tmp_path: Path, text: str, user: str, refused: str) -> None:
    said = policy(tmp_path, text).refusal(order(user))
    assert refused in said and bool(said) == bool(refused)


def test_the_facts_say_whether_others_are_welcome(tmp_path: Path) -> None:
    facts = EndpointFacts(scheduler="local")
    let_in = 'allowed_users = ["b"]\nallow_others = true\n'
    for text, others, users in (
        ("", False, None),
        (let_in + ON_HOST, True, ("b",)),
        (let_in + "containers_only = true", True, ("b",)),
        (let_in, False, ()),
        ("allow_others = true", False, None),
    ):
        found = policy(tmp_path, text).policy.filter_facts(facts)
        assert (found.allows_others, found.allowed_users) == (others, users)


def test_a_rule_that_is_not_in_force_is_told_and_stops_nobody(tmp_path: Path) -> None:
    for text, said in (
        ("allow_others = true", "allow_others = true is not in force, and tasks of others are refused: on the host"),
        ('allowed_users = ["alice", "bob"]', "allowed_users = bob is not in force"),
        ('allowed_users = ["alice"]', ""),  # the owner's own name lets nobody else in
        ("allow_others = true\ncontainers_only = true", ""),
        (f"allow_others = true\n{ON_HOST}", ""),
    ):
        found = policy(tmp_path, text)
        assert said in found.others_problem and bool(said) == bool(found.others_problem)
        assert found.refusal(order("alice")) in ("", "policy.toml: " + NO_IMAGE)


def test_while_no_server_has_said_whose_it_is_everything_is_as_before(tmp_path: Path) -> None:
    found = policy(tmp_path, owner="")
    assert found.refusal(order("bob")) == ""
    assert not found.asked.is_other(order("bob"))


def test_the_first_owner_is_believed_until_it_is_enrolled_anew(tmp_path: Path) -> None:
    first = Asked(tmp_path)
    first.told("alice")
    first.told("alice")
    assert (first.owner, first.warning) == ("alice", "")
    assert (tmp_path / "owner").stat().st_mode & 0o077 == 0
    first.told("mallory")
    assert first.owner == "alice" and "mallory's now; it was enrolled for alice" in first.warning
    assert first.is_other(order("mallory"))
    again = Asked(tmp_path)  # a restart changes nothing
    again.told("mallory")
    assert again.owner == "alice" and again.warning
    again.told("alice")
    assert again.warning == ""
    forget_owner(tmp_path)
    again.told("mallory")
    assert (again.owner, again.warning) == ("mallory", "")


def test_another_s_job_is_on_record_before_it_is_submitted(tmp_path: Path) -> None:
    found = policy(tmp_path, f"allow_others = true\n{ON_HOST}")
    mine = Tracked(order("alice"), tmp_path / "job_00000001")
    theirs = Tracked(order("bob", 2), tmp_path / "job_00000002")
    assert found.submission(mine).asked_by == "" and lines(tmp_path) == []
    assert found.submission(theirs).asked_by == "bob"
    (line,) = lines(tmp_path)
    assert {**line, "at": 0} == {
        "at": 0, "user": "bob", "job": "job_00000002", "task": "tsk_00000001", "scheduler_id": "",
    }  # fmt: skip
    assert (tmp_path / LEDGER).stat().st_mode & 0o777 == 0o600
    seen = Observed(state=JobState.QUEUED, scheduler_id="4711")
    for _ in range(3):
        found.asked.seen(theirs, seen)
        found.asked.seen(mine, seen)
    assert [line["scheduler_id"] for line in lines(tmp_path)] == ["", "4711"]


def test_a_job_that_cannot_be_recorded_waits(tmp_path: Path) -> None:
    found = policy(tmp_path, f"allow_others = true\n{ON_HOST}")
    (tmp_path / LEDGER).mkdir()
    with pytest.raises(Unavailable, match=LEDGER):
        found.submission(Tracked(order("bob"), tmp_path / "job_00000001"))


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    found = policy(tmp_path, f"allow_others = true\n{ON_HOST}")
    (tmp_path / LEDGER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unavailable):
        found.submission(Tracked(order("bob"), tmp_path / "job_00000001"))
    assert not (tmp_path / "elsewhere").exists()


def test_the_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_module, "MAX_BYTES", 500)
    found = policy(tmp_path, f"allow_others = true\n{ON_HOST}")
    job = Tracked(order("bob"), tmp_path / "job_00000001")
    for _ in range(40):
        found.submission(job)
    assert (tmp_path / LEDGER).stat().st_size < 700
    assert (tmp_path / f"{LEDGER}.1").stat().st_size < 700


def test_slurm_is_told_who_asked_and_a_task_cannot_hide_it(tmp_path: Path) -> None:
    options = SlurmOptions(extra=("--comment=nobody",))
    job = Submission(name="job_1", run_dir=tmp_path, script=tmp_path / "job.sh", slurm=options, asked_by="bob")
    argv = sbatch_argv(job)
    assert argv[-3:] == ["--comment=nobody", "--comment=diamond: asked by bob", str(tmp_path / "job.sh")]


@pytest.mark.parametrize(
    ("name", "plain"),
    [("bob", "bob"), ("b o\nb", "b?o?b"), ("", "?"), ("x" * 200, "x" * 64), ("ü;$(rm)", "????rm?")],
)
def test_names_are_made_plain(name: str, plain: str) -> None:
    assert plain_name(name) == plain
