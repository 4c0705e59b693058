"""In which order copies of a model (DDP) exchange their gradients: the same in every job of a run.

DDP exchanges all gradients in one buffer at first, and from the second step on in buckets, in the order in which the
first backward pass computed them. How three or more numbers are rounded when they are added up depends on where in a
buffer they lie. So the order is noted when DDP learns it, is kept in checkpoints, and a run that goes on has its
buckets in that order before its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Buckets:
    """Of one model. All ranks call the same methods at the same step; DDP takes rank 0's order for all.

    Attributes:
        order: names of the parameters, first the one whose gradient is there first; None as long as nobody knows.
    """

    def __init__(self, model: nn.Module, agree: Callable[[bool], bool]) -> None:
        self.order: list[str] | None = None
        self._agree = agree
        self._model = model if isinstance(model, DistributedDataParallel) else None
        self._names: dict[nn.Parameter, str] = {}
        if self._model is not None:
            ignored = self._model.parameters_to_ignore
            named = self._model.module.named_parameters()
            self._names = {one: name for name, one in named if one.requires_grad and name not in ignored}
        self._seen: list[str] = []
        self._hooks: list[Any] = []

    # ---- noting ------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Before a backward pass that DDP exchanges; notes the order until it is known."""
        if self._model is None or self.order is not None or self._hooks:
            return
        self._seen = []
        self._hooks = [
            one.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for one in self._names
        ]

    def watched(self) -> None:
        """After it."""
        if not self._hooks:
            return
        assert self._model is not None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        names = list(self._names.values())
        at = {name: number for number, name in enumerate(names)}
        told = torch.full((len(names),), -1, dtype=torch.int64, device=next(iter(self._names)).device)
        if sorted(self._seen) == sorted(names):  # where a parameter had no gradient, DDP says what it thinks of that
            told.copy_(torch.tensor([at[name] for name in self._seen]))
        dist.broadcast(told, group=self._model.process_group, group_src=0)
        if (heard := told.tolist())[0] >= 0:
            self.order = [names[number] for number in heard]

    def _note(self, parameter: torch.Tensor) -> None:
        self._seen.append(self._names[parameter])  # type: ignore[index]

    # ---- bringing about ----------------------------------------------------------------------------------------------

    def arrange(self, order: Sequence[str]) -> bool:
        """Have DDP make its buckets in this order, before the first step. Whether it did; if not, it makes its own.

        Gradients of nothing are sent through it: sums of parameters, times 0. What is made last goes backward first.
        """
        if self._model is None:  # another job may have copies again
            self.order = list(order)
            return True
        if self.order is not None:  # it is done only once
            return self.order == list(order)
        named = {name: one for one, name in self._names.items()}
        if not self._agree(bool(order) and sorted(order) == sorted(named)):
            return False
        self.watch()
        self._model.reducer.prepare_for_forward()
        self._model.reducer.prepare_for_backward([])
        with torch.enable_grad():
            sums = [named[name].sum().float() for name in reversed(order)]
            (torch.stack(sums).sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        self.watched()
        for one in self._names:
            one.grad = None
        return self.order == list(order)

    # ---- the same by hand --------------------------------------------------------------------------------------------

    def of(self, grads: Iterable[tuple[str, torch.Tensor]]) -> list[list[torch.Tensor]]:
        """These gradients, by name, as DDP puts them together."""
        by_name = dict(grads)
        names = [name for name in self.order or by_name if name in by_name]
        tensors = [by_name[name] for name in names]
        return together(tensors, self._model.bucket_bytes_cap) if self._model is not None else [tensors]


def together(tensors: list[torch.Tensor], most_bytes: int) -> list[list[torch.Tensor]]:
    """What DDP itself reckons when it makes its buckets anew: of one type each, and the first a small one."""
    if not tensors:
        return []
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, most_bytes]  # type: ignore[attr-defined]
    found, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        tensors, limits, [False] * len(tensors)
    )
    return [[tensors[at] for at in bucket] for bucket in found]
