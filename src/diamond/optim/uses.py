"""One use of a weight in a forward pass, and what it says about the two factors of its block.

With a_p the inputs of a weight and b_p the gradients at its outputs, over all positions p of a batch, the factors are
A = mean of a a^T and G = sum of b b^T over the number of the loss's terms ("expand"), or the same of inputs averaged
and gradients summed over the positions of a sample ("reduce"). Neither changes with the size of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from diamond.optim.blocks import CONV, CONV_TRANSPOSE, LINEAR, NORM, Block
from diamond.optim.pieces import grams


@dataclass(eq=False)
class Use:
    """Where a block's weight was applied. `options` are those of the operation (stride, padding, …)."""

    block: Block
    inputs: Tensor
    edge: Any  # torch.autograd.graph.GradientEdge of the output: stays right when the output is changed in place
    columns: tuple[int, int] | None = None  # which of the operation's outputs are this block's, of a fused one
    options: dict[str, Any] = field(default_factory=dict)

    def gradient(self, whole: Tensor) -> Tensor:
        """Of this block's outputs, from that of the operation."""
        return plain(whole) if self.columns is None else plain(whole)[..., slice(*self.columns)]


def plain(tensor: Tensor) -> Tensor:
    """A whole tensor, also where it is spread over devices (DTensor)."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


class Thinning:
    """Takes some rows at random where there are far more than a factor has numbers to learn from them."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def rows(self, rows: Tensor, width: int, scaled: bool = False) -> Tensor:
        """Some of (…, rows, n); `scaled` so that sums of their squares stay what they were on average."""
        number, enough = rows.shape[-2], _enough(width)
        if number < 2 * enough:
            return rows
        chosen = rows.index_select(-2, self._draw(number, enough, rows.device))
        return chosen * math.sqrt(number / enough) if scaled else chosen

    def samples(self, x: Tensor, positions: int, width: int) -> Tensor:
        """Some of a convolution's samples, before what they see is laid out; with rows to spare."""
        enough = -(-4 * _enough(width) // max(positions, 1))
        return x if len(x) < 2 * enough else x.index_select(0, self._draw(len(x), enough, x.device))

    def _draw(self, number: int, enough: int, device: torch.device) -> Tensor:
        return torch.randint(number, (enough,), device=device, generator=self._generator)


def _enough(width: int) -> int:
    return max(2048, 2 * width)


def input_rows(use: Use, sharing: str, thin: Thinning | None = None) -> Tensor:
    """Inputs as (copies, rows, a); the column of the bias at the end is ones, or zeros where this use adds none."""
    block, x = use.block, plain(use.inputs).detach()
    thin = thin if sharing == "expand" else None
    if block.kind == LINEAR:
        rows = _per_sample(x, sharing, mean=True)[None]
    elif block.kind == CONV:
        window = block.weight.shape[2:]
        x = _batched(x, len(window))
        if thin is not None:
            positions = x[0, 0].numel() // math.prod(_each(use.options["stride"], len(window)))
            x = thin.samples(x, positions, block.a_shape[-1])
        rows = _grouped(_patches(x, window, **_convolving(use)), block.copies, sharing, mean=True)
    elif block.kind == CONV_TRANSPOSE:
        x = _batched(x, block.weight.dim() - 2)
        rows = _grouped(x.flatten(2).transpose(1, 2), block.copies, sharing, mean=True)
    else:
        raise AssertionError(f"{block.kind} has a diagonal factor")
    rows = (rows if thin is None else thin.rows(rows, block.a_shape[-1])).float()
    if block.bias_name is not None:
        column = rows.new_full((*rows.shape[:-1], 1), 1.0 if use.options.get("bias", True) else 0.0)
        rows = torch.cat([rows, column], dim=-1)
    return rows


def output_rows(use: Use, gradient: Tensor, sharing: str, thin: Thinning | None = None) -> Tensor:
    """Gradients at the outputs as (copies, rows, g)."""
    block, b = use.block, use.gradient(gradient).detach()
    if block.kind == LINEAR:
        rows = _per_sample(b, sharing, mean=False)[None]
    elif block.kind == CONV:
        b = _batched(b, block.weight.dim() - 2)
        rows = _grouped(b.flatten(2).transpose(1, 2), block.copies, sharing, mean=False)
    elif block.kind == CONV_TRANSPOSE:
        window = block.weight.shape[2:]
        b, x = _batched(b, len(window)), _batched(plain(use.inputs), len(window))
        seen = _patches(b, window, **_convolving(use), positions=x.shape[2:])
        rows = _grouped(seen, block.copies, sharing, mean=False)
    else:
        raise AssertionError(f"{block.kind} has a diagonal factor")
    if thin is None or sharing != "expand":
        return rows.float()
    return thin.rows(rows, block.g_shape[-1], scaled=True).float()


def vocabulary_sums(use: Use, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """For a table of words: sums for its diagonal over words and for its matrices over the width of a word.

    A table may serve twice, to look words up and, turned round, to give each word a score; then its curvature is a sum
    of two Kronecker products, and the roles of inputs and gradients are exchanged in one of them. What is returned of
    both adds up (over uses, draws and ranks) to the one product that has the same two partial traces as that sum:
    each part is weighed by the trace of its other side.
    """
    b = use.gradient(gradient).detach().float()
    if use.options.get("operation") == LINEAR:
        scores, hidden = b.reshape(-1, b.shape[-1]), plain(use.inputs).detach().float().reshape(-1, use.block.g)
        squares = scores.square().sum(0)
        width = grams(hidden[None], use.block.g_pieces)
        return squares * (hidden.square().sum() / len(hidden)), width * (squares.sum() / len(hidden))
    words = plain(use.inputs).reshape(-1)
    padding = use.options.get("padding_idx")
    rows = b.reshape(-1, use.block.g)
    if padding is not None:
        rows, words = rows[words != padding], words[words != padding]
    counts = torch.bincount(words, minlength=use.block.a).float()
    return counts * (rows.square().sum() / max(len(words), 1)), grams(rows[None], use.block.g_pieces)


def norm_squares(use: Use, gradient: Tensor) -> Tensor:
    """Sum over samples of the squared gradients of a normalisation's scale and shift: their exact diagonal."""
    assert use.block.kind == NORM
    b = use.gradient(gradient).detach().float()
    normal = use.options["normal"](plain(use.inputs).detach().float())
    channels_second: bool = use.options["channels_second"]
    shape = use.block.weight.shape
    parts = [normal * b] if use.block.bias_name is None else [normal * b, b]
    squares = []
    for part in parts:
        if channels_second:
            seen = part.flatten(2).sum(2) if part.dim() > 2 else part
        else:
            seen = part.reshape(part.shape[0], -1, *shape).sum(1) if part.dim() > len(shape) else part[None]
        squares.append(seen.square().sum(0).reshape(-1))
    return torch.cat(squares)


def _convolving(use: Use) -> dict[str, Any]:
    return {name: use.options[name] for name in ("stride", "padding", "dilation")}


def _batched(x: Tensor, spatial: int) -> Tensor:
    """Convolutions also take one sample without a dimension for it."""
    return x[None] if x.dim() == spatial + 1 else x


def _per_sample(x: Tensor, sharing: str, mean: bool) -> Tensor:
    if sharing == "reduce" and x.dim() > 2:
        x = x.float().flatten(1, -2)
        return x.mean(1) if mean else x.sum(1)
    return x.reshape(-1, x.shape[-1])


def _grouped(rows: Tensor, copies: int, sharing: str, mean: bool) -> Tensor:
    """(samples, positions, copies * n) as (copies, samples * positions, n)."""
    if sharing == "reduce":
        rows = rows.float()
        rows = (rows.mean(1) if mean else rows.sum(1))[:, None]
    seen = rows.reshape(-1, copies, rows.shape[-1] // copies)
    return seen.transpose(0, 1)


def _patches(
    x: Tensor, window: torch.Size, stride: Any, padding: Any, dilation: Any, positions: torch.Size | None = None
) -> Tensor:
    """What each position of a convolution sees: (samples, positions, channels * window); the first few if so told."""
    spatial = len(window)
    strides, dilations = _each(stride, spatial), _each(dilation, spatial)
    reach = [(size - 1) * step for size, step in zip(window, dilations, strict=True)]
    if padding == "valid":
        sides = [(0, 0)] * spatial
    elif padding == "same":
        sides = [(length // 2, length - length // 2) for length in reach]
    else:
        sides = [(one, one) for one in _each(padding, spatial)]
    if any(left or right for left, right in sides):
        x = F.pad(x, [side for pair in reversed(sides) for side in pair])
    for place in range(spatial):
        x = x.unfold(2 + place, reach[place] + 1, strides[place])[..., :: dilations[place]]
        if positions is not None:
            x = x.narrow(2 + place, 0, positions[place])
    samples, channels = x.shape[:2]
    order = [0, *range(2, 2 + spatial), 1, *range(2 + spatial, 2 + 2 * spatial)]
    return x.permute(order).reshape(samples, -1, channels * window.numel())


def _each(value: Any, number: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * number
    given = tuple(value)
    return given * number if len(given) == 1 else given
