"""The problems that optimizers are compared on: solvers that converge, data that stay the same, networks of the stated
size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks import optim_pde as pde
from benchmarks import optim_problems as problems
from benchmarks import optim_samples as samples
from benchmarks.optim_problems import PROBLEMS
from diamond.optim.pinn import Jet


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- Burgers -------------------------------------------------------------------------------------------------------


def test_half_the_time_step_changes_nothing_of_burgers() -> None:
    start = pde.burgers_start(16, seeded())
    coarse, fine = pde.burgers(start), pde.burgers(start, steps=2 * pde.BURGERS_STEPS)
    assert float((coarse - fine).abs().max()) < 1e-6


def test_twice_the_points_change_nothing_of_burgers() -> None:
    start = pde.burgers_start(4, seeded())
    waves = torch.fft.rfft(start, norm="forward")
    finer = torch.fft.irfft(torch.nn.functional.pad(waves, (0, 128)), n=512, norm="forward")
    assert torch.allclose(finer[:, ::2], start, atol=1e-12)
    assert float((pde.burgers(finer, steps=800)[:, ::2] - pde.burgers(start)).abs().max()) < 1e-6


def test_burgers_loses_energy_and_keeps_its_mean() -> None:
    start = pde.burgers_start(32, seeded(1)) + 0.1
    energies = [start.square().mean(dim=1)]
    for time in (0.25, 0.5, 1.0):
        u = pde.burgers(start, time=time)
        assert torch.allclose(u.mean(dim=1), start.mean(dim=1), atol=1e-12)
        energies.append(u.square().mean(dim=1))
    assert all(bool((later < earlier).all()) for earlier, later in itertools.pairwise(energies))


def test_a_weak_wave_only_decays() -> None:
    """Where u is so small that u u_x vanishes, Burgers' equation is the heat equation."""
    x = torch.arange(256, dtype=torch.float64) / 256
    start = 1e-6 * torch.sin(2 * math.pi * x)[None]
    left = math.exp(-pde.VISCOSITY * 4 * math.pi**2)
    assert torch.allclose(pde.burgers(start), left * start, rtol=0, atol=1e-11)


def test_initial_fields_have_the_stated_covariance() -> None:
    fields = pde.burgers_start(20_000, seeded(2), points=32)
    waves = torch.fft.rfft(fields, norm="forward")
    for k in (1, 2, 5):
        assert float(waves[:, k].abs().square().mean()) == pytest.approx(
            (25 / ((2 * math.pi * k) ** 2 + 25)) ** 2, rel=0.05
        )


# ---- Darcy ---------------------------------------------------------------------------------------------------------


def test_darcy_agrees_with_a_direct_solver() -> None:
    permeability = pde.darcy_permeability(3, 8, seeded())
    unknowns = torch.eye(64, dtype=torch.float64).view(64, 8, 8)
    for one, found in zip(permeability, pde.darcy(permeability), strict=True):
        matrix = pde.Darcy(one.expand(64, 8, 8)).apply(unknowns).reshape(64, 64)
        assert torch.allclose(matrix, matrix.T)
        exact = torch.linalg.solve(matrix, torch.ones(64, dtype=torch.float64))
        assert torch.allclose(found.flatten(), exact, rtol=1e-8)


def test_darcy_is_solved_to_its_residual_on_the_real_grid() -> None:
    permeability = pde.darcy_permeability(8, 64, seeded(1))
    assert set(permeability.unique().tolist()) == {3.0, 12.0}
    pressure = pde.darcy(permeability)
    assert float(pde.Darcy(permeability).residual(pressure).max()) < 1e-8
    assert float(pressure.min()) > 0


def test_darcy_with_one_permeability_is_poisson() -> None:
    """The middle of the unit square under -Laplace u = 1 is at 0.0736713."""
    pressure = pde.darcy(torch.full((1, 64, 64), 3.0, dtype=torch.float64))[0]
    assert 3 * float(pressure[31:33, 31:33].mean()) == pytest.approx(0.0736713, rel=1e-3)


# ---- data ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "NUMBERS", {"train": 6, "validation": 3, "test": 3})


