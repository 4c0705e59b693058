"""SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024).

For a gradient G with two dimensions the factors are running averages of G Gᵀ and Gᵀ G, and Adam runs on Q_Lᵀ G Q_R; for
more dimensions (convolutions) each has a factor of its own. Statistics are kept in float32 at least. Where a parameter
is spread over ranks, every rank gathers its gradient and keeps its statistics in full.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch

from diamond.optim.peers import checks
from diamond.optim.peers.checks import Check, Group
from diamond.optim.peers.moments import adam_directions, decay_and_move
from diamond.optim.peers.peer import Bucket, Params, Peer
from diamond.optim.peers.sharding import gradient_like, held_part, whole

Bases = list[torch.Tensor | None]


class SOAP(Peer):
    """Adam in a basis that one QR power iteration brings up to date every `precondition_every` steps.

    The first gradient of a parameter only gives the basis (by eigh), and the parameter stays: in its own eigenbasis a
    gradient has entries that are rounding errors alone, which Adam would blow up to full size. Parameters of one
    dimension or none, and those all of whose dimensions exceed `max_dim`, get Adam.

    Args:
        params: a model, or what torch's optimizers take.
        betas: Adam's, in the basis.
        factor_beta: of the running averages of the factors; None: betas[1].
        weight_decay: decoupled.
        max_dim: a dimension above it is not rotated, so that a matrix with one such dimension has one factor.

    Raises:
        OptimError: an option cannot be used.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "lr": checks.not_negative,
        "betas": checks.two_fractions,
        "factor_beta": checks.fraction_or_none,
        "eps": checks.positive,
        "weight_decay": checks.not_negative,
        "precondition_every": checks.count,
        "max_dim": checks.count,
    }

    def __init__(
        self,
        params: Params,
        lr: float = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        factor_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_every: int = 10,
        max_dim: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "factor_beta": factor_beta,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_every": precondition_every,
            "max_dim": max_dim,
        }
        super().__init__(params, defaults)

    def _kind(self, group: Group, param: torch.Tensor) -> Hashable:
        """Which dimensions are rotated; those of length 1 have nothing to rotate."""
        if param.ndim < 2:
            return ()
        return tuple(dim for dim, size in enumerate(param.shape) if 1 < size <= group["max_dim"])

    def _update(self, group: Group, bucket: Bucket) -> None:
        if bucket.kind:
            for at, param in enumerate(bucket.owners):
                self._turned_step(group, bucket, at, param)
            return
        directions = self._adam_directions(group, bucket)
        decay_and_move(bucket.params, directions, lr=float(group["lr"]), weight_decay=group["weight_decay"])

    def _turned_step(self, group: Group, bucket: Bucket, at: int, param: torch.Tensor) -> None:
        assert param.grad is not None
        grad = whole(gradient_like(param, param.grad)).to(bucket.dtype)
        state = self.state[param]
        beta = group["betas"][1] if group["factor_beta"] is None else group["factor_beta"]
        if "exp_avg" not in state:
            _begin(state, grad, bucket.kind, beta)
            return
        (step,) = self._count_steps([param])
        bases = _bases(state, grad.ndim)
        (direction,) = adam_directions(
            [turned(grad, bases)],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [step],
            betas=group["betas"],
            eps=group["eps"],
        )
        update = held_part(turned_back(direction, bases), param)
        decay_and_move([bucket.params[at]], [update], lr=float(group["lr"]), weight_decay=group["weight_decay"])
        _average_factors(state, grad, bucket.kind, beta)
        if step % group["precondition_every"] == 0:
            _refresh(state, bucket.kind, bases)


# ---- the state of one parameter: factor_0, basis_0, factor_1, ... ----------------------------------------------------


def _begin(state: dict[str, Any], grad: torch.Tensor, dims: tuple[int, ...], beta: float) -> None:
    state["step"] = torch.zeros((), dtype=torch.float32)
    state["exp_avg"] = torch.zeros_like(grad)
    state["exp_avg_sq"] = torch.zeros_like(grad)
    for dim in dims:
        size = grad.shape[dim]
        state[f"factor_{dim}"] = torch.zeros(size, size, dtype=grad.dtype, device=grad.device)
    _average_factors(state, grad, dims, beta)
    for dim in dims:
        state[f"basis_{dim}"] = _eigenvectors(state[f"factor_{dim}"])


def _bases(state: dict[str, Any], ndim: int) -> Bases:
    return [state.get(f"basis_{dim}") for dim in range(ndim)]


def _average_factors(state: dict[str, Any], grad: torch.Tensor, dims: tuple[int, ...], beta: float) -> None:
    for dim in dims:
        rows = grad.movedim(dim, 0).flatten(1)
        state[f"factor_{dim}"].addmm_(rows, rows.T, beta=beta, alpha=1 - beta)


def _refresh(state: dict[str, Any], dims: tuple[int, ...], bases: Bases) -> None:
    """Bring the bases up to date and both averages over to them."""
    mean = turned_back(state["exp_avg"], bases)
    for dim in dims:
        factor, basis = state[f"factor_{dim}"], state[f"basis_{dim}"]
        # Only with the largest eigenvalue first does QR take each column clear of those before it. The squares
        # belong to directions and follow their order.
        order = torch.argsort((basis * (factor @ basis)).sum(0), descending=True)
        state["exp_avg_sq"] = state["exp_avg_sq"].index_select(dim, order)
        state[f"basis_{dim}"] = torch.linalg.qr(factor @ basis[:, order]).Q
    state["exp_avg"] = turned(mean, _bases(state, mean.ndim))


def _eigenvectors(factor: torch.Tensor) -> torch.Tensor:
    """In columns, that of the largest eigenvalue first."""
    vectors: torch.Tensor
    try:
        vectors = torch.linalg.eigh(factor).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # float32 may fail to converge where eigenvalues lie close together.
        vectors = torch.linalg.eigh(factor.double()).eigenvectors.to(factor.dtype)
    return vectors.flip(1).contiguous()


# ---- into the basis and back -----------------------------------------------------------------------------------------


def turned(tensor: torch.Tensor, bases: Bases) -> torch.Tensor:
    """Each dimension multiplied by the transpose of its basis; None leaves it."""
    for basis in bases:
        # The first dimension goes to the end each time, so that all come round to their places.
        tensor = tensor.movedim(0, -1) if basis is None else torch.tensordot(tensor, basis, dims=([0], [0]))
    return tensor.contiguous()


def turned_back(tensor: torch.Tensor, bases: Bases) -> torch.Tensor:
    return turned(tensor, [None if basis is None else basis.T for basis in bases])
