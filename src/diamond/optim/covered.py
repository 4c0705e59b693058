"""Which parameters are preconditioned, which the fallback takes, and why: for people, before they train for days."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from diamond.optim.blocks import CONV, CONV_TRANSPOSE, EMBEDDING, LINEAR, NORM, Block, discover, unwrapped
from diamond.optim.errors import OptimError
from diamond.optim.pieces import LARGEST, chosen

_KINDS = {
    LINEAR: "linear map",
    CONV: "convolution",
    CONV_TRANSPOSE: "transposed convolution",
    EMBEDDING: "table of words, diagonal over words",
    NORM: "normalisation, diagonal",
}


@dataclass(frozen=True)
class Line:
    """One parameter.

    Attributes:
        name: as in `model.named_parameters()`.
        layer: the class of its module.
        numbers: how many it holds.
        covered: whether K-FAC takes it.
        why: what it is treated as, or why the fallback takes it.
    """

    name: str
    layer: str
    numbers: int
    covered: bool
    why: str


@dataclass(frozen=True)
class Coverage:
    """Of the trainable parameters of a model; print it for a table."""

    lines: tuple[Line, ...]

    @property
    def numbers(self) -> int:
        return sum(one.numbers for one in self.lines)

    @property
    def covered(self) -> int:
        return sum(one.numbers for one in self.lines if one.covered)

    @property
    def share(self) -> float:
        """Of the numbers, from 0 to 1."""
        return self.covered / self.numbers if self.numbers else 0.0

    @property
    def left(self) -> tuple[Line, ...]:
        """What the fallback takes."""
        return tuple(one for one in self.lines if not one.covered)

    def __str__(self) -> str:
        head = f"K-FAC preconditions {self.covered:,} of {self.numbers:,} parameters ({self.share:.1%})"
        if not self.numbers:
            return "K-FAC has nothing to do: none of the model's parameters requires a gradient"
        if self.share < 0.5:
            head = f"WARNING: LESS THAN HALF IS COVERED. {head}"
        cells = [("parameter", "layer", "numbers", "by", "as, or why not")]
        cells += [
            (one.name, one.layer, f"{one.numbers:,}", "K-FAC" if one.covered else "fallback", one.why)
            for one in self.lines
        ]
        widths = [max(len(row[place]) for row in cells) for place in range(4)]
        rows = (
            f"{name:<{widths[0]}}  {layer:<{widths[1]}}  {numbers:>{widths[2]}}  {by:<{widths[3]}}  {why}"
            for name, layer, numbers, by, why in cells
        )
        return "\n".join([head, *rows])


def coverage(model: nn.Module, blocks: Sequence[Block] | None = None) -> Coverage:
    """What K-FAC would take of a model, with a warning where that is less than half.

    Args:
        model: before or after DDP and torch.compile.
        blocks: those of an optimizer (`opt.blocks`), which knows what was excluded and split; found in the model if
            left out.

    Raises:
        OptimError: it is no model, or these are no blocks.
    """
    _check(model, blocks)
    root = unwrapped(model)
    known = discover(root)
    used = chosen(known, (), LARGEST) if blocks is None else list(blocks)
    taken = {id(one): block for block in used for one in block.parameters()}
    excluded = {id(one) for block in known for one in block.parameters()} - taken.keys()
    tables = {id(one.weight) for one in root.modules() if isinstance(one, nn.Embedding)}
    modules = dict(root.named_modules())
    lines = []
    for name, parameter in root.named_parameters():
        if not parameter.requires_grad:
            continue
        path, _, own = name.rpartition(".")
        module = modules[path]
        block = taken.get(id(parameter))
        if block is not None:
            why = _KINDS[block.kind] + _pieces(block)
        elif id(parameter) in excluded:
            why = "excluded" if parameter.numel() else "empty"
        else:
            why = _why_not(module, own, tables)
        lines.append(Line(name, type(module).__name__, parameter.numel(), block is not None, why))
    found = Coverage(tuple(lines))
    if found.numbers and found.share < 0.5:
        warnings.warn(
            f"K-FAC covers {found.share:.1%} of the model's parameters; the fallback takes the rest. "
            "print(diamond.optim.coverage(model)) says why",
            stacklevel=2,
        )
    return found


def _check(model: Any, blocks: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptimError(f"model={type(model).__name__}: give the model itself, not its parameters")
    if blocks is not None and not (isinstance(blocks, Sequence) and all(isinstance(one, Block) for one in blocks)):
        raise OptimError(f"blocks={type(blocks).__name__}: give those of the optimizer, optimizer.blocks")


def _pieces(block: Block) -> str:
    split = (("outputs", block.g_pieces), ("inputs", block.a_pieces))
    return "".join(f", {side} split in {number}" for side, number in split if number > 1)


def _why_not(module: nn.Module, own: str, tables: set[int]) -> str:
    parameter = module._parameters.get(own)
    if parameter is not None and parameter.is_complex():
        return "complex numbers"
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)) and own == "bias":
        return "a transposed convolution's bias is no column of its weight"
    if isinstance(module, nn.MultiheadAttention):
        if own == "in_proj_bias":
            return "one bias for queries, keys and values of different widths"
        return "a key or value that attention adds, multiplied by no input"
    if isinstance(module, nn.Embedding):
        return "sparse gradients"
    if own == "bias" and id(getattr(module, "weight", None)) in tables:
        return "bias of a layer whose weight is a table of words"
    if own == "bias" and getattr(module, "weight", None) is not None:
        return "bias beside a weight that is frozen or another layer's"
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrent layers run as one operation, whose steps cannot be seen"
    return f"{type(module).__name__} has parameters of its own, whose use is not known"
