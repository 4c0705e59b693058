"""What the loss's curvature looks like at the model's output.

For a loss that is `scale` / `terms` times a sum over terms, `Outcome.directions` gives gradients s at the output with
E[s s^T] the Hessian of a term: one random draw (Monte Carlo), or a whole square root of it (exact).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diamond.optim.errors import OptimError
from diamond.optim.uses import plain

NAMES = ("cross_entropy", "nll", "mse", "bce", "bce_probabilities", "huber", "poisson", "poisson_rates")
_CLASSES = ("cross_entropy", "nll")
_SMALL = 1e-6  # probabilities and rates keep this distance from where their curvature has a pole


@dataclass(eq=False)
class Outcome:
    """The tensor a loss was taken of, and how.

    Attributes:
        output: with its graph.
        kind: one of NAMES.
        terms: how many the loss averages over.
        scale: what the sum is multiplied by, times `terms`: 1 for a mean.
        kept: square roots of the weights of the terms, in their shape (0: does not count); None where all count as 1.
        width: of the Huber loss, where it turns linear.
        height: of the Huber loss, its slope beyond.
        offset: output minus target, of losses whose curvature depends on it.
        classes_last: logits are (…, classes) rather than torch's (samples, classes, …).
        share: how fast the number that backward is called on grows with this loss; scalers and weights are in it.
        weight: the same without scalers; None where it is not known.
        samples: how many the model was given; rows of the output beyond that are several for each, one after another.
    """

    output: Tensor
    kind: str
    terms: float
    scale: float = 1.0
    kept: Tensor | None = None
    width: float = 1.0
    height: float = 1.0
    offset: Tensor | None = None
    classes_last: bool = False
    samples: int | None = None
    share: float = 1.0
    weight: float | None = None

    @property
    def of_real(self) -> float:
        """What squares of real gradients are multiplied by, to be sums over terms of the loss's own curvature."""
        return self.terms**2 / (self.scale * self.share**2)

    @property
    def term_shape(self) -> torch.Size:
        """One entry a term: without the classes, for losses over these."""
        shape = self.output.shape
        if self.kind not in _CLASSES:
            return shape
        return shape[:-1] if self.classes_last else shape[:1] + shape[2:]

    def draw(self, generator: torch.Generator | None) -> Tensor:
        """One random direction."""
        out = plain(self.output).detach().float()
        found = _DRAWS[self.kind](self, out, generator)
        return self._fit(found)

    def quadratic(self, one: Tensor, other: Tensor) -> Tensor:
        """one^T H other of the whole loss, for two ways in which the output (in any shape) may move."""
        out = plain(self.output).detach().float()
        u, w = (self._counted(self._arranged(part).float()) for part in (one, other))
        if self.kind in _CLASSES:
            p, u, w = (self._classes_last(part) for part in (out, u, w))
            p = p.softmax(-1)
            found = (p * u * w).sum()
            if self.kind == "cross_entropy":
                found = found - ((p * u).sum(-1) * (p * w).sum(-1)).sum()
        else:
            found = (_curvature(self, out) * u * w).sum()
        return found * (self.scale / self.terms)

    def beyond(self, moved: Tensor) -> Tensor:
        """By how much the loss rises over its tangent when the output moves (in any shape) so far.

        Exact for the losses that are linear in their targets, which then need not be known; to second order for others.
        """
        if self.kind not in _BEYOND:
            return self.quadratic(moved, moved) / 2
        out, by = plain(self.output).detach().float(), self._arranged(moved).float()
        if self.kind in _CLASSES:
            out, by = self._classes_last(out), self._classes_last(by)
        risen = _BEYOND[self.kind](out, by)
        if self.kept is not None:
            risen = risen * self.kept.square()
        return risen.sum() * (self.scale / self.terms)

    def _arranged(self, moved: Tensor) -> Tensor:
        """As the loss saw the model's output: classes second, axes exchanged or flattened."""
        out = self.output
        if moved.shape == out.shape:
            return moved
        if self.kind in _CLASSES and moved.dim() > 2 and moved.movedim(-1, 1).shape == out.shape:
            return moved.movedim(-1, 1)
        if moved.dim() == out.dim() and not out.is_contiguous() and sorted(moved.shape) == sorted(out.shape):
            return moved.contiguous().as_strided(out.shape, out.stride())
        return moved.reshape(out.shape)

    def _counted(self, s: Tensor) -> Tensor:
        """Without what comes from terms that do not count."""
        if self.kept is None:
            return s
        mask = self.kept
        if self.kind in _CLASSES:
            mask = mask[..., None] if self.classes_last or s.dim() <= 2 else mask.unsqueeze(1)
        return s * mask

    def square_root(self, generator: torch.Generator | None = None) -> Iterator[Tensor]:
        """Directions whose outer products add up to the Hessian, for every sample at once.

        Samples get random signs of their own: where they meet all the same (normalisation over a batch, sequences
        whose positions are the rows of the output), what they share cancels on average instead of adding up.
        """
        out = plain(self.output).detach().float()
        rows = len(out) if out.dim() else 1
        if generator is None:
            generator = torch.Generator(out.device).manual_seed(0)
        several = 1 if not self.samples or rows % self.samples else rows // self.samples
        turn = torch.arange(rows, device=out.device) % several
        for direction in self._class_directions(out) if self.kind in _CLASSES else self._number_directions(out):
            signs = torch.randint(0, 2, (rows,), device=out.device, generator=generator) * 2.0 - 1.0
            for place in range(several):
                chosen = (signs * (turn == place)).reshape(out.shape[:1] + (1,) * (out.dim() - 1))
                yield self._fit(direction * chosen)

    def _number_directions(self, out: Tensor) -> Iterator[Tensor]:
        weight = _curvature(self, out).sqrt()
        shape = out.shape[1:]
        for place in range(math.prod(shape)):
            chosen = torch.zeros(math.prod(shape), device=out.device)
            chosen[place] = 1.0
            yield weight * chosen.reshape(shape)

    def _class_directions(self, out: Tensor) -> Iterator[Tensor]:
        p = self._classes_last(out).softmax(-1)
        shape = p.shape[1:-1]
        for position in range(math.prod(shape)):
            only = torch.zeros(math.prod(shape), device=p.device)
            only[position] = 1.0
            for label in range(p.shape[-1]):
                onehot = F.one_hot(torch.tensor(label, device=p.device), p.shape[-1]).float()
                s = p[..., label : label + 1].sqrt() * ((p if self.kind == "cross_entropy" else 0.0) - onehot)
                yield self._classes_back(s * only.reshape(shape)[..., None])

    def _classes_last(self, out: Tensor) -> Tensor:
        return out if self.classes_last or out.dim() <= 2 else out.movedim(1, -1)

    def _classes_back(self, s: Tensor) -> Tensor:
        return s if self.classes_last or s.dim() <= 2 else s.movedim(-1, 1)

    def _fit(self, s: Tensor) -> Tensor:
        """As a gradient of the output: terms that do not count give none."""
        s = self._counted(s)
        return (s * math.sqrt(self.scale)).to(self.output.dtype)


