"""Tensors that are spread over ranks (FSDP2, tensor parallelism) as whole ones, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diamond.optim.errors import OptimError

try:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
except ImportError:  # torch without distributed
    DTensor = FSDPModule = FullyShardedDataParallel = None  # type: ignore[assignment, misc]


def is_spread(tensor: Any) -> bool:
    return DTensor is not None and isinstance(tensor, DTensor)


def whole(tensor: Any) -> Any:
    """The tensor with all its parts; the others must ask for it at the same time."""
    return tensor.full_tensor() if is_spread(tensor) else tensor


def held(tensor: Any) -> Tensor:
    """This rank's part, in the same memory. To be asked for while no gradients are recorded."""
    part: Tensor = tensor.to_local() if is_spread(tensor) else tensor
    return part


def room_for(parameter: Tensor) -> Tensor:
    """Zeros of the whole parameter's shape, laid out as it is."""
    if not is_spread(parameter):
        return torch.zeros_like(parameter, requires_grad=False)
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=held(parameter).device)


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """This rank's part of values that every rank has."""
    if not is_spread(parameter):
        return values
    spread: Any = parameter
    # Every rank has the same values, so none needs to send them.
    return distribute_tensor(values, spread.device_mesh, spread.placements, src_data_rank=None)


def grouped(parameters: list[Any]) -> list[Any]:
    """For torch's optimizers, which treat a group's tensors together: those that are spread alike in a group."""
    groups: dict[Hashable, list[Any]] = {}
    for one in parameters:
        groups.setdefault((one.device_mesh, one.placements) if is_spread(one) else None, []).append(one)
    return parameters if len(groups) < 2 else [{"params": group} for group in groups.values()]


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The sum of all products; of tensors that are spread alike one number travels."""
    found: dict[Hashable, list[Tensor]] = {}
    meshes: dict[Hashable, Any] = {}
    for one, other in zip(left, right, strict=True):
        spread: Any = one if is_spread(one) else None
        key = None if spread is None else (spread.device_mesh, spread.placements)
        if spread is not None:
            meshes[key] = spread
            other = _placed_like(other, spread)
        found.setdefault(key, []).append((held(one).float() * held(other).float()).sum())
    return torch.stack([_added(torch.stack(parts).sum(), meshes.get(key)) for key, parts in found.items()]).sum()


def _placed_like(other: Any, one: Any) -> Any:
    """Gradients may be sums that are still to be made."""
    return other if other.placements == one.placements else other.redistribute(placements=one.placements)


def _added(part: Tensor, like: Any) -> Tensor:
    if like is None:
        return part
    over = [Replicate() if one.is_replicate() else Partial() for one in like.placements]
    found: Tensor = DTensor.from_local(part, like.device_mesh, over, run_check=False).full_tensor()
    return found


# ---- models ----------------------------------------------------------------------------------------------------------


def check(model: nn.Module) -> None:
    """Refuses what cannot be trained here, before anything hangs."""
    for name, module in model.named_modules():
        if FullyShardedDataParallel is not None and isinstance(module, FullyShardedDataParallel):
            raise OptimError(
                f"model: {name or 'it'} is wrapped by FullyShardedDataParallel, which hides the layers' weights; "
                "use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if isinstance(module, nn.DataParallel):
            raise OptimError(
                f"model: {name or 'it'} is wrapped by DataParallel, which copies the layers in every step; "
                "use DistributedDataParallel"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise OptimError(f"model: {name} has no shape yet; call the model once before making the optimizer")


def fsdp_modules(root: nn.Module) -> Iterator[Any]:
    for module in root.modules():
        if FSDPModule is not None and isinstance(module, FSDPModule):
            yield module


def gather_up(modules: Iterable[Any]) -> None:
    """Puts sharded parameters back in their places: after a forward pass without gradients, or where the user keeps
    whole ones, FSDP2 leaves copies there, which would not see a change of the parameters."""
    for module in modules:
        module.reshard()


def data_rank(root: nn.Module, rank: int) -> int:
    """A number that ranks have in common which see the same data: those that share a model by tensor parallelism."""
    dealt = any(True for _ in fsdp_modules(root))
    for parameter in root.parameters():
        if not is_spread(parameter):
            continue
        spread: Any = parameter
        mesh = spread.device_mesh
        first = 0
        if dealt:  # FSDP2 puts its own dimensions first: replicas, if there are any, and shards
            first = 2 if mesh.ndim > 1 and spread.placements[0].is_replicate() else 1
        place = mesh.get_coordinate()
        if first < mesh.ndim and place is not None:
            return int(mesh.mesh[tuple(place[:first])].min())
    return rank
