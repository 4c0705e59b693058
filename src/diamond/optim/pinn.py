"""Networks that are solutions of differential equations (PINN), so that K-FAC sees all of their curvature.

`Residuals` puts what should be zero (inside, on the boundary, in the beginning) into one vector, whose sum of squares
is the loss:

    model = pinn.poisson(net, source=f, boundary=g)
    loss = model(inside, boundary).square().sum()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diamond.optim.errors import OptimError
from diamond.optim.taylor import (
    Carried,
    Jet,
    Sine,
    Smooth,
    carry,
    check_orders,
    check_points,
    derivatives,
    first_linear,
    layers_of,
)

__all__ = ["Condition", "Jet", "Residuals", "Sine", "Smooth", "derivatives", "heat", "poisson"]

Field = Callable[[Tensor], Tensor | float]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What holds at a set of points.

    Attributes:
        name: of the set, for errors.
        residual: takes the points and the Jet there, and gives what should be zero, a number (or more) a point.
        weight: of its mean square in the loss.
        first, second: the derivatives it needs, as in `derivatives`; none where left out.
    """

    name: str
    residual: Callable[[Tensor, Jet], Tensor]
    weight: float = 1.0
    first: tuple[int, ...] = ()
    second: tuple[tuple[float, ...], ...] = ()


class Residuals(nn.Module):
    """What a network leaves of equations and conditions, as one vector: its sum of squares is the loss.

    That is, the sum over conditions of weight times mean square. Written so, it is a loss of this module's own output:
    `KFAC(model)` knows its curvature, and can measure how far to go. The network itself is `net`.

    Args:
        net: an nn.Sequential of Linear layers and smooth activations, from coordinates to the solution.
        conditions: `forward` takes a set of points for each, in this order.

    Raises:
        OptimError: a layer that cannot be carried, or derivatives along axes that do not exist.
    """

    def __init__(self, net: nn.Module, conditions: Sequence[Condition]) -> None:
        super().__init__()
        layers = layers_of(net)
        self.net, self.conditions = net, tuple(conditions)
        if not self.conditions:
            raise OptimError("conditions: there are none; give at least one Condition")
        for one in self.conditions:
            _check_weight(f"the weight of {one.name}", one.weight)
            where = f"of {one.name}"
            check_orders(f"first {where}", f"second {where}", one.first, one.second, first_linear(layers).in_features)

    def forward(self, *points: Tensor) -> Tensor:
        """(all points,): residuals times the square root of weight over number."""
        names = ", ".join(one.name for one in self.conditions)
        if len(points) != len(self.conditions):
            raise OptimError(f"points: {len(points)} sets were given; give one for each of: {names}")
        layers = layers_of(self.net)
        for one, some in zip(self.conditions, points, strict=True):
            check_points(one.name, some, first_linear(layers))
        carried = [Carried(some, one.first, one.second) for one, some in zip(self.conditions, points, strict=True)]
        jets = carry(layers, points, carried)
        found = []
        for one, some, jet in zip(self.conditions, points, jets, strict=True):
            left = one.residual(some, jet).flatten()
            found.append(left * math.sqrt(one.weight / len(some)))
        return torch.cat(found)


def _check_weight(name: str, weight: float) -> None:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise OptimError(f"{name} is {weight!r}; give a number above 0")


def _known(name: str, field: Field, points: Tensor, like: Tensor) -> Tensor | float:
    """What a user's function says at the points, as a column beside the network's value."""
    found = field(points)
    if isinstance(found, Tensor) and found.shape != like.shape:
        if found.numel() not in (1, like.numel()):
            raise OptimError(
                f"{name}: at {len(points)} points it gives the shape {tuple(found.shape)}; give one number a point"
            )
        found = found.reshape(like.shape) if found.numel() == like.numel() else found.reshape(1, 1)
    return found


def _equals(name: str, field: Field, weight: float) -> Condition:
    """The network is what a function says."""
    return Condition(
        name=name, residual=lambda points, jet: jet.value - _known(name, field, points, jet.value), weight=weight
    )


def _nothing(points: Tensor) -> float:
    return 0.0


def poisson(
    net: nn.Module, source: Field, boundary: Field = _nothing, *, weight: float = 1.0, boundary_weight: float = 1.0
) -> Residuals:
    """-Laplace u = source inside, u = boundary on the boundary, in as many dimensions as the network takes.

    `model(inside, boundary)` gives the residuals; both are (points, dimensions).

    Args:
        source, boundary: functions of points, (points, dimensions) to (points,).
        weight, boundary_weight: of the mean squares in the loss. Dividing both sides of the equation by a number s is
            a weight of 1 / s^2.
    """
    axes = first_linear(layers_of(net)).in_features

    def left(points: Tensor, jet: Jet) -> Tensor:
        return jet.laplacian + _known("source", source, points, jet.value)

    inside = Condition(name="inside", residual=left, weight=weight, second=((1.0,) * axes,))
    return Residuals(net, [inside, _equals("boundary", boundary, boundary_weight)])


def heat(
    net: nn.Module,
    initial: Field,
    boundary: Field = _nothing,
    source: Field = _nothing,
    *,
    diffusivity: float = 1.0,
    weight: float = 1.0,
    boundary_weight: float = 1.0,
    initial_weight: float = 1.0,
) -> Residuals:
    """u_t = diffusivity Laplace u + source inside; u = boundary on the boundary and u = initial in the beginning.

    Points are (points, dimensions + 1), the last number being the time. `model(inside, boundary, initial)` gives the
    residuals.

    Args:
        initial, boundary, source: functions of such points, to (points,).
        weight, boundary_weight, initial_weight: of the mean squares in the loss.
    """
    axes = first_linear(layers_of(net)).in_features
    if axes < 2:
        raise OptimError("net: it takes one number; for the heat equation give one with places first and time last")
    _check_weight("diffusivity", diffusivity)

    def left(points: Tensor, jet: Jet) -> Tensor:
        return jet.first[0] - diffusivity * jet.laplacian - _known("source", source, points, jet.value)

    second = ((1.0,) * (axes - 1) + (0.0,),)
    inside = Condition(name="inside", residual=left, weight=weight, first=(axes - 1,), second=second)
    return Residuals(
        net, [inside, _equals("boundary", boundary, boundary_weight), _equals("initial", initial, initial_weight)]
    )
