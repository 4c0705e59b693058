"""How far each optimizer comes on problems of known difficulty; bounds are about three times what was measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from diamond.optim.peers import ScheduleFreeAdamW, make


def spread(size: int, condition: float, seed: int) -> torch.Tensor:
    """A matrix with singular values from 1 down to 1 / condition and random singular vectors."""
    made = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(size, size, generator=made)).Q
    right = torch.linalg.qr(torch.randn(size, size, generator=made)).Q
    return left * torch.logspace(0, -math.log10(condition), size) @ right


def left_over(name: str, steps: int, condition: float, **options: Any) -> float:
    """The part of the loss |A (W - W*) B|² that is left, under a cosine schedule where one is due.

    Its Hessian is a Kronecker product with condition number `condition` ** 4.
    """
    a, b = spread(8, condition, 1), spread(8, condition, 2)
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(4)))
    optimizer = make(name, [weight], **options)
    free = isinstance(optimizer, ScheduleFreeAdamW)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def loss() -> torch.Tensor:
        return (a @ (weight - target) @ b).square().sum()

    first = loss().item()
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if not free:
            schedule.step()
    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.eval()
    return loss().item() / first


@pytest.mark.parametrize(
    ("name", "options", "bound"),
    [
        ("lars", {"lr": 0.1, "trust": 0.1, "weight_decay": 0.0}, 4e-5),
        ("lamb", {"lr": 0.1, "weight_decay": 0.0}, 6e-7),
        ("soap", {"lr": 0.3, "weight_decay": 0.0, "precondition_every": 5}, 8e-7),
        ("muon", {"lr": 0.3, "weight_decay": 0.0}, 1e-8),
        ("schedule-free", {"lr": 0.3}, 5e-4),
    ],
)
def test_a_quadratic_of_condition_ten_to_the_fourth(name: str, options: dict[str, Any], bound: float) -> None:
    assert left_over(name, 300, 10.0, **options) < bound


def test_soap_is_far_ahead_of_adamw_where_the_axes_are_turned() -> None:
    rates = (0.1, 0.3, 1.0)
    adamw = min(left_over("adamw", 200, 30.0, lr=lr, weight_decay=0.0) for lr in rates)
    soap = min(left_over("soap", 200, 30.0, lr=lr, weight_decay=0.0, precondition_every=5) for lr in rates)
    assert adamw > 3e-4
    assert soap < 2e-5, "75 times less than AdamW"
