from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import policy_page
from diamond.agent.policy import Policy, parse_policy, show_bytes
from diamond.agent.policy_files import PolicyFile
from diamond.core.endpoints import EndpointFacts, Partition
from diamond.core.errors import InstallationProblem, InvalidInput
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder


def order(
    time_limit_s: int | None = None, user: str = "", partition: str = "", gpu_type: str = "", **spec: Any
) -> JobOrder:
    parsed = TaskSpec.parse({"run": "true", **spec})
    return JobOrder(
        job_id="job_00000001",
        task_id="tsk_00000001",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=parsed,
        time_limit_s=time_limit_s,
        user=user,
        partition=partition,
        gpu_type=gpu_type,
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


def slurm(**options: Any) -> dict[str, Any]:
    return {"slurm": options}


@pytest.mark.parametrize(
    ("rules", "asked", "refusal"),
    [
        ('allowed_users = ["ada"]', {"user": "bob"}, "allowed_users = ada, the task is of user bob"),
        ('allowed_users = ["ada"]', {}, "allowed_users = ada, the task is of user unknown"),
        ("allowed_users = []", {"user": "bob"}, "allowed_users = none, the task is of user bob"),
        ('allowed_accounts = ["a", "b"]', slurm(account="c"), "allowed_accounts = a, b, the task charges c"),
        ('allowed_accounts = ["a"]', {}, "allowed_accounts = a, the task names none (set slurm.account)"),
        ('denied_accounts = ["a*"]', slurm(account="abc"), "denied_accounts = a*, the task asks for abc"),
        ('denied_accounts = ["Gold"]', slurm(account="gOLD"), "denied_accounts = Gold, the task asks for gOLD"),
        ('allowed_partitions = ["gpu"]', {"partition": "cpu"}, "allowed_partitions = gpu, the task asks for cpu"),
        ('allowed_partitions = ["gpu"]', slurm(partition="gpu,cpu"), "allowed_partitions = gpu, the task asks for cpu"),
        ('allowed_partitions = ["gpu"]', {}, "allowed_partitions = gpu, the task names none (set slurm.partition)"),
        ('denied_partitions = ["cpu"]', {"partition": "gpu,cpu"}, "denied_partitions = cpu, the task asks for cpu"),
        ('allowed_qos = ["normal"]', slurm(qos="high"), "allowed_qos = normal, the task asks for high"),
        (
            "max_gpu_hours = 24",
            {"resources": {"accelerators": "H100:4"}, "num_nodes": 2, "time_limit_s": 43200},
            "max_gpu_hours = 24, the task asks for 96: 2 x 4 GPUs for 12h 00m",
        ),
        (
            "max_gpu_hours = 0.5",
            {"resources": {"accelerators": "H100:1"}},
            "max_gpu_hours = 0.5, the task asks for 1 x 1 GPUs without a time limit (set max_duration)",
        ),
        (
            'max_gpu_hours = 1\nmax_walltime = "2h"',
            {"resources": {"accelerators": "H100:1"}},
            "max_gpu_hours = 1, the task asks for 2: 1 x 1 GPUs for 2h 00m",
        ),
        ("max_gpus = 2", slurm(gres="gpu:a100:4"), "max_gpus = 2, the task asks for 4"),
        (
            "max_gpus = 2",
            slurm(extra=["--gpus-per-socket=4"]),
            "max_gpus = 2, which --gpus-per-socket=4 in slurm.extra would get around",
        ),
        (
            "max_cpus = 2",
            slurm(extra=["--mincpus=64"]),
            "max_cpus = 2, which --mincpus=64 in slurm.extra would get around",
        ),
        (
            "max_cpus = 2",
            slurm(extra=["--core-spec=1"]),
            "max_cpus = 2, which --core-spec=1 in slurm.extra would get around",
        ),
        (
            "max_gpus = 2",
            slurm(gres="fpga:1,gres/gpu:00004"),
            "max_gpus = 2, and gres/gpu:00004 in slurm.gres is no clear number of GPUs",
        ),
        (
            "max_gpus = 2",
            {"gpu_type": "a100:8,gpu", "resources": {"accelerators": "A100:1"}},
            "max_gpus = 2, and 'a100:8,gpu' is no model of a GPU",
        ),
        (
            'path_roots = ["/scratch"]',
            slurm(nodelist="/etc/passwd"),
            "path_roots = /scratch, the task names /etc/passwd in slurm.nodelist",
        ),
        ("max_cpus = 2", slurm(exclusive=True), "max_cpus = 2, the task asks for whole nodes (slurm.exclusive)"),
        (
            'max_memory = "100MB"',
            {"resources": {"memory": "1500MB"}},
            "max_memory = 100 MiB, the task asks for 1.465 GiB",
        ),
        ("containers_only = true", {}, "containers_only = true, the task names no image (set resources.image_id)"),
        (
            'allowed_extra = ["--mail-*", "comment"]',
            slurm(extra=["--mail-user=x", "--comment=y", "--hold"]),
            "allowed_extra = mail-*, comment, the task uses --hold",
        ),
        ("allowed_extra = []", slurm(extra=["--hold"]), "allowed_extra = none, the task uses --hold"),
    ],
)
def test_refuses_with_the_rule_its_value_and_what_was_asked(
    tmp_path: Path, rules: str, asked: dict[str, Any], refusal: str
) -> None:
    assert read(tmp_path, rules).policy.refusal(order(**asked)) == f"policy.toml: {refusal}"


@pytest.mark.parametrize(
    ("rules", "asked"),
    [
        ('allowed_users = ["ada", "team-*"]', {"user": "team-x"}),
        ('allowed_users = ["unknown"]', {}),
        ('allowed_accounts = ["a*"]', slurm(account="abc")),
        ('denied_accounts = ["a"]', {}),
        ('allowed_partitions = ["gpu"]', {"partition": "gpu", **slurm(partition="other")}),
        ('allowed_qos = ["normal"]', {}),
        ("max_gpu_hours = 96", {"resources": {"accelerators": "H100:4"}, "num_nodes": 2, "time_limit_s": 43200}),
        ("max_gpu_hours = 0", {}),
        ("max_nodes = 1", slurm(exclusive=True)),
    ],
)
def test_allows_what_keeps_to_the_rules(tmp_path: Path, rules: str, asked: dict[str, Any]) -> None:
    assert read(tmp_path, rules).policy.refusal(order(**asked)) == ""


def test_paths_must_lie_in_a_root_links_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/out").symlink_to("/etc")
    policy = read(tmp_path, f'path_roots = ["{tmp_path}/data", "/opt/images"]').policy

    def refused(image: str = "", *extra: str) -> str:
        resources = {"image_id": image} if image else {}
        return policy.refusal(order(resources=resources, **slurm(extra=list(extra))))

    for good in (f"{tmp_path}/data/x.sif", "/opt/images", "docker://reg.example/a/b:1", "images/a.sif", "a..b/c"):
        assert refused(good) == "", good
        assert refused("", f"--container={good}") == "", good
    bad = [f"{tmp_path}/data/out/passwd", f"{tmp_path}/database", "/etc/passwd", "~/x.sif", "~root/x", "file:///etc/x"]
    bad += ["//etc/x", f"{tmp_path}/data/../x", "../x", "a/../../x", "..", "docker-archive:/etc/x", "oci:///etc/x"]
    for path in bad:
        assert "path_roots" in refused(path), path
        assert "path_roots" in refused("", f"--container={path}"), path
    assert "the task names /etc in slurm.extra" in refused("", "--container-mounts=/opt/images/a:/etc,/opt/images")


def test_roots_must_be_absolute(tmp_path: Path) -> None:
    with pytest.raises(InstallationProblem, match="absolute"):
        read(tmp_path, 'path_roots = ["scratch"]')


@pytest.mark.parametrize(
    "text",
    ['allow_shells = "no"', "queue_ahead = 1", "max_gpu_hours = true", 'allowed_users = ["a", ""]', "allowed_qos = 1"],
)
def test_rules_of_the_wrong_kind_are_mistakes(tmp_path: Path, text: str) -> None:
    with pytest.raises(InstallationProblem, match=text.split(" ")[0]):
        read(tmp_path, text)


def test_the_facts_offer_what_the_rules_allow(tmp_path: Path) -> None:
    names = ("gpu", "gpu-long", "cpu")
    facts = EndpointFacts(
        scheduler="slurm",
        partitions=tuple(Partition(name=name) for name in names),
        accounts=("a", "b"),
        default_account="b",
        qos=("normal", "high"),
        queues_ahead=True,
    )
    same = Policy().filter_facts(facts)
    assert same == facts
    rules = 'allowed_partitions = ["gpu*"]\ndenied_partitions = ["*-long"]\nallowed_accounts = ["a"]\n'
    rules += 'allowed_qos = ["normal"]\nmax_walltime = "2h"\nqueue_ahead = false\nallow_shells = false\n'
    found = read(tmp_path, rules).policy.filter_facts(facts)
    assert [partition.name for partition in found.partitions] == ["gpu"]
    assert (found.accounts, found.default_account, found.qos) == (("a",), "", ("normal",))
    assert (found.max_walltime_s, found.queues_ahead, found.allows_shells) == (7200, False, False)


def test_accounts_the_site_does_not_tell_are_those_the_rules_name(tmp_path: Path) -> None:
    policy = read(tmp_path, 'allowed_accounts = ["a", "b*"]').policy
    assert policy.filter_facts(EndpointFacts(scheduler="slurm")).accounts == ("a",)


def test_sizes_are_shown_in_a_unit_that_suits() -> None:
    sizes = {0: "0 B", 900: "900 B", 2048: "2 KiB", 10**6: "976.6 KiB", 2**30: "1 GiB", 3 * 2**39: "1.5 TiB"}
    assert {size: show_bytes(size) for size in sizes} == sizes


def test_the_rules_in_force_are_described(tmp_path: Path) -> None:
    rules = 'allowed_users = []\nallow_shells = false\nqueue_ahead = true\nmax_gpu_hours = 1e3\nmax_memory = "100MB"'
    assert read(tmp_path, rules).policy.describe() == {
        "max_memory": "100 MiB",
        "max_gpu_hours": "1000",
        "allowed_users": "none",
        "allow_shells": "false",
        "keep_finished": "7d 00h",
        "max_output_bytes": "1 GiB",
        "cache_bytes": "20 GiB",
    }


def test_a_file_that_goes_away_leaves_the_rules(tmp_path: Path) -> None:
    file = read(tmp_path, "max_nodes = 1")
    path = tmp_path / "policy.toml"
    path.rename(tmp_path / "policy.toml~")
    assert not file.refresh()
    assert file.policy.max_nodes == 1
    assert "gone" in file.warning
    path.write_text("")
    assert file.refresh()
    assert (file.policy, file.warning) == (Policy(), "")


def test_the_page_shows_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert policy_page.show(tmp_path) == 0
    assert "is not there" in capsys.readouterr().out
    (tmp_path / "policy.toml").write_text('max_walltime = "2h"')
    assert policy_page.show(tmp_path) == 0
    assert "max_walltime      2h 00m" in capsys.readouterr().out
    new = tmp_path / "new.toml"
    new.write_text("max_node = 1")
    assert policy_page.show(tmp_path, check=new, as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["ok"]
    assert "did you mean 'max_nodes'" in said["problem"]
    assert policy_page.show(tmp_path, check=new) == 1
    assert "keeps the rules it had" in capsys.readouterr().out
    with pytest.raises(InvalidInput, match="no such file"):
        policy_page.show(tmp_path, check=tmp_path / "nope")


def test_edits_while_the_agent_runs(server: Any, start: Any, home: Path, until: Any) -> None:
    home.mkdir()
    path = home / "policy.toml"
    path.write_text("max_nodes = 1\n")
    start()
    assert server.result(server.order("true")).state == "SUCCEEDED"
    path.write_text("max_nodes = 5\nallow_shels = false\n")
    refused = server.result(server.order("true", num_nodes=2))
    assert refused.detail == "policy.toml: max_nodes = 1, the task asks for 2"
    path.write_text('allowed_users = ["ada"]\nallow_shells = false\n')
    refused = server.result(server.order("true"))
    assert refused.detail == "policy.toml: allowed_users = ada, the task is of user unknown"
    until(lambda: server.hellos[-1]["facts"]["policy"].get("allowed_users") == "ada", "the new rules are told")
    assert server.hellos[-1]["facts"]["allows_shells"] is False


def test_the_operator_guide_shows_every_rule() -> None:
    guide = (Path(__file__).parents[3] / "docs/operator-guide.md").read_text()
    (block,) = re.findall(r"### policy\.toml\n.*?```toml\n(.*?)```", guide, re.DOTALL)
    raw = tomllib.loads(block)
    assert set(raw) == {rule.name for rule in fields(Policy)}
    assert parse_policy(raw).refusal(order()) != ""
