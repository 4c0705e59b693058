"""A task file's text: what is written is read back as it was."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.core.errors import InvalidInput
from diamond.core.tasks import TaskSpec
from diamond.texts import tasktext

SPECS: list[dict[str, Any]] = [
    {"run": "echo"},
    {"run": "echo one\n\n  two\n", "setup": "  begins with blanks\nand: goes on"},
    {"run": "trailing blanks  \nand\ttabs\r\n", "name": "1e5"},
    {"run": "true", "name": "null", "envs": {"A": "1.10", "B": "yes", "C": "", "D": "~", "E": "- x", "F": "1e5"}},
    {"run": "x", "secrets": {"A": "A", "B": "other", "C": {"secret": "c", "file": True}}},
    {"run": "x", "secrets": ["A", "B"], "outputs": ["a/*.csv", "*"], "priority": -3},
    {"run": "x", "max_duration": 5400, "retry": {"max_retries": 3, "backoff": 45, "on": ["NODE_FAIL"]}},
    {"run": "x", "resources": {"accelerators": "H100:4", "cpus": 4, "memory": "1.5+", "infra": "here"}},
    {"run": "x", "slurm": {"account": "007", "time": "01:30:00", "warning": 90, "extra": ["--licenses=a:1"]}},
    {"run": "x", "image": {"base": "docker://python:3.13-slim", "pip": ["numpy"], "name": "env"}},
    {"run": "x", "curves": ["Epoch {epoch}/* loss: {train/loss}", "{{'a': {a}", "# x {b}", "- {c}", "*{d}: x"]},
    {"run": "x", "curves": False},
    {"run": "emoji 🙂 and \u2028 and \u202e", "name": "<b>x</b>"},
]


@pytest.mark.parametrize("raw", SPECS)
def test_a_spec_survives_being_written(raw: dict[str, Any]) -> None:
    spec = TaskSpec.parse(raw)
    text = tasktext.write(tasktext.fields_of(spec))
    assert TaskSpec.parse(tasktext.read(text).raw) == spec


def test_only_what_differs_is_written() -> None:
    spec = TaskSpec.parse({"run": "x", "num_nodes": 1, "resources": {}, "max_duration": 7200, "envs": {}})
    assert tasktext.fields_of(spec) == {"run": "x", "max_duration": "2h"}


def test_scripts_are_blocks_and_errors_have_places() -> None:
    assert "run: |\n  one\n  two\n" in tasktext.write({"run": "one\ntwo\n"})
    with pytest.raises(InvalidInput, match=r"here, line 3, column 1"):
        tasktext.read("name: x\nruns: [1\n", "here")
    with pytest.raises(InvalidInput, match=r"line 2"):
        tasktext.read("run: x\ncommand: y\n", "here")
