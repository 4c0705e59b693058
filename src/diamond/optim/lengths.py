"""How far to go: the length of a step and how much of the last one to keep, measured instead of guessed.

Along the preconditioned gradient d and the last step v the loss is, to second order, a parabola in two numbers. Its
curvature is that of the loss at the model's output, times how the output moves: two more forward passes a way, without
gradients, on the batch at hand and in the precision in which the model computed. Layers that disturb each other, of
which K-FAC knows nothing, are seen that way. It is done often in the beginning and rarely later; between, the two
numbers stay.
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
from diamond.optim.casting import Autocast
from diamond.optim.damping import BROKEN
from diamond.optim.losses import Outcome, first_tensor
from diamond.optim.uses import plain

MOST_MOMENTUM = 0.9
MOST_WHEN_STILL = 4.0  # where the next measurement will be of the same loss: conjugate gradients keep more than all
_HALVINGS = 6
_NUDGE = 1e-3  # of the weights' own size: where no length is known yet, and the most in single precision
_LEAST_NUDGE, _MOST_NUDGE = 1e-4, 1e-2  # the least in single precision, and the most in half
_HALF = 1e-5  # an output whose numbers are farther apart than that is one in half precision
_VISIBLE = 4.0  # times that distance, an output must move for its derivative to be known to some percent
_TOO_FAR = 4.0  # times the length that is found in the end, a nudge says little about the derivative
_NUDGES = 3  # how often another one is tried
_OWN = 1.25  # the gradient's slope over that of the loss at the output, as far as both may be the same
_STEEPER = 4.0  # how much the gradient's slope may be over that of the loss at the output, before it is another's, too


@dataclass(eq=False)
class Seen:
    """A forward pass that can be done again: what the model was given, what came out, and which loss was taken."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dice: tuple[Tensor, list[Tensor]]
    output: Any = None
    slope: Tensor | None = None  # of the loss by the output, from the backward pass
    autocast: Autocast | None = None
    parts: float = 1.0  # the weight of all passes' losses in the gradient, over that of this one's
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
    clipped: float = 1.0,
    known: Lengths | None = None,
    still: bool = False,
) -> Lengths | None:
    """The lengths at which the parabola is lowest; None where the loss cannot be followed from the model's output.

    Args:
        direction: what is added to the parameters, for a step of length 1.
        rate: what the length will be multiplied by.
        add_up: the mean over ranks of numbers that are means over this rank's terms, of which there are so many.
        clipped: what the gradients were multiplied by since the backward pass. The loss is as steep as before that.
        known: what was measured last.
        still: the batch is that of the last measurement, on all ranks.
    """
    outcome = _followed(seen)
    if outcome is None:
        return None
    ways = [direction] if last is None else [direction, last]
    with _as_before(root, seen), _restored(parameters) as restore:
        again = _Again(root, seen, outcome, parameters, restore, add_up)
        slopes = [float(sharded.dot(way, gradients)) / clipped for way in ways]
        damped = [float(sharded.dot(one, other)) for place, one in enumerate(ways) for other in ways[place:]]
        motion = _motion(again, ways, slopes, damped, damping, rate, known or Lengths(), still)
        if motion is None:
            return None
        found, moved, numbers, whole = motion
        if seen.slope is None:
            return replace(found, still=still)

        def change(lengths: Lengths) -> float:
            """Of the loss, at the output that such a step really gives."""
            sizes = [rate * lengths.step, lengths.momentum][: len(ways)]
            by = again.moved_by(ways, sizes)
            bent = by - sum(one * size for one, size in zip(moved, sizes, strict=True))
            linear = sum(slope * size for slope, size in zip(slopes, sizes, strict=True))
            return linear + again.mean(again.part(slopes[0], moved[0]) * again.tangent(bent) + outcome.beyond(by))

        promised = _promised(found, rate, slopes, numbers)
        hoped = rate * found.step * slopes[0] * (1 - rate / 2)
        seen_from = again.mean(again.part(slopes[0], moved[0]) * again.rounded())
        return replace(_shortened(found, change, hoped, promised, seen_from), still=still, whole=whole)


def _motion(
    again: _Again,
    ways: Sequence[Sequence[Tensor]],
    slopes: list[float],
    damped: list[float],
    damping: float,
    rate: float,
    known: Lengths,
    still: bool,
) -> tuple[Lengths, list[Tensor], list[float], bool] | None:
    """The lowest point of the parabola, how the output moves along each way, the curvatures along them, and whether
    the gradient can be that of this loss and of nothing else.

    A nudge that turns out to be far longer than the step, or too short for the precision, is tried again.
    """
    most = MOST_WHEN_STILL if still else MOST_MOMENTUM
    sizes = again.first_nudges(ways, [rate * known.step, 1.0])
    motion, tries = None, 0
    while tries < _NUDGES:
        moved = [again.derivative(way, size) for way, size in zip(ways, sizes, strict=True)]
        numbers = again.curvatures(moved)
        carefully, whole = damping, True
        if again.checked:
            by_output = again.mean(again.tangent(moved[0])) * again.own
            if by_output:
                whole = 0 < slopes[0] / by_output <= _STEEPER
                if not 0 <= slopes[0] / by_output <= _OWN:
                    outwards = float(sharded.dot(again.parameters, ways[0]))
                    carefully += _of_a_penalty(slopes[0] - by_output, outwards)
        found = _lowest(slopes, [one + carefully * other for one, other in zip(numbers, damped, strict=True)], most)
        if found is None:
            return None
        motion = found, moved, numbers, whole
        better = again.better_nudge(sizes[0], moved[0], rate * found.step)
        if better is None:
            break
        sizes[0] = better
        tries += 1
    return motion


