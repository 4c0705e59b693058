"""Where a model is trained may become clear only after its optimizer was made: under DDP, in shards (FSDP2), by ranks
that had not met yet. K-FAC follows it there, as if it had been made afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from diamond.optim import sharded
from diamond.optim.blocks import unwrapped
from diamond.optim.compress import Compress, Wire, attach
from diamond.optim.errors import OptimError

if TYPE_CHECKING:
    from diamond.optim.kfac import KFAC


def rebind(optimizer: KFAC, model: nn.Module) -> None:
    """See `KFAC.rebind`."""
    if unwrapped(model) is not optimizer.root:
        raise OptimError("rebind: model is not the one that the optimizer was made for; wrap or shard that one")
    if optimizer.steps or optimizer.wire is not None:
        _check_unchanged(optimizer)
        return
    optimizer._curving.disarm()
    fresh = type(optimizer)(model, **optimizer._given)
    # Schedulers hold the optimizer and its groups, and may have changed them; only the parameters are others.
    for group, now in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        group["params"] = now["params"]
    torchs = vars(Optimizer([nn.Parameter()], {}))
    vars(optimizer).update({name: value for name, value in vars(fresh).items() if name not in torchs})


def wire_of(model: nn.Module, compress: Compress | None) -> Wire | None:
    """How gradients travel; None for a model that sends none, or not yet."""
    wanted = compress is not None and compress.grad != "none"
    sends = isinstance(model, nn.parallel.DistributedDataParallel) or any(True for _ in sharded.fsdp_modules(model))
    return attach(model, compress) if wanted and sends and compress is not None else None


def check_wire(optimizer: KFAC) -> None:
    """When training begins: what was asked to be compressed must travel."""
    compress: Compress | None = optimizer._given["compress"]
    if compress is not None and compress.grad != "none" and optimizer.wire is None and optimizer.crew.several:
        raise OptimError(
            f"compress=Compress(grad={compress.grad!r}): the model that KFAC was given sends no gradients; give it "
            "the one that DistributedDataParallel or fully_shard made, or call rebind with that"
        )


def _check_unchanged(optimizer: KFAC) -> None:
    known = {id(one) for group in optimizer.param_groups for one in group["params"]}
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world != optimizer.crew.world or any(
        id(one) not in known for block in optimizer.blocks for one in block.parameters()
    ):
        raise OptimError(
            f"rebind: the optimizer has made {optimizer.steps} steps, and since then parameters were replaced or "
            "ranks joined; rebind it before its first step, and load its state afterwards"
        )
