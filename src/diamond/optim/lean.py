"""Gradients of few rows, preconditioned without the whole matrix.

The gradient of a linear layer is a product of what went in and what came back, with as many rows as the batch has. As
long as these are fewer than the layer is wide, it costs less to multiply both by their inverses than to multiply the
gradient by them: with 100 rows and a width of 384, two fifths. That is worth it where arithmetic is what a step takes,
which on a GPU is the number of operations, and where the gradient is that product and nothing else: of one use, on one
rank, and not changed since (clipped, say, or accumulated).
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diamond.optim.blocks import LINEAR, Block

_WORTH = 0.75  # of the arithmetic of the whole matrix
_ALIKE = 1e-3  # between a row of the gradient and the same computed again


class Rows(NamedTuple):
    """(rows, a) with the column of ones for a bias, and (rows, g): the gradient is their product."""

    inputs: Tensor
    slopes: Tensor


class _Watch:
    """A layer's hook. It does not keep what it tells alive, and a copy of the layer tells nobody."""

    def __init__(self, lean: Lean | None = None) -> None:
        self._lean = None if lean is None else weakref.ref(lean)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        lean = None if self._lean is None else self._lean()
        if lean is not None:
            lean.used(module, args, output)

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return _Watch, ()


class Lean:
    """Keeps the rows of one block's last use, from its forward pass to the step."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._inputs: Tensor | None = None
        self._slopes: Tensor | None = None
        self._uses = 0
        self._turn = 0
        handle = block.module.register_forward_hook(_Watch(self))
        weakref.finalize(self, handle.remove)

    def take(self) -> Rows | None:
        """What the gradient is made of; None where it is not, or no longer. Each is taken once."""
        inputs, slopes, uses = self._inputs, self._slopes, self._uses
        self._forget()
        gradient = self.block.weight.grad
        if inputs is None or slopes is None or uses != 1 or gradient is None or gradient._version > 0:
            return None
        inputs = inputs.reshape(-1, inputs.shape[-1])
        slopes = slopes.reshape(-1, slopes.shape[-1])
        self._turn = (self._turn + 1) % len(gradient)
        again = slopes[:, self._turn] @ inputs
        if not torch.allclose(again, gradient[self._turn], rtol=_ALIKE, atol=_ALIKE * float(again.abs().max())):
            return None
        if self.block.bias_name is not None:
            inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
        return Rows(inputs, slopes)

    def used(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not module.training:
            return
        self._uses += 1
        self._slopes = None
        given = args[0] if len(args) == 1 else None
        if (
            not isinstance(given, Tensor)
            or not isinstance(output, Tensor)
            or not output.requires_grad
            or given.dtype != torch.float32
            or given.device.type != "cpu"
            or output.dtype != torch.float32
            or not pays(self.block, given.numel() // max(1, given.shape[-1]))
        ):
            self._inputs = None
            return
        self._inputs = given.detach()
        output.register_hook(self._came_back)  # type: ignore[no-untyped-call]

    def _came_back(self, slope: Tensor) -> None:
        # The curvature is found by backward passes of its own, before the real one; the last is the real one.
        self._slopes = slope.detach()

    def _forget(self) -> None:
        self._inputs = self._slopes = None
        self._uses = 0


def pays(block: Block, rows: int) -> bool:
    whole = block.g * block.a * (block.g + block.a)
    return rows * (block.g**2 + block.a**2 + block.g * block.a) < _WORTH * whole


def suits(block: Block) -> bool:
    """Whether its gradients may be such products: a plain linear layer, all of it, on a CPU."""
    return (
        block.kind == LINEAR
        and type(block.module) is nn.Linear
        and block.rows is None
        and block.a_pieces == block.g_pieces == 1
        and (block.module.bias is None) == (block.bias_name is None)
        and type(block.weight.data) is Tensor
        and block.weight.device.type == "cpu"
        and block.weight.dtype == torch.float32
    )
