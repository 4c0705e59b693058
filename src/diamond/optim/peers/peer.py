"""What the optimizers of this package share: parameters in, gradients sorted, state kept and loaded.

A step sorts the parameters that have gradients into buckets of one device, dtype and layout, so that a subclass can
treat each bucket with torch's foreach operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from diamond.optim.errors import OptimError
from diamond.optim.peers.checks import Check, Group, check_group
from diamond.optim.peers.moments import adam_directions
from diamond.optim.peers.sharding import gradient_like, held, layout

Params = nn.Module | Iterable[Any]


class Bucket(NamedTuple):
    """Parameters that can be treated together.

    `owners` are the parameters as the user has them, `params` and `grads` what this rank holds of them; gradients and
    state are of `dtype`, float32 at least. `kind` is what the optimizer's `_kind` said.
    """

    owners: list[torch.Tensor]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    dtype: torch.dtype
    kind: Any


class Peer(Optimizer):
    """A torch optimizer that takes a model as well as what torch takes.

    Subclasses name the checks of their options and define `_update`.
    """

    CHECKS: ClassVar[dict[str, Check]] = {}

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        check_group(defaults, self.CHECKS)
        super().__init__(params.named_parameters() if isinstance(params, nn.Module) else params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            self._check_added(self.param_groups[-1])
        except OptimError:
            self.param_groups.pop()
            raise

    def _check_added(self, group: Group) -> None:
        check_group(group, self.CHECKS)
        for at, param in enumerate(group["params"]):
            if not param.is_floating_point():
                raise OptimError(
                    f"{type(self).__name__} takes real floating-point parameters; {_called(group, at)} is of "
                    f"{param.dtype}: leave it out"
                )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Parameters without a gradient are left alone.

        Raises:
            OptimError: a gradient is sparse; nothing has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group, buckets in [(group, self._buckets(group)) for group in self.param_groups]:
                if buckets:
                    self._update_group(group, buckets)
        return loss

    def _update_group(self, group: Group, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            self._update(group, bucket)

    def _update(self, group: Group, bucket: Bucket) -> None:
        raise NotImplementedError

    def _kind(self, group: Group, param: torch.Tensor) -> Hashable:
        """What else must be equal within a bucket."""
        return None

    def _buckets(self, group: Group) -> list[Bucket]:
        found: dict[Hashable, Bucket] = {}
        for at, param in enumerate(group["params"]):
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise OptimError(
                    f"{type(self).__name__} takes no sparse gradients, and {_called(group, at)} has one: "
                    "make its layer with sparse=False"
                )
            dtype, kind = torch.promote_types(param.dtype, torch.float32), self._kind(group, param)
            key = (param.device, param.dtype, layout(param), kind)
            bucket = found.setdefault(key, Bucket([], [], [], dtype, kind))
            bucket.owners.append(param)
            bucket.params.append(held(param))
            bucket.grads.append(held(gradient_like(param, param.grad)).to(dtype))
        return list(found.values())

    # ---- state -------------------------------------------------------------------------------------------------------

    def _zeros(self, bucket: Bucket, key: str) -> list[torch.Tensor]:
        """One state tensor per parameter, zero at first: the part held here, to be changed in place."""
        for param in bucket.owners:
            if key not in self.state[param]:
                self.state[param][key] = torch.zeros_like(param, dtype=bucket.dtype)
        return [held(self.state[param][key]) for param in bucket.owners]

    def _count_steps(self, params: list[torch.Tensor]) -> list[int]:
        """One more step for each of them; how many each has taken, this one included."""
        counts = []
        for param in params:
            # A tensor on the CPU, as torch's own optimizers keep it: checkpoint libraries expect that.
            step = self.state[param].setdefault("step", torch.zeros((), dtype=torch.float32))
            step += 1
            counts.append(int(step.item()))
        return counts

    def _adam_directions(self, group: Group, bucket: Bucket) -> list[torch.Tensor]:
        """Of the group's betas and eps, with the state named as torch's Adam names it."""
        return adam_directions(
            bucket.grads,
            self._zeros(bucket, "exp_avg"),
            self._zeros(bucket, "exp_avg_sq"),
            self._count_steps(bucket.owners),
            betas=group["betas"],
            eps=group["eps"],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but the state is of float32 at least, where torch casts it to bfloat16 for such parameters."""
        super().load_state_dict(state_dict)
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved_ids, params, strict=True):
            wanted = torch.promote_types(param.dtype, torch.float32)
            for key, value in state_dict["state"].get(number, {}).items():
                loaded = self.state[param].get(key)
                if isinstance(loaded, torch.Tensor) and loaded.dtype == param.dtype != wanted:
                    self.state[param][key] = value.to(device=loaded.device, dtype=wanted, copy=True)


def _called(group: Group, at: int) -> str:
    """How to speak of a parameter in an error."""
    names = group.get("param_names")
    return f"parameter {names[at]!r}" if names else f"a parameter of shape {tuple(group['params'][at].shape)}"
