"""`attach`: compression for a model as it is, whatever optimizer trains it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from diamond.optim.compress.ddp import attach_to_ddp
from diamond.optim.compress.fsdp import attach_to_fsdp
from diamond.optim.compress.meeting import together
from diamond.optim.compress.spec import Compress
from diamond.optim.compress.wire import Wire
from diamond.optim.errors import OptimError


def attach(model: nn.Module, compress: Compress, process_group: dist.ProcessGroup | None = None) -> Wire:
    """Compress the gradients that a model sends.

    Args:
        model: wrapped in DistributedDataParallel, or sharded with `fully_shard`; compiled or not. Once only; DDP takes
            one hook.
        compress: how.
        process_group: with DDP, which ranks (its own group where this is left out). With FSDP2, the replicas of this
            rank's shard: their all-reduce is compressed, and the reduce-scatter within a replica left alone. Where it
            is left out, the reduce-scatter is compressed.

    Raises:
        OptimError: the model is neither, has a hook already, or FSDP2 joins replicas itself.
    """
    if not isinstance(compress, Compress):
        raise OptimError(f'compress={compress!r} is no Compress; give for example Compress(grad="powersgd:4")')
    if not isinstance(model, nn.Module):
        raise OptimError(f"model={type(model).__name__}: give the model itself, under DistributedDataParallel or FSDP2")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise OptimError(
            f"process_group={type(process_group).__name__}: give a group, as torch.distributed.new_group or "
            "mesh.get_group() gives it, or leave it out"
        )
    model, wire = _sending(model), Wire(compress)
    together("attach")
    if isinstance(model, DistributedDataParallel):
        attach_to_ddp(model, wire, process_group)
    else:
        attach_to_fsdp(model, wire, process_group)
    return wire


def _sending(model: nn.Module) -> nn.Module:
    """The module that sends gradients, from under torch.compile."""
    name, inside = type(model).__name__, model
    while not isinstance(inside, DistributedDataParallel):
        below: Any = getattr(inside, "_orig_mod", None)
        if below is None:
            break
        inside, name = below, type(below).__name__
    if isinstance(inside, DistributedDataParallel) or any(isinstance(one, FSDPModule) for one in inside.modules()):
        return inside
    raise OptimError(
        f"model={name} sends no gradients; wrap it first, once torch.distributed.init_process_group was called: "
        "DistributedDataParallel(model), or fully_shard(model), and attach to what that gives"
    )
