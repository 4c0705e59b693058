"""Compression of what FSDP2 (`fully_shard`) sends of gradients.

Two places can be taken over through FSDP2's public methods: the reduce-scatter between the ranks that share a model,
and, for several such groups that are replicas of each other, the all-reduce between the replicas.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from diamond.optim.compress.codec import Layout
from diamond.optim.compress.wire import Wire
from diamond.optim.errors import OptimError

Shapes = tuple[tuple[int, ...], ...]


class ReduceScatter:
    """Takes the place of FSDP2's own."""

    def __init__(self, wire: Wire, site: str, shapes: Shapes) -> None:
        self._wire, self._site, self._shapes = wire, site, shapes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        factor = {dist.ReduceOp.AVG: 1.0, dist.ReduceOp.SUM: float(group.size())}.get(getattr(op, "op", op))
        if factor is None:
            raise OptimError(
                f"FSDP reduces with {op}, which cannot be compressed; "
                "call set_force_sum_reduction_for_comms(True) on every FSDP module"
            )
        layout = shard_layout(self._site, self._shapes, output_tensor.numel())
        passage = self._wire.depart(input_tensor, layout, group, site=self._site, scatter=True)
        passage.arrive(output_tensor, factor)
        self._wire.step_done(self._site)


class AllReduce:
    """Averages the shards of replicas."""

    def __init__(self, wire: Wire, site: str, shapes: Shapes, group: dist.ProcessGroup) -> None:
        self._wire, self._site, self._shapes, self._group = wire, site, shapes, group

    def __call__(self, reduce_output: torch.Tensor) -> None:
        layout = shard_layout(self._site, self._shapes, reduce_output.numel())
        passage = self._wire.depart(reduce_output, layout, self._group, site=self._site)
        passage.arrive(reduce_output)
        self._wire.step_done(self._site)


def attach_to_fsdp(model: nn.Module, wire: Wire, replicas: dist.ProcessGroup | None) -> None:
    _refuse_native_hybrid(model)
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        site = name or "root"
        assert isinstance(module, nn.Module)
        if replicas is None:
            module.set_custom_reduce_scatter(ReduceScatter(wire, site, shard_shapes(module)))  # type: ignore[arg-type]
        else:
            module.set_all_reduce_hook(AllReduce(wire, site, shard_shapes(module), replicas))
    if replicas is not None:
        _begin_alike(model, replicas)


def shard_shapes(module: nn.Module) -> Shapes:
    """What one rank has of each parameter, filled up to whole rows. To be asked while parameters are sharded."""
    shapes: list[tuple[int, ...]] = []
    for parameter in own_parameters(module):
        if parameter.requires_grad and isinstance(parameter, DTensor):
            shape, world = tuple(parameter.shape), parameter.device_mesh.size()
            shapes.append((-(-shape[0] // world), *shape[1:]) if shape else (1,))
    return tuple(shapes)


def shard_layout(site: str, shapes: Shapes, numel: int) -> Layout:
    """The pieces of one rank's share of a gradient buffer, as far as the parameters explain it.

    A buffer that holds something else (some got no gradient, say) is treated as one matrix as square as can be. A wrong
    guess costs accuracy, never correctness.
    """
    if sum(math.prod(shape) for shape in shapes) != numel:
        shapes = (_square(numel),)
    # Modules must not share their random numbers.
    first = zlib.crc32(site.encode()) << 20
    count = len(shapes)
    return Layout(tuple(f"{site}.{at}" for at in range(count)), tuple(range(first, first + count)), shapes)


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those of the module that no FSDP module inside it owns, each once."""
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop(0)
        for parameter in one.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
        waiting[:0] = [child for child in one.children() if not isinstance(child, FSDPModule)]


def _square(numel: int) -> tuple[int, ...]:
    for rows in range(math.isqrt(numel), 1, -1):
        if numel % rows == 0:
            return rows, numel // rows
    return (numel,)


def _refuse_native_hybrid(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1 and parameter.placements[0].is_replicate():
            raise OptimError(
                f"{name} lies on a mesh of replicas and shards, and FSDP2 lets nobody into the all-reduce between its "
                'replicas; shard within a replica alone, fully_shard(model, mesh=mesh["shard"]), and let Diamond join '
                'the replicas: attach(model, compress, process_group=mesh["replicate"].get_group())'
            )


def _begin_alike(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Replicas must start from the same weights, as under DDP: those of the first one."""
    first = dist.get_global_rank(replicas, 0)
    for one in [*model.parameters(), *model.buffers()]:
        local = one.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        dist.broadcast(local, src=first, group=replicas)
