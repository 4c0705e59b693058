"""Sees where weights are used in a forward pass, and which loss follows.

Weights are known by identity at the operation that uses them, not by the module around it. So one weight used twice, a
module called many times, attention's fused projections, padding given as a word and layers that run now and then all
come out right. Nothing is installed in steps that take no curvature.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import CheckpointFunction

from diamond.optim.blocks import CONV, CONV_TRANSPOSE, EMBEDDING, LINEAR, NORM, Block
from diamond.optim.errors import OptimError
from diamond.optim.losses import Outcome, first_tensor
from diamond.optim.uses import Use
from diamond.optim.watch import Losses

ADDMM = "addmm"  # a linear map whose weight is kept the other way round


class Capture(TorchFunctionMode):
    """Active from the beginning of a forward pass until the optimizer steps or the next one begins.

    Args:
        blocks: of the model.
        on_loss: called with every loss that counts, when backward is called and the graph is still there.
    """

    def __init__(self, blocks: list[Block], on_loss: Callable[[Outcome], None] | None) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.terms = 0.0  # of the first loss
        self._blocks = blocks
        self._on_loss = on_loss
        self._by_weight: dict[int, list[Block]] = {}
        self.recording = False
        self._losses = Losses()
        self._samples: int | None = None
        self._entered = False
        self._followed = False  # by a backward pass
        self._handles: list[Any] = []
        self._at_root: Any = None

    def begin(self, root: nn.Module) -> None:
        """Before the forward pass."""
        self._learn(self._blocks)
        for module, blocks in _by_module(root, self._blocks).items():
            self._handles.append(module.register_forward_pre_hook(lambda *_, known=blocks: self._learn(known)))
        self._at_root = root.register_forward_hook(self._count_samples)
        self.recording = True
        _insert(self)
        self._entered = True

    def end_forward(self) -> None:
        self.recording = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def leave(self) -> None:
        """At the latest when the optimizer steps.

        Where it is another forward pass that begins (an optimizer steps without gradients), losses of this one that
        still wait for backward count as they are: they will be part of a sum of losses.
        """
        self.end_forward()
        if self._entered and torch.is_grad_enabled() and not self._followed:
            for outcome in self._losses.without_backward():
                self._tell(outcome)
        self._on_loss = None
        self._losses = Losses()
        if self._entered:
            self._entered = False
            _remove(self)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recording and func is F.multi_head_attention_forward:
            with self._inside_attention():
                return func(*args, **kwargs)
        if func is Tensor.backward and self._on_loss is not None:
            self._followed = True
            for outcome in self._losses.before_backward(args[0], _argument(args, kwargs, 1, "gradient")):
                self._tell(outcome)
        result = func(*args, **kwargs)
        read = _OPERATIONS.get(func) if self.recording else None
        if read is not None:
            self._note(read, args, kwargs, result)
        elif self._on_loss is not None and torch.is_grad_enabled():
            self._losses.note(func, args, kwargs, result, squares=not self.recording)
        return result

    def _tell(self, outcome: Outcome) -> None:
        outcome.samples = self._samples
        if self._on_loss is not None and _depends(outcome.output, {use.edge.node for use in self.uses}):
            self._on_loss(outcome)

    def _count_samples(self, module: nn.Module, args: Any, output: Any) -> None:
        """Once. It takes itself away, if need be at the end of the next pass: where a pass fails, torch does not bear
        that others take hooks away while it goes through them."""
        self._at_root.remove()
        with contextlib.suppress(OptimError):
            tensor = first_tensor(output)
            self._samples = tensor.shape[0] if tensor.dim() else None

    def _learn(self, blocks: list[Block]) -> None:
        """Which tensors are these blocks' weights just now: FSDP2 puts others in their place for a while."""
        fresh: dict[int, list[Block]] = {}
        for block in blocks:
            fresh.setdefault(id(block.weight), []).append(block)
        self._by_weight.update(fresh)

    def _note(self, read: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = read(args, kwargs)
        if found is None:
            return
        operation, inputs, weight, bias, options = found
        first, number = 0, weight.shape[0]
        blocks = self._by_weight.get(id(weight))
        if blocks is None and weight._base is not None:  # a part of a fused weight
            blocks = self._by_weight.get(id(weight._base))
            if blocks is None or blocks[0].rows is None:
                return
            first = weight.storage_offset() // max(weight.stride(0), 1)
        if blocks is None:
            return
        if not torch.is_grad_enabled():
            _refuse_reentrant(blocks[0])
            return
        if not isinstance(result, Tensor) or not result.requires_grad or not inputs.numel():
            return
        edge = get_gradient_edge(result)
        for block in blocks:
            if not _understood(operation, block):
                continue
            columns = None
            if block.rows is not None:
                if not (first <= block.rows[0] and block.rows[1] <= first + number):
                    continue
                columns = (block.rows[0] - first, block.rows[1] - first)
            own = bias is not None and (bias is block.bias or (columns is not None and bias._base is block.bias))
            self.uses.append(
                Use(block, inputs.detach(), edge, columns, {**options, "operation": operation, "bias": own})
            )

    @contextlib.contextmanager
    def _inside_attention(self) -> Iterator[None]:
        """Attention is one function to torch's overrides; the linear maps within are seen by standing in for them."""
        real = F.linear

        def linear(*args: Any, **kwargs: Any) -> Tensor:
            result = real(*args, **kwargs)
            self._note(_linear, args, kwargs, result)
            return result

        F.linear = linear
        try:
            yield
        finally:
            F.linear = real


def _insert(mode: Capture) -> None:
    """Below the modes of the user's own `with` statements, whose ends take the uppermost."""
    above = _popped()
    # that of torch.set_default_device insists on being the lowest; only it was entered by its own method
    insists = above and isinstance(above[-1], DeviceContext) and hasattr(above[-1], "old_device")
    lowest = [above.pop()] if insists else []
    for one in [*lowest, mode, *reversed(above)]:
        _push_mode(one)  # type: ignore[no-untyped-call]


def _remove(mode: Capture) -> None:
    for one in reversed(_popped()):
        if one is not mode:
            _push_mode(one)  # type: ignore[no-untyped-call]


def _popped() -> list[Any]:
    """All modes, taken off, the uppermost first."""
    number = len(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return [_pop_mode() for _ in range(number)]  # type: ignore[no-untyped-call]


def _depends(output: Tensor, nodes: set[Any]) -> bool:
    """Whether any of these is among what an output was computed by."""
    ahead: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node in nodes:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            ahead.extend(one for one, _ in node.next_functions)
    return False


def _understood(operation: str, block: Block) -> bool:
    if operation == LINEAR:
        return (block.kind == LINEAR and not block.columns_first) or block.kind == EMBEDDING
    if operation == ADDMM:
        return block.kind == LINEAR and block.columns_first
    return operation == block.kind


def _refuse_reentrant(block: Block) -> None:
    """Its forward pass runs without a graph, so nothing could be seen of the layers within."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise OptimError(
                f"{block.name}: activation checkpointing with use_reentrant=True hides this layer; "
                "pass use_reentrant=False"
            )
        frame = frame.f_back


def _by_module(root: nn.Module, blocks: list[Block]) -> dict[nn.Module, list[Block]]:
    """For every module the blocks that may be used by its forward: its own and its children's."""
    own: dict[nn.Module, list[Block]] = {}
    for block in blocks:
        own.setdefault(block.module, []).append(block)
    return {
        module: found
        for module in root.modules()
        if (found := [*own.get(module, []), *(one for child in module.children() for one in own.get(child, []))])
    }


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return LINEAR, *_inputs_weight_bias(args, kwargs), {}


def _inputs_weight_bias(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    return _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), _argument(args, kwargs, 2, "bias")


def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1 or len(args) > 3:
        return None
    bias, inputs = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "mat1")
    return ADDMM, inputs, _argument(args, kwargs, 2, "mat2"), bias, {}


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A product with a transposed weight, as tables of words are often turned into scores."""
    right = _argument(args, kwargs, 1, "other")
    if not isinstance(right, Tensor) or right.dim() != 2 or right._base is None or right.T.shape != right._base.shape:
        return None
    return (LINEAR, args[0], right._base, None, {}) if right.T.stride() == right._base.stride() else None


def _conv(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {
        "stride": _argument(args, kwargs, 3, "stride", 1),
        "padding": _argument(args, kwargs, 4, "padding", 0),
        "dilation": _argument(args, kwargs, 5, "dilation", 1),
    }
    return CONV, *_inputs_weight_bias(args, kwargs), options


def _conv_transpose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {
        "stride": _argument(args, kwargs, 3, "stride", 1),
        "padding": _argument(args, kwargs, 4, "padding", 0),
        "dilation": _argument(args, kwargs, 7, "dilation", 1),
    }
    return CONV_TRANSPOSE, *_inputs_weight_bias(args, kwargs), options


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = _argument(args, kwargs, 1, "weight")
    padding = _argument(args, kwargs, 2, "padding_idx")
    if padding is not None and padding < 0:
        padding += weight.shape[0]
    return EMBEDDING, _argument(args, kwargs, 0, "input"), weight, None, {"padding_idx": padding}


def _norm(place: int, normal: Callable[..., Callable[[Tensor], Tensor]], channels_second: bool) -> Any:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = _argument(args, kwargs, place, "weight")
        if weight is None:
            return None
        options = {"normal": normal(args, kwargs), "channels_second": channels_second}
        bias = _argument(args, kwargs, place + 1, "bias")
        return NORM, _argument(args, kwargs, 0, "input"), weight, bias, options

    return read


def _layer_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    shape, eps = _argument(args, kwargs, 1, "normalized_shape"), _argument(args, kwargs, 4, "eps", 1e-5)
    return lambda x: F.layer_norm(x, shape, eps=eps)


def _rms_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    shape, eps = _argument(args, kwargs, 1, "normalized_shape"), _argument(args, kwargs, 3, "eps")
    return lambda x: F.rms_norm(x, shape, eps=eps)


def _group_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    groups, eps = _argument(args, kwargs, 1, "num_groups"), _argument(args, kwargs, 4, "eps", 1e-5)
    return lambda x: F.group_norm(x, groups, eps=eps)


def _batch_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    if not _argument(args, kwargs, 5, "training", False):
        return _resting_normal(args, kwargs)
    eps = _argument(args, kwargs, 7, "eps", 1e-5)
    return lambda x: F.batch_norm(x, None, None, training=True, eps=eps)


def _resting_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """By running means, which another forward pass may change before this is asked."""
    mean, variance = _argument(args, kwargs, 1, "running_mean"), _argument(args, kwargs, 2, "running_var")
    mean, variance, eps = mean.float().clone(), variance.float().clone(), _argument(args, kwargs, 7, "eps", 1e-5)
    return lambda x: F.batch_norm(x, mean, variance, training=False, eps=eps)


def _instance_normal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    if not _argument(args, kwargs, 5, "use_input_stats", True):
        return _resting_normal(args, kwargs)
    eps = _argument(args, kwargs, 7, "eps", 1e-5)
    return lambda x: F.instance_norm(x, eps=eps)


_OPERATIONS: dict[Any, Any] = {
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
