"""Schedule-Free AdamW: an average of the iterates in place of a learning-rate schedule (Defazio et al. 2024).

Three sequences: z takes Adam's steps without momentum, x is a weighted average of z, and gradients are taken at
y = (1 - beta1) z + beta1 x. The model holds y while it trains and x while it is judged or saved for use.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from diamond.optim.errors import OptimError
from diamond.optim.peers import checks
from diamond.optim.peers.checks import Check, Group
from diamond.optim.peers.peer import Bucket, Params, Peer
from diamond.optim.peers.sharding import held


def _betas(name: str, value: Any) -> None:
    checks.two_fractions(name, value)
    if value[0] == 0:
        raise OptimError(f"{name}[0]=0 cannot be used: x could not be found from y and z; give a number above 0")


class ScheduleFreeAdamW(Peer):
    """AdamW that needs no schedule. Call `eval()` before judging the model and `train()` before going on.

    It begins in training mode. No learning-rate schedule is needed; one may be given all the same.

    Args:
        params: a model, or what torch's optimizers take.
        betas: beta1 is how far y leans to the average, above 0; beta2 is Adam's.
        weight_decay: decoupled, of y.
        warmup_steps: the learning rate rises linearly over so many.
        averaging_power: r, the weight of step t in the average grows as t ** r.
        lr_power: and as the largest learning rate so far to this power.

    Raises:
        OptimError: an option cannot be used.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "lr": checks.not_negative,
        "betas": _betas,
        "eps": checks.positive,
        "weight_decay": checks.not_negative,
        "warmup_steps": checks.count_or_zero,
        "averaging_power": checks.not_negative,
        "lr_power": checks.not_negative,
    }

    def __init__(
        self,
        params: Params,
        lr: float = 2.5e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        averaging_power: float = 0.0,
        lr_power: float = 2.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "averaging_power": averaging_power,
            "lr_power": lr_power,
            # Beside the options, so that a state dict carries them.
            "steps": 0,
            "largest_lr": 0.0,
            "weight_sum": 0.0,
            "training": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def train(self) -> None:
        """Put y into the model. Harmless when it is there already."""
        for group in self.param_groups:
            if not group["training"]:
                self._lean_to_z(group, 1 - group["betas"][0])
                group["training"] = True

    @torch.no_grad()
    def eval(self) -> None:
        """Put x, the average, into the model. Harmless when it is there already."""
        for group in self.param_groups:
            if group["training"]:
                self._lean_to_z(group, 1 - 1 / group["betas"][0])
                group["training"] = False

    def _lean_to_z(self, group: Group, weight: float) -> None:
        for param in group["params"]:
            if "z" in self.state[param]:
                z, mine = held(self.state[param]["z"]), held(param)
                mine.copy_(torch.lerp(mine.to(z.dtype), z, weight))

    def step(self, closure: Any = None) -> Any:
        """One step.

        Raises:
            OptimError: the model holds the average, or a gradient is sparse.
        """
        if not all(group["training"] for group in self.param_groups):
            raise OptimError(
                "ScheduleFreeAdamW.step() was called in eval mode: gradients at the average lead nowhere; "
                "call optimizer.train() before the forward pass"
            )
        return super().step(closure)

    def _update_group(self, group: Group, buckets: list[Bucket]) -> None:
        group["steps"] += 1
        step, warmup = group["steps"], group["warmup_steps"]
        lr = float(group["lr"]) * (min(1.0, step / warmup) if warmup else 1.0)
        group["largest_lr"] = max(group["largest_lr"], lr)
        weight = step ** group["averaging_power"] * group["largest_lr"] ** group["lr_power"]
        group["weight_sum"] += weight
        # Nothing has been weighed yet while the learning rate was always 0.
        part = weight / group["weight_sum"] if group["weight_sum"] else 0.0
        for bucket in buckets:
            self._move(group, bucket, lr, part)

    def _move(self, group: Group, bucket: Bucket, lr: float, part: float) -> None:
        beta1, beta2 = group["betas"]
        zs, squares = self._zs(bucket), self._zeros(bucket, "exp_avg_sq")
        steps = self._count_steps(bucket.owners)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, bucket.grads, bucket.grads, 1 - beta2)
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(below, group["eps"])
        directions = torch._foreach_div(bucket.grads, below)
        ys = [param.to(bucket.dtype) for param in bucket.params]  # the parameters themselves, unless they are narrow
        if group["weight_decay"]:
            torch._foreach_add_(directions, ys, alpha=group["weight_decay"])
        # With x <- (1 - part) x + part z and z <- z - lr d, y's own change follows without x being kept.
        torch._foreach_lerp_(ys, zs, part)
        torch._foreach_add_(ys, directions, alpha=lr * (beta1 * (1 - part) - 1))
        if ys[0].dtype != bucket.params[0].dtype:
            torch._foreach_copy_(bucket.params, ys)
        torch._foreach_add_(zs, directions, alpha=-lr)

    def _zs(self, bucket: Bucket) -> list[torch.Tensor]:
        for param in bucket.owners:
            if "z" not in self.state[param]:
                self.state[param]["z"] = param.detach().to(bucket.dtype, copy=True)
        return [held(self.state[param]["z"]) for param in bucket.owners]
