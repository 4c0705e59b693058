"""Takes the curvature of a forward pass: sums for the factors, while the graph of the loss is there."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from diamond.optim import clipping, losses
from diamond.optim.blocks import Block
from diamond.optim.capture import Capture, Pass
from diamond.optim.casting import autocast_now, without_autocast
from diamond.optim.factors import Sums
from diamond.optim.lengths import Seen, dice_now
from diamond.optim.losses import Outcome
from diamond.optim.sharded import held
from diamond.optim.uses import Thinning, Use

CURVATURES = ("ggn-mc", "ggn-exact", "empirical")


@dataclass
class Taken:
    """What the forward passes of one step gave.

    Attributes:
        sums: by the index of the block.
        terms: of the losses.
        seen: the last forward pass that a loss was taken of, to be done again.
        weights: of the passes' losses in the number whose gradient it is; None where that is not known.
        passes, resting: how many forward passes were seen, and how many more in evaluation mode or without gradients.
        empty: a loss was of a batch without samples.
        reached: by the backward pass, the forward passes whose output it went through.
        differentiated: derivatives of an output were taken to become part of the loss.
        arrived: the sum of squares of the gradients when the last backward pass had ended.
    """

    sums: dict[int, Sums] = field(default_factory=dict)
    terms: float = 0.0
    seen: Seen | None = None
    weights: list[float | None] = field(default_factory=list)
    passes: int = 0
    resting: int = 0
    empty: bool = False
    reached: dict[int, set[int]] = field(default_factory=dict)
    differentiated: bool = False
    arrived: Tensor | None = None

    def meet(self, output: Any, parameters: list[Tensor]) -> None:
        """Notes which backward passes go through the output of the last forward pass, and what they leave in the
        gradients of these parameters."""
        known, number = weakref.ref(self), self.passes  # weakly: the pass that is kept leads back to its output

        def arrived() -> None:
            if (taken := known()) is not None:
                taken.arrived = clipping.sizes(parameters)

        def met(_: Tensor) -> None:
            if (taken := known()) is None:
                return
            taken.differentiated |= torch.is_grad_enabled()  # which it is where derivatives get a graph of their own
            backward = torch._C._current_graph_task_id()
            if backward not in taken.reached:
                clipping.at_the_end(arrived)
            taken.reached.setdefault(backward, set()).add(number)

        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                one.register_hook(met)  # type: ignore[no-untyped-call]

    def to_follow(self) -> Seen | None:
        """The pass to do again; None where its output is not all that a loss depends on."""
        if self.differentiated or any(len(passes) > 1 for passes in self.reached.values()):
            return None
        if self.seen is not None:
            self.seen.alone = self.passes == 1
        return self.seen

    def weigh(self) -> None:
        """Makes the loss of the pass that is done again that of all passes: losses may be multiplied, or added up
        piece by piece, before their gradient is taken."""
        known = [one for one in self.weights if one is not None]
        if self.seen is not None and known:
            total = sum(known[-1] if one is None else one for one in self.weights)
            for outcome in self.seen.outcomes:
                outcome.scale *= total
                self.seen.parts = total / outcome.weight if outcome.weight else 1.0

    def why_nothing(self) -> str:
        """What a user should know where no loss was found."""
        if self.passes:
            return (
                "loss='auto' recognised no loss since the last step; say which it is, e.g. "
                f"KFAC(model, loss='mse'), one of {', '.join(losses.NAMES)}"
            )
        if self.resting:
            return (
                "model: since the last step it was only called in evaluation mode or without gradients (as "
                "checkpointing with use_reentrant=True does); call model.train(), and the model with gradients"
            )
        return (
            "model: its forward was not called since the last step; call the model that KFAC was given, model(inputs), "
            "rather than its parts or other methods, or make KFAC for the part that is called"
        )


class Curving:
    """Armed, it takes the curvature of every training forward pass until it is disarmed. Otherwise it is not there.

    The model does not keep it alive: where an optimizer is dropped, its hooks go with it, and copies of the model have
    none that do anything.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: list[Block],
        *,
        curvature: str,
        sharing: str,
        loss: str | Callable[[Any], Outcome],
        seed: int,
    ) -> None:
        self._root, self._blocks = root, blocks
        self._curvature, self._sharing, self._loss = curvature, sharing, loss
        self.again = False  # whether forward passes are kept, to be done again
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._capture: Capture | None = None
        self._modes: list[Capture] = []  # the same, for whoever cleans up
        self._hooks: list[Any] = []
        self._taken = Taken()
        weakref.finalize(self, _clean_up, self._hooks, self._modes).atexit = False

    @property
    def parameters(self) -> list[Tensor]:
        """Of all blocks, each once."""
        return list({id(one): one for block in self._blocks for one in block.parameters()}.values())

    @property
    def armed(self) -> bool:
        return bool(self._hooks)

    def arm(self, again: bool = False) -> None:
        if not self._hooks:
            self.again = again
            self._taken = Taken()
            self._hooks += [
                self._root.register_forward_pre_hook(_Weakly(self._begin), with_kwargs=True),
                self._root.register_forward_hook(_Weakly(self._end), always_call=True),
            ]
            _ARMED.add(self)
            _take_stance()

    def disarm(self) -> Taken:
        _remove(self._hooks)
        self._leave()
        _ARMED.discard(self)
        _take_stance()
        taken, self._taken = self._taken, Taken()
        taken.weigh()
        for sums in taken.sums.values():
            sums.join()
        return taken

    def _leave(self) -> list[Pass]:
        capture, self._capture = self._capture, None
        self._modes.clear()
        if capture is None:
            return []
        waiting = capture.leave()
        self._taken.empty |= capture.empty
        return waiting

    def state(self) -> dict[str, Tensor]:
        return {name: one.get_state() for name, one in self._generators.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Also where devices have other names now; draws of a kind of device that is not there begin anew."""
        here = next(self._root.parameters()).device
        for name, known in state.items():
            if torch.device(name).type == here.type:
                self._generator(here).set_state(known.cpu())

    def reseed(self, steps: int) -> None:
        """Other draws than from the beginning."""
        self._seed += 1_000_003 * steps
        self._generators.clear()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a backward pass computes a checkpointed model again
            return
        if self._capture is not None and self._capture.over:
            self._leave()
        if not (module.training and torch.is_grad_enabled()):
            self._taken.resting += 1
            return
        waiting = self._leave()
        self._taken.passes += 1
        capture = Capture(self._blocks, _Weakly(self._take) if self._loss == "auto" else None, waiting)
        if self.again:
            device = next(module.parameters()).device
            capture.own.seen = Seen(args, kwargs, dice_now(device), autocast=autocast_now(device.type))
        self._capture = capture
        self._modes.append(capture)
        capture.begin(self._root)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        capture = self._capture
        if capture is None or not capture.recording:
            return
        capture.end_forward()
        if output is None:  # the forward pass failed
            self._leave()
            return
        if capture.own.seen is not None:
            capture.own.seen.followed(output)
            self._taken.meet(output, self.parameters)
        if self._loss != "auto":
            self._leave()
            self._take(
                losses.of_output(output, self._loss) if isinstance(self._loss, str) else self._loss(output),
                [capture.own],
            )

    @torch.no_grad()
    def _take(self, outcome: Outcome, passes: list[Pass]) -> None:
        """The statistics of one loss, of these forward passes."""
        with without_autocast(outcome.output.device.type):
            self._take_statistics(outcome, passes)

    def _take_statistics(self, outcome: Outcome, passes: list[Pass]) -> None:
        uses, taken = [use for one in passes for use in one.uses], self._taken
        if not outcome.terms:
            taken.empty = True
        if not uses or not outcome.terms:
            return
        if passes[-1].seen is not None:
            taken.seen = passes[-1].seen
            taken.seen.lost(outcome)
        before = max(one.terms for one in passes)
        first = before == 0.0
        terms = outcome.terms if first else before
        if first:  # a forward pass counts once, however many losses are taken of it
            taken.terms += terms
            taken.weights.append(outcome.weight)
            for use in uses:
                taken.sums.setdefault(use.block.index, Sums(use.block)).add_inputs(use, self._sharing, self._thin(use))
        for one in passes:
            one.terms = terms
        if self._curvature == "empirical":
            if first:
                for use in uses:
                    use.edge.node.register_prehook(self._of_real(use, outcome.of_real))
            return
        edges = list(dict.fromkeys(use.edge for use in uses))
        for direction in self._directions(outcome):
            with torch.enable_grad():
                found = torch.autograd.grad(outcome.output, edges, direction, retain_graph=True, allow_unused=True)
            by_edge = dict(zip(edges, found, strict=True))
            for use in uses:
                if by_edge[use.edge] is not None:
                    self._add(use, by_edge[use.edge], terms / outcome.terms)

    def _directions(self, outcome: Outcome) -> Iterable[Tensor]:
        if self._curvature == "ggn-exact":
            return outcome.square_root(self._generator(outcome.output.device))
        return [outcome.draw(self._generator(outcome.output.device))]

    def _of_real(self, use: Use, factor: float) -> Callable[[Any], None]:
        place = use.edge.output_nr
        alone = replace(use, edge=None)  # a node whose hook leads back to it is never freed

        def seen(gradients: Any) -> None:
            gradient = gradients[place]
            if gradient is not None:
                with torch.no_grad():
                    self._add(alone, gradient, factor)

        return seen

    def _add(self, use: Use, gradient: Tensor, factor: float) -> None:
        index = use.block.index
        self._taken.sums[index].add_gradient(use, gradient, self._sharing, factor, self._thin(use))

    def _thin(self, use: Use) -> Thinning | None:
        """Where the curvature is drawn at random anyway."""
        return Thinning(self._generator(held(use.inputs).device)) if self._curvature == "ggn-mc" else None

    def _generator(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[name]


class _Weakly:
    """A method that does not keep its object alive. Copies do nothing: they belong to copies of the model."""

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        method = None if self._method is None else self._method()
        return None if method is None else method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Weakly, ()


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _clean_up(hooks: list[Any], modes: list[Capture]) -> None:
    _remove(hooks)
    for mode in modes:
        mode.leave()
    modes.clear()
    _take_stance()


_ARMED: weakref.WeakSet[Curving] = weakref.WeakSet()
_stances: list[Any] = []  # the one that was taken, which knows the one before


def _take_stance() -> None:
    """Compiled models run as they are written while curvature is taken: a compiled graph has no layers to look into."""
    if _ARMED and not _stances and "torch._dynamo" in sys.modules:
        _stances.append(torch.compiler.set_stance("force_eager"))
    elif not _ARMED and _stances:
        ours = _stances.pop()
        now = torch.compiler.set_stance("default")
        # what the user has set meanwhile stays
        (ours if now.prev is ours.stance else now).__exit__(None, None, None)
