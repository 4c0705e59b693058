"""Muon for the matrices of hidden layers, AdamW for everything else, as one optimizer (Jordan et al. 2024).

Muon replaces the momentum of a matrix by the nearest orthogonal one, roughly, with a Newton-Schulz iteration.
torch.optim.Muon does the same for matrices alone and one at a time; here those of one shape are treated together, and
kernels of convolutions are matrices with one row per output channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from diamond.optim.errors import OptimError
from diamond.optim.peers import checks
from diamond.optim.peers.checks import Check, Group
from diamond.optim.peers.moments import decay_and_move
from diamond.optim.peers.peer import Bucket, Params, Peer
from diamond.optim.peers.sharding import held_part, spread_like, whole

# The quintic a x + b x³ + c x⁵ of Jordan et al.: steep at zero, and close enough to 1 beyond it.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7
_MOST_STACKED = 2**26  # elements that are treated together, so that the copy stays small beside a large model
_PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
AUTO = "auto"


class Muon(Peer):
    """Muon and AdamW in one: every parameter group has `muon` True or False.

    From a model, embeddings, parameters of one dimension or none and what `heads` names go to AdamW, all other
    parameters to Muon. From a list, only the dimensions are known (and names, where it has (name, parameter) pairs). A
    group given as a dict is divided in the same way, unless it says "muon" itself; "lr" and "weight_decay" in it hold
    for both parts.

    Args:
        params: a model, or what torch's optimizers take.
        lr, weight_decay: of the matrices.
        heads: names of modules or parameters that AdamW shall take, for instance ("lm_head",).
        adjust_lr_fn: "original" multiplies lr by sqrt(max(1, rows / columns)); "match_rms_adamw" by
            0.2 sqrt(max(rows, columns)), with which learning rates found for AdamW serve.
        ns_steps: Newton-Schulz iterations.
        precision: of these iterations: "bfloat16", "float32", "float64", or "auto": bfloat16, as
            torch.optim.Muon has it, and float64 for parameters of float64.
        adamw_lr, adamw_weight_decay, betas, eps: of everything else.

    Raises:
        OptimError: an option cannot be used, or `heads` names nothing.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "lr": checks.not_negative,
        "weight_decay": checks.not_negative,
        "momentum": checks.fraction,
        "nesterov": checks.flag,
        "adjust_lr_fn": checks.one_of("original", "match_rms_adamw"),
        "ns_steps": checks.count,
        "precision": checks.one_of(AUTO, *_PRECISIONS),
        "betas": checks.two_fractions,
        "eps": checks.positive,
    }

    def __init__(
        self,
        params: Params,
        lr: float = 0.02,
        *,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        heads: Iterable[str] = (),
        adjust_lr_fn: str = "original",
        ns_steps: int = 5,
        precision: str = AUTO,
        adamw_lr: float = 3e-4,
        adamw_weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        checks.not_negative("adamw_lr", adamw_lr)
        checks.not_negative("adamw_weight_decay", adamw_weight_decay)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_steps": ns_steps,
            "precision": precision,
            "betas": betas,
            "eps": eps,
        }
        checks.check_group(defaults, self.CHECKS)
        others = {"lr": adamw_lr, "weight_decay": adamw_weight_decay}
        super().__init__(list(_divided(params, _names(heads), others)), defaults)

    def _check_added(self, group: Group) -> None:
        super()._check_added(group)
        if "muon" not in group:
            raise OptimError('a group added to Muon must say which part takes it: give "muon" as True or False in it')
        checks.flag("muon", group["muon"])
        flat = [tuple(param.shape) for param in group["params"] if param.ndim < 2]
        if group["muon"] and flat:
            raise OptimError(f'a group with "muon": True has a parameter of shape {flat[0]}: it takes matrices alone')

    def _update(self, group: Group, bucket: Bucket) -> None:
        if group["muon"]:
            self._orthogonal_step(group, bucket)
            return
        directions = self._adam_directions(group, bucket)
        decay_and_move(bucket.params, directions, lr=float(group["lr"]), weight_decay=group["weight_decay"])

    def _orthogonal_step(self, group: Group, bucket: Bucket) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        buffers = self._zeros(bucket, "momentum_buffer")
        torch._foreach_lerp_(buffers, bucket.grads, 1 - momentum)
        moving = list(torch._foreach_lerp(bucket.grads, buffers, momentum)) if group["nesterov"] else buffers
        if group["weight_decay"]:
            torch._foreach_mul_(bucket.params, 1 - lr * group["weight_decay"])
        for places in _alike(bucket.owners):
            owners = [bucket.owners[at] for at in places]
            matrices = torch.stack([_whole_matrix(moving[at], bucket.owners[at]) for at in places])
            flat = orthogonalised(matrices, steps=group["ns_steps"], dtype=_precision(group["precision"], matrices))
            rate = lr * _rate_factor(group["adjust_lr_fn"], *matrices.shape[1:])
            for at, owner, matrix in zip(places, owners, flat.to(bucket.dtype), strict=True):
                bucket.params[at].add_(held_part(matrix.view(owner.shape), owner), alpha=-rate)


