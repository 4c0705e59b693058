"""What optimizers are compared on: six problems, all computed here, each with training, validation and test data.

Methods are tuned on validation data and measured on test data. `PROBLEMS` has them by name; those with a second form
(wider, for GPUs, or tiny, to try things) have a name each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks import optim_networks as networks
from benchmarks import optim_pde as pde
from benchmarks import optim_samples as samples
from diamond.optim import pinn

Data = tuple[Tensor, ...]
Batches = Callable[[Data, int, int], Iterator[Data]]
NUMBERS = {"train": 1000, "validation": 200, "test": 200}  # samples of each differential equation
_SEEDS = {"train": 0, "validation": 1, "test": 2}
DIFFUSIVITY = 0.1  # of the heat equation


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One thing to learn.

    Attributes:
        device: what it is meant for: "cpu" or "cuda".
        samples: all splits, from a seed.
        network: made anew at every call, from torch's global random numbers.
        loss: of a model and a batch.
        measure: the metric of a model on a split; lower is better.
        batches: of the training data, for ever, from a size and a seed.
        steps: the horizon at which AdamW is tuned.
        evaluations: of the metric along the way.
        heads: names of the output layers, which Muon leaves to AdamW.
        whole: the training data fit into one batch, so that L-BFGS applies.
        targets: further values of the metric to reach, besides AdamW's.
        aim: how many times faster than the best first-order method K-FAC is to be.
    """

    name: str
    about: str
    device: str
    samples: Callable[[int], dict[str, Data]]
    network: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Data], Tensor]
    measure: Callable[[nn.Module, Data], float]
    batches: Batches
    batch_size: int
    steps: int
    metric_name: str
    evaluations: int = 100
    heads: tuple[str, ...] = ()
    whole: bool = False
    targets: tuple[float, ...] = ()
    aim: float | None = 1.5

    def data(self, split: str, seed: int = 0) -> Data:
        """Computed once, kept in memory."""
        return _placed(self.samples, split, seed, "cpu")

    def data_on(self, device: str, split: str, seed: int = 0) -> Data:
        return _placed(self.samples, split, seed, device)

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def metric(self, model: nn.Module, split: str) -> float:
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                return self.measure(model, self.data_on(str(device), split))
        finally:
            model.train(was_training)


@cache
def _splits(make: Callable[[int], dict[str, Data]], seed: int) -> dict[str, Data]:
    return make(seed)


@cache
def _placed(make: Callable[[int], dict[str, Data]], split: str, seed: int, device: str) -> Data:
    if split not in samples.SPLITS:
        raise ValueError(f"split={split!r} is none of {', '.join(samples.SPLITS)}")
    return tuple(one.to(device) for one in _splits(make, seed)[split])


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- batches -------------------------------------------------------------------------------------------------------