def _curvature(outcome: Outcome, out: Tensor) -> Tensor:
    """Second derivative of a term by its output; for losses with corners, of the parabola that touches from above."""
    if outcome.kind == "mse":
        return torch.full_like(out, 2.0)
    if outcome.kind == "bce":
        p = out.sigmoid()
        return p * (1 - p)
    if outcome.kind == "bce_probabilities":
        p = out.clamp(_SMALL, 1 - _SMALL)
        return 1 / (p * (1 - p))
    if outcome.kind == "poisson":
        return out.exp()
    if outcome.kind == "poisson_rates":
        return out.clamp_min(_SMALL).reciprocal()
    assert outcome.kind == "huber" and outcome.offset is not None
    return outcome.height / outcome.offset.detach().abs().float().clamp_min(outcome.width)


def _normal(outcome: Outcome, out: Tensor, generator: torch.Generator | None) -> Tensor:
    noise = torch.randn(out.shape, device=out.device, generator=generator)
    return noise * _curvature(outcome, out).sqrt()


def _labels(p: Tensor, generator: torch.Generator | None) -> Tensor:
    known = p.nan_to_num(1.0)  # of what is no number anything may be drawn: the direction will not be one either
    drawn = torch.multinomial(known.reshape(-1, p.shape[-1]), 1, generator=generator)
    return drawn.reshape(p.shape[:-1])


def _of_classes(outcome: Outcome, out: Tensor, generator: torch.Generator | None) -> Tensor:
    logits = outcome._classes_last(out)
    p = logits.softmax(-1)
    labels = _labels(p, generator)[..., None]
    found = p if outcome.kind == "cross_entropy" else p * 0
    found.scatter_add_(-1, labels, torch.full_like(labels, -1.0, dtype=p.dtype))  # many classes: no second matrix
    return outcome._classes_back(found)


def _of_two(outcome: Outcome, out: Tensor, generator: torch.Generator | None) -> Tensor:
    p = out.sigmoid() if outcome.kind == "bce" else out.clamp(_SMALL, 1 - _SMALL)
    label = (torch.rand(p.shape, device=p.device, generator=generator) < p).float()
    return p - label if outcome.kind == "bce" else (p - label) / (p * (1 - p))


_DRAWS: dict[str, Callable[[Outcome, Tensor, torch.Generator | None], Tensor]] = {
    "cross_entropy": _of_classes,
    "nll": _of_classes,
    "mse": _normal,
    "huber": _normal,
    "poisson": _normal,
    "poisson_rates": _normal,
    "bce": _of_two,
    "bce_probabilities": _of_two,
}


# Over the tangent, by entry of the output (cross-entropy: by term).
_BEYOND: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda out, by: (out + by).logsumexp(-1) - out.logsumexp(-1) - (out.softmax(-1) * by).sum(-1),
    "mse": lambda out, by: by.square(),
    "bce": lambda out, by: F.softplus(out + by) - F.softplus(out) - out.sigmoid() * by,
    "poisson": lambda out, by: (out + by).exp() - out.exp() * (1 + by),
}


def of_output(output: Any, name: str, classes_last: bool = False) -> Outcome:
    """The outcome of a model's output under a loss given by name, averaged as torch does."""
    tensor = first_tensor(output)
    if name not in NAMES:
        raise OptimError(f"loss={name!r} is not known; one of {', '.join(NAMES)}, or a function of the output")
    if name == "huber":
        raise OptimError(f"loss={name!r} depends on the targets; leave loss='auto' and call torch's own loss function")
    if name in _CLASSES:
        classes = tensor.shape[-1 if classes_last or tensor.dim() <= 2 else 1]
        return Outcome(tensor, name, tensor.numel() / classes, classes_last=classes_last)
    return Outcome(tensor, name, tensor.numel())


def first_tensor(output: Any) -> Tensor:
    """Of what a model may answer with: its logits where they are named, else the first tensor that is no single number,
    as the loss is that some answer with, too."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if found is None and isinstance(output, (dict, list, tuple)):
        tensors = [one for one in (output.values() if isinstance(output, dict) else output) if isinstance(one, Tensor)]
        found = next((one for one in tensors if one.dim()), tensors[0] if tensors else None)
    if not isinstance(found, Tensor):
        raise OptimError("loss: the model's output holds no tensor; pass loss=function(output) -> Outcome")
    return found
