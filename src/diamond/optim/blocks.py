"""The parts of a model that K-FAC treats each on its own: a matrix of weights with a factor on either side.

A block is a weight seen as `copies` matrices of `g` rows and `a` columns (a bias is one more column). Layers with
groups have a copy for each group; a fused projection of queries, keys and values is three blocks, for their inputs and
their curvature differ. What no block covers is left to the fallback, and the coverage report says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diamond.optim.errors import OptimError

LINEAR, CONV, CONV_TRANSPOSE, EMBEDDING, NORM = "linear", "conv", "conv_transpose", "embedding", "norm"
NORMS = tuple(
    kind
    for kind in (
        nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
        nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, getattr(nn, "RMSNorm", None),
    )
    if kind is not None
)  # fmt: skip


@dataclass(eq=False)
class Block:
    """One matrix of weights.

    Attributes:
        kind: how its statistics are taken.
        module, weight_name, bias_name: where its parameters live; under FSDP2 they change from step to step.
        rows: which of the weight's rows, of a fused projection; None for all.
        columns_first: the weight is kept as (a, g), as in GPT-2's own layers and in transposed convolutions.
        a_diagonal: the input factor is a diagonal (of a vocabulary), kept as a vector.
    """

    name: str
    kind: str
    module: nn.Module
    weight_name: str
    bias_name: str | None
    copies: int
    g: int
    a: int
    rows: tuple[int, int] | None = None
    columns_first: bool = False
    a_diagonal: bool = False
    index: int = 0

    @property
    def weight(self) -> nn.Parameter:
        found: nn.Parameter = getattr(self.module, self.weight_name)
        return found

    @property
    def bias(self) -> nn.Parameter | None:
        return getattr(self.module, self.bias_name) if self.bias_name else None

    @property
    def numbers(self) -> int:
        return self.copies * self.g * self.a

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def pieces(self, weight: Tensor, bias: Tensor | None) -> list[tuple[slice, Tensor]]:
        """Tensors of the shape of its parameters, as columns of (copies, g, a): which, and what stands there."""
        if self.kind == NORM:
            part, column = weight.reshape(1, 1, -1), None if bias is None else bias.reshape(1, 1, -1)
        else:
            part = weight if self.rows is None else weight[slice(*self.rows)]
            if self.columns_first:
                part = part.reshape(self.copies, -1, self.g).transpose(1, 2)
            else:
                part = part.reshape(self.copies, self.g, -1)
            column = bias if bias is None or self.rows is None else bias[slice(*self.rows)]
            column = None if column is None else column.reshape(self.copies, self.g, 1)
        first = (slice(0, part.shape[2]), part)
        return [first] if column is None else [first, (slice(part.shape[2], self.a), column)]

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors of the shape of its parameters (gradients, say) as (copies, g, a)."""
        parts = [part for _, part in self.pieces(weight, bias)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def places(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """The other way: parts of tensors of the shape of its parameters, and what of a matrix belongs there."""
        split = self.a - (0 if bias is None else self.a // 2 if self.kind == NORM else 1)
        seen = matrix[:, :, :split]
        part = weight if self.rows is None else weight[slice(*self.rows)]
        found = [(part, (seen.transpose(1, 2) if self.columns_first else seen).reshape(part.shape))]
        if bias is not None:
            column = bias if self.rows is None else bias[slice(*self.rows)]
            found.append((column, matrix[:, :, split:].reshape(column.shape)))
        return found

    def write(self, matrix: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        for part, values in self.places(matrix, weight, bias):
            part.copy_(values)


def discover(model: nn.Module) -> list[Block]:
    """The blocks of a model's trainable parameters, in the model's order; a shared weight once.

    A table of words that also scores words is the table's block: its side of the vocabulary is a diagonal, whereas a
    linear layer would keep a matrix as large as the vocabulary is squared.
    """
    found: list[Block] = []
    taken: set[int] = set()
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding) and not one.sparse}
    for name, module in model.named_modules():
        if any(isinstance(one, nn.UninitializedParameter) for one in module.parameters(recurse=False)):
            raise OptimError(f"model: {name} has no shape yet; give the model one batch before its optimizer")
        for block in _of(name or "model", module):
            if block.weight_name not in module._parameters:  # computed from others, as weight normalisation does
                continue
            if not block.weight.requires_grad or id(block.weight) in taken:
                continue
            if block.kind != EMBEDDING and id(block.weight) in tables:
                continue
            own_bias = block.bias_name in module._parameters
            if block.bias is not None and (not own_bias or not block.bias.requires_grad or id(block.bias) in taken):
                block.a -= block.bias.numel() if block.kind == NORM else 1
                block.bias_name = None
            block.index = len(found)
            found.append(block)
        taken.update(id(one) for block in found if block.module is module for one in block.parameters())
    return found


def _of(name: str, module: nn.Module) -> Iterator[Block]:
    if isinstance(module, nn.MultiheadAttention):
        yield from _attention(name, module)
    elif isinstance(module, nn.Linear):
        rows, columns = module.weight.shape
        yield _block(name, LINEAR, module, 1, rows, columns)
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        yield _convolution(name, module)
    elif isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        inputs, outputs, *window = module.weight.shape
        seen, groups = outputs * math.prod(window), module.groups
        block = _block(name, CONV_TRANSPOSE, module, groups, seen, inputs // groups, bias=False)
        block.columns_first = True  # its bias adds to outputs, which are no rows here: the fallback's
        yield block
    elif isinstance(module, nn.Embedding) and not module.sparse:
        words, width = module.weight.shape
        block = _block(name, EMBEDDING, module, 1, width, words, bias=False)
        block.columns_first, block.a_diagonal = True, True
        yield block
    elif isinstance(module, NORMS) and getattr(module, "weight", None) is not None:
        weight: Tensor = module.weight
        bias = getattr(module, "bias", None)
        numbers = weight.numel() * (1 if bias is None else 2)
        yield Block(name, NORM, module, "weight", None if bias is None else "bias", 1, 1, numbers, a_diagonal=True)
    elif _gpt2_like(module):
        columns, rows = getattr(module, "weight").shape  # noqa: B009 - typed as a tensor or a module
        block = _block(name, LINEAR, module, 1, int(rows), int(columns))
        block.columns_first = True
        yield block


def _block(name: str, kind: str, module: nn.Module, copies: int, g: int, a: int, bias: bool = True) -> Block:
    with_bias = bias and getattr(module, "bias", None) is not None
    return Block(name, kind, module, "weight", "bias" if with_bias else None, copies, g, a + with_bias)


def _convolution(name: str, module: Any) -> Block:
    outputs, inputs, *window = module.weight.shape
    return _block(name, CONV, module, module.groups, outputs // module.groups, inputs * math.prod(window))


def _attention(name: str, module: nn.MultiheadAttention) -> Iterator[Block]:
    """Queries, keys and values apart; the projection of the output is a layer of its own within."""
    width = module.embed_dim
    bias = 0 if module.in_proj_bias is None else 1
    bias_name = "in_proj_bias" if bias else None
    for place, part in enumerate("qkv"):
        rows = (place * width, (place + 1) * width)
        if module._qkv_same_embed_dim:
            yield Block(f"{name}.{part}", LINEAR, module, "in_proj_weight", bias_name, 1, width, width + bias, rows)
        else:  # keys and values of widths of their own: the bias is one vector for all three, left to the fallback
            weight = getattr(module, f"{part}_proj_weight")
            yield Block(f"{name}.{part}", LINEAR, module, f"{part}_proj_weight", None, 1, width, weight.shape[1])


def _gpt2_like(module: nn.Module) -> bool:
    """Layers that keep a linear map the other way round, by the attributes that transformers gives them."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, from under DDP and torch.compile."""
    for _ in range(8):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
    raise OptimError("model: wrapped more than eight times; pass the model itself")
