"""Specs: what is accepted, what is refused, and that every refusal names the field and a fix."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, InvalidInput
from diamond.core.reasons import Reason
from diamond.core.tasks import RetryPolicy, TaskSpec

MEGABYTES_10 = "x" * (10 * 1024 * 1024)


def refused(fields: dict[str, Any]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        TaskSpec.parse({"run": "true", **fields})
    return caught.value


def test_a_full_spec_round_trips() -> None:
    spec = TaskSpec.parse(
        {
            "name": "naïve 'quoted' $(reboot) 名前",
            "workdir": ".",
            "num_nodes": 2,
            "min_nodes": 1,
            "ranks_per_node": 4,
            "resources": {"infra": "delta", "accelerators": {"H100": 4}, "cpus": "4+", "memory": 32},
            "envs": {"A": 'multi\nline "quotes" $(reboot)', "N": 3, "F": 1.5, "EMPTY": ""},
            "file_mounts": {"data/x/": "~/x"},
            "setup": "pip install x",
            "run": "python train.py\n",
            "outputs": "model.pt",
            "retry": {"max_retries": 3, "on": ["node_fail", "OUT_OF_MEMORY"], "backoff": "1m"},
            "max_duration": "2h30m",
            "priority": -5,
        }
    )
    assert spec.resources.accelerators == "H100:4"
    assert (spec.resources.gpu_type, spec.resources.gpus) == ("H100", 4)
    assert (spec.resources.cpus_min, spec.resources.mem_bytes_min) == (4, 32 * 1024**3)
    assert spec.envs == {"A": 'multi\nline "quotes" $(reboot)', "N": "3", "F": "1.5", "EMPTY": ""}
    assert spec.file_mounts == {"data/x": "~/x"}
    assert spec.outputs == ("model.pt",)
    assert spec.max_duration == 9000
    assert spec.retry.on == (Reason.NODE_FAIL, Reason.OUT_OF_MEMORY)
    assert TaskSpec.parse(encode(spec)) == spec
    assert decode(TaskSpec, {**encode(spec), "from_the_future": 1}) == spec


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"run": ""}, "run"),
        ({"run": None}, "run"),
        ({"run": ["a"]}, "run"),
        ({"run": "a\x00b"}, "run"),
        ({"run": "\ud800"}, "run"),
        ({"run": MEGABYTES_10}, "run"),
        ({"setup": 3}, "setup"),
        ({"name": ""}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"name": "nul\x00"}, "name"),
        ({"name": "\ufeff\u200b"}, "name"),
        ({"name": "esc\x1b[31m"}, "name"),
        ({"name": "right\u202eleft"}, "name"),
        ({"name": MEGABYTES_10}, "name"),
        ({"name": 12}, "name"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"num_nodes": True}, "num_nodes"),
        ({"num_nodes": 1.5}, "num_nodes"),
        ({"num_nodes": "2"}, "num_nodes"),
        ({"num_nodes": 10**50}, "num_nodes"),
        ({"min_nodes": 0}, "min_nodes"),
        ({"min_nodes": 2}, "min_nodes"),
        ({"num_nodes": 4, "min_nodes": 5}, "min_nodes"),
        ({"num_nodes": 4, "min_nodes": 2, "ranks_per_node": 0}, "min_nodes"),
        ({"ranks_per_node": -1}, "ranks_per_node"),
        ({"priority": "high"}, "priority"),
        ({"max_duration": "soon"}, "max_duration"),
        ({"max_duration": 0}, "max_duration"),
        ({"max_duration": float("nan")}, "max_duration"),
        ({"max_duration": "9" * 1000}, "max_duration"),
        ({"resources": []}, "resources"),
        ({"resources": {"gpus": 1}}, "resources.gpus"),
        ({"x" * 500: 1}, "x" * 76 + "..."),
        ({"resources": {"cpus": "many"}}, "resources.cpus"),
        ({"resources": {"cpus": 0}}, "resources.cpus"),
        ({"resources": {"memory": "32 apples"}}, "resources.memory"),
        ({"resources": {"accelerators": "H100:0"}}, "resources.accelerators"),
        ({"resources": {"accelerators": {"A": 1, "B": 1}}}, "resources.accelerators"),
        ({"resources": {"accelerators": "$(reboot):1"}}, "resources.accelerators"),
        ({"envs": []}, "envs"),
        ({"envs": {"1X": "a"}}, "envs"),
        ({"envs": {"A B": "a"}}, "envs"),
        ({"envs": {"A=B": "a"}}, "envs"),
        ({"envs": {"$(reboot)": "a"}}, "envs"),
        ({"envs": {"RANK": "0"}}, "envs"),
        ({"envs": {"DIAMOND_TASK_ID": "x"}}, "envs"),
        ({"envs": {"UID": "5"}}, "envs"),
        ({"envs": {"POSIXLY_CORRECT": "1"}}, "envs"),
        ({"envs": {"PATH": "/opt/bin:$PATH"}}, "envs.PATH"),
        ({"envs": {"A": None}}, "envs.A"),
        ({"envs": {"A": True}}, "envs.A"),
        ({"envs": {"A": {}}}, "envs.A"),
        ({"envs": {"A": "a\x00b"}}, "envs.A"),
        ({"envs": {"A": MEGABYTES_10}}, "envs.A"),
        ({"envs": {f"A{n}": "x" * 99_000 for n in range(20)}}, "envs"),
        ({"file_mounts": {"/data": "x"}}, "file_mounts"),
        ({"file_mounts": {"~/data": "x"}}, "file_mounts"),
        ({"file_mounts": {"a/../../b": "x"}}, "file_mounts"),
        ({"file_mounts": {".": "x"}}, "file_mounts"),
        ({"file_mounts": {"a\nb": "x"}}, "file_mounts"),
        ({"file_mounts": {"a": ""}}, "file_mounts"),
        ({"file_mounts": {"d/a": "x", "./d//a": "y"}}, "file_mounts"),
        ({"file_mounts": {"a": 3}}, "file_mounts"),
        ({"outputs": ["../secret"]}, "outputs"),
        ({"outputs": ["/etc/passwd"]}, "outputs"),
        ({"outputs": {"a": 1}}, "outputs"),
        ({"outputs": ["x"] * 1000}, "outputs"),
        ({"retry": {"max_retries": -1}}, "retry.max_retries"),
        ({"retry": {"on": ["CANCELLED"]}}, "retry.on"),
        ({"retry": {"on": 5}}, "retry.on"),
        ({"workdir": 5}, "workdir"),
        ({"workdir": "a\x00"}, "workdir"),
    ],
)
def test_bad_values_name_their_field_and_stay_short(fields: dict[str, Any], field: str) -> None:
    error = refused(fields)
    assert error.field == field
    assert len(str(error)) < 1000
    assert "\x1b" not in str(error)


def test_unknown_fields_list_the_valid_ones() -> None:
    error = refused({"num_node": 2})
    assert "num_nodes" in error.hint
    for name in ("workdir", "file_mounts", "retry", "max_duration", "priority", "outputs"):
        assert name in error.hint


@pytest.mark.parametrize("raw", [None, [], "run: x", 3, {}])
def test_not_a_spec_at_all(raw: object) -> None:
    with pytest.raises(InvalidInput):
        TaskSpec.parse(raw)


def test_paths_of_the_client_mean_nothing_to_the_server() -> None:
    spec = TaskSpec.parse({"run": "x", "file_mounts": {"d": "/home/me/d"}})
    with pytest.raises(InvalidInput, match="server cannot see") as caught:
        spec.check_uploaded()
    assert caught.value.field == "file_mounts.d"


def test_backoff_doubles_and_is_capped() -> None:
    policy = RetryPolicy(max_retries=9, backoff=10, max_backoff=60)
    assert [policy.delay_s(n) for n in (1, 2, 3, 4, 500)] == [10, 20, 40, 60, 60]


@pytest.mark.parametrize(
    ("raw", "seconds"), [(90, 90), ("90", 90), ("1.5h", 5400), ("1d 2h", 93600), ("02:30:00", 9000), ("1-0:0:1", 86401)]
)
def test_durations(raw: object, seconds: int) -> None:
    assert TaskSpec.parse({"run": "x", "max_duration": raw}).max_duration == seconds


def test_errors_are_diamonds_own() -> None:
    assert issubclass(InvalidInput, DiamondError)


@pytest.mark.parametrize("unseen", ["\u200b", "\u200c", "\u200d", "\u200e", "\u200f", "\u2060", "\ufeff"])
def test_what_cannot_be_seen_is_no_part_of_a_name(unseen: str) -> None:
    """Else two tasks could look alike and be called differently."""
    name = TaskSpec.parse({"run": "true", "name": f"{unseen} my{unseen}task {unseen}"}).name
    assert name == "mytask"
    assert TaskSpec.parse({"run": "true", "name": name}).name == name


def test_a_users_switches_of_the_training_may_be_set_and_nothing_else_of_diamonds() -> None:
    spec = TaskSpec.parse({"run": "true", "envs": {"DIAMOND_STANDBYS": 0, "DIAMOND_GLOBAL_BATCH": "512"}})
    assert spec.envs == {"DIAMOND_STANDBYS": "0", "DIAMOND_GLOBAL_BATCH": "512"}
    assert "is set by Diamond itself" in str(refused({"envs": {"DIAMOND_LAUNCH_KEY": "x"}}))
