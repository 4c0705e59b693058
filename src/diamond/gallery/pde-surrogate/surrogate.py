"""A Fourier neural operator that solves the heat equation on a circle: u(x, 0) -> u(x, T)."""

import json
import os

import torch
from torch import nn

from diamond.train import log

POINTS, MODES, WIDTH, DIFFUSION_TIME = 64, 12, 24, 0.004


def exact(u0):
    """The solution is known: every wave number decays at its own rate. For your own equation, call your solver."""
    k = torch.arange(POINTS // 2 + 1)
    return torch.fft.irfft(torch.fft.rfft(u0) * torch.exp(-DIFFUSION_TIME * (2 * torch.pi * k) ** 2), n=POINTS)


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    k = torch.arange(1, MODES + 1)
    x = torch.arange(POINTS) / POINTS
    size = torch.randn(count, MODES, generator=generator) / k
    phase = torch.rand(count, MODES, generator=generator)
    u0 = (size[:, :, None] * torch.sin(2 * torch.pi * (k[None, :, None] * x + phase[:, :, None]))).sum(1)
    return u0, exact(u0)


class Spectral(nn.Module):
    """A convolution over the whole circle, done on the lowest wave numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES + 1, 2) / WIDTH)
        self.beside = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, v):
        low = torch.fft.rfft(v)[..., : MODES + 1]
        mixed = torch.einsum("bim,iom->bom", low, torch.view_as_complex(self.weight))
        whole = nn.functional.pad(mixed, (0, POINTS // 2 - MODES))
        return nn.functional.gelu(torch.fft.irfft(whole, n=POINTS) + self.beside(v))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv1d(1, WIDTH, 1), Spectral(), Spectral(), nn.Conv1d(WIDTH, 1, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    steps = int(os.environ.get("STEPS", "200"))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    test_u0, test_u = samples(256, seed=10_000)

    def error():
        with torch.no_grad():
            return ((model(test_u0[:, None])[:, 0] - test_u).norm(dim=1) / test_u.norm(dim=1)).mean().item()

    for step in range(1, steps + 1):
        u0, u = samples(64, seed=step)
        loss = nn.functional.mse_loss(model(u0[:, None])[:, 0], u)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        log(step=step, loss=loss.item())
        if step % 50 == 0 or step == steps:
            found = error()
            log(step=step, relative_error=found)
            print(f"step {step}: loss {loss.item():.2e}, relative error {found:.2%}", flush=True)
    torch.save(model.state_dict(), "surrogate.pt")
    with open("result.json", "w") as file:
        json.dump({"relative_error": error()}, file)


if __name__ == "__main__":
    main()
