"""The networks that optimizers are compared on. Weights are real and live in torch's own layers where one exists."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def perceptron(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), activation()]
    return nn.Sequential(*layers[:-1])


def autoencoder(sizes: Sequence[int]) -> nn.Sequential:
    """Mirrored around the last size, which is the code and linear; tanh elsewhere.

    Weights begin as large as keeps signals alive through so many layers: with torch's own, first-order methods see
    nothing but the mean image for hundreds of steps.
    """
    made = nn.Sequential(*perceptron(sizes, nn.Tanh), *perceptron(sizes[::-1], nn.Tanh))
    for module in made:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)
    return made


class Branch(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(F.gelu(x))))


class Pyramid(nn.Module):
    """A field to a field of the same size, through grids of a half, a quarter and an eighth of its points."""

    def __init__(self, widths: tuple[int, int, int] = (16, 32, 48)) -> None:
        super().__init__()
        high, middle, low = widths
        self.enter = nn.Conv2d(4, high, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(high, middle, 2, stride=2), nn.Conv2d(middle, low, 2, stride=2)])
        self.before = nn.ModuleList([Branch(high), Branch(middle)])
        self.bottom = nn.Sequential(Branch(low), Branch(low))
        self.up = nn.ModuleList([nn.Conv2d(low, middle, 1), nn.Conv2d(middle, high, 1)])
        self.after = nn.ModuleList([Branch(middle), Branch(high)])
        self.leave = nn.Conv2d(high, 4, 3, padding=1)

    def forward(self, field: Tensor) -> Tensor:
        x = self.enter(F.pixel_unshuffle(field[:, None], 2))
        passed = []
        for before, down in zip(self.before, self.down, strict=True):
            x = before(x)
            passed.append(x)
            x = down(x)
        x = self.bottom(x)
        for up, after in zip(self.up, self.after, strict=True):
            x = after(F.interpolate(up(x), scale_factor=2.0, mode="nearest") + passed.pop())
        return F.pixel_shuffle(self.leave(x), 2)[:, 0]


class Spectral(nn.Module):
    """A linear map of the lowest waves, channel by channel and wave by wave."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        # outputs first, as in a convolution; the last dimension holds real and imaginary part
        self.weight = nn.Parameter(torch.randn(width, width, 2 * modes, modes, 2) / (width * math.sqrt(2)))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x)
        m, weight = self.modes, torch.view_as_complex(self.weight)
        lowest = torch.cat([waves[:, :, :m, :m], waves[:, :, -m:, :m]], dim=2)
        mixed = torch.einsum("bixy,oixy->boxy", lowest, weight)
        out = torch.zeros_like(waves)
        out[:, :, :m, :m], out[:, :, -m:, :m] = mixed[:, :, :m], mixed[:, :, m:]
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FNO(nn.Module):
    """A Fourier neural operator for fields on a square, which gets the coordinates as well."""

    def __init__(self, width: int = 32, modes: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 1)
        self.spectral = nn.ModuleList(Spectral(width, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))
        self.between = nn.Conv2d(width, 128, 1)
        self.leave = nn.Conv2d(128, 1, 1)

    def forward(self, field: Tensor) -> Tensor:
        along = torch.linspace(-1, 1, field.shape[-1], device=field.device)
        places = torch.stack(torch.meshgrid(along, along, indexing="ij")).expand(len(field), -1, -1, -1)
        x = self.enter(torch.cat([field[:, None], places], dim=1))
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.leave(F.gelu(self.between(x)))[:, 0]


class Layer(nn.Module):
    """Attention to what came before, and a perceptron, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Speaker(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for layer in self.layers:  # so that the sum of all branches does not grow with depth
            for last in (layer.out, layer.narrow):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
