"""Derivatives of perceptrons by their inputs, carried forward through the layers together with the value.

Every use of a weight is one of torch's linear operations, which K-FAC sees: of the values with the bias, of the
derivatives without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from diamond.optim.errors import OptimError

Triple = tuple[Tensor, Tensor, Tensor]  # an activation and its first two derivatives


# ---- activations ---------------------------------------------------------------------------------------------------


class Smooth(nn.Module):
    """An activation of one's own, given with its first two derivatives.

    Args:
        function, first, second: each takes a tensor and gives one of its shape, by operations that torch can
            differentiate.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        first: Callable[[Tensor], Tensor],
        second: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.function, self.first, self.second = function, first, second

    def forward(self, z: Tensor) -> Tensor:
        return self.function(z)


class Sine(nn.Module):
    """sin(frequency z)."""

    def __init__(self, frequency: float = 1.0) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, z: Tensor) -> Tensor:
        return torch.sin(self.frequency * z)


def _tanh(activation: nn.Module, z: Tensor) -> Triple:
    y = torch.tanh(z)
    first = 1 - y.square()
    return y, first, -2 * y * first


def _sigmoid(activation: nn.Module, z: Tensor) -> Triple:
    y = torch.sigmoid(z)
    first = y * (1 - y)
    return y, first, first * (1 - 2 * y)


def _silu(activation: nn.Module, z: Tensor) -> Triple:
    s = torch.sigmoid(z)
    falling = s * (1 - s)
    return z * s, s + z * falling, falling * (2 + z * (1 - 2 * s))


def _gelu(activation: nn.Module, z: Tensor) -> Triple:
    if getattr(activation, "approximate", "none") == "tanh":
        return _gelu_by_tanh(z)
    bell = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    share = 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return z * share, share + z * bell, bell * (2 - z.square())


def _gelu_by_tanh(z: Tensor) -> Triple:
    width, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(width * (z + cubic * z.pow(3)))
    inner, inner_slope = width * (1 + 3 * cubic * z.square()), width * 6 * cubic * z
    share, rise = 0.5 * (1 + t), 0.5 * (1 - t.square())
    slope = rise * inner
    return z * share, share + z * slope, 2 * slope + z * rise * (inner_slope - 2 * t * inner.square())


def _softplus(activation: nn.Module, z: Tensor) -> Triple:
    beta = float(activation.beta)  # type: ignore[arg-type]
    s = torch.sigmoid(beta * z)
    return activation(z), s, beta * s * (1 - s)


def _sine(activation: nn.Module, z: Tensor) -> Triple:
    frequency = float(activation.frequency)  # type: ignore[arg-type]
    y = torch.sin(frequency * z)
    return y, frequency * torch.cos(frequency * z), -(frequency**2) * y


def _given(activation: nn.Module, z: Tensor) -> Triple:
    assert isinstance(activation, Smooth)
    return activation(z), activation.first(z), activation.second(z)


_ACTIVATIONS: dict[type[nn.Module], Callable[[nn.Module, Tensor], Triple]] = {
    nn.Tanh: _tanh, nn.Sigmoid: _sigmoid, nn.SiLU: _silu, nn.GELU: _gelu, nn.Softplus: _softplus,
    Sine: _sine, Smooth: _given,
}  # fmt: skip


# ---- what a network can be made of ---------------------------------------------------------------------------------


def _layers(net: nn.Module, name: str = "net") -> Iterator[tuple[str, nn.Module]]:
    """Linear layers and activations in their order, with their names; anything else is refused."""
    if isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward:
        for place, layer in net._modules.items():  # one activation may stand in many places
            assert layer is not None
            yield from _layers(layer, f"{name}.{place}")
    elif _is_linear(net) or type(net) in _ACTIVATIONS:
        yield name, net
    elif not isinstance(net, nn.Identity):
        known = ", ".join(one.__name__ for one in _ACTIVATIONS if one not in (Sine, Smooth))
        raise OptimError(
            f"net: derivatives cannot be carried through {name}, a {type(net).__name__}; make the network an "
            f"nn.Sequential of Linear, {known} and pinn.Sine, or wrap an activation as "
            "pinn.Smooth(function, first, second)"
        )


def _is_linear(layer: nn.Module) -> bool:
    """Also where its weight is computed from others, but not where it does more than a linear map."""
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward


def layers_of(net: nn.Module) -> list[nn.Module]:
    layers = [layer for _, layer in _layers(net)]
    if not any(isinstance(layer, nn.Linear) for layer in layers):
        raise OptimError("net: it has no Linear layer; give an nn.Sequential of Linear layers and smooth activations")
    return layers


def first_linear(layers: Sequence[nn.Module]) -> nn.Linear:
    return next(layer for layer in layers if isinstance(layer, nn.Linear))


# ---- derivatives ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Jet:
    """A network and its derivatives at some points.

    Attributes:
        value: (points, outputs).
        first: (axes asked for, points, outputs).
        second: (sums asked for, points, outputs).
    """

    value: Tensor
    first: Tensor
    second: Tensor

    @property
    def laplacian(self) -> Tensor:
        """The first of the sums: (points, outputs)."""
        return self.second[0]


