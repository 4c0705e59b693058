"""How a model is spread over the ranks: as copies (DDP), in shards (FSDP2), or sharded inside a node and copied across.

The choice looks at what training the model takes against what a device has; `parallel=` of `run()` overrules it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from diamond.train.cohort import Cohort
from diamond.train.errors import TrainError

KINDS = ("none", "ddp", "fsdp", "hybrid")
AS_SAID = "set in the script"  # why it is this one, where nothing was chosen
_ADAM_BYTES = 8  # two moments in single precision: what most optimizers keep for each parameter
_ROOM = 0.6  # of a device; the rest is for activations and the allocator


@dataclass(frozen=True)
class Sizes:
    """`device_bytes` is what one rank may use."""

    train_bytes: int
    device_bytes: int
    world: int
    num_nodes: int


def train_bytes(model: nn.Module) -> int:
    """Parameters, gradients and the usual optimizer's state."""
    return sum(one.numel() * (2 * one.element_size() + _ADAM_BYTES) for one in model.parameters() if one.requires_grad)


def device_bytes(device: torch.device, ranks_here: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size // max(1, ranks_here)


def choose(sizes: Sizes) -> str:
    """The simplest that fits."""
    if sizes.world == 1:
        return "none"
    room = sizes.device_bytes * _ROOM
    if sizes.train_bytes <= room:
        return "ddp"
    ranks_here = max(1, sizes.world // sizes.num_nodes)
    if sizes.num_nodes > 1 and ranks_here > 1 and sizes.train_bytes <= room * ranks_here:
        return "hybrid"
    return "fsdp"


def chosen(sizes: Sizes) -> tuple[str, str]:
    """The same, and why in a few words."""
    kind = choose(sizes)
    if kind == "none":
        return kind, "one rank holds all of it"
    takes = f"{_gib(sizes.train_bytes)} for training, {_gib(sizes.device_bytes)} a rank"
    why = {"ddp": "fits on each rank", "hybrid": "fits in a node, not on a rank", "fsdp": "too large for a rank"}[kind]
    return kind, f"{why}: {takes}"


def _gib(size: int) -> str:
    number, unit = (size / 1024**3, "GiB") if size >= 1024**3 // 10 else (size / 1024**2, "MiB")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def spread(
    model: nn.Module, kind: str, device: torch.device, *, world: int, num_nodes: int, reshard: bool | None = None
) -> nn.Module:
    """The model as it is to be called from now on. `reshard`: whether all of it is in shards again after a forward
    pass; otherwise the outermost part waits for a backward pass to come."""
    if kind not in KINDS:
        raise TrainError(f"parallel={kind!r} is unknown", hint=f"use one of {', '.join(KINDS)}, or leave it out")
    if world == 1 or kind == "none":
        if world > 1:
            raise TrainError("parallel='none' with several ranks would train as many models", hint="use ddp or fsdp")
        return model
    if kind == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    sizes = (num_nodes, world // num_nodes) if kind == "hybrid" else (world,)
    names = ("copies", "shards") if kind == "hybrid" else ("shards",)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def blocks(model: nn.Module) -> Iterable[nn.Module]:
    """What repeats: each is gathered alone, so that no device ever holds the whole model."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from blocks(child)


def follow(optimizer: torch.optim.Optimizer, before: dict[int, str], model: nn.Module) -> None:
    """The model is spread by now, and sharding replaced its parameters; the optimizer was made with the old ones."""
    rebind = getattr(optimizer, "rebind", None)
    if callable(rebind):  # it has more than groups of parameters, and knows itself what to do (diamond.optim.KFAC does)
        rebind(model)
        return
    if not isinstance(model, FSDPModule):
        return
    now = dict(model.named_parameters())
    for group in optimizer.param_groups:
        unknown = [one for one in group["params"] if id(one) not in before]
        if unknown:
            raise TrainError(
                f"the optimizer holds {len(unknown)} parameters that are not the model's",
                hint="make the optimizer from model.parameters() of the model given to prepare()",
            )
        group["params"] = [now[before[id(one)]] for one in group["params"]]


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(value): name for name, value in model.named_parameters()}


def sync_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the coming backward pass exchanges gradients; the last one of a step does."""
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = wanted
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)


def cast(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Run the model's forward in `dtype` where that is safe; the loss stays outside."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*given: Any, **named: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return inner(*given, **named)

    model.forward = forward


def connect(device: torch.device) -> tuple[Any, Any]:
    """Join the others; a group for decisions and one for saving, whose talk must not mix with the training's."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    return dist.new_group(backend="gloo"), dist.new_group(backend="gloo")


_GONE = re.compile(
    r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|\b(TCP)?[Ss]tore\b|Socket [Tt]imeout|recvVector"
)


def is_peer_lost(error: BaseException | None) -> bool:
    """Whether it comes from another rank that is gone, and not from what this one does."""
    while error is not None:
        if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
            return True
        if isinstance(error, RuntimeError) and _GONE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave_if_peer_lost(error: BaseException, us: Cohort) -> None:
    """Where a launcher brings all ranks back, this one ends at once; elsewhere the error goes its way."""
    if us.is_led and not isinstance(error, TrainError) and is_peer_lost(error):
        text = str(error).strip().split("\n", 1)[0][:300]
        sys.stderr.write(f"diamond.train: another rank is gone ({text})\n")
        us.leave()


@contextlib.contextmanager
def watching(us: Cohort) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        leave_if_peer_lost(error, us)
        raise
