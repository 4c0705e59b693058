from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.policy import Policy, PolicyFile
from diamond.core.errors import InstallationProblem
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder


def order(time_limit_s: int | None = None, **spec: Any) -> JobOrder:
    parsed = TaskSpec.parse({"run": "true", **spec})
    return JobOrder(
        job_id="job_00000001",
        task_id="tsk_00000001",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=parsed,
        time_limit_s=time_limit_s,
    )


def read(tmp_path: Path, text: str) -> PolicyFile:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return PolicyFile(path)


def test_no_file_means_no_rules(tmp_path: Path) -> None:
    policy = PolicyFile(tmp_path / "policy.toml").policy
    assert policy == Policy()
    assert policy.refusal(order(num_nodes=1000, time_limit_s=10**7)) == ""


@pytest.mark.parametrize(
    ("rules", "asked", "refusal"),
    [
        ("max_nodes = 1", {"num_nodes": 2}, "policy.toml: max_nodes = 1, the task asks for 2"),
        ("max_cpus = 4", {"resources": {"cpus": 8}}, "policy.toml: max_cpus = 4, the task asks for 8"),
        ("max_gpus = 0", {"resources": {"accelerators": "H100:2"}}, "policy.toml: max_gpus = 0, the task asks for 2"),
        (
            'max_memory = "8GB"',
            {"resources": {"memory": "16"}},
            "policy.toml: max_memory = 8 GiB, the task asks for 16 GiB",
        ),
        (
            'max_walltime = "2h"',
            {"time_limit_s": 7260},
            "policy.toml: max_walltime = 2h 00m, the task asks for 2h 01m",
        ),
        ('denied_envs = ["X"]', {"envs": {"X": "1"}}, "policy.toml: denied_envs names X, which the task sets"),
        (
            'allowed_envs = ["Y"]',
            {"envs": {"X": "1"}},
            "policy.toml: allowed_envs does not name X, which the task sets",
        ),
    ],
)
def test_refuses_with_the_rule_and_both_numbers(
    tmp_path: Path, rules: str, asked: dict[str, Any], refusal: str
) -> None:
    policy = read(tmp_path, rules).policy
    assert policy.refusal(order(**asked)) == refusal
    assert policy.refusal(order()) == ""


def test_a_walltime_rule_is_the_limit_of_those_who_have_none(tmp_path: Path) -> None:
    policy = read(tmp_path, 'max_walltime = "2h"').policy
    assert policy.time_limit_s(order()) == 7200
    assert policy.time_limit_s(order(time_limit_s=60)) == 60


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_node = 1", ["max_node", "did you mean 'max_nodes'", "max_walltime"]),
        ('max_nodes = "two"', ["max_nodes", "whole number"]),
        ("max_nodes = true", ["max_nodes"]),
        ("max_nodes = -1", ["max_nodes"]),
        ('max_walltime = "soon"', ["max_walltime", "length of time"]),
        ("max_memory = 1.5", ["max_memory", "20GB"]),
        ('allowed_envs = "X"', ["allowed_envs", "list"]),
        ("max_nodes = ", ["policy.toml"]),
        ("[limits]\nmax_nodes = 1", ["limits"]),
    ],
)
def test_a_mistake_stops_the_start_and_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InstallationProblem) as caught:
        read(tmp_path, text)
    assert all(word in str(caught.value) for word in words)


def test_a_broken_edit_keeps_the_old_rules(tmp_path: Path) -> None:
    file = read(tmp_path, "max_nodes = 1")
    path = tmp_path / "policy.toml"
    path.write_text("max_nodes = 1\nmax_cpu = 3\n")
    os.utime(path, ns=(1, 1))
    assert not file.refresh()
    assert file.policy.max_nodes == 1
    assert "max_cpu" in file.warning and "old rules" in file.warning
    path.write_text("max_nodes = 5\n")
    assert file.refresh()
    assert (file.policy.max_nodes, file.warning) == (5, "")
    assert not file.refresh()
