"""How far to go: the length of a step and how much of the last one to keep, measured instead of guessed.

Along the preconditioned gradient d and the last step v the loss is, to second order, a parabola in two numbers. Its
curvature is that of the loss at the model's output, times how the output moves: two more forward passes, without
gradients, on the batch at hand. Layers that disturb each other, of which K-FAC knows nothing, are seen that way. It is
done often in the beginning and rarely later; between, the two numbers stay.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from diamond.optim import sharded
from diamond.optim.damping import BROKEN
from diamond.optim.losses import Outcome, first_tensor
from diamond.optim.uses import plain

MOST_MOMENTUM = 0.9
MOST_WHEN_STILL = 4.0  # where the next measurement will be of the same loss: conjugate gradients keep more than all
_HALVINGS = 6
_NUDGE = 1e-3  # of the weights' own size: small enough to be linear, large enough for single precision
_OWN = 1.25  # the gradient's slope over that of the loss at the output, as far as both may be the same
_STEEPER = 4.0  # how much the gradient's slope may be over that of the loss at the output, before it is another's, too
_NUDGE_IN_HALVES = 1e-2  # what half precision rounds away is then a few percent of the curvature found


@dataclass(eq=False)
class Seen:
    """A forward pass that can be done again: what the model was given, what came out, and which loss was taken."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dice: tuple[Tensor, list[Tensor]]
    output: Any = None
    slope: Tensor | None = None  # of the loss by the output, from the backward pass
    autocast: torch.dtype | None = None  # what the model computed in, under autocast
    outcomes: list[Outcome] = field(default_factory=list)
    straight: bool = False  # whether the loss is one of the model's output itself
    alone: bool = False  # whether it is the only pass that the gradients come from

    def lost(self, outcome: Outcome) -> None:
        """A loss was taken; its graph is still there."""
        self.outcomes.append(outcome)
        with contextlib.suppress(RuntimeError):
            self.straight = _is_straight(first_tensor(self.output), outcome.output)

    def followed(self, output: Any) -> None:
        """Keep the output, and the loss's slope there once it is known."""
        self.output = output
        with contextlib.suppress(RuntimeError):
            tensor = first_tensor(output)
            if tensor.requires_grad:
                # weakly: a tensor whose hook leads back to it is never freed
                known = weakref.ref(self)
                tensor.register_hook(lambda slope: _keep_slope(known(), slope))  # type: ignore[no-untyped-call]

    @property
    def can_be_followed(self) -> bool:
        return _followed(self) is not None

    def fingerprint(self) -> list[float]:
        """Of what the model was given: the same for the same batch, in whatever tensors it comes."""
        given = [plain(one) for one in tree_leaves((self.args, self.kwargs)) if isinstance(one, Tensor)]
        return [number for one in given for number in (float(one.numel()), *_two_numbers(one))]


