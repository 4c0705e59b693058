"""Symmetric matrices in one buffer, and out of it again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diamond.optim.compress import FACTORS, pack, unpack
from diamond.optim.compress.triangle import FILTER
from diamond.optim.errors import OptimError

CODED = ("int8-tri", "filtered8-tri", "filtered4-tri")


def factor(side: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """As K-FAC has them: positive definite, with rows of very different size."""
    samples = torch.randn(2 * side, side, generator=torch.Generator().manual_seed(seed))
    samples = samples * torch.logspace(-spread, spread, side)
    product = samples.T @ samples / side
    return (product + product.T) / 2


def sparse_factor(side: int) -> torch.Tensor:
    """Neighbours are correlated, others hardly."""
    at = torch.arange(side)
    return torch.exp(-(at[:, None] - at[None, :]).abs().float() / 2)


@pytest.mark.parametrize("how", FACTORS)
def test_round_trip_is_symmetric_with_the_diagonal_positive(how: str) -> None:
    given = [factor(side, seed) for seed, side in enumerate((1, 2, 7, 33, 64))]
    packed = pack(given, how)
    got = unpack(packed)
    assert [one.shape for one in got] == [one.shape for one in given]
    for one, true in zip(got, given, strict=True):
        assert torch.equal(one, one.T) and bool((one.diagonal() > 0).all())
        if how in ("none", "tri"):
            assert torch.equal(one, true)
        if how in CODED:
            assert torch.equal(one.diagonal(), true.diagonal())


@pytest.mark.parametrize(("how", "levels"), [("int8-tri", 127), ("filtered8-tri", 127), ("filtered4-tri", 7)])
@pytest.mark.parametrize("side", [3, 50])
def test_errors_are_small_against_the_units_of_row_and_column(how: str, levels: int, side: int) -> None:
    for true in (factor(side), sparse_factor(side)):
        unit = true.diagonal().sqrt()
        shares = true / torch.outer(unit, unit)
        largest = float((shares - torch.eye(side)).abs().max())
        error = ((unpack(pack([true], how))[0] - true) / torch.outer(unit, unit)).abs()
        dropped = FILTER * largest if how.startswith("filtered") else 0.0
        assert float(error.max()) <= max(dropped, largest / levels / 2) * 1.001 + 1e-6


def test_bytes_are_what_was_promised() -> None:
    true = [sparse_factor(100)]
    beside = 100 * 99 // 2
    kept = int((sparse_factor(100).triu(1) >= FILTER * sparse_factor(100)[0, 1]).sum())
    assert 0 < kept < beside // 4
    sizes = {how: pack(true, how).nbytes for how in FACTORS}
    assert sizes == {
        "none": 40_000,
        "tri": 4 * 5050,
        "bf16-tri": 2 * 5050,
        "int8-tri": 8 + 400 + beside,
        "filtered8-tri": 8 + 400 + -(-beside // 8) + kept,
        "filtered4-tri": 8 + 400 + -(-beside // 8) + -(-kept // 2),
    }


def test_a_dense_matrix_is_not_made_longer_by_its_filter() -> None:
    dense = 0.5 * torch.eye(40) + 0.5
    assert pack([dense], "filtered8-tri").nbytes == pack([dense], "int8-tri").nbytes


@pytest.mark.parametrize("how", ["tri", "bf16-tri"])
def test_buffers_of_ranks_may_be_summed(how: str) -> None:
    first, second = pack([factor(20, 1)], how), pack([factor(20, 2)], how)
    assert first.summable and not pack([factor(20)], "int8-tri").summable
    total = unpack(replace(first, buffer=first.buffer + second.buffer))[0]
    true = factor(20, 1) + factor(20, 2)
    unit = true.diagonal().sqrt()
    most = 0.01 if how == "bf16-tri" else 1e-6
    assert float(((total - true) / torch.outer(unit, unit)).abs().max()) < most


@pytest.mark.parametrize("how", FACTORS)
def test_what_is_not_finite_stays_so(how: str) -> None:
    spoiled = factor(10)
    spoiled[2, 5] = spoiled[5, 2] = float("nan")
    assert not bool(unpack(pack([spoiled], how))[0].isfinite().all())


@pytest.mark.parametrize("how", FACTORS)
def test_zeros_diagonals_and_types_come_back(how: str) -> None:
    given = [torch.zeros(6, 6), torch.eye(5), torch.eye(3, dtype=torch.float64), torch.empty(0, 0)]
    got = unpack(pack(given, how))
    for one, true in zip(got, given, strict=True):
        assert torch.equal(one, true) and one.dtype == true.dtype
    assert unpack(pack([], how)) == []


def test_bad_input_is_named() -> None:
    with pytest.raises(OptimError, match=r"matrices\[1\] has the shape \(2, 3\)"):
        pack([torch.eye(2), torch.zeros(2, 3)], "tri")
    with pytest.raises(OptimError, match="factor='int7-tri'"):
        pack([torch.eye(2)], "int7-tri")
