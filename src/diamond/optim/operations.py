"""How to read torch's calls: which of their arguments are inputs and weights, and who asks for which derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import GradientEdge

from diamond.optim.blocks import CONV, CONV_TRANSPOSE, EMBEDDING, LINEAR, NORM

ADDMM = "addmm"  # a linear map whose weight is kept the other way round


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _several(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, (Tensor, GradientEdge)) else list(value)


Asked = tuple[list[Any], list[Any], list[Any] | None, bool]


def _asked(first: tuple[int, str], gradients: tuple[int, str], by: tuple[int, str], retain: int) -> Any:
    """How to read one of torch's ways to ask for derivatives: of what, from where, by what, and is the graph kept."""

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Asked:
        inputs = argument(args, kwargs, *by)
        inputs = list(inputs.values()) if isinstance(inputs, dict) else inputs
        retained = argument(args, kwargs, retain, "retain_graph")
        kept = bool(argument(args, kwargs, retain + 1, "create_graph", False) if retained is None else retained)
        given = _several(argument(args, kwargs, *gradients))
        return _several(argument(args, kwargs, *first)), given, None if inputs is None else _several(inputs), kept

    return read


BACKWARD: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Asked]] = {
    Tensor.backward: _asked((0, "self"), (1, "gradient"), (4, "inputs"), 2),
    torch.autograd.backward: _asked((0, "tensors"), (1, "grad_tensors"), (5, "inputs"), 2),
    torch.autograd.grad: _asked((0, "outputs"), (2, "grad_outputs"), (1, "inputs"), 3),
}


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return LINEAR, *_inputs_weight_bias(args, kwargs), {}


def _inputs_weight_bias(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    return argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight"), argument(args, kwargs, 2, "bias")


def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or len(args) > 3:
        return None
    bias, inputs = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "mat1")
    return ADDMM, inputs, argument(args, kwargs, 2, "mat2"), bias, {}


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product with a transposed weight, as tables of words are often turned into scores."""
    right = argument(args, kwargs, 1, "other")
    if not isinstance(right, Tensor) or right.dim() != 2 or right._base is None or right.T.shape != right._base.shape:
        return None
    return (LINEAR, args[0], right._base, None, {}) if right.T.stride() == right._base.stride() else None


def _conv(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {
        "stride": argument(args, kwargs, 3, "stride", 1),
        "padding": argument(args, kwargs, 4, "padding", 0),
        "dilation": argument(args, kwargs, 5, "dilation", 1),
    }
    return CONV, *_inputs_weight_bias(args, kwargs), options


def _conv_transpose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {
        "stride": argument(args, kwargs, 3, "stride", 1),
        "padding": argument(args, kwargs, 4, "padding", 0),
        "dilation": argument(args, kwargs, 7, "dilation", 1),
    }
    return CONV_TRANSPOSE, *_inputs_weight_bias(args, kwargs), options


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = argument(args, kwargs, 1, "weight")
    padding = argument(args, kwargs, 2, "padding_idx")
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    return EMBEDDING, argument(args, kwargs, 0, "input"), weight, None, {"padding_idx": padding}


def _norm(place: int, normal: Callable[..., Callable[[Tensor], Tensor]], channels_second: bool) -> Any:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = argument(args, kwargs, place, "weight")
        if weight is None:
            return None
        options = {"normal": normal(args, kwargs), "channels_second": channels_second}
        bias = argument(args, kwargs, place + 1, "bias")
        return NORM, argument(args, kwargs, 0, "input"), weight, bias, options

    return read


def _layer_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    shape, eps = argument(args, kwargs, 1, "normalized_shape"), argument(args, kwargs, 4, "eps", 1e-5)
    return lambda x: F.layer_norm(x, shape, eps=eps)


def _rms_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    shape, eps = argument(args, kwargs, 1, "normalized_shape"), argument(args, kwargs, 3, "eps")
    return lambda x: F.rms_norm(x, shape, eps=eps)


def _group_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    groups, eps = argument(args, kwargs, 1, "num_groups"), argument(args, kwargs, 4, "eps", 1e-5)
    return lambda x: F.group_norm(x, groups, eps=eps)


def _batch_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    if not argument(args, kwargs, 5, "training", False):
        return _resting_normal(args, kwargs)
    eps = argument(args, kwargs, 7, "eps", 1e-5)
    return lambda x: F.batch_norm(x, None, None, training=True, eps=eps)


def _resting_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """By running means, which another forward pass may change before this is asked."""
    mean, variance = argument(args, kwargs, 1, "running_mean"), argument(args, kwargs, 2, "running_var")
    mean, variance, eps = mean.float().clone(), variance.float().clone(), argument(args, kwargs, 7, "eps", 1e-5)
    return lambda x: F.batch_norm(x, mean, variance, training=False, eps=eps)


def _instance_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    if not argument(args, kwargs, 5, "use_input_stats", True):
        return _resting_normal(args, kwargs)
    eps = argument(args, kwargs, 7, "eps", 1e-5)
    return lambda x: F.instance_norm(x, eps=eps)


OPERATIONS: dict[Any, Any] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    torch.conv1d: _conv,
    torch.conv2d: _conv,
    torch.conv3d: _conv,
    torch.conv_transpose1d: _conv_transpose,
    torch.conv_transpose2d: _conv_transpose,
    torch.conv_transpose3d: _conv_transpose,
    F.embedding: _embedding,
    F.layer_norm: _norm(2, _layer_normal, False),
    F.group_norm: _norm(2, _group_normal, True),
    F.batch_norm: _norm(3, _batch_normal, True),
    F.instance_norm: _norm(3, _instance_normal, True),
    **({F.rms_norm: _norm(2, _rms_normal, False)} if hasattr(F, "rms_norm") else {}),
}