@pytest.mark.parametrize("make", [problems.burgers_data, problems.darcy_data])
@pytest.mark.usefixtures("few_samples")
def test_fields_are_the_same_again_and_in_one_split_alone(make: Callable[[int], dict[str, problems.Data]]) -> None:
    once, again, other = make(0), make(0), make(1)
    for split in samples.SPLITS:
        assert all(torch.equal(a, b) for a, b in zip(once[split], again[split], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(once[split], other[split], strict=True))
    together = torch.cat([once[split][0].flatten(1) for split in samples.SPLITS])
    assert len(together.unique(dim=0)) == len(together) == 12
    assert float(once["train"][1].std()) == pytest.approx(1.0, rel=1e-3)


def test_digits_are_the_same_again_and_in_one_split_alone() -> None:
    parts = [samples.digits(60, seed) for seed in (0, 1, 2)]
    assert torch.equal(parts[0], samples.digits(60, 0))
    assert len(torch.cat(parts).unique(dim=0)) == 180


def test_digits_are_drawings() -> None:
    images = samples.digits(200, 0)
    assert images.shape == (200, 784)
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    ink = (images > 0.5).float().mean(dim=1)
    assert float(ink.min()) > 0.02
    assert float(ink.max()) < 0.4
    border = images.view(-1, 28, 28)[:, 0].mean()
    assert float(border) < 0.05


def test_text_is_divided_by_files() -> None:
    parts = {split: samples.source_split(split) for split in samples.SPLITS}
    together = [path for files in parts.values() for path in files]
    assert sorted(together) == sorted(samples.source_files())
    assert len(set(together)) == len(together)
    assert len(parts["train"]) == pytest.approx(0.9 * len(together), abs=2)
    text = samples.source_text("validation")
    assert text.dtype == torch.uint8
    assert parts["validation"][0].read_bytes() == bytes(text[: parts["validation"][0].stat().st_size].tolist())


def test_points_of_poisson_are_inside_on_the_boundary_and_never_shared() -> None:
    data = problems.poisson_data(0)
    inside, boundary = data["train"]
    assert inside.shape == (900, 2)
    assert boundary.shape == (120, 2)
    assert bool(((boundary == 0) | (boundary == 1)).any(dim=1).all())
    assert bool(((inside > 0) & (inside < 1)).all())
    grids = torch.cat([data["validation"][0], data["test"][0]])
    assert len(grids.unique(dim=0)) == len(grids) == 50**2 + 101**2


def test_batches_go_round_all_samples() -> None:
    data = (torch.arange(10),)
    batches = problems.shuffled(data, 5, seed=3)
    rounds = [torch.cat([next(batches)[0], next(batches)[0]]) for _ in range(2)]
    assert all(sorted(one.tolist()) == list(range(10)) for one in rounds)
    assert not torch.equal(*rounds)
    assert torch.equal(next(problems.shuffled(data, 5, seed=3))[0], rounds[0][:5])


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split='dev' is none of train, validation, test"):
        PROBLEMS["poisson"].data("dev")


# ---- networks ------------------------------------------------------------------------------------------------------

SIZES = {
    "burgers": 128 * 384 + 384 + 2 * (384 * 384 + 384) + 384 * 128 + 128,
    "poisson": 2 * 64 + 64 + 2 * (64 * 64 + 64) + 64 + 1,
    "digits": 1_106_564,
    "digits-wide": 2_837_314,
}


def parameters(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_networks_have_the_stated_size_and_depend_on_the_seed_alone(name: str) -> None:
    problem = PROBLEMS[name]
    before = torch.random.get_rng_state()
    model, again, other = problem.model(1), problem.model(1), problem.model(2)
    assert torch.equal(before, torch.random.get_rng_state())
    weights, same, different = (next(iter(one.parameters())) for one in (model, again, other))
    assert torch.equal(weights, same)
    assert not torch.equal(weights, different)
    names = dict(model.named_parameters())
    assert all(f"{head}.weight" in names for head in problem.heads)
    number = parameters(model)
    if name in SIZES:
        assert number == SIZES[name]
    elif name == "darcy":
        assert 100_000 < number < 300_000
    elif name == "source":
        assert 10e6 < number < 12e6


@pytest.mark.parametrize(("waves", "wrong"), [(1, 3), (3, 1)])
def test_the_exact_solution_of_poisson_has_no_loss(waves: int, wrong: int) -> None:
    inside, boundary = problems.poisson_data(0)["train"]
    equation, edge = problems.poisson_network(waves).conditions

    def loss(exact: int) -> float:
        u, outside = problems.poisson_exact(exact, inside)[:, None], problems.poisson_exact(exact, boundary)[:, None]
        none = torch.zeros(0)
        left = equation.residual(inside, Jet(u, none, -2 * (exact * math.pi) ** 2 * u[None]))
        return float(
            equation.weight * left.square().mean() + edge.residual(boundary, Jet(outside, none, none)).square().mean()
        )

    assert loss(waves) < 1e-9
    assert loss(wrong) > 1.0


def test_the_exact_solution_of_heat_has_no_loss() -> None:
    inside, boundary, initial = problems.heat_data(0)["train"]
    equation, edge, start = problems.heat_network().conditions
    u, none = problems.heat_exact(inside)[:, None], torch.zeros(0)
    rate = -2 * math.pi**2 * problems.DIFFUSIVITY
    left = equation.residual(inside, Jet(u, rate * u[None], -2 * math.pi**2 * u[None]))
    assert float(left.abs().max()) < 1e-5
    for condition, points in ((edge, boundary), (start, initial)):
        value = problems.heat_exact(points)[:, None]
        assert float(condition.residual(points, Jet(value, none, none)).abs().max()) < 1e-5
    assert float(start.residual(boundary, Jet(torch.ones(120, 1), none, none)).abs().max()) > 0.9


def test_the_transformer_does_not_look_ahead() -> None:
    model = PROBLEMS["source-tiny"].model(0)
    text = torch.randint(256, (2, 20), generator=seeded())
    changed = text.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_an_untrained_transformer_needs_eight_bits_a_byte() -> None:
    problem = PROBLEMS["source-tiny"]
    assert problem.metric(problem.model(0), "validation") == pytest.approx(8.0, abs=0.3)


@pytest.mark.parametrize(("name", "shape"), [("darcy", (2, 64, 64)), ("darcy-fno", (2, 64, 64)), ("burgers", (2, 128))])
def test_operators_give_fields_of_the_same_size(name: str, shape: tuple[int, ...]) -> None:
    problem = PROBLEMS[name]
    field, model = torch.randn(shape, generator=seeded()), problem.model(0)
    assert model(field).shape == shape
    problem.loss(model, (field, field)).backward()
    assert all(one.grad is not None and bool(one.grad.isfinite().all()) for one in model.parameters())
    assert problems.relative_l2(lambda inputs: 0.9 * inputs, (field, field)) == pytest.approx(0.1, rel=1e-4)  # type: ignore[arg-type]
