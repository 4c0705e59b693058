"""Carries the rounds of an exchange over a process group, and counts every byte handed to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from diamond.optim.compress.codec import Rebuilt, Rounds, Send
from diamond.optim.compress.counting import Count

# Its older name warns since the newer one exists.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Flight:
    """An exchange under way: at any time one collective runs, or all is over and `rebuilt` is there."""

    def __init__(self, rounds: Rounds, group: dist.ProcessGroup, count: Count, kind: str) -> None:
        self._rounds, self._group, self._count, self._kind = rounds, group, count, kind
        self._work: Any = None
        self._came: torch.Tensor | None = None
        self.rebuilt: Rebuilt | None = None
        self._go_on(None)

    def advance(self) -> bool:
        """Wait for the round under way and begin the next; whether it was the last."""
        if self.rebuilt is None:
            self._work.wait()
            self._go_on(self._came)
        return self.rebuilt is not None

    def finish(self) -> Rebuilt:
        while not self.advance():
            pass
        assert self.rebuilt is not None
        return self.rebuilt

    def _go_on(self, came: torch.Tensor | None) -> None:
        try:
            # The first answer of a generator must be None.
            send = self._rounds.send(came)  # type: ignore[arg-type]
        except StopIteration as end:
            self.rebuilt, self._work, self._came = end.value, None, None
            return
        self._work, self._came = start(send, self._group)
        self._count.add(self._kind, send, self._group.size())


def start(send: Send, group: dist.ProcessGroup) -> tuple[Any, torch.Tensor]:
    """Begin a collective: what to wait for, and where the answer will be."""
    tensor, world = send.tensor.contiguous(), group.size()
    if send.how == "sum":
        return dist.all_reduce(tensor, group=group, async_op=True), tensor
    if send.how == "gather":
        # Gloo wants rows of the same shape as what is sent, or all of it flat.
        came = tensor.new_empty(world * tensor.numel())
        return _gather(came, tensor.view(-1), group=group, async_op=True), came.view(world, *tensor.shape)
    came = torch.empty_like(tensor)
    return dist.all_to_all_single(came, tensor, group=group, async_op=True), came
