"""Records of pools as files: read again as they were, and refused by the field that is wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.core.pool_records import FORMAT, KIND, JobRecord, NodeRecord, PoolRecord, TaskRecord, WindowRecord

JOB = JobRecord(asked_at=1.0, started_at=2.0, ended_at=50.0, slots=2, nodes=1, first_at=12.0, first_samples=0.0)
WINDOW = WindowRecord(nodes=1, slots=2, global_batch=64, step_s=0.5)
TASK = TaskRecord(id=1, least=1, most=4, submitted_at=0.0, ended_at=51.0, like=(1, 2), windows=(WINDOW,), jobs=(JOB,))
RECORD = PoolRecord(
    slots_per_node=2, most_nodes=4, recorded_at=60.0, nodes=(NodeRecord(began_at=0.5, slots=2),), tasks=(TASK,)
)


def changed(**fields: Any) -> dict[str, Any]:
    return encode(RECORD) | fields


def test_a_file_holds_all_of_it() -> None:
    assert PoolRecord.parse(json.loads(json.dumps(encode(RECORD)))) == RECORD


def test_what_later_versions_add_is_left_alone() -> None:
    assert PoolRecord.parse(changed(colour="red")) == RECORD


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ([], "kind"),
        ({}, "kind"),
        ({"kind": KIND}, "format"),
        (changed(kind="a shopping list"), "kind"),
        (changed(format=FORMAT + 1), "format"),
        (changed(format=None), "format"),
        (changed(slots_per_node=0), "slots_per_node"),
        (changed(slots_per_node=10**12), "slots_per_node"),
        (changed(most_nodes=True), "most_nodes"),
        (changed(recorded_at=math.nan), "recorded_at"),
        (changed(recorded_at=-1), "recorded_at"),
        (changed(nodes=[{"began_at": "soon", "slots": 1}]), "nodes[0].began_at"),
        (changed(nodes=[{"began_at": 1.0}]), "nodes[0].slots"),
        (changed(tasks=[encode(TASK), encode(TASK)]), "tasks"),
        (changed(tasks=[encode(TASK) | {"least": 5}]), "tasks[0]"),
        (changed(tasks=[encode(TASK) | {"ended_at": 1.0, "submitted_at": 2.0}]), "tasks[0]"),
        (changed(tasks=[encode(TASK) | {"total_samples": math.inf}]), "tasks[0].total_samples"),
        (
            changed(tasks=[encode(TASK) | {"windows": [encode(WINDOW) | {"step_s": -1.0}]}]),
            "tasks[0].windows[0].step_s",
        ),
        (changed(tasks=[encode(TASK) | {"jobs": [encode(JOB) | {"slots": 1.5}]}]), "tasks[0].jobs[0].slots"),
    ],
)
def test_what_is_no_record_is_refused_by_its_field(raw: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PoolRecord.parse(raw)
    assert refused.value.field == field
