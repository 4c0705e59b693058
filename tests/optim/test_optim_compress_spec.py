"""What a user may say about compression, and what is answered to nonsense."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from diamond.optim.compress import FACTORS, GRADS, Compress, attach
from diamond.optim.compress.spec import Method
from diamond.optim.errors import OptimError


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("none", Method("none")),
        ("bf16", Method("bf16")),
        ("fp16", Method("fp16")),
        ("powersgd:4", Method("powersgd", 4)),
        ("powersgd:16:int8", Method("powersgd", 16, "int8")),
        ("powersgd:2:bf16", Method("powersgd", 2, "bf16")),
        ("topk:0.01", Method("topk", 0.01)),
        ("topk:0.05:int4", Method("topk", 0.05, "int4")),
        ("topk:1", Method("topk", 1.0)),
        ("randomk:1e-3", Method("randomk", 1e-3)),
        ("int8", Method("int", 8)),
        ("int1", Method("int", 1)),
    ],
)
def test_grad_is_read(text: str, method: Method) -> None:
    assert Compress(grad=text).method == method


@pytest.mark.parametrize(
    "text",
    [
        "", None, 3, "int3", "int", "int8:2", "bf16:1", "none:", "powersgd", "powersgd:", "powersgd:0", "powersgd:-1",
        "powersgd:2.5", "powersgd:99999", "powersgd:²", "topk", "topk:0", "topk:2", "topk:-0.1", "topk:nan",
        "topk:inf", "randomk:", "randomk:x", "randomk:0.1:int8", "powersgd:4:", "powersgd:4:int2", "powersgd:4:int4",
        "powersgd::int8", "powersgd:4:int8:", "topk:0.1:bf16", "int8:int8", " topk:0.1", "TOPK:0.1", "zip",
    ],
)  # fmt: skip
def test_a_hostile_grad_is_refused_with_an_example(text: Any) -> None:
    with pytest.raises(OptimError) as caught:
        Compress(grad=text)
    said = str(caught.value)
    assert f"grad={text!r}" in said and 'for example grad="' in said


@pytest.mark.parametrize("text", ["", None, "bf16", "int4-tri", "tri ", "filtered-tri", 8])
def test_a_hostile_factor_is_refused_with_all_there_is(text: Any) -> None:
    with pytest.raises(OptimError) as caught:
        Compress(factor=text)
    said = str(caught.value)
    assert f"factor={text!r}" in said and all(known in said for known in FACTORS)


def test_an_unknown_grad_lists_all_there_is() -> None:
    with pytest.raises(OptimError) as caught:
        Compress(grad="gzip")
    assert all(known in str(caught.value) for known in GRADS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start_after", -1), ("start_after", 0.5),
        ("chunk", 0), ("chunk", 12), ("chunk", 8.0), ("chunk", True), ("two_step_from", 1), ("report_every", 0),
        ("seed", -1), ("seed", "x"), ("error_feedback", "yes"), ("error_feedback", 2),
    ],
)  # fmt: skip
def test_other_fields_are_checked(field: str, value: Any) -> None:
    with pytest.raises(OptimError, match=f"{field}="):
        Compress(**{field: value})


@pytest.mark.parametrize(
    ("grad", "remembers"),
    [
        ("none", False),
        ("bf16", False),
        ("int1", False),
        ("powersgd:2", True),
        ("topk:0.1", True),
        ("randomk:0.1", True),
    ],
)
def test_errors_are_remembered_where_the_method_needs_it(grad: str, remembers: bool) -> None:
    assert Compress(grad=grad).remembers is remembers
    assert Compress(grad=grad, error_feedback=True).remembers is (grad != "none")
    assert Compress(grad=grad, error_feedback=False).remembers is False


def test_it_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Compress().grad = "int8"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Compress("int8")  # type: ignore[misc]


def test_a_model_that_sends_nothing_is_refused() -> None:
    with pytest.raises(OptimError, match=r"model=Linear .*DistributedDataParallel\(model\)"):
        attach(nn.Linear(2, 2), Compress())
    with pytest.raises(OptimError, match="compress='int8'"):
        attach(nn.Linear(2, 2), "int8")  # type: ignore[arg-type]