# ---- which parameter goes where --------------------------------------------------------------------------------------


def _names(heads: Iterable[str]) -> tuple[str, ...]:
    found = (heads,) if isinstance(heads, str) else tuple(heads)
    for name in found:
        if not isinstance(name, str) or not name:
            raise OptimError(f"heads={heads!r} cannot be used: give names of modules or parameters")
    return found


def _divided(params: Params, heads: tuple[str, ...], others: dict[str, Any]) -> Iterator[Group]:
    """Groups that say which part takes them."""
    embedded, unseen = _embeddings(params), set(heads)
    for group in _groups(params):
        if "muon" in group:
            yield group if group["muon"] else {**others, **group}
            continue
        matrices: list[Any] = []
        rest: list[Any] = []
        for entry in group["params"]:
            name, param = entry if isinstance(entry, tuple) else ("", entry)
            named = {head for head in heads if name == head or name.startswith(f"{head}.")}
            unseen -= named
            (rest if named or param.ndim < 2 or id(param) in embedded else matrices).append(entry)
        if matrices:
            yield {**group, "params": matrices, "muon": True}
        if rest:
            yield {**others, **group, "params": rest, "muon": False}
    if unseen:
        raise OptimError(
            f"heads names {', '.join(sorted(unseen))}, which no parameter is called: give names as "
            "model.named_parameters() has them, and a model or (name, parameter) pairs as params"
        )


def _embeddings(params: Params) -> set[int]:
    """By identity, since a head may be tied to one."""
    if not isinstance(params, nn.Module):
        return set()
    return {id(module.weight) for module in params.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}


def _groups(params: Params) -> list[Group]:
    given = list(params.named_parameters() if isinstance(params, nn.Module) else params)
    if not given or not isinstance(given[0], dict):
        return [{"params": given}]
    return [{**group, "params": _entries(group["params"])} for group in given]


def _entries(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


# ---- the iteration ---------------------------------------------------------------------------------------------------


def orthogonalised(matrices: torch.Tensor, *, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """A stack of matrices with all singular values brought near 1."""
    a, b, c = NEWTON_SCHULZ
    found = matrices.to(dtype)
    tall = found.shape[1] > found.shape[2]
    if tall:
        found = found.mT
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=_TINY)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT.contiguous() if tall else found


def _alike(params: list[torch.Tensor]) -> Iterator[list[int]]:
    """Places of parameters that are matrices of one shape, not too many at once."""
    shapes: dict[tuple[int, int], list[int]] = {}
    for at, param in enumerate(params):
        shapes.setdefault((param.shape[0], math.prod(param.shape[1:])), []).append(at)
    for (rows, columns), places in shapes.items():
        most = max(1, _MOST_STACKED // max(1, rows * columns))
        yield from (places[start : start + most] for start in range(0, len(places), most))


def _whole_matrix(part: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """The whole of what this rank holds a part of, one row per output."""
    return whole(spread_like(part, owner)).flatten(1)


def _rate_factor(adjust: str, rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


def _precision(precision: str, matrices: torch.Tensor) -> torch.dtype:
    if precision != AUTO:
        return _PRECISIONS[precision]
    return torch.float64 if matrices.dtype == torch.float64 else torch.bfloat16
