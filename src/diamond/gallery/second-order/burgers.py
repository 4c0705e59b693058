"""Burgers' equation u_t + u u_x = NU u_xx on a circle, solved by waves: replace it by your own solver or data."""

import torch

POINTS, NU, TIME, STEPS = 64, 0.02, 0.25, 100


def samples(count, seed):
    """Random smooth fields u(x, 0), and u(x, TIME), each (count, POINTS)."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.arange(POINTS // 2 + 1, dtype=torch.float64)
    size = torch.where(k > 0, torch.exp(-((k / 2) ** 2)) / 2, 0.0)
    waves = torch.randn(count, len(k), 2, dtype=torch.float64, generator=generator)
    start = torch.fft.irfft(torch.view_as_complex(waves) * size, n=POINTS, norm="forward")
    return start.float(), solve(start).float()


def solve(u):
    """Diffusion is exact for every wave; the rest is stepped by Runge and Kutta's method of second order."""
    k = 2 * torch.pi * torch.arange(POINTS // 2 + 1, dtype=u.dtype)
    dt = TIME / STEPS
    fade = torch.exp(-NU * k**2 * dt)
    low = k < 2 * torch.pi * POINTS / 3  # products of higher waves would be mistaken for lower ones

    def steepen(waves):
        return -0.5j * k * low * torch.fft.rfft(torch.fft.irfft(waves, n=POINTS) ** 2)

    waves = torch.fft.rfft(u)
    for _ in range(STEPS):
        first = steepen(waves)
        second = steepen(fade * (waves + dt * first))
        waves = fade * (waves + dt / 2 * first) + dt / 2 * second
    return torch.fft.irfft(waves, n=POINTS)
