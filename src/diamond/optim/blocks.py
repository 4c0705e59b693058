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
        a_pieces, g_pieces: in how many blocks on its diagonal the factor of a large side is kept.
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
    a_pieces: int = 1
    g_pieces: int = 1
    index: int = 0

    @property
    def weight(self) -> nn.Parameter:
        found: nn.Parameter = self.module._parameters[self.weight_name]  # type: ignore[assignment]
        return found

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module._parameters[self.bias_name] if self.bias_name else None

    @property
    def a_shape(self) -> tuple[int, ...]:
        """Of its input factor: matrices of all copies and pieces, or a vector for each copy."""
        return (self.copies, self.a) if self.a_diagonal else _squares(self.copies, self.a, self.a_pieces)

    @property
    def g_shape(self) -> tuple[int, ...]:
        return _squares(self.copies, self.g, self.g_pieces)

    @property
    def numbers(self) -> int:
        return self.copies * self.g * self.a

    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def seen(self, tensor: Tensor) -> Tensor:
        """A tensor of the shape of its weight or bias as `views` shows them: the rows that are the block's."""
        if self.rows is not None:
            return tensor[slice(*self.rows)]
        if self.columns_first and self.copies > 1:  # groups of a transposed convolution, which has no bias here
            return tensor.view(self.copies, self.a, *tensor.shape[1:])
        return tensor

    def views(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """A matrix (copies, g, a) in the shapes of its weight and bias, in the same memory."""
        bias = self.bias
        split = self.a - (0 if bias is None else self.a // 2 if self.kind == NORM else 1)
        part = matrix[:, :, :split]
        if self.columns_first:
            part = part.transpose(1, 2)
        weight = part.view(self._seen_shape(self.weight))
        return weight, None if bias is None else matrix[:, :, split:].view(self._seen_shape(bias))

    def _seen_shape(self, parameter: Tensor) -> tuple[int, ...]:
        first, *rest = parameter.shape
        if self.rows is not None:
            return self.rows[1] - self.rows[0], *rest
        return (self.copies, self.a, *rest) if self.columns_first and self.copies > 1 else (first, *rest)

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Tensors of the shape of its parameters (gradients, say) as a matrix of its own."""
        found = torch.empty(self.copies, self.g, self.a, dtype=weight.dtype, device=weight.device)
        for part, given in zip(self.views(found), (weight, bias), strict=True):
            if part is not None and given is not None:
                part.copy_(self.seen(given))
        return found


def _squares(copies: int, n: int, pieces: int) -> tuple[int, ...]:
    size = -(-n // pieces)
    return copies * pieces, size, size


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
            if not block.weight.requires_grad or block.weight.is_complex() or id(block.weight) in taken:
                continue
            if block.kind != EMBEDDING and id(block.weight) in tables:
                continue
            bias = None if block.bias_name is None else module._parameters.get(block.bias_name)
            if block.bias_name is not None and (bias is None or not bias.requires_grad or id(bias) in taken):
                block.a -= block.weight.numel() if block.kind == NORM else 1
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
