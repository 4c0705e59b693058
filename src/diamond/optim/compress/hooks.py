"""`attach`: compression for a model as it is, whatever optimizer trains it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from diamond.optim.compress.ddp import attach_to_ddp
from diamond.optim.compress.fsdp import attach_to_fsdp
from diamond.optim.compress.spec import Compress
from diamond.optim.compress.wire import Wire
from diamond.optim.errors import OptimError


def attach(model: nn.Module, compress: Compress, process_group: dist.ProcessGroup | None = None) -> Wire:
    """Compress the gradients that a model sends.

    Args:
        model: wrapped in DistributedDataParallel, or sharded with `fully_shard`. Once only; DDP takes one hook.
        compress: how.
        process_group: with DDP, which ranks (its own group where this is left out). With FSDP2, the replicas of this
            rank's shard: their all-reduce is compressed, and the reduce-scatter within a replica left alone. Where it
            is left out, the reduce-scatter is compressed.

    Raises:
        OptimError: the model is neither, or FSDP2 joins replicas itself.
    """
    if not isinstance(compress, Compress):
        raise OptimError(f'compress={compress!r} is no Compress; give for example Compress(grad="powersgd:4")')
    wire = Wire(compress)
    if isinstance(model, DistributedDataParallel):
        attach_to_ddp(model, wire, process_group)
    elif any(isinstance(one, FSDPModule) for one in model.modules()):
        attach_to_fsdp(model, wire, process_group)
    else:
        raise OptimError(
            f"model={type(model).__name__} sends no gradients; wrap it first: "
            "DistributedDataParallel(model), or fully_shard(model), and attach to what that gives"
        )
    return wire