class Carried:
    """The derivatives at one set of points, on their way through the layers.

    Slopes along single axes make sums of squares; so a sum of second derivatives is one tensor, however many axes it
    is over. `sums` is None as long as all layers were linear: a use of a weight with nothing but zeros would count in
    K-FAC's means and say nothing.
    """

    def __init__(self, points: Tensor, first: Sequence[int], second: Sequence[Sequence[float]]) -> None:
        number, dimensions = points.shape
        used = {axis for row in second for axis, weight in enumerate(row) if weight}
        self.axes = sorted({*first, *used})
        self.asked = [self.axes.index(axis) for axis in first]
        self.weights = points.new_tensor([[row[axis] for axis in self.axes] for row in second])
        axes = torch.eye(dimensions, dtype=points.dtype, device=points.device)[self.axes]
        self.slopes = axes[:, None].expand(-1, number, -1)
        self.sums: Tensor | None = None

    def rows(self) -> list[Tensor]:
        """All that a linear layer is to be applied to."""
        parts = [self.slopes] if self.sums is None else [self.slopes, self.sums]
        return [part.flatten(0, 1) for part in parts if len(part)]

    def take(self, rows: Iterator[Tensor]) -> None:
        """What became of them."""
        if len(self.slopes):
            self.slopes = _unflat(next(rows), len(self.slopes))
        if self.sums is not None:
            self.sums = _unflat(next(rows), len(self.weights))

    def activate(self, first: Tensor, second: Tensor) -> None:
        if len(self.weights):
            squares = self.slopes.square()
            bent = second * torch.tensordot(self.weights, squares, dims=1)
            self.sums = bent if self.sums is None else torch.addcmul(bent, first, self.sums)
        self.slopes = first * self.slopes

    def keep_asked(self) -> None:
        """Slopes that only second derivatives were made of are not needed any more."""
        self.slopes, self.axes = self.slopes[self.asked], [self.axes[place] for place in self.asked]
        self.asked = list(range(len(self.axes)))

    def jet(self, value: Tensor) -> Jet:
        self.keep_asked()
        sums = value.new_zeros(len(self.weights), *value.shape) if self.sums is None else self.sums
        return Jet(value, self.slopes, sums)


def _unflat(rows: Tensor, number: int) -> Tensor:
    return rows.reshape(number, -1, rows.shape[1])


def carry(layers: Sequence[nn.Module], points: Sequence[Tensor], carried: Sequence[Carried]) -> list[Jet]:
    """Several sets of points at once: at every layer one operation for all values and one for all derivatives."""
    value, numbers = torch.cat(list(points)), [len(one) for one in points]
    for place, layer in enumerate(layers):
        if isinstance(layer, nn.Linear):
            value = layer(value)
            if place + 1 == len(layers):
                for one in carried:
                    one.keep_asked()
            rows = [part for one in carried for part in one.rows()]
            if rows:
                moved = F.linear(rows[0] if len(rows) == 1 else torch.cat(rows), layer.weight)
                parts = iter(torch.split(moved, [len(part) for part in rows]))
                for one in carried:
                    one.take(parts)
        else:
            value = torch.cat([
                _activated(layer, part, one) for part, one in zip(torch.split(value, numbers), carried, strict=True)
            ])  # fmt: skip
    return [one.jet(part) for part, one in zip(torch.split(value, numbers), carried, strict=True)]


def _activated(layer: nn.Module, z: Tensor, carried: Carried) -> Tensor:
    if not carried.axes:
        found: Tensor = layer(z)
        return found
    y, first, second = _ACTIVATIONS[type(layer)](layer, z)
    carried.activate(first, second)
    return y


def derivatives(
    net: nn.Module, points: Tensor, *, first: Sequence[int] = (), second: Sequence[Sequence[float]] | None = None
) -> Jet:
    """A perceptron's value and derivatives at points, in one forward pass.

    Args:
        net: an nn.Sequential of Linear layers and smooth activations.
        points: (points, dimensions).
        first: axes along which first derivatives are wanted.
        second: rows of one number for each axis, which weigh the second derivatives in a sum; the Laplacian where
            left out.

    Raises:
        OptimError: a layer that cannot be carried, or points and axes that do not fit.
    """
    layers = layers_of(net)
    check_points("points", points, first_linear(layers))
    dimensions = points.shape[1]
    second = [[1.0] * dimensions] if second is None else second
    check_orders("first", "second", first, second, dimensions)
    return carry(layers, [points], [Carried(points, first, second)])[0]


def check_points(name: str, points: Tensor, layer: nn.Linear) -> None:
    if points.dim() != 2 or points.shape[1] != layer.in_features or not len(points):
        raise OptimError(
            f"{name}: its shape is {tuple(points.shape)}; give (points, {layer.in_features}), as the network takes "
            f"{layer.in_features} numbers, and at least one point"
        )
    if points.dtype != layer.weight.dtype:
        raise OptimError(f"{name}: its numbers are {points.dtype}, the network's {layer.weight.dtype}; convert one")


def check_orders(
    first_name: str, second_name: str, first: Sequence[int], second: Sequence[Sequence[float]], dimensions: int
) -> None:
    for axis in first:
        if not 0 <= axis < dimensions:
            raise OptimError(f"{first_name}: there is no axis {axis}; give some of 0 to {dimensions - 1}")
    for row in second:
        if len(row) != dimensions:
            raise OptimError(f"{second_name}: a row has {len(row)} numbers; give one for each of {dimensions} axes")
