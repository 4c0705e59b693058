"""Adam's direction for many tensors at once, and decoupled weight decay."""

from __future__ import annotations

import math

import torch


def adam_directions(
    grads: list[torch.Tensor],
    means: list[torch.Tensor],
    squares: list[torch.Tensor],
    steps: list[int],
    *,
    betas: tuple[float, float],
    eps: float,
) -> list[torch.Tensor]:
    """Takes the gradients into both averages, in place, and returns the bias-corrected m / (sqrt(v) + eps)."""
    beta1, beta2 = betas
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    below = torch._foreach_sqrt(squares)
    torch._foreach_div_(below, [math.sqrt(1 - beta2**step) for step in steps])
    torch._foreach_add_(below, eps)
    directions = torch._foreach_div(means, [1 - beta1**step for step in steps])
    torch._foreach_div_(directions, below)
    return list(directions)


def decay_and_move(
    params: list[torch.Tensor], directions: list[torch.Tensor], *, lr: float, weight_decay: float
) -> None:
    """p <- (1 - lr * weight_decay) p - lr * direction, in place."""
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, directions, alpha=-lr)
