"""Samples of several nodes come together in one file, once each, whatever the job wrote into its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import node_samples
from diamond.agent.node_samples import NodeSamples
from diamond.core.rundir import RunDir
from diamond.core.tasks import TaskSpec
from diamond.core.wire import STREAMS, Desired, JobOrder


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_samples, "_PERIOD_S", 0.0)


def order(**spec: Any) -> JobOrder:
    return JobOrder(
        job_id="job_00000001",
        task_id="t",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=TaskSpec(run="true", **{"num_nodes": 2, **spec}),
        received=dict.fromkeys(STREAMS, 0),
    )


def note(folder: Path, node: int, *records: object) -> None:
    with open(RunDir(folder).node_util(node), "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def merged(folder: Path) -> list[dict[str, float]]:
    path = RunDir(folder).stream("util")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_increments_of_each_node_come_in_order_of_time(tmp_path: Path) -> None:
    samples = NodeSamples()
    samples.gather(order(), tmp_path, is_over=False)
    assert merged(tmp_path) == []
    note(tmp_path, 0, {"t": 10, "sys/cpu_percent": 50.5}, {"t": 20, "sys/cpu_percent": 60})
    note(tmp_path, 1, {"t": 15, "sys/cpu_percent": 70, "sys/rss_bytes": 4096})
    with open(RunDir(tmp_path).node_util(1), "a") as file:
        file.write('{"t": 25, "sys/cpu_')  # as a network file system may show it
    samples.gather(order(), tmp_path, is_over=False)
    first = [
        {"t": 10, "sys/node0/cpu_percent": 50.5},
        {"t": 15, "sys/node1/cpu_percent": 70, "sys/node1/rss_bytes": 4096},
        {"t": 20, "sys/node0/cpu_percent": 60},
    ]
    assert merged(tmp_path) == first
    with open(RunDir(tmp_path).node_util(1), "a") as file:
        file.write('percent": 80}\n')
    samples.gather(order(), tmp_path, is_over=True)
    assert merged(tmp_path) == [*first, {"t": 25, "sys/node1/cpu_percent": 80}]


def test_a_restart_neither_loses_nor_doubles_a_sample(tmp_path: Path) -> None:
    note(tmp_path, 0, {"t": 10, "sys/cpu_percent": 1}, {"t": 20, "sys/cpu_percent": 2})
    note(tmp_path, 1, {"t": 11, "sys/cpu_percent": 3})
    NodeSamples().gather(order(), tmp_path, is_over=False)
    before = merged(tmp_path)
    with open(RunDir(tmp_path).stream("util"), "a") as file:
        file.write('{"t": 21, "sys/no')  # killed while it wrote
    note(tmp_path, 1, {"t": 21, "sys/cpu_percent": 4})
    again = NodeSamples()
    again.gather(order(), tmp_path, is_over=False)
    again.gather(order(), tmp_path, is_over=True)
    text = RunDir(tmp_path).stream("util").read_text().splitlines()
    assert [json.loads(line) for line in text[:3]] == before
    assert json.loads(text[-1]) == {"t": 21, "sys/node1/cpu_percent": 4}
    assert len(text) == 5, "with the line that was cut short, which nobody can read"


def test_gpus_of_a_node_are_one_line(tmp_path: Path) -> None:
    gpus = {f"sys/gpu{n}_percent": 10 * n for n in range(4)} | {f"sys/gpu{n}_mem_bytes": 5 for n in range(4)}
    note(tmp_path, 1, {"t": 10, "sys/cpu_percent": 1, **gpus})
    NodeSamples().gather(order(), tmp_path, is_over=False)
    assert merged(tmp_path) == [
        {"t": 10, "sys/node1/cpu_percent": 1, "sys/node1/gpu_percent": 15, "sys/node1/gpu_mem_bytes": 20}
    ]


def test_only_numbers_that_mean_something_are_taken(tmp_path: Path) -> None:
    bad: list[object] = [[1], "x", None, {"t": 5}, {"sys/cpu_percent": 1}, {"t": "now", "sys/cpu_percent": 1}]
    bad += [{"t": 6, "sys/cpu_percent": value} for value in (float("nan"), -1, True, "9", 10**400)]
    bad += [{"t": 7, "loss": 1, "sys/gpu0_colour": 3}, {"t": 8, **{f"sys/gpu{n}_percent": 1 for n in range(5000)}}]
    note(tmp_path, 0, *bad, {"t": 30, "sys/cpu_percent": 5, "loss": 7})
    os.mkfifo(RunDir(tmp_path).node_util(1))
    NodeSamples().gather(order(), tmp_path, is_over=True)
    assert merged(tmp_path) == [{"t": 30, "sys/node0/cpu_percent": 5}]


def test_a_flood_without_an_end_of_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_samples, "_MAX_BYTES", 1024 * 1024)
    RunDir(tmp_path).node_util(0).write_bytes(b"7" * 3 * 1024 * 1024)
    NodeSamples().gather(order(), tmp_path, is_over=True)
    assert merged(tmp_path) == []


@pytest.mark.parametrize("spec", [{"num_nodes": 1}, {"ranks_per_node": 0}])
def test_others_are_not_looked_at(tmp_path: Path, spec: dict[str, Any]) -> None:
    note(tmp_path, 0, {"t": 10, "sys/cpu_percent": 1})
    NodeSamples().gather(order(**spec), tmp_path, is_over=True)
    assert merged(tmp_path) == []