class _Again:
    """A forward pass, done again with other weights.

    Attributes:
        own: what brings the slope at the output to the size that it has in the loss, without a scaler.
        checked: whether the gradient's slope can be compared with that at the output: it comes from this pass alone,
            and half precision does not round away most of what the output does.
    """

    def __init__(
        self,
        root: nn.Module,
        seen: Seen,
        outcome: Outcome,
        parameters: Sequence[Tensor],
        restore: Callable[[], None],
        add_up: Callable[[Tensor, float], Tensor],
    ) -> None:
        self.parameters = parameters
        self._root, self._seen, self._outcome, self._restore, self._add_up = root, seen, outcome, restore, add_up
        self._base = plain(first_tensor(seen.output)).detach()
        slope = torch.zeros_like(self._base) if seen.slope is None else seen.slope
        self._slope = slope.float().reshape(self._base.shape)
        dtype = self._base.dtype if seen.autocast is None else seen.autocast.dtype
        self._eps = torch.finfo(dtype).eps
        self._half = self._eps > _HALF
        self.own = 1.0 if outcome.weight is None else outcome.weight / outcome.share
        self.checked = outcome.weight is not None and seen.alone and not self._half

    def mean(self, number: Tensor) -> float:
        """Over all ranks."""
        return float(self._add_up(torch.stack([number.float()]), self._outcome.terms))

    def tangent(self, moved: Tensor) -> Tensor:
        """By how much the loss rises where the output moves so, if it went on as steeply as it begins."""
        return (self._slope * moved.reshape(self._slope.shape)).sum()

    def part(self, slope: float, moved: Tensor) -> float:
        """What the slope at this pass's output is multiplied by, to be that of all passes' losses. What the losses
        count is not known where the loss was only named: then it is taken from the gradient, if that is possible."""
        if self._outcome.weight is not None:
            return self.own * self._seen.parts
        by_output = self.mean(self.tangent(moved))
        return slope / by_output if slope * by_output > 0 else 1.0

    def rounded(self) -> Tensor:
        """What rounding may hide of a change of the loss. It falls to either side, so that most of it cancels where
        there is enough of it to matter."""
        parts = self._slope * self._base.float()
        return self._eps * (parts.square().sum().sqrt() if self._half else parts.abs().sum())

    def curvatures(self, moved: Sequence[Tensor]) -> list[float]:
        pairs = [(one, other) for place, one in enumerate(moved) for other in moved[place:]]
        found = self._add_up(
            torch.stack([self._outcome.quadratic(one, other) for one, other in pairs]), self._outcome.terms
        )
        return [float(one) for one in found]

    # ---- forward passes ----------------------------------------------------------------------------------------------

    def _output(self, ways: Sequence[Sequence[Tensor]], sizes: Sequence[float]) -> Tensor:
        for way, size in zip(ways, sizes, strict=True):
            torch._foreach_add_(held(self.parameters), held(way), alpha=size)
        found = _forward(self._root, self._seen).float()
        self._restore()
        return found

    def moved_by(self, ways: Sequence[Sequence[Tensor]], sizes: Sequence[float]) -> Tensor:
        return self._output(ways, sizes) - self._base.float()

    def derivative(self, way: Sequence[Tensor], size: float) -> Tensor:
        """From both sides: from one, half of the curvature would count as slope."""
        return (self._output([way], [size]) - self._output([way], [-size])) / (2 * size)

    # ---- nudges ------------------------------------------------------------------------------------------------------

    def first_nudges(self, ways: Sequence[Sequence[Tensor]], lengths: Sequence[float]) -> list[float]:
        """About the last lengths, as far as they are known and the precision allows."""
        found = []
        self._far = [float(_norm(self.parameters) / _norm(way).clamp_min(1e-30)) for way in ways]
        for far, length in zip(self._far, lengths, strict=False):
            least, most = (0.0, _MOST_NUDGE) if self._half else (_LEAST_NUDGE, _NUDGE)
            found.append(min(max(length, least * far), most * far) if length else _NUDGE * far)
        return found

    def better_nudge(self, size: float, moved: Tensor, length: float) -> float | None:
        """Where this one is no good for the length that was found with it."""
        least = _LEAST_NUDGE * self._far[0]
        if self._half:
            squares = torch.stack([(moved * size).square().mean(), self._base.float().square().mean()])
            motion, output = (math.sqrt(float(one)) for one in self._add_up(squares, self._outcome.terms))
            if not motion > 0:
                return None
            least = size * _VISIBLE * self._eps * output / motion
        if size < 0.5 * least:
            return min(least, _MOST_NUDGE * self._far[0]) if size < 0.5 * _MOST_NUDGE * self._far[0] else None
        return max(length, least) if size > _TOO_FAR * max(length, least) else None


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
    with contextlib.nullcontext() if seen.autocast is None else seen.autocast.entered():
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
