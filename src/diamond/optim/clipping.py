"""What gradients are multiplied by between the backward pass and the step, as by `clip_grad_norm_`.

K-FAC compares the gradient with the curvature of the loss. A gradient that was made smaller is that of a smaller loss,
whose curvature nobody made smaller: steps along it would be too short by the same factor. So sizes are noted when the
backward pass ends, and compared when the optimizer steps.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from diamond.optim.sharded import held, is_spread

_UNCHANGED = 1e-3  # of what rounding may change


def sizes(parameters: Iterable[Tensor]) -> Tensor | None:
    """The sum of squares of the parts of these gradients that this rank holds; None where there are none."""
    with torch.no_grad():
        parts = [held(one.grad) for one in parameters if one.grad is not None and not one.grad.is_sparse]
        parts = [one for one in parts if one.numel()]
        if not parts:
            return None
        norms = [one.float().to(parts[0].device) for one in torch._foreach_norm(parts)]
        return torch.stack(norms).square().sum()


def at_the_end(call: Callable[[], None]) -> None:
    """Calls it when the backward pass under way has ended and ranks have added up their gradients.

    That is done in calls of the same kind, which were asked for before this one asks for itself again.
    """
    engine = Variable._execution_engine
    with contextlib.suppress(RuntimeError):  # of engines that know no such calls
        engine.queue_callback(lambda: engine.queue_callback(call))


def factor(before: float, now: float, scaler: float) -> float:
    """What gradients were multiplied by, from the sums of their squares.

    Args:
        scaler: what they must be multiplied by anyway, to lose the size that a GradScaler gave them.
    """
    if not before > 0 or not now > 0 or not math.isfinite(before + now):
        return 1.0
    found = math.sqrt(now / before) / scaler
    return found if found < 1 - _UNCHANGED else 1.0


class Watch:
    """Knows, in every step, what became of the gradients. Until it is asked to begin, nothing is installed.

    Not where parameters are spread over ranks: each would find a number that is rounded differently, and what they have
    in common would drift apart.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._handles: list[Any] = []
        self._before: Tensor | None = None
        self._backward = -1

    @property
    def on(self) -> bool:
        return bool(self._handles)

    def begin(self) -> None:
        if self._handles or any(is_spread(one) for one in self._parameters):
            return
        known = weakref.ref(self)

        def met(_: Tensor) -> None:
            if (watch := known()) is not None:
                watch._met()

        for one in self._parameters:
            if one.requires_grad and one.is_leaf:
                self._handles.append(one.register_post_accumulate_grad_hook(met))  # type: ignore[no-untyped-call]
        weakref.finalize(self, _remove, self._handles).atexit = False

    def end(self) -> None:
        _remove(self._handles)
        self._before = None

    def _met(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            at_the_end(self._arrived)

    def _arrived(self) -> None:
        self._before = sizes(self._parameters)

    def take(self) -> Tensor | None:
        """What gradients were multiplied by since the last backward pass, without waiting for a GPU; 1 for what cannot
        be. None where that was not seen."""
        before, self._before = self._before, None
        now = None if before is None else sizes(self._parameters)
        if before is None or now is None:
            return None
        found = (now / before).sqrt()
        return torch.where((found > 0) & (found < 1 - _UNCHANGED), found, 1.0)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
