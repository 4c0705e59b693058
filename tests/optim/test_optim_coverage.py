"""The report of what is preconditioned says the truth about every parameter."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from diamond.optim.covered import coverage
from diamond.optim.errors import OptimError
from diamond.optim.kfac import KFAC


class Own(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(size, size)), nn.Linear(size, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(F.linear(x, self.weight))
        return found


def test_all_of_a_plain_network() -> None:
    found = coverage(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Conv1d(1, 2, 3)))
    assert found.share == 1.0 and not found.left
    assert found.numbers == 15 + 6 + 8
    text = str(found)
    assert "K-FAC preconditions 29 of 29 parameters (100.0%)" in text and "WARNING" not in text
    assert "convolution" in text and "normalisation" in text and "linear map" in text


def test_less_than_half_is_said_aloud() -> None:
    with pytest.warns(UserWarning, match=r"covers 18.0% of the model's parameters"):
        found = coverage(Own(10))
    assert [one.name for one in found.left] == ["weight"]
    assert "Own has parameters of its own" in found.left[0].why
    assert str(found).startswith("WARNING: LESS THAN HALF IS COVERED. K-FAC preconditions 22 of 122")


def test_what_was_excluded_and_what_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2))
    model[2].requires_grad_(requires_grad=False)
    opt = KFAC(model, exclude=["1"])
    found = coverage(model, opt.blocks)
    assert {one.name: one.covered for one in found.lines} == {
        "0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False,
    }  # fmt: skip
    assert all(one.why == "excluded" for one in found.left)


def tied() -> nn.Module:
    model = nn.ModuleDict({"table": nn.Embedding(9, 5), "head": nn.Linear(5, 9)})
    model["head"].weight = model["table"].weight
    return model


@pytest.mark.parametrize(
    ("model", "left", "why"),
    [
        (nn.ConvTranspose2d(4, 4, 3), ["bias"], "transposed convolution's bias"),
        (nn.MultiheadAttention(8, 2, kdim=4, vdim=6), ["in_proj_bias"], "different widths"),
        (nn.MultiheadAttention(8, 2, add_bias_kv=True), ["bias_k", "bias_v"], "attention adds"),
        (tied(), ["head.bias"], "table of words"),
        (
            nn.ModuleDict({"cell": nn.RNN(2, 2, bias=False), "rest": nn.Linear(9, 9)}),
            ["cell.weight_hh_l0", "cell.weight_ih_l0"],
            "recurrent",
        ),
        (
            nn.ModuleDict({"words": nn.Embedding(3, 2, sparse=True), "rest": nn.Linear(9, 9)}),
            ["words.weight"],
            "sparse gradients",
        ),
    ],
)
def test_why_the_fallback_takes_it(model: nn.Module, left: list[str], why: str) -> None:
    found = coverage(model)
    assert sorted(one.name for one in found.left) == left
    assert all(why in one.why for one in found.left)
    assert found.share > 0.5


def test_the_report_is_what_the_optimizer_does() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ConvTranspose1d(2, 2, 3), nn.Embedding(5, 2))
    opt = KFAC(model)
    taken = {id(one) for block in opt.blocks for one in block.parameters()}
    names = {name for name, one in model.named_parameters() if id(one) in taken}
    assert names == {one.name for one in coverage(model, opt.blocks).lines if one.covered}


def test_what_is_neither_a_model_nor_blocks_is_told() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(OptimError, match="model=generator: give the model itself, not its parameters"):
        coverage(model.parameters())  # type: ignore[arg-type]
    for blocks in (KFAC(model), ["0"]):
        with pytest.raises(OptimError, match=f"blocks={type(blocks).__name__}: give .* optimizer.blocks"):
            coverage(model, blocks)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_nothing_to_cover_is_no_warning() -> None:
    found = coverage(nn.Linear(3, 2).requires_grad_(requires_grad=False))
    assert not found.lines and str(found).endswith("none of the model's parameters requires a gradient")
    empty = coverage(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 0)))
    assert [(one.name, one.why) for one in empty.left] == [("1.weight", "empty"), ("1.bias", "empty")]
    assert empty.share == 1.0


def test_it_can_be_asked_for_again() -> None:
    import diamond.optim

    model = nn.Sequential(nn.Linear(3, 2))
    assert str(diamond.optim.coverage(model)) == str(diamond.optim.coverage(model)), "no module takes its name"
