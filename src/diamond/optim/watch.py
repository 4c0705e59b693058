"""Recognises the loss a user takes, so that its curvature is known without being asked for.

Torch's own loss functions carry all that is needed (targets that are ignored, weights, reduction). Squares written by
hand are followed through masks, sums, means and divisions until one number is left. What really counts is known when
backward is called: losses that the number does not depend on are forgotten, and of several each counts by its share.
Anything else: say `loss=` to the optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import _reduction

from diamond.optim.losses import Outcome


@dataclass(eq=False)
class _Found:
    """Terms of a loss that are on their way to one number: so far their sum over `divisor`, in `result`."""

    result: Tensor
    outcome: Outcome
    divisor: float = 1.0

    def finished(self) -> Outcome:
        return replace(self.outcome, scale=self.outcome.terms / self.divisor)


class Losses:
    """The losses of one forward pass.

    A mean is done; a sum may yet be divided. What is divided or multiplied after that says nothing about the loss: it
    is a scaler for half precision, or the number of pieces of a batch.
    """

    def __init__(self) -> None:
        self.empty = False  # whether a loss had no terms, of a batch without samples
        self._spread: dict[int, _Found] = {}  # by the id of a tensor of terms, which is kept so that the id stays its
        self._summed: dict[int, tuple[Tensor, list[_Found]]] = {}  # likewise, of sums that may yet be divided
        self._done: list[_Found] = []
        self._scaler = 1.0  # what a GradScaler has multiplied by, and takes out of the gradients again

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, squares: bool) -> None:
        """One call of torch's. `squares`: also where it is a square, which may be the beginning of a loss."""
        if not isinstance(result, Tensor) or not result.requires_grad:
            return
        if func in _LOSSES:
            self._of_function(func, args, kwargs, result)
            return
        name = getattr(func, "__name__", "")
        if name in ("sum", "mean") and id(args[0]) in self._spread:
            self._reduce(self._spread[id(args[0])], result, mean=name == "mean")
        elif name in _MULTIPLYING and len(args) == 2:
            if name == "mul" and result.dim() == 0 and _within_a_scaler():
                self._scaler = _number(args[1]) or 1.0
            self._multiply(args, result, divide=not name.startswith("mul"), squares=squares and name == "mul")
        elif name in _SHAPING and args and id(args[0]) in self._spread:
            found = self._spread[id(args[0])]
            if result.numel() == found.result.numel():
                self._spread[id(result)] = replace(found, result=result)
        elif name in _CHOOSING:
            self._choose(name, args, result)
        elif name in ("add", "add_") and self._summed:
            parts = [found for one in args if id(one) in self._summed for found in self._summed[id(one)][1]]
            if parts:
                self._summed[id(result)] = (result, parts)
        elif squares and (name == "square" or (name == "pow" and len(args) == 2 and _is_two(args[1]))):
            self._begin(args[0], result)

    def before_backward(self, numbers: list[Tensor], gradients: list[Any] | None = None) -> list[Outcome]:
        """Those that these numbers depend on, which are forgotten then."""
        found = self._all()
        if not found or not numbers:
            return []
        shares = torch.autograd.grad(
            numbers, [one.result for one in found], gradients, retain_graph=True, allow_unused=True
        )
        counted = [(one, float(share)) for one, share in zip(found, shares, strict=True) if share is not None]
        met = {one for one, _ in counted}
        self._keep([one for one in found if one not in met])
        most = max((share for _, share in counted), default=0.0)
        return [
            replace(
                outcome,
                scale=outcome.scale * (1.0 if share == most else share / most),
                share=most,
                weight=most / self._scaler,
            )
            for outcome, share in ((one.finished(), share) for one, share in counted)
            if share > 0
        ]

    def without_backward(self) -> list[Outcome]:
        """All, where the next forward pass begins before backward was called. All are forgotten then."""
        found = self._all()
        self.forget()
        return [one.finished() for one in found]

    def forget(self) -> None:
        self._keep([])

    def _all(self) -> list[_Found]:
        return [*self._done, *dict.fromkeys(one for _, parts in self._summed.values() for one in parts)]

    def _keep(self, some: list[_Found]) -> None:
        self._done, self._spread, self._summed = some, {}, {}

    def _begin(self, root: Tensor, result: Tensor) -> None:
        if not root.numel():
            self.empty = True
        elif root.requires_grad and root.is_floating_point():
            self._spread[id(result)] = _Found(result, Outcome(root, "mse", float(root.numel())))

    def _of_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        reduction = options["reduction"]
        if options.get("size_average") is not None or options.get("reduce") is not None:
            reduction = _reduction.legacy_get_string(options["size_average"], options["reduce"], emit_warning=False)
        with torch.enable_grad():
            outcome = _LOSSES[func](options)
        if not outcome.output.numel():
            self.empty = True
            return
        if not outcome.output.requires_grad:
            return
        found = _Found(result, outcome)
        if reduction == "mean":
            self._done.append(replace(found, divisor=outcome.terms))
        elif reduction == "sum":
            self._summed[id(result)] = (result, [found])
        else:
            self._spread[id(result)] = found

    def _reduce(self, found: _Found, result: Tensor, mean: bool) -> None:
        if not found.result.numel():  # a mask has left nothing
            self.empty = True
            return
        part = found.result.numel() / max(result.numel(), 1) if mean else 1.0
        reduced = replace(found, result=result, divisor=found.divisor * part)
        if result.numel() > 1:
            self._spread[id(result)] = reduced
        elif mean:
            self._done.append(reduced)
        else:
            self._summed[id(result)] = (result, [reduced])

    def _multiply(self, args: tuple[Any, ...], result: Tensor, divide: bool, squares: bool) -> None:
        one, other = args
        if squares and not divide and one is other:
            self._begin(one, result)
            return
        if not divide and id(other) in self._spread:
            one, other = other, one
        if divide and id(one) in self._summed:
            number = _number(other)
            if number:
                self._divide(self._summed[id(one)][1], result, number)
        elif id(one) in self._spread:
            found, number = self._spread[id(one)], _number(other)
            if number is not None and number > 0:
                by = number if divide else 1 / number
                self._spread[id(result)] = replace(found, result=result, divisor=found.divisor * by)
            elif isinstance(other, Tensor) and not other.requires_grad and result.shape == found.result.shape:
                weighed = _weighed(found.outcome, found.result.shape, other, divide)
                if weighed is not None:
                    self._spread[id(result)] = replace(found, result=result, outcome=weighed)

    def _choose(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        """Some of the terms, by a mask: the others become zeros, or are left out."""
        if len(args) < 2:
            return
        terms, mask = (args[1], args[0]) if name == "where" and id(args[1]) in self._spread else args[:2]
        found = self._spread.get(id(terms))
        if found is None or not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return
        left_out = name in ("__getitem__", "masked_select")
        if not left_out and not (len(args) > 2 and _is_nothing(args[2])):
            return
        if mask.shape != found.result.shape and (left_out or result.shape != found.result.shape):
            return
        weighed = _weighed(found.outcome, found.result.shape, ~mask if name == "masked_fill" else mask, False)
        if weighed is not None:
            self._spread[id(result)] = replace(found, result=result, outcome=weighed)

    def _divide(self, parts: list[_Found], result: Tensor, number: float) -> None:
        self._done.extend(replace(one, result=result, divisor=one.divisor * number) for one in parts)
        for key, (tensor, others) in list(self._summed.items()):
            self._summed[key] = (tensor, [one for one in others if one not in parts])


# Names of what multiplies, of what keeps the order of the terms, and of what chooses some of them by a mask.
_MULTIPLYING = frozenset({"mul", "div", "true_divide", "mul_", "div_"})
_SHAPING = frozenset({
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "unflatten", "contiguous",
    "float", "double", "to",
})  # fmt: skip
_CHOOSING = frozenset({"__getitem__", "masked_select", "where", "masked_fill"})


def _within_a_scaler() -> bool:
    """Whether it is torch's GradScaler that asks: what it multiplies by does not stay in the gradients."""
    frame = inspect.currentframe()
    for _ in range(6):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_filename.endswith("grad_scaler.py"):
            return True
    return False


def _is_nothing(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.requires_grad and not bool(value.any())
    return isinstance(value, (int, float)) and value == 0


def _is_two(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 2


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad else None


def _weighed(outcome: Outcome, shape: torch.Size, by: Tensor, divide: bool) -> Outcome | None:
    """With weights for its terms, where they can be told apart: no sum was taken yet but of last dimensions."""
    terms = outcome.term_shape
    if shape != terms[: len(shape)] and shape.numel() != terms.numel():
        return None
    weight = by.detach().float().expand(shape)
    weight = (weight.reciprocal() if divide else weight).clamp_min(0).sqrt()
    if shape.numel() == terms.numel():
        weight = weight.reshape(terms)
    else:
        weight = weight.reshape(*shape, *(1,) * (len(terms) - len(shape))).expand(terms)
    return replace(outcome, kept=weight if outcome.kept is None else outcome.kept * weight)


def _classes(kind: str) -> Callable[[dict[str, Any]], Outcome]:
    def read(given: dict[str, Any]) -> Outcome:
        output, target, weight = given["input"], given["target"], given.get("weight")
        if output.dim() == 1:
            output, target = output[None], target[None]
        smoothing = given.get("label_smoothing", 0.0)
        number = output.shape[1]
        if target.is_floating_point():
            smooth = target.float() * (1 - smoothing) + smoothing / number
            shape = (1, number) + (1,) * (target.dim() - 2)
            counts = (smooth if weight is None else smooth * weight.float().reshape(shape)).sum(1)
            return Outcome(output, kind, float(counts.numel()), kept=counts.clamp_min(0).sqrt())
        kept = (target != given["ignore_index"]).float()
        if weight is None:
            return Outcome(output, kind, max(float(kept.sum()), 1e-12), kept=kept)
        own = weight.float()[target.clamp(0, number - 1)] * kept
        counts = own * (1 - smoothing) + kept * smoothing * float(weight.float().mean())
        return Outcome(output, kind, max(float(own.sum()), 1e-12), kept=counts.clamp_min(0).sqrt())

    return read


def _elementwise(kind: str, slope: str = "") -> Callable[[dict[str, Any]], Outcome]:
    """`slope` names the option that is the slope of a Huber loss far out, where it is not 1."""

    def read(given: dict[str, Any]) -> Outcome:
        output, target, weight = given["input"], given["target"], given.get("weight")
        if kind in ("mse", "huber") and target.requires_grad:
            output, target = (output - target, torch.zeros_like(output)) if output.requires_grad else (target, output)
        terms = float(output.numel())
        counts = None if weight is None else weight.detach().float().clamp_min(0).expand(output.shape)
        if counts is not None and given["_mean_of_weights"]:
            terms = float(counts.sum())
        if given.get("pos_weight") is not None:
            positive = 1 + (given["pos_weight"].float() - 1) * target.float()
            counts = positive.expand(output.shape) if counts is None else counts * positive
        outcome = Outcome(output, kind, terms, kept=None if counts is None else counts.clamp_min(0).sqrt())
        if kind == "huber":
            offset = (output - target).detach().float()
            width = float(given.get("delta", given.get("beta", 0.0)))
            # a corner has no curvature: rounded off, well below where the errors are
            width = max(width, 1e-3 * float(offset.abs().mean()), 1e-12)
            outcome = replace(outcome, width=width, height=float(given[slope]) if slope else 1.0, offset=offset)
        return outcome

    return read


def _poisson(given: dict[str, Any]) -> Outcome:
    return Outcome(given["input"], "poisson" if given["log_input"] else "poisson_rates", float(given["input"].numel()))


def _over_weights(read: Callable[[dict[str, Any]], Outcome], wanted: bool) -> Callable[[dict[str, Any]], Outcome]:
    """Torch's weighted means of squares and of absolute values divide by the weights' sum, the others by the number."""
    return lambda given: read({**given, "_mean_of_weights": wanted})


_LOSSES: dict[Any, Callable[[dict[str, Any]], Outcome]] = {
    F.cross_entropy: _classes("cross_entropy"),
    F.nll_loss: _classes("nll"),
    F.mse_loss: _over_weights(_elementwise("mse"), True),
    F.l1_loss: _over_weights(_elementwise("huber"), True),
    F.smooth_l1_loss: _over_weights(_elementwise("huber"), False),
    F.huber_loss: _over_weights(_elementwise("huber", "delta"), False),
    F.binary_cross_entropy_with_logits: _over_weights(_elementwise("bce"), False),
    F.binary_cross_entropy: _over_weights(_elementwise("bce_probabilities"), False),
    F.poisson_nll_loss: _poisson,
}