def shuffled(data: Data, size: int, seed: int) -> Iterator[Data]:
    """Every sample once before any comes twice; what is left over at the end of a round is dropped."""
    generator = _generator(seed)
    while True:
        order = torch.randperm(len(data[0]), generator=generator).to(data[0].device)
        for part in order[: len(order) // size * size].split(size):
            yield tuple(one[part] for one in data)


def all_at_once(data: Data, size: int, seed: int) -> Iterator[Data]:
    while True:
        yield data


def windows(context: int, data: Data, size: int, seed: int) -> Iterator[Data]:
    """Pieces of a text from anywhere, one byte longer than the context: the last is only predicted."""
    (text,) = data
    generator = _generator(seed)
    along = torch.arange(context + 1, device=text.device)
    while True:
        starts = torch.randint(len(text) - context, (size, 1), generator=generator).to(text.device)
        yield (text[starts + along].long(),)


# ---- fields to fields: Burgers and Darcy ---------------------------------------------------------------------------


def _in_splits(inputs: Tensor, outputs: Tensor) -> dict[str, Data]:
    """As float32, outputs scaled by their deviation in the training data."""
    scale = outputs[: NUMBERS["train"]].std()
    numbers = list(NUMBERS.values())
    parts = zip(NUMBERS, inputs.float().split(numbers), (outputs / scale).float().split(numbers), strict=True)
    return {split: (one, other) for split, one, other in parts}


def burgers_data(seed: int) -> dict[str, Data]:
    start = pde.burgers_start(sum(NUMBERS.values()), _generator(seed))
    seen = slice(None, None, pde.BURGERS_POINTS // 128)
    inputs = start[:, seen] / start[: NUMBERS["train"]].std()
    return _in_splits(inputs, pde.burgers(start)[:, seen])


def darcy_data(seed: int) -> dict[str, Data]:
    permeability = pde.darcy_permeability(sum(NUMBERS.values()), 64, _generator(seed))
    return _in_splits((permeability - 7.5) / 4.5, pde.darcy(permeability))


def regression_loss(model: nn.Module, batch: Data) -> Tensor:
    inputs, truth = batch
    return F.mse_loss(model(inputs), truth)


def relative_l2(model: nn.Module, data: Data) -> float:
    """The mean over samples."""
    inputs, truth = data
    found = torch.cat([model(part) for part in inputs.split(100)])
    return float(((found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).mean())


# ---- Poisson and heat: networks that are solutions -----------------------------------------------------------------


def poisson_exact(waves: int, points: Tensor) -> Tensor:
    return torch.sin(waves * math.pi * points).prod(dim=-1)


def poisson_network(waves: int) -> nn.Module:
    """-Laplace u = f and u = 0 on the boundary; both sides of the equation divided by waves^2."""
    return pinn.poisson(
        networks.perceptron((2, 64, 64, 64, 1), nn.Tanh),
        source=lambda points: 2 * (waves * math.pi) ** 2 * poisson_exact(waves, points),
        weight=waves**-4,
    )


def poisson_data(seed: int) -> dict[str, Data]:
    """Training: 900 points inside and 120 on the boundary. The other splits are grids that share no point."""
    generator = _generator(seed)
    inside = torch.rand(900, 2, generator=generator)
    return {"train": (inside, _edges(30, generator)), "validation": (_grid(50),), "test": (_grid(101),)}


def heat_exact(points: Tensor) -> Tensor:
    return torch.sin(math.pi * points[:, :2]).prod(dim=1) * torch.exp(-2 * math.pi**2 * DIFFUSIVITY * points[:, 2])


def heat_network() -> nn.Module:
    return pinn.heat(networks.perceptron((3, 64, 64, 64, 1), nn.Tanh), initial=heat_exact, diffusivity=DIFFUSIVITY)


def heat_data(seed: int) -> dict[str, Data]:
    """Training: 900 points inside, 120 on the boundary and 120 in the beginning. The other splits as for Poisson."""
    generator = _generator(seed)
    inside = torch.rand(900, 3, generator=generator)
    boundary = torch.cat([_edges(30, generator), torch.rand(120, 1, generator=generator)], dim=1)
    initial = torch.cat([torch.rand(120, 2, generator=generator), torch.zeros(120, 1)], dim=1)
    return {"train": (inside, boundary, initial), "validation": (_grid(20, 3),), "test": (_grid(31, 3),)}


def _edges(number: int, generator: torch.Generator) -> Tensor:
    """So many points on each side of the unit square."""
    along, side = torch.rand(number, 4, generator=generator), torch.zeros(number)
    edges = [(along[:, 0], side), (along[:, 1], side + 1), (side, along[:, 2]), (side + 1, along[:, 3])]
    return torch.cat([torch.stack(edge, dim=1) for edge in edges])


def _grid(points: int, dimensions: int = 2) -> Tensor:
    along = (torch.arange(points) + 0.5) / points
    return torch.cartesian_prod(*[along] * dimensions)


def residual_loss(model: nn.Module, batch: Data) -> Tensor:
    """The sum over conditions of mean squares, as one sum of squares."""
    found: Tensor = model(*batch).square().sum()
    return found


def solution_error(exact: Callable[[Tensor], Tensor], model: nn.Module, data: Data) -> float:
    assert isinstance(model, pinn.Residuals)
    truth = exact(data[0])
    return float((model.net(data[0])[:, 0] - truth).norm() / truth.norm())


# ---- digits --------------------------------------------------------------------------------------------------------


def digits_data(seed: int) -> dict[str, Data]:
    numbers = {"train": 8000, "validation": 1000, "test": 1000}
    return {split: (samples.digits(number, 3 * seed + _SEEDS[split]),) for split, number in numbers.items()}


def reconstruction_loss(model: nn.Module, batch: Data) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[0])


def reconstruction_error(model: nn.Module, data: Data) -> float:
    """Squared error of an image, summed over its pixels, mean over images."""
    return float((model(data[0]).sigmoid() - data[0]).square().sum(dim=1).mean())


# ---- text ----------------------------------------------------------------------------------------------------------


def source_data(seed: int) -> dict[str, Data]:
    """The same for every seed: there is one standard library."""
    return {split: (samples.source_text(split),) for split in samples.SPLITS}


def text_loss(model: nn.Module, batch: Data) -> Tensor:
    text = batch[0]
    with torch.autocast(text.device.type, dtype=torch.bfloat16, enabled=text.is_cuda):
        guesses = model(text[:, :-1])
    return F.cross_entropy(guesses.float().flatten(0, 1), text[:, 1:].flatten())


def bits_per_byte(context: int, number: int, model: nn.Module, data: Data) -> float:
    """Over `number` windows, evenly spaced."""
    text = data[0]
    starts = torch.linspace(0, len(text) - context - 1, number, device=text.device).long()
    pieces = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    losses = [text_loss(model, (part,)) * len(part) for part in pieces.split(64)]
    return float(torch.stack(losses).sum()) / number / math.log(2)


# ---- the table -----------------------------------------------------------------------------------------------------

_FIELDS = {"loss": regression_loss, "measure": relative_l2, "batches": shuffled, "metric_name": "relative L2 error"}
_DIGITS = {
    "samples": digits_data,
    "loss": reconstruction_loss,
    "measure": reconstruction_error,
    "batches": shuffled,
    "batch_size": 200,
    "metric_name": "squared error per image",
    "heads": ("13",),
}


_SOLUTIONS = {
    "device": "cpu",
    "loss": residual_loss,
    "batches": all_at_once,
    "batch_size": 0,
    "metric_name": "relative L2 error",
    "evaluations": 200,
    "heads": ("net.6",),
    "whole": True,
}


def _poisson(name: str, waves: int, targets: tuple[float, ...]) -> Problem:
    return Problem(
        name=name,
        about=f"-Laplace u = f on the unit square by its residual, solution sin({waves} pi x) sin({waves} pi y); "
        "perceptron 2-64-64-64-1, tanh; 900 points inside and 120 on the boundary, all in every step",
        samples=poisson_data,
        network=partial(poisson_network, waves),
        measure=partial(solution_error, partial(poisson_exact, waves)),
        steps=5000,
        targets=targets,
        **_SOLUTIONS,  # type: ignore[arg-type]
    )


def _source(name: str, width: int, depth: int, context: int, number: int, **rest: object) -> Problem:
    return Problem(
        name=name,
        about=f"bytes of Python's standard library; transformer of width {width}, depth {depth}, context {context}",
        samples=source_data,
        network=partial(networks.Speaker, width, depth, width // 64, context),
        loss=text_loss,
        measure=partial(bits_per_byte, context, number),
        batches=partial(windows, context),
        metric_name="bits per byte",
        heads=("head",),
        **rest,  # type: ignore[arg-type]
    )


_ALL = (
    Problem(
        name="burgers",
        about="u(0) to u(1) of Burgers' equation, viscosity 0.01; perceptron 128-384-384-384-128, GELU",
        device="cpu",
        samples=burgers_data,
        network=partial(networks.perceptron, (128, 384, 384, 384, 128), nn.GELU),
        batch_size=100,
        steps=2000,
        evaluations=200,
        heads=("6",),
        whole=True,
        targets=(0.010,),
        **_FIELDS,  # type: ignore[arg-type]
    ),
    Problem(
        name="darcy",
        about="permeability (12 or 3) to pressure, 64 x 64; residual convolutions at three resolutions, GELU",
        device="cpu",
        samples=darcy_data,
        network=networks.Pyramid,
        batch_size=20,
        steps=1000,
        evaluations=50,
        heads=("leave",),
        **_FIELDS,  # type: ignore[arg-type]
    ),
    Problem(
        name="darcy-fno",
        about="permeability (12 or 3) to pressure, 64 x 64; Fourier neural operator of width 32, 12 modes, depth 4",
        device="cuda",
        samples=darcy_data,
        network=networks.FNO,
        batch_size=20,
        steps=2500,
        heads=("leave",),
        **_FIELDS,  # type: ignore[arg-type]
    ),
    _poisson("poisson", 1, (1e-3, 1e-4)),
    _poisson("poisson-high", 3, (1e-2, 1e-3)),
    Problem(
        name="heat",
        about=f"u_t = {DIFFUSIVITY} Laplace u on the unit square by its residual; perceptron 3-64-64-64-1, tanh; "
        "900 points inside, 120 on the boundary and 120 in the beginning, all in every step",
        samples=heat_data,
        network=heat_network,
        measure=partial(solution_error, heat_exact),
        steps=3000,
        targets=(1e-2, 1e-3),
        **_SOLUTIONS,  # type: ignore[arg-type]
    ),
    Problem(
        name="digits",
        about="autoencoder 784-500-250-125-30 and back (half of the classical widths), tanh, cross-entropy",
        device="cpu",
        network=partial(networks.autoencoder, (784, 500, 250, 125, 30)),
        steps=1500,
        **_DIGITS,  # type: ignore[arg-type]
    ),
    Problem(
        name="digits-wide",
        about="autoencoder 784-1000-500-250-30 and back, tanh, cross-entropy",
        device="cuda",
        network=partial(networks.autoencoder, (784, 1000, 500, 250, 30)),
        steps=5000,
        **_DIGITS,  # type: ignore[arg-type]
    ),
    _source("source", 384, 6, 256, 256, device="cuda", batch_size=64, steps=3000, evaluations=60, aim=1 / 1.05),
    _source("source-tiny", 64, 2, 64, 64, device="cpu", batch_size=16, steps=300, evaluations=30, aim=None),
)
PROBLEMS = {one.name: one for one in _ALL}
