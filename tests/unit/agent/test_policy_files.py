"""Whose rules hold: the centre's file first, its owner's within it; and what becomes of files that are not right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from diamond.agent import command, policy_page
from diamond.agent.policy import Policy
from diamond.agent.policy_files import PolicyFile
from diamond.agent.policy_record import RECORD
from diamond.core.errors import InstallationProblem
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder

ME = os.getuid()


@pytest.fixture
def centre(tmp_path: Path) -> Path:
    folder = tmp_path / "etc-diamond"
    folder.mkdir(mode=0o755)
    return folder


def write(file: Path, text: str, mode: int = 0o644) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def load(tmp_path: Path, centre: Path) -> PolicyFile:
    """As an agent does, but that this account stands for root."""
    (tmp_path / "home").mkdir(exist_ok=True)
    return PolicyFile(tmp_path / "home/policy.toml", centre=centre, root=ME)


def an_order(num_nodes: int = 1) -> JobOrder:
    return JobOrder(
        job_id="job_00000001", task_id="tsk_00000001", task_name="t", attempt=1, desired=Desired.RUN, user="alice",
        spec=TaskSpec.parse({"run": "true", "num_nodes": num_nodes}),
    )  # fmt: skip


def test_the_owner_may_only_narrow_it(tmp_path: Path, centre: Path) -> None:
    write(centre / "policy.toml", "max_nodes = 2\nallow_shells = false\ncontainers_only = true\n")
    write(tmp_path / "home/policy.toml", "max_nodes = 8\nallow_shells = true\ncontainers_only = false\nmax_cpus = 3\n")
    found = load(tmp_path, centre)
    rules = found.policy
    assert (rules.max_nodes, rules.allow_shells, rules.containers_only, rules.max_cpus) == (2, False, True, 3)
    assert found.refusal(an_order()).startswith("policy.toml: containers_only = true")
    assert found.files == (str(centre / "policy.toml"), str(tmp_path / "home/policy.toml"))
    write(tmp_path / "home/policy.toml", "max_nodes = 1\n")
    assert found.refresh() and found.policy.max_nodes == 1


def test_a_centre_without_a_file_changes_nothing(tmp_path: Path, centre: Path) -> None:
    for folder in (centre, tmp_path / "not-there"):
        assert load(tmp_path, folder).policy == Policy()


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_starts_nothing(tmp_path: Path, centre: Path, mode: int) -> None:
    write(centre / "policy.toml", "max_nodes = 2\n", mode)
    with pytest.raises(InstallationProblem, match="must be root's, and writable by nobody else") as caught:
        load(tmp_path, centre)
    assert "administrators" in str(caught.value.hint)


def test_nor_one_of_another_account_or_in_a_folder_of_all(tmp_path: Path, centre: Path) -> None:
    write(centre / "policy.toml", "max_nodes = 2\n")
    with pytest.raises(InstallationProblem, match="must be root's"):
        PolicyFile(tmp_path / "policy.toml", centre=centre, root=ME + 1)
    centre.chmod(0o777)
    with pytest.raises(InstallationProblem, match="its folder must be root's"):
        load(tmp_path, centre)
    centre.chmod(0o755)
    (centre / "policy.toml").rename(tmp_path / "elsewhere.toml")
    (centre / "policy.toml").symlink_to(tmp_path / "elsewhere.toml")
    with pytest.raises(InstallationProblem):
        load(tmp_path, centre)


def test_a_wrong_file_of_the_centre_starts_nothing(tmp_path: Path, centre: Path) -> None:
    write(centre / "policy.toml", "max_noodles = 2\n")
    with pytest.raises(InstallationProblem, match="max_noodles"):
        load(tmp_path, centre)


def test_what_goes_wrong_later_opens_nothing(tmp_path: Path, centre: Path) -> None:
    file = centre / "policy.toml"
    write(file, "max_nodes = 2\n")
    found = load(tmp_path, centre)
    write(file, "max_nodes =\n")
    assert not found.refresh() and found.policy.max_nodes == 2
    assert f"{file} was changed but not accepted, the old rules hold" in found.warning
    file.unlink()
    assert not found.refresh() and found.policy.max_nodes == 2 and "is gone" in found.warning
    write(file, "max_nodes = 9\n", 0o666)
    assert found.refresh() and found.policy.max_nodes == 2
    assert "nothing is taken up until that is mended" in found.refusal(an_order())
    assert "nothing is taken up" in found.warning
    write(file, "max_nodes = 9\n")
    assert found.refresh() and found.policy.max_nodes == 9
    assert (found.refusal(an_order()), found.warning) == ("", "")


def test_a_first_file_that_is_wrong_closes_a_running_agent(tmp_path: Path, centre: Path) -> None:
    found = load(tmp_path, centre)
    write(centre / "policy.toml", "nonsense")
    assert found.refresh() and "nothing is taken up until it is mended" in found.refusal(an_order())
    write(centre / "policy.toml", "max_nodes = 1\n")
    assert found.refresh() and found.refusal(an_order()) == ""


def test_changes_are_on_record(tmp_path: Path, centre: Path) -> None:
    found = load(tmp_path, centre)
    record = tmp_path / "home" / RECORD
    first = found.changed_at
    assert first > 0 and load(tmp_path, centre).changed_at == first, "a restart is no change"
    write(centre / "policy.toml", "max_nodes = 2\n")
    assert found.refresh() and found.changed_at > first
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["rules"].get("max_nodes") for line in lines] == [None, "2"]
    assert lines[-1]["files"] == [str(centre / "policy.toml")]
    assert record.stat().st_mode & 0o077 == 0
    record.unlink()
    record.mkdir()
    write(centre / "policy.toml", "max_nodes = 1\n")
    assert found.refresh() and found.policy.max_nodes == 1 and RECORD in found.warning


def test_the_page_shows_what_holds_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "home/policy.toml", "allow_others = true\n")
    assert policy_page.show(tmp_path / "home", centre=tmp_path / "none") == 1
    assert "not in force: allow_others = true is not in force" in capsys.readouterr().out
    write(tmp_path / "home/policy.toml", "allow_others = true\ncontainers_only = true\n")
    assert policy_page.show(tmp_path / "home", centre=tmp_path / "none", as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["rules"]["containers_only"] == "true" and said["files"] == [str(tmp_path / "home/policy.toml")]
    assert not (tmp_path / "home" / RECORD).exists(), "looking notes nothing"


def test_the_agents_status_says_what_is_not_in_force(tmp_path: Path) -> None:
    assert command.status(tmp_path)["policy"] is None
    write(tmp_path / "policy.toml", "allow_others = true\n")
    assert "tasks of others are refused" in command.status(tmp_path)["policy"]
    write(tmp_path / "policy.toml", "max_noodles = 1\n")
    assert "max_noodles" in command.status(tmp_path)["policy"]


def test_no_setting_names_another_centre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs an agent must not choose whose rules it obeys."""
    source = Path(__file__).parents[3] / "src/diamond/agent"
    text = (source / "policy_files.py").read_text() + (source / "centre.py").read_text()
    assert "environ" not in text and "getenv" not in text
