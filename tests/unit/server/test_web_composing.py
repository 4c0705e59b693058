"""The form and the text of a task: made from each other, losing nothing, and never guessing."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from diamond.core.errors import Conflict, InvalidInput
from diamond.core.tasks import TaskSpec
from diamond.server.web import composing
from diamond.server.web.composing import Sheet, field_of, merged, shown
from diamond.texts import tasktext

WHOLE = """# a comment
name: whole
project: lab
num_nodes: 2
ranks_per_node: 4
resources: {infra: here, accelerators: {H100: 4}, cpus: 8+, memory: 32, image_id: env}
envs: {DATASET: /data, MESSAGE: "two\\nlines", EMPTY: ""}
secrets: {A: A, B: other, C: {secret: c, file: true}}
setup: pip list
run: |
  python train.py
outputs: [model.pt]
curves: ["Epoch {epoch}/* loss: {loss}", "acc {acc}%"]
retry: {max_retries: 2, backoff: 30}
max_duration: 2d
priority: 5
slurm: {partition: gpu, account: abc, qos: high, time: "12:00:00", constraint: fast, extra: [--licenses=a:1]}
"""


def test_the_form_shows_a_whole_task() -> None:
    values = shown(composing.read(WHOLE))
    assert set(values) == set(composing.FIELDS)
    assert {name: values[name] for name in ("type", "ranks", "gpu_type", "gpus", "dataset", "total", "walltime")} == {
        "type": "distributed", "ranks": "4", "gpu_type": "H100", "gpus": "4", "dataset": "/data", "total": "2d",
        "walltime": "12:00:00",
    }  # fmt: skip
    assert values["envs"] == 'MESSAGE="two\\nlines"\nEMPTY='
    assert values["secrets"] == "A\nB=other\nC=c (file)"


def test_what_nobody_touched_stays_as_it_is_written() -> None:
    raw = composing.read(WHOLE)
    assert merged(raw, shown(raw)) == raw
    sheet = Sheet.of_text(WHOLE)
    assert TaskSpec.parse(sheet.settle()) == TaskSpec.parse(raw)
    assert sheet.text == WHOLE, "comments and all"


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"run": "echo hi\n"}, {"run": "echo hi\n"}),
        ({"num_nodes": "1", "retries": "0", "priority": "0", "run": "x"}, {"run": "x"}),
        ({"num_nodes": "3", "retries": "2", "run": "x"}, {"run": "x", "num_nodes": 3, "retry": {"max_retries": 2}}),
        ({"num_nodes": "many"}, {"num_nodes": "many"}),
        ({"gpus": "2"}, {"resources": {"accelerators": "gpu:2"}}),
        ({"gpus": "0", "gpu_type": "H100"}, {}),
        ({"gpu_type": "H100"}, {"resources": {"accelerators": "H100:1"}}),
        ({"type": "distributed", "gpus": "4"}, {"ranks_per_node": 4, "resources": {"accelerators": "gpu:4"}}),
        ({"type": "distributed", "ranks": "0"}, {"ranks_per_node": 0}),
        ({"dataset": "/d", "envs": "A=b=c\n\n B = x "}, {"envs": {"A": "b=c", "B": "x", "DATASET": "/d"}}),
        ({"secrets": "A\nB"}, {"secrets": ["A", "B"]}),
        ({"secrets": "A=b\nC=c (file)"}, {"secrets": {"A": "b", "C": {"secret": "c", "file": True}}}),
        ({"outputs": " a \n\nb"}, {"outputs": ["a", "b"]}),
        ({"curves": " loss: {loss} \n\nacc {acc}%"}, {"curves": ["loss: {loss}", "acc {acc}%"]}),
        ({"curves": "Off\n"}, {"curves": "off"}),
        ({"curves": " \n"}, {}),
        ({"walltime": "2h", "partition": "gpu"}, {"slurm": {"time": "2h", "partition": "gpu"}}),
    ],
)
def test_what_the_form_says(values: dict[str, str], found: dict[str, Any]) -> None:
    assert merged({}, values) == found


def test_an_emptied_field_goes_and_the_others_stay() -> None:
    raw = {"run": "x", "slurm": {"time": "2h"}, "resources": {"infra": "a", "cpus": 2}, "envs": {"A": "b"}}
    values = shown(raw) | {"walltime": "", "endpoint": "", "envs": ""}
    assert merged(raw, values) == {"run": "x", "resources": {"cpus": 2}}


@pytest.mark.parametrize(
    ("name", "text"),
    [("envs", "no equals"), ("envs", "A=1\nA=2"), ("envs", 'A="open'), ("secrets", "A\nA=b")],
)
def test_lines_that_cannot_be_understood(name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match="line") as caught:
        merged({}, {name: text})
    assert caught.value.field == name


def test_all_that_is_wrong_is_found_at_once() -> None:
    values = {
        "num_nodes": "two", "gpus": "-1", "cpus": "lots", "memory": "32 bananas", "walltime": "tomorrow",
        "retries": "many", "envs": "noequals", "secrets": "A\nA=b", "outputs": "/etc/passwd", "name": "n" * 300,
    }  # fmt: skip
    found = Sheet(values=values).problems()
    assert {field_of(each) for each in found} == {*values, "run"}
    assert len(found) == len(values) + 1, "each once"
    assert not Sheet(values={"run": "true", "envs": "A=b"}).problems()


@pytest.mark.parametrize(
    ("raw", "fields"),
    [
        ({"run": "", "resources": {"infra": "a", "cpus": "x"}}, ["resources.cpus", "run"]),
        ({"run": "x", "resourcs": 1, "num_nodes": 0}, ["num_nodes", "resourcs"]),
        ({"run": "x", "resources": "all", "envs": {"A.B": "1", "C": None}}, ["envs", "resources"]),
        ({"run": "x", "secrets": {"A": "a"}, "envs": {"A": "b"}}, ["secrets.A"]),
        ({"run": "x", "outputs": ["ok", "../no"]}, ["outputs"]),
    ],
)
def test_what_is_wrong_in_a_spec(raw: dict[str, Any], fields: list[str]) -> None:
    before = copy.deepcopy(raw)
    assert sorted(each.field for each in composing.wrong_in(raw)) == fields
    assert raw == before


def test_both_sides_changed() -> None:
    sheet = Sheet.of_fields({"run": "x"})
    sheet.values["name"] = "form"
    assert sheet.settle() == {"run": "x", "name": "form"}
    assert sheet.base == sheet.text == tasktext.write({"name": "form", "run": "x"})
    sheet.text += "priority: 3\n"
    assert sheet.settle()["priority"] == 3
    assert sheet.values["priority"] == "3"
    sheet.values["name"], sheet.text = "other", sheet.text.replace("priority: 3", "priority: 4")
    with pytest.raises(Conflict):
        sheet.settle()
    sheet.text = sheet.text.replace("priority: 4", "priority: 3").replace("form", "other")
    assert sheet.settle()["name"] == "other", "both say the same"


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("resources.cpus", "cpus"), ("slurm.time", "walltime"), ("envs.DATASET", "dataset"), ("envs.OTHER", "envs"),
        ("secrets.A.file", "secrets"), ("outputs[3]", "outputs"), ("curves", "curves"), ("file_mounts.data", "workdir"),
        ("retry.on", "retries"), ("slurm.extra", ""), ("image.base", "image"), ("", ""),
    ],
)  # fmt: skip
def test_errors_find_their_field(field: str, name: str) -> None:
    assert field_of(InvalidInput("x", field=field)) == name


@pytest.mark.parametrize(
    ("written", "shows"), [("off", "off"), ("false", "off"), ("[]", "off"), ("true", ""), ("'x {a}'", "x {a}")]
)
def test_curves_in_the_form(written: str, shows: str) -> None:
    sheet = Sheet.of_text(f"run: x\ncurves: {written}\n")
    assert sheet.values["curves"] == shows
    before = TaskSpec.parse(sheet.settle())
    sheet.values["curves"] = "step {step} loss {loss}"
    assert TaskSpec.parse(sheet.settle()).curves == ("step {step} loss {loss}",)
    sheet.take_text()
    sheet.values["curves"] = shows
    assert TaskSpec.parse(sheet.settle()) == before
