"""Steps the optimizer that takes what K-FAC does not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from diamond.optim import sharded


def step(optimizer: Optimizer, besides: Sequence[Tensor], lr: float) -> None:
    """By all gradients but those of some parameters.

    Gradients that are not finite would stay in its averages for good: then no step is made. On a GPU, which must not be
    waited for, all gradients count as zeros instead.
    """
    taken = {id(one) for one in besides}
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    hidden = [(one, one.grad) for one in parameters]
    own = [one for one in parameters if id(one) not in taken]
    for one in besides:
        one.grad = None
    for group in optimizer.param_groups:
        group["lr"] = lr
    try:
        if _may_step(own):
            optimizer.step()
    finally:
        for one, gradient in hidden:
            one.grad = gradient


def forget(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """What it knows of these parameters, which others have moved since."""
    for one in parameters:
        optimizer.state.pop(one, None)


def _may_step(parameters: list[Tensor]) -> bool:
    held = [sharded.held(one.grad) for one in parameters]
    held = [one.coalesce().values() if one.is_sparse else one for one in held]
    held = [one for one in held if one.numel()]  # of a small parameter some ranks have nothing
    if not held:
        return True
    numbers = torch._foreach_norm([torch.view_as_real(one) if one.is_complex() else one for one in held], torch.inf)
    good = torch.stack([one.to(held[0].device).float() for one in numbers]).isfinite().all()
    if good.device.type == "cpu":
        return bool(good)
    for one in parameters:
        if one.grad is not None and not one.grad.is_sparse and not sharded.is_spread(one.grad):
            one.grad = torch.where(good, one.grad, 0.0)
    return True
