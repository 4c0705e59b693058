"""Sees where weights are used in a forward pass, and which loss follows.

Weights are known by identity at the operation that uses them, not by the module around it. So one weight used twice, a
module called many times, attention's fused projections, padding given as a word and layers that run now and then all
come out right. Nothing is installed in steps that take no curvature.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import CheckpointFunction

from diamond.optim.blocks import EMBEDDING, LINEAR, Block
from diamond.optim.errors import OptimError
from diamond.optim.losses import Outcome, first_tensor
from diamond.optim.operations import ADDMM, BACKWARD, OPERATIONS
from diamond.optim.uses import Use
from diamond.optim.watch import Losses

_LINEAR = OPERATIONS[F.linear]  # before anything stands in for it
_PATIENCE = 20_000  # calls of torch's after a forward pass, until no loss is expected of it any more
_MOST_PASSES = 8  # that one loss may be taken of


@dataclass(eq=False)
class Pass:
    """One forward pass. `terms` are those of the first loss that was taken of it, `seen` is the caller's."""

    uses: list[Use] = field(default_factory=list)
    terms: float = 0.0
    samples: int | None = None
    seen: Any = None

    def reached_by(self, output: Tensor) -> bool:
        return _depends(output, {use.edge.node for use in self.uses})


class Capture(TorchFunctionMode):
    """Active from the beginning of a forward pass until the optimizer steps or the next one begins.

    A mode cannot take itself away while torch calls it. Once no loss can follow any more (backward has freed the graph,
    or the pass led nowhere) it therefore only lets go of what it keeps and hands every call on.

    Args:
        blocks: of the model.
        on_loss: called with every loss that counts and the passes it was taken of, when backward is called and the
            graph is still there.
        earlier: passes that no loss has followed yet: one loss may be taken of several.
    """

    def __init__(
        self,
        blocks: list[Block],
        on_loss: Callable[[Outcome, list[Pass]], None] | None,
        earlier: Sequence[Pass] = (),
    ) -> None:
        super().__init__()
        self.own = Pass()
        self.recording = False
        self._passes = [*earlier, self.own]
        self._blocks = blocks
        self._on_loss = on_loss
        self._by_weight: dict[int, list[Block]] = {}
        self._losses = Losses()
        self._patience = _PATIENCE
        self._entered = False
        self._handles: list[Any] = []
        self._at_root: Any = None

    @property
    def uses(self) -> list[Use]:
        """Of the pass that it was begun for."""
        return self.own.uses

    @property
    def over(self) -> bool:
        """No loss can follow any more."""
        return not self._passes

    @property
    def empty(self) -> bool:
        """A loss was recognised, and it had no terms."""
        return self._losses.empty

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

    def leave(self) -> list[Pass]:
        """At the latest when the optimizer steps.

        Where it is another forward pass that begins (an optimizer steps without gradients), losses of this one that
        still wait for backward count as they are: they will be part of a sum of losses. Given back are the passes that
        none was taken of yet.
        """
        self.end_forward()
        told = False
        if self._entered and torch.is_grad_enabled():
            for outcome in self._losses.without_backward():
                told |= bool(self._tell(outcome))
        waiting = [] if told else self._passes[1 - _MOST_PASSES :]
        self._passes, self._on_loss = [], None
        self._losses.forget()
        if self._entered:
            self._entered = False
            _remove(self)
        return waiting

    def _let_go(self) -> None:
        self.own, self._passes = Pass(), []
        self._losses.forget()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.over:
            return func(*args, **kwargs)
        if self.recording and func is F.multi_head_attention_forward:
            with self._inside_attention():
                return func(*args, **kwargs)
        if self._on_loss is not None and func in BACKWARD:
            return self._backward(func, args, kwargs)
        result = func(*args, **kwargs)
        read = OPERATIONS.get(func) if self.recording else None
        if read is not None:
            self._note(read, args, kwargs, result)
        elif self._on_loss is not None and torch.is_grad_enabled():
            self._losses.note(func, args, kwargs, result, squares=not self.recording)
        if not self.recording:
            self._patience -= 1
            if self._patience < 0:
                self._let_go()
        return result

    def _backward(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Losses count where derivatives by weights are asked for; what frees the graph ends the passes in it."""
        roots, gradients, by, retained = BACKWARD[func](args, kwargs)
        chosen = [place for place, one in enumerate(roots) if isinstance(one, Tensor) and one.requires_grad]
        if by is None or any(id(one) in self._weights() for one in by):
            for outcome in self._losses.before_backward(
                [roots[place] for place in chosen], [gradients[place] for place in chosen] if gradients else None
            ):
                self._tell(outcome)
        ended = [one for one in self._passes if not retained and any(one.reached_by(roots[place]) for place in chosen)]
        result = func(*args, **kwargs)
        self._passes = [one for one in self._passes if one not in ended]
        if self.over:
            self._let_go()
        return result

    def _weights(self) -> set[int]:
        return {id(one) for block in self._blocks for one in block.parameters()}

    def _tell(self, outcome: Outcome) -> list[Pass]:
        """The passes that a loss was taken of, after it has counted."""
        reached = [one for one in self._passes if one.reached_by(outcome.output)]
        if reached and self._on_loss is not None:
            outcome.samples = reached[-1].samples
            self._on_loss(outcome, reached)
        return reached

    def _count_samples(self, module: nn.Module, args: Any, output: Any) -> None:
        """Once. It takes itself away, if need be at the end of the next pass: where a pass fails, torch does not bear
        that others take hooks away while it goes through them."""
        self._at_root.remove()
        with contextlib.suppress(OptimError):
            tensor = first_tensor(output)
            self.own.samples = tensor.shape[0] if tensor.dim() else None

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
            self.own.uses.append(
                Use(block, inputs.detach(), edge, columns, {**options, "operation": operation, "bias": own})
            )

    @contextlib.contextmanager
    def _inside_attention(self) -> Iterator[None]:
        """Attention is one function to torch's overrides; the linear maps within are seen by standing in for them."""
        real = F.linear

        def linear(*args: Any, **kwargs: Any) -> Tensor:
            result = real(*args, **kwargs)
            self._note(_LINEAR, args, kwargs, result)
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
