"""What gradients are multiplied by between the backward pass and the step, as by `clip_grad_norm_`.

K-FAC compares the gradient with the curvature of the loss. A gradient that was made smaller is that of a smaller loss,
whose curvature nobody made smaller: steps along it would be too short by the same factor. So sizes are noted when the
backward pass ends, and compared when the optimizer steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import Variable

from diamond.optim.sharded import held

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
    engine = Variable._execution_engine  # type: ignore[attr-defined]
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
