"""What a user may say about compression, and what is answered to nonsense."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from diamond.optim import KFAC
from diamond.optim.compress import FACTORS, GRADS, Compress, attach, average_factors
from diamond.optim.compress.spec import Method
from diamond.optim.errors import OptimError

RANKS = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from diamond.optim import KFAC, Compress
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
sent = {}
for name, factor in (("left out", {}), ("alone", None), ("none", {"factor": "none"}), ("tri", {"factor": "tri"})):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)))
    optimizer = KFAC(model, 0.1, compress=None if factor is None else Compress(grad="bf16", **factor))
    nn.functional.mse_loss(model(torch.randn(4, 7)), torch.randn(4, 3)).backward()
    optimizer.step()
    sent[name] = [optimizer.crew.count.sent["factor reduce"], optimizer.crew.count.plain["factor"]]
print(json.dumps(sent))
dist.destroy_process_group()
"""


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


@pytest.mark.parametrize("text", ["", "bf16", "int4-tri", "tri ", "filtered-tri", 8])
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


def test_statistics_travel_as_triangles_unless_it_is_said_otherwise(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    plain, packed = (4 * sum(n**2 for n in (8, 5, 6, 3)), 4 * sum(n * (n + 1) // 2 for n in (8, 5, 6, 3)))
    wanted = {"left out": [packed, plain], "alone": [packed, plain], "none": [plain, plain], "tri": [packed, plain]}
    assert [json.loads(out) for out, _ in told] == [wanted, wanted]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_second_hook_is_refused_with_what_to_do() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    attach(model, Compress(grad="bf16"))
    for again in (lambda: attach(model, Compress(grad="bf16")), lambda: KFAC(model, compress=Compress(grad="bf16"))):
        with pytest.raises(OptimError, match=r"model: DistributedDataParallel takes one communication hook .*once"):
            again()


@pytest.mark.usefixtures("alone")
def test_a_compiled_model_is_attached_to_under_its_cover() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    wire = attach(torch.compile(model, backend="eager"), Compress(grad="bf16"))  # type: ignore[arg-type]
    model(torch.ones(1, 2)).sum().backward()
    assert wire.steps == {"ddp": 1}
    with pytest.raises(OptimError, match=r"model=Linear sends no gradients"):
        attach(torch.compile(nn.Linear(2, 2), backend="eager"), Compress(grad="bf16"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(OptimError, match=r"process_group=str: give a group, .*or leave it out"):
        attach(DistributedDataParallel(nn.Linear(2, 2)), Compress(), process_group="all")  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
def test_ranks_that_have_not_met_are_told_how() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    dist.destroy_process_group()
    with pytest.raises(OptimError, match=r"attach: .*call torch.distributed.init_process_group before"):
        attach(model, Compress(grad="bf16"))
    with pytest.raises(OptimError, match=r"attach: .*call torch.distributed.init_process_group before"):
        KFAC(model, compress=Compress(grad="bf16"))
    with pytest.raises(OptimError, match=r"average_factors: .*call torch.distributed.init_process_group before"):
        average_factors([torch.eye(2)], "tri")


def test_a_model_that_sends_nothing_is_refused() -> None:
    for what in (None, [nn.Linear(2, 2)]):
        with pytest.raises(OptimError, match=f"model={type(what).__name__}: give the model itself"):
            attach(what, Compress())  # type: ignore[arg-type]
    with pytest.raises(OptimError, match=r"model=Linear .*DistributedDataParallel\(model\)"):
        attach(nn.Linear(2, 2), Compress())
    with pytest.raises(OptimError, match="compress='int8'"):
        attach(nn.Linear(2, 2), "int8")  # type: ignore[arg-type]