def _two_numbers(values: Tensor) -> tuple[float, float]:
    if not values.numel() or values.is_complex():
        return 0.0, 0.0
    numbers = values.detach().flatten().double()
    return float(numbers.sum()), float(numbers[:: max(1, len(numbers) // 64)].square().sum())


def _keep_slope(seen: Seen | None, slope: Tensor) -> None:
    if seen is not None:
        seen.slope = plain(slope).detach()


def dice_now(device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The state of the random numbers, so that dropout falls the same way again."""
    return torch.get_rng_state(), [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []


@dataclass
class Lengths:
    """`step` multiplies the direction, `momentum` the last step.

    `ratio` is what the loss really falls by at the lowest point of the parabola, over what that promises; None where
    nobody looked. `still` says that they were measured with the same batch as the last ones, `whole` that the gradient
    can be that of the loss that was followed, and of nothing else. Both lengths are 0 where no step lowers the loss.
    """

    step: float = 0.0
    momentum: float = 0.0
    ratio: float | None = field(default=None, compare=False)
    still: bool = field(default=False, compare=False)
    whole: bool = field(default=True, compare=False)

    @property
    def poor(self) -> bool:
        """Whether the loss is far from the parabola."""
        return self.ratio is not None and not self.ratio >= BROKEN

    def close_to(self, other: Lengths) -> bool:
        return 0.5 * other.step <= self.step <= 2.0 * other.step

    def after(self, last: Lengths) -> Lengths:
        """What is made of a new measurement: shorter at once, longer by and by, for one batch is not all.

        Where it is all, there is no noise to be careful of.
        """
        if self.still or not last.step:
            return self
        step = self.step if self.step < last.step else math.sqrt(self.step * last.step)
        return Lengths(step, min(self.momentum, (self.momentum + last.momentum) / 2), self.ratio)


def measure(
    root: nn.Module,
    seen: Seen,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    direction: Sequence[Tensor],
    last: Sequence[Tensor] | None,
    *,
    rate: float,
    damping: float,
    add_up: Callable[[Tensor, float], Tensor],
    still: bool = False,
) -> Lengths | None:
    """The lengths at which the parabola is lowest; None where the loss cannot be followed from the model's output.

    Args:
        direction: what is added to the parameters, for a step of length 1.
        rate: what the length will be multiplied by.
        add_up: the mean over ranks of numbers that are means over this rank's terms, of which there are so many.
        still: the batch is that of the last measurement, on all ranks.
    """
    most = MOST_WHEN_STILL if still else MOST_MOMENTUM
    outcome = _followed(seen)
    if outcome is None:
        return None
    ways = [direction] if last is None else [direction, last]
    with _as_before(root, seen), _restored(parameters) as restore:
        base = plain(first_tensor(seen.output)).detach()
        nudge = _NUDGE if seen.autocast is None else _NUDGE_IN_HALVES

        def moved_by(way: Sequence[Tensor], size: float) -> Tensor:
            torch._foreach_add_(held(parameters), torch._foreach_mul(held(way), size))
            moved = (_forward(root, seen) - base).float()
            restore()
            return moved

        sizes = [float(nudge * _norm(parameters) / _norm(way).clamp_min(1e-30)) for way in ways]
        moved = [moved_by(way, size) / size for way, size in zip(ways, sizes, strict=True)]
        slopes = [sharded.dot(way, gradients) for way in ways]
        curved = [outcome.quadratic(one, other) for place, one in enumerate(moved) for other in moved[place:]]
        numbers = add_up(torch.stack(curved), outcome.terms)
        slope = torch.zeros_like(base) if seen.slope is None else seen.slope
        by_output = float(add_up((slope.float() * moved[0].reshape(slope.shape)).sum(), outcome.terms))
        own = 1.0 if outcome.weight is None else outcome.weight / outcome.share
        unit = float(slopes[0]) / by_output if by_output else 0.0  # not 1 for pieces of a batch and clipped gradients
        # Half precision may round away most of what the output does.
        checked = outcome.weight is not None and seen.alone and seen.autocast is None
        if checked and not 0 <= unit <= _OWN * own:
            damping += _of_a_penalty(float(slopes[0]) - own * by_output, float(sharded.dot(parameters, direction)))
        damped = [damping * sharded.dot(one, other) for place, one in enumerate(ways) for other in ways[place:]]
        found = _lowest(
            [float(one) for one in slopes], [float(a + b) for a, b in zip(numbers, damped, strict=True)], most
        )
        if found is None:
            return None
        if by_output == 0.0:
            return replace(found, still=still)
        whole = 0 < unit <= _STEEPER * own or not checked
        unit = unit if whole else own

        def change(lengths: Lengths) -> float:
            """Of the loss, at the output that such a step really gives."""
            step = torch._foreach_mul(held(direction), rate * lengths.step)
            if last is not None:
                torch._foreach_add_(step, held(last), alpha=lengths.momentum)
            by = moved_by(step, 1.0)
            bent = by - sum(
                one * size for one, size in zip(moved, (rate * lengths.step, lengths.momentum), strict=False)
            )
            bent = unit * (slope.float() * bent.reshape(slope.shape)).sum()
            linear = rate * lengths.step * slopes[0] + (lengths.momentum * slopes[1] if last is not None else 0.0)
            return float(linear + add_up(torch.stack([bent + outcome.beyond(by)]), outcome.terms))

        promised = _promised(found, rate, [float(one) for one in slopes], [float(one) for one in numbers])
        rounded = unit * torch.finfo(seen.autocast or base.dtype).eps * (slope * base.reshape(slope.shape)).abs().sum()
        seen_from = float(add_up(rounded.float(), outcome.terms))
        hoped = rate * found.step * float(slopes[0]) * (1 - rate / 2)
        return replace(_shortened(found, change, hoped, promised, seen_from), still=still, whole=whole)


def _of_a_penalty(slope: float, outwards: float) -> float:
    """The curvature of a penalty on the weights' squares that has this slope along a direction, which leads so far
    outwards: what the loss at the output does not explain is most often one, and without it steps would be too long."""
    return abs(slope / outwards) if outwards and _finite(slope / outwards) else 0.0


def _shortened(
    found: Lengths, change: Callable[[Lengths], float], hoped: float, promised: float, seen_from: float
) -> Lengths:
    """Halved until the loss falls by a fair part of what was hoped for: far away, parabolas end.

    No step where it never does, unless there is so little to hope for that rounding hides it.
    """
    ratio = None
    for halved in range(_HALVINGS):
        real = change(found)
        ratio = real / promised if ratio is None and promised < 0 else ratio
        if _finite(real) and real <= 0.25 * hoped * 0.5**halved:
            return Lengths(found.step, found.momentum, ratio)
        found = Lengths(found.step / 2, found.momentum / 2)
    return Lengths(found.step, found.momentum) if abs(hoped) <= seen_from else Lengths(0.0, 0.0, ratio)


def _promised(lengths: Lengths, rate: float, slopes: list[float], curved: list[float]) -> float:
    """The change of the loss on the parabola itself, without damping."""
    step, momentum = rate * lengths.step, lengths.momentum
    change = step * slopes[0] + step * step * curved[0] / 2
    if len(slopes) > 1:
        change += momentum * slopes[1] + step * momentum * curved[1] + momentum * momentum * curved[2] / 2
    return change


def _lowest(slopes: list[float], curved: list[float], most: float) -> Lengths | None:
    own = curved[0]
    if not own > 0 or not all(map(_finite, [*slopes, *curved])):
        return None
    alone = Lengths(max(0.0, -slopes[0] / own))
    if len(slopes) == 1:
        return alone
    _, mixed, other = curved
    determinant = own * other - mixed * mixed
    if determinant <= 1e-6 * own * other:  # the two ways are one
        return alone
    step = (-slopes[0] * other + slopes[1] * mixed) / determinant
    momentum = (-slopes[1] * own + slopes[0] * mixed) / determinant
    bounded = min(max(momentum, 0.0), most)
    if bounded != momentum:  # the best length, given how much of the last step is kept
        step = -(slopes[0] + bounded * mixed) / own
    return Lengths(step, bounded) if step > 0 else alone


def _finite(value: float) -> bool:
    return value - value == 0.0


def _followed(seen: Seen) -> Outcome | None:
    """The loss, if it was taken of the model's output itself, or of that in another shape or minus a target."""
    return seen.outcomes[0] if len(seen.outcomes) == 1 and seen.straight else None


# What changes a tensor's shape, its precision or where it begins, and not how it moves.
_STRAIGHT = frozenset({
    "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Movedim", "Squeeze", "Unsqueeze", "Expand",
    "Sub", "Rsub", "Add", "Neg", "ToCopy", "Clone", "Alias", "_DDPSink",
})  # fmt: skip


def _is_straight(output: Tensor, lost: Tensor) -> bool:
    """Whether the loss's tensor is the model's output, but for such changes."""
    if output.numel() != lost.numel() or output.grad_fn is None:
        return False
    node: Any = lost.grad_fn
    for _ in range(16):
        if node is output.grad_fn:
            return True
        before = [] if node is None else [one for one, _ in node.next_functions if one is not None]
        if (
            len(before) != 1
            or node.name().split("::")[-1].rstrip("0123456789").removesuffix("Backward") not in _STRAIGHT
        ):
            return False
        node = before[0]
    return False


def held(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [sharded.held(one) for one in tensors]


def _forward(root: nn.Module, seen: Seen) -> Tensor:
    found = plain(first_tensor(root(*seen.args, **seen.kwargs))).detach()
    sharded.gather_up(sharded.fsdp_modules(root))  # or the next pass would see the parameters of this one
    return found


@contextlib.contextmanager
def _as_before(root: nn.Module, seen: Seen) -> Iterator[None]:
    """Dropout falls as it did; running means of normalisations stay."""
    norms = [one for one in root.modules() if getattr(one, "track_running_stats", False) and one.training]
    cpu, devices = seen.dice
    now = dice_now(torch.device("cuda") if devices else torch.device("cpu"))
    for norm in norms:
        norm.track_running_stats = False  # type: ignore[assignment]
    try:
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state(devices[0])
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True  # type: ignore[assignment]
        torch.set_rng_state(now[0])
        if now[1]:
            torch.cuda.set_rng_state(now[1][0])


@contextlib.contextmanager
def _restored(parameters: Sequence[Tensor]) -> Iterator[Callable[[], None]]:
    """Gives what puts the parameters back, bit by bit; at the end they are in any case."""
    here = held(parameters)
    kept = [one.detach().clone() for one in here]

    def restore() -> None:
        torch._foreach_copy_(here, kept)

    try:
        yield restore
    finally:
        restore()


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return sharded.dot(tensors, tensors).sqrt()
