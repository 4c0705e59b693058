"""Inverses against numpy in double precision, and what happens where a matrix is hopeless."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from diamond.optim import solvers
from diamond.optim.errors import OptimError
from diamond.optim.solvers import Background, block_sizes, inverses

HOW = ("auto", "cholesky", "newton-schulz", "eigen")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(autouse=True, params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """All that a test makes lives there."""
    with torch.device(request.param):
        yield request.param


def spd(n: int, seed: int, low: float = 0.5, high: float = 4.0) -> torch.Tensor:
    """Symmetric, with eigenvalues from low to high, evenly in their logarithms; in double precision."""
    dice = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(dice.normal(size=(n, n)))
    lower = np.tril((basis * np.geomspace(low, high, n)) @ basis.T)
    return torch.from_numpy(lower + np.tril(lower, -1).T).to(torch.get_default_device())


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=shape)).to(torch.get_default_device())


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


def reference(matrix: torch.Tensor, damping: float) -> np.ndarray:
    return np.linalg.inv(array(matrix) + damping * np.eye(len(matrix)))


def error(found: torch.Tensor | None, wanted: np.ndarray) -> float:
    assert found is not None
    return float(np.linalg.norm(array(found) - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_inverses_of_mixed_shapes(how: str, dtype: torch.dtype, close: float) -> None:
    sizes = [5, 1, 33, 5, 64, 1, 33, 5]
    matrices = [spd(n, seed).to(dtype) for seed, n in enumerate(sizes)]
    dampings = [0.01 * (1 + at) for at in range(len(sizes))]
    found = inverses(matrices, dampings, how)
    assert len(found) == len(sizes)
    for one, matrix, damping in zip(found, matrices, dampings, strict=True):
        assert one.inverse is not None and one.inverse.dtype == dtype and one.inverse.shape == matrix.shape
        assert error(one.inverse, reference(matrix, damping)) < close
        assert torch.equal(one.inverse, one.inverse.mT)
        assert (one.retries, one.damping) == (0, pytest.approx(damping))
        assert one.method == ("cholesky" if how == "auto" else how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("damping", [1e-12, 1e-6, 1e-2, 1e3])
def test_ill_conditioned_matrices(how: str, damping: float) -> None:
    """In double precision 18 orders of magnitude do not fit, but what the damping lifts them to does."""
    matrix = spd(40, 3, low=1e-12, high=1e6)
    [one] = inverses([matrix], [damping], how)
    assert one.inverse is not None and one.damping >= damping
    condition = (1e6 + one.damping) / one.damping
    if condition < 1e13:
        assert one.damping == damping and error(one.inverse, reference(matrix, damping)) < condition * 1e-14
    eigenvalues = np.linalg.eigvalsh(array(one.inverse))
    assert eigenvalues.max() < 2 / damping and eigenvalues.min() > -1e-3 * eigenvalues.max()


def test_single_precision_raises_the_damping_where_it_must() -> None:
    matrix = spd(60, 4, low=1e-12, high=1e6).float()
    [one] = inverses([matrix], [1e-12])
    assert one.inverse is not None and one.retries >= 1 and 1e-12 < one.damping < 0.1 * float(matrix.diagonal().mean())
    assert np.linalg.eigvalsh(array(one.inverse)).max() > 0
    for direction in normal(20, 60).float():
        assert direction @ one.inverse @ direction > 0, "a step along it goes down"


@pytest.mark.parametrize("how", HOW)
def test_singular_matrices_without_damping(how: str) -> None:
    ones, zeros = torch.ones(8, 8), torch.zeros(8, 8)
    found = inverses([ones, zeros, torch.eye(8)], [0.0, 0.0, 0.0], how)
    assert all(one.inverse is not None and one.inverse.isfinite().all() for one in found)
    assert all(one.damping > 0 and one.retries > 0 for one in found[:2])
    assert found[2].damping == 0 and error(found[2].inverse, np.eye(8)) < 1e-6


def test_only_the_failed_ones_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    honest = solvers._COMPUTE["cholesky"]
    monkeypatch.setitem(solvers._COMPUTE, "cholesky", lambda stack, d: (tried.append(len(stack)), honest(stack, d))[1])
    bad = torch.diag(torch.tensor([1.0, -0.005, 1.0]))
    found = inverses([torch.eye(3), bad, torch.eye(3)], [1e-3, 1e-3, 1e-3])
    assert tried == [3, 1]
    assert [one.retries for one in found] == [0, 1, 0] and found[1].damping == pytest.approx(1e-2)
    assert error(found[1].inverse, reference(bad, 1e-2)) < 1e-5


def test_what_is_indefinite_gives_none() -> None:
    found = inverses([torch.eye(4), -torch.eye(4)], [1e-9, 1e-9])
    assert found[0].inverse is not None
    assert found[1].inverse is None and found[1].method == "none" and found[1].retries > 5


def test_double_precision_saves_what_overflows() -> None:
    tiny = torch.eye(3) * 1e-39
    [one] = inverses([tiny], [0.0], out_dtype=torch.float64)
    assert one.method == "cholesky/fp64" and error(one.inverse, np.eye(3) * 1e39) < 1e-3
    [none] = inverses([tiny], [1e-39])
    assert none.inverse is None or none.inverse.isfinite().all(), "never what its type cannot hold"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_harms_nobody_else(how: str, poison: float) -> None:
    good = [spd(6, seed).float() for seed in range(3)]
    bad = good[1].clone()
    bad[4, 2] = bad[2, 4] = poison
    found = inverses([good[0], bad, good[2], good[1]], [0.1, 0.1, 0.1, float("nan")], how)
    assert found[1].inverse is None and found[1].method == "none"
    assert found[3].inverse is None, "so for a damping that is none"
    for at, matrix in ((0, good[0]), (2, good[2])):
        assert error(found[at].inverse, reference(matrix, 0.1)) < 1e-4


def test_nothing_and_the_smallest() -> None:
    assert inverses([], []) == []
    [one, empty] = inverses([torch.tensor([[3.0]]), torch.zeros(0, 0)], [1.0, 1.0])
    assert one.inverse is not None and one.inverse.item() == pytest.approx(0.25)
    assert empty.inverse is not None and empty.inverse.shape == (0, 0)


def test_a_vector_is_a_diagonal_matrix() -> None:
    found = inverses([torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]), torch.tensor([float("nan"), 1.0])], [1, 0, 1])
    assert found[0].inverse is not None and found[0].inverse.tolist() == [0.5, 0.25]
    assert found[1].inverse is not None and found[1].damping > 0 and found[1].inverse.isfinite().all()
    assert found[2].inverse is None


def test_dampings_may_be_tensors_and_types_may_differ() -> None:
    matrices = [spd(7, seed).float() for seed in range(3)]
    found = inverses(matrices, [torch.tensor(0.5), 0.25, torch.tensor([0.125])], out_dtype=torch.float64)
    for one, matrix, damping in zip(found, matrices, (0.5, 0.25, 0.125), strict=True):
        assert one.inverse is not None and one.inverse.dtype == torch.float64 and one.damping == damping
        assert error(one.inverse, reference(matrix, damping)) < 1e-5


def test_chunks_and_autocast_and_gradients_change_nothing(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    matrices = [spd(16, seed).float().requires_grad_() for seed in range(9)]
    for how in HOW:
        whole = inverses(matrices, [0.1] * 9, how)
        with monkeypatch.context() as smaller, torch.autocast(device, dtype=torch.bfloat16):
            smaller.setattr(solvers, "CHUNK_BYTES", 2 * 16 * 16 * 4 * solvers._WORKING_COPIES)
            parts = inverses(matrices, [0.1] * 9, how)
        for one, other in zip(whole, parts, strict=True):
            assert one.inverse is not None and other.inverse is not None and not one.inverse.requires_grad
            assert torch.allclose(one.inverse, other.inverse, rtol=1e-5, atol=1e-6)


def test_newton_schulz_hands_over_what_does_not_converge() -> None:
    hard, easy = spd(30, 1, low=1e-9, high=1e3), spd(30, 2)
    found = inverses([hard, easy], [0.0, 0.0], "newton-schulz")
    assert (found[0].method, found[1].method) == ("cholesky", "newton-schulz")
    assert error(found[0].inverse, reference(hard, found[0].damping)) < 1e-2


def test_bad_arguments_are_named() -> None:
    eye = torch.eye(2)
    for matrices, dampings, how, said in [
        ([eye], [1.0], "qr", "how='qr'.*cholesky"),
        ([eye], [], "auto", "dampings has 0 values for 1"),
        ([eye], [-1.0], "auto", r"dampings\[0\] is -1"),
        ([eye], [torch.ones(2)], "auto", r"dampings\[0\]"),
        ([torch.ones(2, 3)], [1.0], "auto", r"matrices\[0\] has shape \(2, 3\)"),
        ([eye, eye.long()], [1.0, 1.0], "auto", r"matrices\[1\] is of torch.int64"),
    ]:
        with pytest.raises(OptimError, match=said):
            inverses(matrices, dampings, how)


def test_blocks_of_large_dimensions() -> None:
    assert block_sizes(10, 4) == [4, 3, 3] and block_sizes(8, 4) == [4, 4] and block_sizes(3, None) == [3]
    assert all(sum(block_sizes(n, 7)) == n and max(block_sizes(n, 7)) <= 7 for n in range(1, 100))
    with pytest.raises(OptimError, match="largest=0"):
        block_sizes(10, 0)


# ---- in the background -----------------------------------------------------------------------------------------------


def test_the_background_computes_what_it_was_given() -> None:
    matrix = spd(20, 5)
    before = matrix.clone()
    with Background() as background:
        assert background.submit("a", [matrix], [0.1])
        matrix.zero_()
        assert not background.submit("a", [matrix], [0.1]), "one at a time"
        [one] = background.wait("a")
        assert background.ready("a") is None, "a result is taken once"
        assert background.submit("a", [matrix], [0.1]), "and then the next"
    assert error(one.inverse, reference(before, 0.1)) < 1e-12


def test_ready_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    honest = solvers._COMPUTE["cholesky"]
    monkeypatch.setitem(solvers._COMPUTE, "cholesky", lambda stack, d: (go.wait(20), honest(stack, d))[1])
    with Background() as background:
        background.submit(7, [torch.eye(3)], [1.0])
        assert background.ready(7) is None and background.ready("other") is None
        go.set()
        assert background.wait(7)[0].inverse is not None


def test_with_a_lag_all_ranks_switch_at_the_same_step() -> None:
    with Background(lag=3) as background:
        background.submit("a", [spd(50, 1)], [0.1], step=10)
        background._flying["a"].future.result()
        assert [background.ready("a", step=step) is None for step in (10, 11, 12, 13, 14)] == [
            True, True, True, False, True,
        ]  # fmt: skip
        background.submit("b", [spd(200, 1)] * 20, [0.1] * 20, step=20)
        found = background.ready("b", step=23)
        assert found is not None and len(found) == 20, "it waits, done or not"


def test_what_goes_wrong_in_the_background_is_told() -> None:
    background = Background()
    background.submit("a", [torch.eye(3)], [1.0], how="magic")
    with pytest.raises(OptimError, match="how='magic'"):
        background.wait("a")
    with pytest.raises(OptimError, match="nothing is under way for 'a'"):
        background.wait("a")
    background.submit("b", [torch.eye(3)], [1.0])
    background.close()
    background.close()
    with pytest.raises(OptimError, match="closed"):
        background.submit("a", [torch.eye(3)], [1.0])
    with pytest.raises(OptimError, match="lag=-1"):
        Background(lag=-1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("diamond-solver")]
