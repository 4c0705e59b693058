"""Takes the curvature of a forward pass: sums for the factors, while the graph of the loss is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diamond.optim import losses
from diamond.optim.blocks import Block
from diamond.optim.capture import Capture
from diamond.optim.factors import Sums
from diamond.optim.lengths import Seen, dice_now
from diamond.optim.losses import Outcome
from diamond.optim.precondition import Eigen, Inverse
from diamond.optim.sharded import held
from diamond.optim.uses import Thinning, Use

CURVATURES = ("ggn-mc", "ggn-exact", "empirical")


@dataclass
class Taken:
    """What the forward passes of one step gave.

    Attributes:
        sums: by the index of the block.
        squares: sums of squared gradients in the eigenbases, where there are any.
        terms: of the losses.
        seen: the last forward pass, to be done again.
    """

    sums: dict[int, Sums] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)
    terms: float = 0.0
    seen: Seen | None = None


class Curving:
    """Armed, it takes the curvature of every training forward pass until it is disarmed. Otherwise it is not there."""

    def __init__(
        self,
        root: nn.Module,
        blocks: list[Block],
        kept: dict[int, Inverse | Eigen],
        *,
        curvature: str,
        sharing: str,
        loss: str | Callable[[Any], Outcome],
        seed: int,
    ) -> None:
        self._root, self._blocks, self._kept = root, blocks, kept
        self._curvature, self._sharing, self._loss = curvature, sharing, loss
        self.again = False  # whether forward passes are kept, to be done again
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}
        self._capture: Capture | None = None
        self._hooks: list[Any] = []
        self._taken = Taken()

    @property
    def armed(self) -> bool:
        return bool(self._hooks)

    def arm(self, again: bool = False) -> None:
        if not self._hooks:
            self.again = again
            self._taken = Taken()
            self._hooks = [
                self._root.register_forward_pre_hook(self._begin, with_kwargs=True),
                self._root.register_forward_hook(self._end, always_call=True),
            ]
            _eager(True)

    def disarm(self) -> Taken:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._capture is not None:
            self._capture.leave()
            self._capture = None
        _eager(False)
        taken, self._taken = self._taken, Taken()
        return taken

    def state(self) -> dict[str, Tensor]:
        return {name: one.get_state() for name, one in self._generators.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, known in state.items():
            self._generator(torch.device(name)).set_state(known.cpu())

    def reseed(self, steps: int) -> None:
        """Other draws than from the beginning."""
        self._seed += 1_000_003 * steps
        self._generators.clear()

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        if torch._C._current_graph_task_id() != -1:  # a backward pass computes a checkpointed model again
            return
        if self._capture is not None:
            self._capture.leave()
        if self.again:
            device = next(module.parameters()).device
            autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
            self._taken.seen = Seen(args, kwargs, dice_now(device), autocast=autocast)
        self._capture = Capture(self._blocks, self._take if self._loss == "auto" else None)
        self._capture.begin(self._root)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        capture = self._capture
        if capture is None or not capture.recording:
            return
        capture.end_forward()
        if output is None:  # the forward pass failed
            capture.leave()
            return
        if self._taken.seen is not None:
            self._taken.seen.followed(output)
        if self._loss != "auto":
            capture.leave()
            self._take(losses.of_output(output, self._loss) if isinstance(self._loss, str) else self._loss(output))

    @torch.no_grad()
    def _take(self, outcome: Outcome) -> None:
        """The statistics of one loss."""
        assert self._capture is not None
        uses, taken = self._capture.uses, self._taken
        if not uses:
            return
        if taken.seen is not None:
            taken.seen.lost(outcome)
        first = self._capture.terms == 0.0
        if first:  # a forward pass counts once, however many losses are taken of it
            self._capture.terms = outcome.terms
            taken.terms += outcome.terms
            for use in uses:
                taken.sums.setdefault(use.block.index, Sums(use.block)).add_inputs(use, self._sharing, self._thin(use))
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
                    self._add(use, by_edge[use.edge], self._capture.terms / outcome.terms)

    def _directions(self, outcome: Outcome) -> Iterable[Tensor]:
        if self._curvature == "ggn-exact":
            return outcome.square_root(self._generator(outcome.output.device))
        return [outcome.draw(self._generator(outcome.output.device))]

    def _of_real(self, use: Use, factor: float) -> Callable[[Any], None]:
        def seen(gradients: Any) -> None:
            gradient = gradients[use.edge.output_nr]
            if gradient is not None:
                with torch.no_grad():
                    self._add(use, gradient, factor)

        return seen

    def _add(self, use: Use, gradient: Tensor, factor: float) -> None:
        index = use.block.index
        self._taken.sums[index].add_gradient(use, gradient, self._sharing, factor, self._thin(use))
        kept = self._kept.get(index)
        if isinstance(kept, Eigen):
            found = kept.squares(use, gradient, self._sharing) * factor
            before = self._taken.squares.get(index)
            self._taken.squares[index] = found if before is None else before.add_(found)

    def _thin(self, use: Use) -> Thinning | None:
        """Where the curvature is drawn at random anyway."""
        return Thinning(self._generator(held(use.inputs).device)) if self._curvature == "ggn-mc" else None

    def _generator(self, device: torch.device) -> torch.Generator:
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[name]


def _eager(wanted: bool) -> None:
    """Compiled models run as they are written while curvature is taken: a compiled graph has no layers to look into."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager" if wanted else "default")
