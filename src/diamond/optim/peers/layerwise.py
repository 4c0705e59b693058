"""LARS and LAMB: for large batches, each layer's step is as long as its weights are, times the learning rate.

The norms are those of whole parameters, also where FSDP2 spreads them over ranks. Biases and the weights of norm layers
(parameters of one dimension or none) get neither the ratio nor weight decay unless `exclude_1d=False`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch

from diamond.optim.peers import checks
from diamond.optim.peers.checks import Check, Group
from diamond.optim.peers.peer import Bucket, Params, Peer
from diamond.optim.peers.sharding import norms


class _Layerwise(Peer):
    def _kind(self, group: Group, param: torch.Tensor) -> Hashable:
        return not (group["exclude_1d"] and param.ndim <= 1)


class LARS(_Layerwise):
    """SGD with momentum on gradients that each layer scales to trust * |w| / |g| (You et al. 2017).

    Weight decay is decoupled: w <- (1 - lr * weight_decay) w, apart from ratio and momentum. The learning rate
    multiplies the momentum buffer, as in torch.optim.SGD.

    Args:
        params: a model, or what torch's optimizers take.
        trust: the length of a step at lr=1, as a part of the weights' norm.
        eps: added to the gradient's norm.
        exclude_1d: treat parameters of one dimension or none as SGD without weight decay does.

    Raises:
        OptimError: an option cannot be used.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "lr": checks.not_negative,
        "momentum": checks.fraction,
        "weight_decay": checks.not_negative,
        "trust": checks.positive,
        "eps": checks.not_negative,
        "nesterov": checks.flag,
        "exclude_1d": checks.flag,
    }

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        eps: float = 1e-8,
        nesterov: bool = False,
        exclude_1d: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
            "nesterov": nesterov,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, defaults)

    def _update(self, group: Group, bucket: Bucket) -> None:
        lr, momentum, adapts = float(group["lr"]), group["momentum"], bucket.kind
        scaled = bucket.grads
        if adapts:
            weights, gradients = _norms_of_both(bucket, bucket.grads)
            ratios = trust_ratios(group["trust"] * weights, gradients + group["eps"])
            scaled = list(torch._foreach_mul(bucket.grads, list(ratios.unbind())))
        if momentum:
            buffers = self._zeros(bucket, "momentum_buffer")
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, scaled)
            scaled = list(torch._foreach_add(scaled, buffers, alpha=momentum)) if group["nesterov"] else buffers
        if adapts and group["weight_decay"]:
            torch._foreach_mul_(bucket.params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(bucket.params, scaled, alpha=-lr)


class LAMB(_Layerwise):
    """Adam's direction u, bias corrected, plus weight_decay * w, scaled by each layer to |w| / |u| (You et al. 2020).

    Weight decay is no part of the moments, but of the direction that the ratio scales, as in the paper.

    Args:
        params: a model, or what torch's optimizers take.
        max_trust: the largest ratio |w| / |u|; None: any.
        exclude_1d: treat parameters of one dimension or none as Adam without weight decay does.

    Raises:
        OptimError: an option cannot be used.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "lr": checks.not_negative,
        "betas": checks.two_fractions,
        "eps": checks.positive,
        "weight_decay": checks.not_negative,
        "max_trust": checks.positive_or_none,
        "exclude_1d": checks.flag,
    }

    def __init__(
        self,
        params: Params,
        lr: float = 2e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_trust: float | None = None,
        exclude_1d: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_trust": max_trust,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, defaults)

    def _update(self, group: Group, bucket: Bucket) -> None:
        directions = self._adam_directions(group, bucket)
        if bucket.kind:
            if group["weight_decay"]:
                torch._foreach_add_(directions, bucket.params, alpha=group["weight_decay"])
            weights, lengths = _norms_of_both(bucket, directions)
            ratios = trust_ratios(weights, lengths)
            if group["max_trust"] is not None:
                ratios = ratios.clamp(max=group["max_trust"])
            torch._foreach_mul_(directions, list(ratios.unbind()))
        torch._foreach_add_(bucket.params, directions, alpha=-float(group["lr"]))


def trust_ratios(weights: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """weights / lengths, and 1 where one of them is zero: weights must be able to leave zero."""
    usable = (weights > 0) & (lengths > 0)
    return torch.where(usable, weights / lengths, torch.ones_like(weights))


def _norms_of_both(bucket: Bucket, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the weights and of the tensors beside them, with one all-reduce at most."""
    weights = [param.to(bucket.dtype) for param in bucket.params]
    both = norms([*weights, *tensors], bucket.owners[0])
    return both[: len(weights)], both[len(weights) :]
