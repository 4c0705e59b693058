"""Curvature by brute force, and the factors that the optimizer found, to be held against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from diamond.optim.kfac import KFAC

Loss = Callable[[Any], Tensor]


def factors_of(model: nn.Module, inputs: Any, take: Loss, /, **options: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """A and G of every block that was used, after one step with a rate of nothing."""
    opt = stepped(model, [inputs], take, **options)
    assert not _get_current_function_mode_stack()
    return {
        one.block.name: (one.a.mean(), None if one.g._sum is None else one.g.mean()) for one in opt.factors if one.known
    }


def stepped(model: nn.Module, batches: list[Any], take: Loss, /, **options: Any) -> KFAC:
    opt = KFAC(model, lr=0.0, **{"curvature": "ggn-exact", **options})
    for inputs in batches:
        take(model(*inputs) if isinstance(inputs, tuple) else model(inputs)).backward()
    opt.step()
    opt._curving.disarm()  # it would wait for the next forward pass of a model that several tests share
    return opt


def kron(found: tuple[Tensor, Tensor | None], copy: int = 0) -> Tensor:
    """The curvature of a block's matrix, row by row."""
    a, g = found
    assert g is not None
    return torch.kron(g[copy], a[copy] if a.dim() == 3 else torch.diag(a[copy]))


def ggn(model: nn.Module, inputs: Tensor, loss: Loss, layer: str) -> Tensor:
    """J^T H J of a layer's (weight, bias) as one matrix, in double precision; `loss` is one of the model's output."""
    model.eval()  # so that the optimizer, which waits for the next training pass, does not take this for it
    known = {name: one.detach().double() for name, one in model.named_parameters()}
    names = [name for name in (f"{layer}.weight", f"{layer}.bias") if name in known]
    x = inputs.double() if inputs.is_floating_point() else inputs

    def output(*chosen: Tensor) -> Tensor:
        found: Tensor = functional_call(model, {**known, **dict(zip(names, chosen, strict=True))}, (x,))
        return found

    out = output(*(known[name] for name in names)).detach()
    curved = jacrev(jacrev(lambda flat: loss(flat.reshape(out.shape))))(out.reshape(-1))
    jacobians = jacrev(output, argnums=tuple(range(len(names))))(*(known[name] for name in names))
    rows = known[names[0]].shape[0]
    j = torch.cat([one.reshape(out.numel(), rows, -1) for one in jacobians], dim=2).reshape(out.numel(), -1)
    return j.T @ curved @ j


def close(found: Tensor, wanted: Tensor, relative: float = 1e-4) -> None:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
    assert error < relative, f"relative error {error:.2e}"


def no_modes() -> Iterator[None]:
    """For a fixture: whatever a test does, none of torch's function modes stays behind."""
    yield
    left = [_pop_mode() for _ in range(len(_get_current_function_mode_stack()))]
    assert not left
