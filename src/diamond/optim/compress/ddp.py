"""Compression as a communication hook of DistributedDataParallel.

Annotations are evaluated here (no `from __future__`), because DDP compares those of a hook with its own types.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from diamond.optim.compress.codec import Layout
from diamond.optim.compress.wire import Passage, Wire
from diamond.optim.errors import OptimError

_SITE = "ddp"


class Buckets:
    """The buckets of one backward pass, in the order in which DDP hands them over.

    A method of several rounds begins the next round of a bucket when a later bucket comes, and not when the network
    is done: then all ranks issue their collectives in the same order, and gradients are computed meanwhile.
    """

    def __init__(self, wire: Wire, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self._wire, self._group = wire, group
        self._places = {id(one): (at, name) for at, (name, one) in enumerate(model.module.named_parameters())}
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._under_way: list[tuple[Passage, torch.Tensor, Any]] = []

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise OptimError("gradients of sparse=True embeddings cannot be compressed; make them with sparse=False")
        if bucket.index() == 0:
            # What an interrupted backward pass left behind.
            self._under_way.clear()
        for passage, _, _ in self._under_way:
            passage.advance()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        passage = self._wire.depart(buffer, self._layout(bucket), self._group, site=_SITE)
        self._under_way.append((passage, buffer, future))
        if bucket.is_last():
            self._deliver()
        return future  # type: ignore[no-any-return]

    def _deliver(self) -> None:
        rounds_left = True
        while rounds_left:
            # One round of each, so that the next bucket's is on the wire while this one's is worked on.
            ended = [passage.advance() for passage, _, _ in self._under_way]
            rounds_left = not all(ended)
        for passage, buffer, future in self._under_way:
            passage.arrive(buffer)
            future.set_result(buffer)
        self._under_way.clear()
        self._wire.step_done(_SITE)

    def _layout(self, bucket: dist.GradBucket) -> Layout:  # type: ignore[name-defined]
        parameters = bucket.parameters()
        ids = tuple(id(one) for one in parameters)
        if ids not in self._layouts:
            places = [self._places[one] for one in ids]
            self._layouts[ids] = Layout(
                tuple(name for _, name in places),
                tuple(at for at, _ in places),
                tuple(tuple(one.shape) for one in parameters),
            )
        return self._layouts[ids]


def hook(state: Buckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    return state.take(bucket)


def attach_to_ddp(model: DistributedDataParallel, wire: Wire, group: dist.ProcessGroup | None) -> None:
    buckets = Buckets(wire, model, group or model.process_group)
    try:
        model.register_comm_hook(buckets, hook)
    except RuntimeError as error:
        raise OptimError(
            f"model: DistributedDataParallel takes one communication hook ({error}); call attach once, not beside "
            "KFAC(compress=…) or a hook of your own, or wrap the model anew"
        ) from error
