"""The physics: viscous Burgers' equation  u_t + u u_x = NU u_xx  on the periodic unit interval.

Gives random initial conditions and the solution at time T. Fourier pseudo-spectral in space, with the 2/3 rule against
aliasing; in time, fourth-order Runge-Kutta on the equation multiplied by exp(-NU k^2 t), which makes diffusion exact.
"""

import math

import torch
from torch import Tensor

NU = 0.01  # viscosity: shocks are about NU wide, so the solver's grid resolves them
T = 0.2
SOLVER_POINTS = 256
SOLVER_STEPS = 120
POINTS = 128  # what the network sees: every other point


def initial_conditions(count: int, seed: int) -> Tensor:
    """Smooth zero-mean Gaussian random fields, standard deviation 1, as (count, SOLVER_POINTS)."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.arange(SOLVER_POINTS // 2 + 1, dtype=torch.float64)
    amplitude = (k**2 + 3.0**2) ** -1.5
    amplitude[0] = 0  # a mean flow would only carry everything along
    amplitude /= (4 * amplitude.square().sum()).sqrt()
    noise = torch.randn(count, len(k), 2, dtype=torch.float64, generator=generator)
    return torch.fft.irfft(torch.view_as_complex(noise) * amplitude, n=SOLVER_POINTS, norm="forward")


def solve(u0: Tensor, time: float = T, steps: int = SOLVER_STEPS) -> Tensor:
    """The solution at `time` for each row of `u0`."""
    n = u0.shape[-1]
    dt = time / steps
    k = torch.arange(n // 2 + 1, dtype=u0.dtype, device=u0.device)
    half = torch.exp(-NU * (2 * math.pi * k) ** 2 * dt / 2)  # what diffusion leaves after half a step
    full = half**2
    slope = -0.5j * dt * 2 * math.pi * k * (k < n / 3)

    def advect(v: Tensor) -> Tensor:
        return slope * torch.fft.rfft(torch.fft.irfft(v, n=n).square())

    v = torch.fft.rfft(u0)
    for _ in range(steps):
        v_half = half * v
        a = advect(v)
        b = advect(v_half + half * a / 2)
        c = advect(v_half + b / 2)
        d = advect(full * v + half * c)
        v = full * v + (full * a + 2 * half * (b + c) + d) / 6
    return torch.fft.irfft(v, n=n)


def dataset(count: int, seed: int, rank: int = 0, world_size: int = 1) -> tuple[Tensor, Tensor]:
    """This rank's share of `count` pairs (u at 0, u at T), each (share, POINTS).

    The pairs depend on the seed alone, so any number of ranks trains on the same data; each solves only its own.
    """
    u0 = initial_conditions(count, seed)[rank::world_size]
    every = SOLVER_POINTS // POINTS
    return u0[:, ::every].float(), solve(u0)[:, ::every].float()
