"""Solutions of partial differential equations to learn from, computed here: Burgers' equation and Darcy flow.

Everything is float64, batched over samples, and decided by the generator alone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

VISCOSITY, BURGERS_TIME = 0.01, 1.0
BURGERS_POINTS = 256  # of the solver: shocks are resolved to 1e-8; networks see every other point
BURGERS_STEPS = 400
CG_RESIDUAL = 1e-10  # relative; what callers are promised is 1e-8
_AT_ONCE = 100  # samples of Darcy flow that are solved together, so that they stay in the cache


# ---- Burgers: u_t + u u_x = VISCOSITY u_xx on the periodic [0, 1) --------------------------------------------------


def burgers_start(count: int, generator: torch.Generator, points: int = BURGERS_POINTS) -> Tensor:
    """Zero-mean Gaussian fields with covariance 625 (-Laplace + 25)^-2, the usual choice in operator learning."""
    k = torch.arange(points // 2 + 1, dtype=torch.float64)
    deviation = 25 / ((2 * math.pi * k) ** 2 + 25)
    deviation[0] = 0.0
    deviation[-1] = 0.0  # the highest wave has no phase on this grid
    waves = torch.view_as_complex(torch.randn(count, len(k), 2, dtype=torch.float64, generator=generator))
    return torch.fft.irfft(waves * deviation / math.sqrt(2), n=points, norm="forward")


def burgers(start: Tensor, *, steps: int = BURGERS_STEPS, time: float = BURGERS_TIME) -> Tensor:
    """The field at `time`: Fourier in space with the 2/3 rule, RK4 in time with diffusion integrated exactly."""
    points, dt = start.shape[-1], time / steps
    k = 2 * math.pi * torch.arange(points // 2 + 1, dtype=torch.float64)
    decay_half = torch.exp(-VISCOSITY * k**2 * dt / 2)
    decay = decay_half**2
    transport = torch.where(torch.arange(len(k)) < points / 3, -0.5 * k, 0.0) * 1j

    def rate(u: Tensor) -> Tensor:
        return transport * torch.fft.rfft(torch.fft.irfft(u, n=points).square())

    u = torch.fft.rfft(start)
    for _ in range(steps):
        first = rate(u)
        second = rate(decay_half * (u + dt / 2 * first))
        third = rate(decay_half * u + dt / 2 * second)
        fourth = rate(decay * u + dt * decay_half * third)
        u = decay * (u + dt / 6 * first) + dt / 3 * decay_half * (second + third) + dt / 6 * fourth
    return torch.fft.irfft(u, n=points)


# ---- Darcy: -div(a grad u) = 1 on the unit square, u = 0 on its boundary -------------------------------------------


def darcy_permeability(count: int, points: int, generator: torch.Generator) -> Tensor:
    """12 where a Gaussian field with covariance (-Laplace + 9)^-2 (no flux at the boundary) is positive, else 3."""
    wave = torch.arange(points, dtype=torch.float64)
    centre = (wave + 0.5) / points
    cosines = torch.cos(math.pi * centre[:, None] * wave)
    deviation = 1 / (math.pi**2 * (wave[:, None] ** 2 + wave**2) + 9)
    deviation[0, 0] = 0.0
    noise = torch.randn(count, points, points, dtype=torch.float64, generator=generator)
    return torch.where(cosines @ (noise * deviation) @ cosines.T > 0, 12.0, 3.0).double()


class Darcy:
    """Finite volumes of one size, unknowns at their centres, harmonic means of `permeability` between them."""

    def __init__(self, permeability: Tensor) -> None:
        self.points = permeability.shape[-1]
        self.down = _between(permeability)
        self.right = _between(permeability.mT).mT

    def apply(self, u: Tensor) -> Tensor:
        """-div(a grad u)."""
        padded = F.pad(u, (1, 1, 1, 1))
        down = self.down * padded[:, :, 1:-1].diff(dim=1)
        right = self.right * padded[:, 1:-1, :].diff(dim=2)
        return -(down.diff(dim=1) + right.diff(dim=2)) * self.points**2

    def residual(self, u: Tensor) -> Tensor:
        """Of each sample, relative to the right-hand side."""
        return (1 - self.apply(u)).flatten(1).norm(dim=1) / self.points


def _between(permeability: Tensor) -> Tensor:
    """Conductances across the faces along dim 1; the boundary is half a cell away from the centres."""
    above, below = permeability[:, :-1], permeability[:, 1:]
    inner = 2 * above * below / (above + below)
    return torch.cat([2 * permeability[:, :1], inner, 2 * permeability[:, -1:]], dim=1)


def darcy(permeability: Tensor) -> Tensor:
    """The pressure in each cell."""
    return torch.cat([_conjugate_gradients(Darcy(part)) for part in permeability.split(_AT_ONCE)])


def _conjugate_gradients(system: Darcy, most: int = 200) -> Tensor:
    """Preconditioned by the equation with permeability 1, which sines solve: with 12 against 3 the condition number is
    at most 4 whatever the grid."""
    count, points = len(system.down), system.points
    solve = _Sines(points).solve
    u = torch.zeros(count, points, points, dtype=torch.float64)
    left = torch.ones_like(u)
    better = solve(left)
    way, product = better, _dot(left, better)
    for _ in range(most):
        along = system.apply(way)
        length = product / _dot(way, along)
        u, left = u + length * way, left - length * along
        if float(left.flatten(1).norm(dim=1).max()) / points < CG_RESIDUAL:
            return u
        better = solve(left)
        before, product = product, _dot(left, better)
        way = better + product / before * way
    raise RuntimeError(f"conjugate gradients did not converge in {most} iterations")


class _Sines:
    """Solves the equation with permeability 1, exactly."""

    def __init__(self, points: int) -> None:
        number = torch.arange(1, points + 1, dtype=torch.float64)
        sines = torch.sin(math.pi / points * (torch.arange(points, dtype=torch.float64)[:, None] + 0.5) * number)
        self.sines = sines / sines.norm(dim=0)
        one = 4 * torch.sin(math.pi * number / (2 * points)) ** 2 * points**2
        self.values = one[:, None] + one

    def solve(self, right: Tensor) -> Tensor:
        waves = self.sines.T @ right @ self.sines / self.values
        return self.sines @ waves @ self.sines.T


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(1, 2), keepdim=True)
