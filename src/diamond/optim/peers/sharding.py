"""Parameters that are spread over ranks (DTensor, as FSDP2 makes them): the part held here, the whole, and norms.

Elementwise arithmetic is done on the part that this rank holds, which needs no communication and none of DTensor's
dispatch. Ordinary tensors pass through unchanged.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate


def layout(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are spread over the same ranks in the same way."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What of it this rank holds, in the same memory. Call it without gradients being recorded."""
    if not isinstance(tensor, DTensor):
        return tensor
    part: torch.Tensor = tensor.to_local()
    return part


def gradient_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, spread as its parameter is: it may be a sum that is still to be made."""
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, on every rank."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered: torch.Tensor = tensor.full_tensor()
    return gathered


def spread_like(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor of which every rank holds a part as it does of `like`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def held_part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `like`, cut out of a whole tensor that every rank has. No communication."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    everywhere = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return held(everywhere.redistribute(placements=like.placements))


def norms(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The 2-norms of whole tensors, one vector, from the parts held here.

    Args:
        parts: all on one device.
        like: a tensor spread over ranks as all of them are. One all-reduce serves them all.
    """
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    found = torch.stack(torch._foreach_norm(parts, 2, dtype=dtype))
    if not isinstance(like, DTensor):
        return found
    mesh = like.device_mesh
    to_add = [Replicate() if placement.is_replicate() else Partial() for placement in like.placements]
    squares = DTensor.from_local(found.square(), mesh, to_add, run_check=False)
    return held(squares.redistribute(placements=[Replicate()] * mesh.ndim)).sqrt()
