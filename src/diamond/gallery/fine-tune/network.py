"""The network, and the two tasks: telling apart shapes of waves (known), and their pitch (new)."""

import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 12, 7, stride=2),
            nn.ReLU(),
            nn.Conv1d(12, 24, 5, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(24 * 4, classes)

    def forward(self, x):
        return self.head(self.body(x))


def waves(count, task, seed):
    """Noisy waves, with what they are: `task` "shape" (3 classes) or "pitch" (2 classes)."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 128)
    shape = torch.randint(3, (count,), generator=generator)
    pitch = torch.randint(2, (count,), generator=generator)
    phase = torch.rand(count, 1, generator=generator)
    turns = (4 + 5 * pitch[:, None]) * t + phase
    sine = torch.sin(2 * torch.pi * turns)
    saw = 2 * (turns % 1) - 1
    forms = torch.stack([sine, sine.sign(), saw])
    x = forms[shape, torch.arange(count)] + 0.3 * torch.randn(count, 128, generator=generator)
    return x[:, None], shape if task == "shape" else pitch


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()
