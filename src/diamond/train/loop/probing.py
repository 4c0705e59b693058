"""Steps at which a run looks closer at itself: how long it computes, how long gradients take to be exchanged, how noisy
they are.

Copies of a model (DDP) exchange gradients while others are still computed, and nobody can tell the two apart from the
outside. At a *probe* each rank computes its own gradients first and exchanges them afterwards, to the same mean: what
is trained is the same. Which steps are probes depends on their number alone, so all ranks do the same and a run that
was killed does what it would have done. On a GPU nothing is waited for: what is measured is read a step later.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diamond.train.loop.batches import Piece
from diamond.train.loop.buckets import Buckets
from diamond.train.loop.noise import Noise

EVERY = 128  # steps; a probe costs what overlapping saves, once in so many
_FIRST = 8  # by then caches are warm and DDP has its final buckets
_LAST = 8  # so many probes are remembered
_ROOM = 0.1  # of the free memory, for a copy of the gradients
_Group = list[torch.Tensor]


def is_probe(step: int) -> bool:
    """Of the step that gets this number: 8, 16, 32, 64, and every 128th."""
    return step >= _FIRST and (step % EVERY == 0 or (step < EVERY and step & (step - 1) == 0))


@dataclass
class _Look:
    """Square norms on their way from the device, by group: of gradients of `small` and then of `big` samples."""

    due: int
    values: torch.Tensor
    ready: Any
    small: float
    big: float


@dataclass
class _Before:
    """A step's gradients, kept until the next one's are there; None where there was no room for them."""

    samples: int
    step: int
    params: list[list[nn.Parameter]]
    grads: list[_Group] | None


class Probes:
    """Of one run. All ranks call the same methods at the same step.

    Attributes:
        noise: how noisy gradients are; the same on every rank, after every step.
        compute_s, sync_s: seconds of computing and of exchanging gradients, of the last probes.
        exchanges: whether gradients are exchanged here at a probe, instead of by DDP.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, device: torch.device, world: int,
        copies: int, by_group: bool, buckets: Buckets,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._by_group = model, optimizer, by_group
        self._buckets = buckets
        self._device, self._world, self._copies = device, world, copies
        self.noise = Noise()
        self.compute_s: deque[float] = deque(maxlen=_LAST)
        self.sync_s: deque[float] = deque(maxlen=_LAST)
        # DDP sends sparse gradients in a way of its own.
        sparse = any(getattr(one, "sparse", False) is True for one in model.modules())
        self.exchanges = isinstance(model, DistributedDataParallel) and not sparse
        self.times = self.exchanges or device.type == "cuda"
        self._probing, self._is_first = False, True
        self._marks: list[Any] = []  # begin and end of each piece
        self._exchange: list[Any] = []  # when gradients were computed, when exchanging them began and ended
        self._timed: tuple[int, list[Any], list[Any]] | None = None
        self._looks: list[_Look] = []
        self._first_sqr: tuple[torch.Tensor, float] | None = None  # of the first piece of several
        self._before: _Before | None = None

    # ---- what the loop calls -----------------------------------------------------------------------------------------

    def begins(self, step: int, piece: Piece) -> bool:
        """Before a piece of the step that will have this number. Whether DDP is to exchange gradients after it."""
        if self._is_first:
            self._is_first = False
            self._probing = is_probe(step)
            self._marks, self._exchange, self._first_sqr = [], [], None
            if self._probing and self.exchanges and getattr(self._model, "_comm_hooks", None):
                self.exchanges = False  # the user exchanges in a way of their own
        if not self._probing:
            return piece.is_last
        self._mark(self._marks)
        return piece.is_last and not self.exchanges

    def computed(self, step: int, piece: Piece) -> None:
        """After a piece's backward pass, before anybody changes its gradients."""
        if self._before is not None and piece.is_last:
            self._compare(step, piece)
        if not self._probing:
            return
        if self.exchanges:
            if piece.is_last:
                self._average(step, piece)
        elif self._world == 1 and not piece.is_last:
            if len(self._marks) <= 1 and self._first_sqr is None and piece.weight > 0:
                self._first_sqr = (self._square_norms(), piece.weight)
        elif piece.is_last:
            self._look_back(step, piece)

    def stepped(self, step: int, *, is_last: bool) -> None:
        """After a piece, and after the optimizer's step if it was the last."""
        if self._probing:
            self._mark(self._marks)
        if is_last:
            if self._probing and self.times:
                self._timed = (step + 1, self._marks, self._exchange)
            self._probing, self._is_first = False, True

    def after(self, step: int) -> None:
        """Take up what was measured: a step later, so that it is there, and at the same step on every rank."""
        while self._looks and self._looks[0].due <= step:
            self._take(self._looks.pop(0))
        if self._timed is not None and self._timed[0] <= step:
            self._read_clocks()

    def keeps_gradients(self, step: int) -> bool:
        """Whether gradients are to be zeroed where they lie, before the step with this number: then a probe's lie in
        DDP's own memory and need no more of it."""
        return self.exchanges and is_probe(step)

    def state(self) -> dict[str, Any]:
        """For the checkpoint, with what is still to be taken up."""
        return {**self.noise.state(), "looks": [[one.due, *self._read(one)] for one in self._looks]}

    def load(self, state: dict[str, Any]) -> None:
        self.noise.load(state)
        for due, values, small, big in state["looks"]:
            held = torch.tensor(values, dtype=torch.float64)
            self._looks.append(_Look(int(due), held, None, float(small), float(big)))

    # ---- clocks ------------------------------------------------------------------------------------------------------

    def _mark(self, marks: list[Any]) -> None:
        if not self.times:
            marks.append(None)
        elif self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    def _between(self, begin: Any, end: Any) -> float:
        if self._device.type == "cuda":
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000
        return float(end - begin)

    def _read_clocks(self) -> None:
        assert self._timed is not None
        _, marks, exchange = self._timed
        self._timed = None
        took = sum(self._between(begin, end) for begin, end in zip(marks[::2], marks[1::2], strict=True))
        if exchange:
            took -= self._between(exchange[0], exchange[2])
            self.sync_s.append(self._between(exchange[1], exchange[2]))
        self.compute_s.append(max(took, 0.0))

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _groups(self) -> list[list[nn.Parameter]]:
        """Whose noise is told apart."""
        if self._by_group and self._optimizer is not None:
            return [[one for one in group["params"] if one.requires_grad] for group in self._optimizer.param_groups]
        return [[one for one in self._model.parameters() if one.requires_grad]]

    def _square_norms(self) -> torch.Tensor:
        return self._squares([_gradients(group) for group in self._groups()])

    def _squares(self, groups: Sequence[_Group]) -> torch.Tensor:
        found = []
        for grads in groups:
            if not grads:
                found.append(torch.zeros((), dtype=torch.float64, device=self._device))
                continue
            norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
            found.append(torch.stack(norms).double().square().sum())
        return torch.stack(found)

    def _average(self, step: int, piece: Piece) -> None:
        """What DDP does, after the computing instead of beside it: ranks' gradients against their mean."""
        assert isinstance(self._model, DistributedDataParallel)
        # DDP takes the last forward pass as a promise of what the next one finds on other ranks.
        self._model.require_forward_param_sync = True
        self._mark(self._exchange)
        small = self._square_norms() / self._world
        self._mark(self._exchange)
        for bucket in self._buckets.of(self._own(self._model)):  # as DDP's own, so that sums are rounded alike
            flat = torch.cat([one.reshape(-1) for one in bucket]).mul_(1.0 / self._world)
            dist.all_reduce(flat, group=self._model.process_group)
            parts = torch.split(flat, [one.numel() for one in bucket])
            torch._foreach_copy_(bucket, [part.view(one.shape) for part, one in zip(parts, bucket, strict=True)])
        self._mark(self._exchange)
        dist.all_reduce(small, group=self._model.process_group)
        if (
            self._world > 1 and piece.samples % self._world == 0
        ):  # else some ranks computed more, and their gradients say something else
            self._send(step, small, piece.samples / self._world, self._square_norms(), piece.samples)
        del self._exchange[3:]  # a second backward pass in the same step is exchanged as well, and not measured

    def _own(self, model: DistributedDataParallel) -> Iterable[tuple[str, torch.Tensor]]:
        ignored = model.parameters_to_ignore
        for name, one in model.module.named_parameters():
            if one.requires_grad and name not in ignored:
                if one.grad is None:  # not used here; another rank may have used it
                    one.grad = torch.zeros_like(one)
                yield name, one.grad

    def _look_back(self, step: int, piece: Piece) -> None:
        """Without ranks to compare: the first piece against the step, or this step against the next."""
        if self._first_sqr is not None:
            sqr, weight = self._first_sqr
            self._send(step, sqr / weight**2, weight * piece.samples, self._square_norms(), piece.samples)
            self._first_sqr = None
            return
        groups = self._groups()
        grads = [_gradients(group) for group in groups]
        needed = sum(one.numel() * one.element_size() for group in grads for one in group)
        kept = None
        if needed < _ROOM * _free_bytes(self._device):
            kept = [[one.clone() for one in group] for group in grads]
        if kept is not None or self._world > 1:  # ranks compare together, whatever each has to say
            self._before = _Before(piece.samples, step, groups, kept)

    def _compare(self, step: int, piece: Piece) -> None:
        before, self._before = self._before, None
        assert before is not None
        if before.samples != piece.samples or before.step != step - 1:
            return
        both = self._differences(before)
        if self._world > 1:
            # Each rank has its shards; where several hold the same, they come more than once.
            both /= self._copies
            dist.all_reduce(both)
        squares, apart = both.chunk(2)
        # The mean of two batches is a batch twice as large: |(a + b)/2|^2 = (|a|^2 + |b|^2)/2 - |a - b|^2/4.
        self._send(step, squares / 2, piece.samples, squares / 2 - apart / 4, 2 * piece.samples)

    def _differences(self, before: _Before) -> torch.Tensor:
        """By group |a|^2 + |b|^2, then |a - b|^2; no numbers where they cannot be compared."""
        grads = [_gradients(group) for group in before.params]
        then = before.grads
        if then is None or [len(one) for one in then] != [len(one) for one in grads]:
            return torch.full((2 * len(grads),), float("nan"), dtype=torch.float64, device=self._device)
        squares = self._squares(then) + self._squares(grads)
        for one, two in zip(then, grads, strict=True):
            if one:
                torch._foreach_sub_(one, two)  # in place: no third set of gradients
        return torch.cat([squares, self._squares(then)])

    # ---- what was found ----------------------------------------------------------------------------------------------

    def _send(self, step: int, small_sqr: torch.Tensor, small: float, big_sqr: torch.Tensor, big: float) -> None:
        found = torch.cat([small_sqr, big_sqr])
        ready = None
        if self._device.type == "cuda":
            held = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            held.copy_(found, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
            found = held
        self._looks.append(_Look(step + 1, found, ready, small, big))

    def _read(self, look: _Look) -> tuple[list[float], float, float]:
        if look.ready is not None:
            look.ready.synchronize()
        return look.values.tolist(), look.small, look.big

    def _take(self, look: _Look) -> None:
        values, small, big = self._read(look)
        half = len(values) // 2
        self.noise.look(values[:half], small, values[half:], big)


def _gradients(params: Iterable[nn.Parameter]) -> _Group:
    """Those that are there, of shards the local ones."""
    found = (one.grad for one in params if one.grad is not None and not one.grad.is_sparse)
    local = (one.to_local() if isinstance(one, DTensor) else one for one in found)
    return [one.detach() for one in local if one.numel()]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        # The most that was ever in use leaves room for the rest, whatever the allocator holds back.
        total = torch.cuda.mem_get_info(device)[1]
        return max(0, int(total) - torch.cuda.max_memory_allocated(device))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
