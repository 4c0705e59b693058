"""Layers with large sides: their factors are kept as blocks on the diagonal, and nothing larger is ever made."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from diamond.optim import KFAC, OptimError, stacks
from diamond.optim.blocks import discover
from diamond.optim.covered import coverage
from diamond.optim.keeping import load_sharded, sharded_state
from diamond.optim.pieces import chosen, filled, grams, left, right
from diamond.optim.planning import Block, plan_blocks
from diamond.optim.products import Split, exactly
from tests.optim.curved import close

DAMPING = 1e-2
LARGEST = 4


@pytest.mark.parametrize(("copies", "n", "pieces"), [(1, 10, 3), (2, 8, 2), (3, 7, 7), (2, 5, 1)])
def test_products_with_pieces_are_those_with_whole_matrices(copies: int, n: int, pieces: int) -> None:
    dice = torch.Generator().manual_seed(n)
    size = -(-n // pieces)
    rows = torch.randn(copies, 6, n, generator=dice, dtype=torch.float64)
    wide = filled(rows, 6, pieces * size)
    found = grams(rows, pieces)
    assert found.shape == (copies * pieces, size, size)
    factors = torch.randn(copies * pieces, size, size, generator=dice, dtype=torch.float64)
    for place in range(copies):
        own = slice(place * pieces, (place + 1) * pieces)
        diagonal = torch.block_diag(*torch.ones(pieces, size, size, dtype=torch.float64))
        close(torch.block_diag(*found[own]), wide[place].T @ wide[place] * diagonal, 1e-12)
        whole = torch.block_diag(*factors[own])[:n, :n]
        close(right(rows, factors)[place], rows[place] @ whole, 1e-12)
        close(left(factors, rows.mT)[place], whole @ rows[place].T, 1e-12)
    room = torch.empty_like(rows)
    assert right(rows, factors, room) is room and torch.equal(room, right(rows, factors))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.words(x)).sum(1))
        return found


MODELS: dict[str, Any] = {
    "linear": (lambda: nn.Linear(9, 7), (12, 9)),
    "groups": (lambda: nn.Conv1d(6, 10, 2, groups=2), (5, 6, 4)),
    "transposed": (lambda: nn.ConvTranspose1d(6, 3, 2, bias=False), (5, 6, 4)),
    "table": (Table, None),
}


def looked(name: str, largest: int, **options: Any) -> tuple[nn.Module, KFAC, dict[str, Tensor]]:
    """A model after one step, the optimizer, and how far its weights moved."""
    torch.manual_seed(1)
    make, shape = MODELS[name]
    model: nn.Module = make()
    options = {"curvature": "ggn-exact", "damping": DAMPING, "clip": None, "momentum": 0.0, **options}
    optimizer = KFAC(model, 1.0, largest=largest, **options)
    dice = torch.Generator().manual_seed(2)
    x = torch.randint(0, 9, (20, 3), generator=dice) if shape is None else torch.randn(shape, generator=dice)
    out = model(x)
    F.mse_loss(out, torch.randn(out.shape, generator=dice)).backward()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer.step()
    return model, optimizer, {name: one.detach() - before[name] for name, one in model.named_parameters()}


def diagonal_blocks(matrix: Tensor, pieces: int) -> Tensor:
    """Of each copy, with zeros at the end."""
    size = -(-matrix.shape[1] // pieces)
    wide = filled(matrix, pieces * size, pieces * size)
    return torch.stack([one[at : at + size, at : at + size] for one in wide for at in range(0, pieces * size, size)])


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_with_the_blocks_on_the_diagonal(name: str) -> None:
    _, whole, _ = looked(name, 100)
    model, split, moved = looked(name, LARGEST)
    assert any(block.g_pieces > 1 or block.a_pieces > 1 for block in split.blocks)
    for ours, theirs in zip(split.factors, whole.factors, strict=True):
        block, a, g = ours.block, theirs.a.mean(), theirs.g.mean()
        assert max(ours.g.mean().shape[-1], 0 if block.a_diagonal else ours.a.mean().shape[-1]) <= LARGEST
        close(ours.g.mean(), diagonal_blocks(g, block.g_pieces), 1e-5)
        close(ours.a.mean(), a if block.a_diagonal else diagonal_blocks(a, block.a_pieces), 1e-5)
        balance = theirs.balance(a, g)
        close(ours.balance(ours.a.mean(), ours.g.mean()), balance, 1e-5)
        gradient = block.matrix(block.weight.grad, None if block.bias is None else block.bias.grad)
        for copy_, weight in enumerate(gradient):
            root = DAMPING**0.5
            of_a = torch.diag(a[copy_]) if block.a_diagonal else only_blocks(a[copy_], block.a_pieces)
            of_a = of_a + root * balance[copy_] * torch.eye(len(of_a))
            of_g = only_blocks(g[copy_], block.g_pieces) + root / balance[copy_] * torch.eye(block.g)
            wanted = -torch.linalg.solve(of_g, torch.linalg.solve(of_a.T, weight.T).T)
            names = {id(one): key for key, one in model.named_parameters()}
            bias = None if block.bias is None else moved[names[id(block.bias)]]
            close(block.matrix(moved[names[id(block.weight)]], bias)[copy_], wanted, 2e-3)


def only_blocks(matrix: Tensor, pieces: int) -> Tensor:
    size = -(-len(matrix) // pieces)
    return torch.block_diag(*diagonal_blocks(matrix[None], pieces))[: len(matrix), : len(matrix)] if size else matrix


def test_training_with_pieces_and_a_break(tmp_path: Path) -> None:
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(64, 10, generator=dice)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:5].sum(1), x[:, 5].sin()], 1)

    def made(**options: Any) -> tuple[nn.Module, KFAC]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 21), nn.Tanh(), nn.Linear(21, 3))
        return model, KFAC(model, 0.1, damping=DAMPING, largest=6, **options)

    def train(model: nn.Module, optimizer: KFAC, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    model, optimizer = made()
    losses = train(model, optimizer, 15)
    state = copy.deepcopy({"model": model.state_dict(), "kfac": optimizer.state_dict()})
    dcp.save(sharded_state(optimizer), checkpoint_id=tmp_path)
    after = train(model, optimizer, 10)
    assert after[-1] < 0.5 * losses[0]
    for road in ("state_dict", "sharded"):
        again, resumed = made(seed=5)
        again.load_state_dict(state["model"])
        if road == "state_dict":
            resumed.load_state_dict(state["kfac"])
        else:
            given = sharded_state(resumed)
            dcp.load(given, checkpoint_id=tmp_path)
            load_sharded(resumed, given)
        assert train(again, resumed, 10) == after, road
    other, unlike = made()
    unlike = KFAC(other, 0.1, largest=7)
    with pytest.raises(
        OptimError, match=r"0 is linear 1x21x11 split in 4x2 in it and linear 1x21x11 split in 3x2 here"
    ):
        unlike.load_state_dict(state["kfac"])


def test_nothing_as_large_as_the_layer_is_made() -> None:
    """A head with 12,000 words: whole, its factor would have 576 MB, and the inverse as much."""
    torch.manual_seed(0)
    model = nn.Linear(8, 12_000)
    optimizer = KFAC(model, 0.1, largest=150)
    F.cross_entropy(model(torch.randn(32, 8)), torch.randint(0, 12_000, (32,))).backward()
    optimizer.step()
    block = optimizer.blocks[0]
    assert (block.g_pieces, block.a_pieces, block.g_shape) == (80, 1, (80, 150, 150))
    assert optimizer.memory_bytes()["factors"] == optimizer.memory_bytes()["inverses"] == 4 * (80 * 150**2 + 9**2)
    assert all(one.isfinite().all() for one in model.parameters())


def test_a_plan_says_where_to_split() -> None:
    model = nn.Linear(8, 30)
    one = discover(model)[0]
    plan = plan_blocks([Block(name=one.name, a=one.a, g=one.g)], largest=8)
    assert KFAC(model, 0.1, plan=plan).blocks[0].g_shape == (4, 8, 8)
    assert KFAC(model, 0.1, plan=plan, largest=5).blocks[0].g_shape == (6, 5, 5)


def test_the_report_says_what_is_split() -> None:
    model = nn.Sequential(nn.Linear(9000, 20), nn.Linear(20, 3))
    why = {one.name: one.why for one in coverage(model).lines}
    assert why["0.weight"] == "linear map, inputs split in 2" and why["1.weight"] == "linear map"
    blocks = KFAC(model, largest=7).blocks
    assert coverage(model, blocks).lines[2].why == "linear map, inputs split in 3"
    assert coverage(model, blocks).lines[0].why == "linear map, outputs split in 3, inputs split in 1286"


@pytest.mark.parametrize("largest", [0, -3, 2.5, "8k", True, None])
def test_a_largest_that_is_none_is_named(largest: Any) -> None:
    with pytest.raises(OptimError, match=r"largest=.*: give a whole number of at least 1"):
        chosen(discover(nn.Linear(3, 3)), (), largest)


# ---- products of half-precision parts ----------------------------------------------------------------------------


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_products_of_halves_are_accurate_enough_for_badly_conditioned_inverses() -> None:
    """Eigenvalues that fall as 1/i^2, the default damping, gradients that are larger where the curvature is."""
    dice = torch.Generator().manual_seed(0)
    copies, n, damping = 2, 100, 1e-4**0.5
    roots = torch.linalg.qr(torch.randn(copies, n, n, generator=dice, dtype=torch.float64))[0]
    values = torch.arange(1.0, n + 1, dtype=torch.float64) ** -2
    values /= values.mean()
    inverse = (roots * (values + damping).reciprocal() @ roots.mT).float()
    inverse = (inverse + inverse.mT) / 2
    noise = torch.randn(copies, 50, n, generator=dice, dtype=torch.float64)
    gradient = (1e-7 * noise @ (roots * values.sqrt() @ roots.mT)).float()
    wanted = gradient.double() @ inverse.double()
    found, unit = Split(inverse, copies).right_of(gradient)
    turned, other = Split(inverse, copies).left_of(gradient.mT)
    rounded = [((one.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double() for one in (gradient, inverse)]
    rough = error(rounded[0] @ rounded[1], wanted)
    assert error(found * unit, wanted) < 1e-4 and error((turned * other).mT, wanted) < 1e-4
    assert rough > 1e-3 and rough > 100 * error(found * unit, wanted), "what eleven bits alone would make of it"


@pytest.mark.parametrize("name", MODELS)
def test_a_stack_whose_products_are_split_gives_the_same(name: str) -> None:
    _, optimizer, _ = looked(name, LARGEST)
    dice = torch.Generator().manual_seed(3)
    for group in stacks.alike(optimizer.blocks, optimizer.kept):
        gradients = torch.randn(stacks.room(group), generator=dice)
        plain, halves = torch.zeros_like(gradients), torch.zeros_like(gradients)
        stacks.Stack(group, optimizer.kept, gradients, plain, split=False).apply()
        stacks.Stack(group, optimizer.kept, gradients, halves, split=True).apply()
        assert plain.norm() > 0
        assert error(halves, plain.double()) < 1e-5


def test_gradients_that_are_not_finite_are_not_hidden_by_splitting() -> None:
    inverse = torch.eye(6)[None]
    for bad in (float("inf"), float("nan")):
        gradient = torch.ones(1, 3, 6)
        gradient[0, 1, 2] = bad
        found, unit = Split(inverse, 1).right_of(gradient)
        assert not (found * unit).isfinite().all()
    found, unit = Split(inverse, 1).right_of(torch.zeros(1, 3, 6))
    assert torch.equal(found * unit, torch.zeros(1, 3, 6))


def test_what_the_user_allows_for_products_stays_allowed() -> None:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32"
    try:
        with exactly(torch.device("cuda")):
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == "tf32"
        with pytest.raises(OptimError), exactly(torch.device("cuda")):
            chosen([], (), 0)
        assert setting.fp32_precision == "tf32"
        with exactly(torch.device("cpu")):
            assert setting.fp32_precision == "tf32"
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize("largest", [4, 100])
def test_layers_of_a_shape_are_stacked_whatever_their_pieces_and_their_memory(largest: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)), nn.Flatten(), nn.Linear(48, 2))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = KFAC(model, 0.01, largest=largest)
    x = torch.randn(5, 3, 4, 4)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(5, 2)).backward()
        optimizer.step()
    optimizer._curving.disarm()
    with torch.no_grad():
        direction = optimizer.directions.find()
        assert [len(one.blocks) for one in optimizer.directions.stacks] == [3, 1]
        steps = dict(zip(map(id, direction.parameters), direction.tensors(), strict=True))
        slope = 0.0
        for block in optimizer.blocks:
            gradient = block.matrix(block.weight.grad, block.bias.grad if block.bias is not None else None)
            wanted = optimizer.kept[block.index].apply(gradient)
            slope += float((wanted * gradient).sum())
            close(block.matrix(steps[id(block.weight)], steps[id(block.bias)]), wanted, 1e-5)
    assert float(direction.along) == pytest.approx(slope, rel=1e-5)
