"""Which way to go: what the curvature makes of the gradients, by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diamond.optim import products, sharded, stacks
from diamond.optim.blocks import Block
from diamond.optim.crew import Crew
from diamond.optim.lean import Lean, Rows, suits
from diamond.optim.precondition import Eigen, Inverse


@dataclass(eq=False)
class Direction:
    """Of one step.

    Attributes:
        along: the gradient's slope along it.
        parameters: those that it moves, each once.
    """

    along: Tensor
    parameters: list[nn.Parameter] = field(default_factory=list)
    _places: dict[int, int] = field(default_factory=dict)  # of parameters, by their identity
    _of: list[int] = field(default_factory=list)  # the parameter that each of the parts belongs to,
    _blocks: list[Block] = field(default_factory=list)  # the block that it is of,
    _parts: list[Tensor] = field(default_factory=list)  # and how that moves
    _memory: list[Tensor] = field(default_factory=list)  # what the parts are views of

    def note(self, block: Block, values: stacks.Pair) -> None:
        for parameter, part in ((block.weight, values[0]), (block.bias, values[1])):
            if parameter is not None and part is not None:
                place = self._places.setdefault(id(parameter), len(self.parameters))
                if place == len(self.parameters):
                    self.parameters.append(parameter)
                self._of.append(place)
                self._blocks.append(block)
                self._parts.append(part)

    def scale(self, by: Tensor) -> None:
        if self._memory:
            torch._foreach_mul_(self._memory, by)

    def add_to(self, tensors: Sequence[Tensor]) -> None:
        """To one tensor a parameter, like it."""
        here = [sharded.room_for(one) if sharded.is_spread(one) else one for one in tensors]
        into = [block.seen(here[of]) for of, block in zip(self._of, self._blocks, strict=True)]
        for places, parts in _in_one_go(into, self._parts):
            torch._foreach_add_(places, parts)
        for one, whole in zip(tensors, here, strict=True):
            if whole is not one:
                sharded.held(one).add_(sharded.held(sharded.like(one, whole)))

    def tensors(self) -> list[Tensor]:
        """One a parameter, like it."""
        found = [torch.zeros_like(one, requires_grad=False) for one in self.parameters]
        self.add_to(found)
        return found


def _in_one_go(into: Sequence[Tensor], out_of: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Pairs of tensors as lists that torch takes at once: those of which both lie in memory in one piece and in the
    same order, seen as vectors; and the others, of which a single one would hold all of them up."""
    plain: tuple[list[Tensor], list[Tensor]] = [], []
    others: tuple[list[Tensor], list[Tensor]] = [], []
    for place, given in zip(into, out_of, strict=True):
        alike = place.is_contiguous() and given.is_contiguous() and place.dtype == given.dtype
        kind = plain if alike else others
        kind[0].append(place.view(-1) if alike else place)
        kind[1].append(given.view(-1) if alike else given)
    yield from (kind for kind in (plain, others) if kind[0])


class _Memory:
    """Of the stacks of one device: all their gradients, and all that becomes of them."""

    def __init__(self, groups: list[list[Block]], kept: dict[int, Inverse | Eigen], device: torch.device) -> None:
        rooms = [stacks.room(group) for group in groups]
        begins, end = stacks.lined_up(rooms)
        self.gradients, self.values = torch.zeros(end, device=device), torch.zeros(end, device=device)
        self.stacks = [
            stacks.Stack(group, kept, self.gradients[begin : begin + numbers], self.values[begin : begin + numbers])
            for group, begin, numbers in zip(groups, begins, rooms, strict=True)
        ]


class Directions:
    """Finds them, for one optimizer. Gradients are taken to, and steps left in, memory that stays.

    Args:
        blocks: of the model.
        kept: inverses by the index of the block, as far as this rank works on it.

    Attributes:
        lean: blocks whose gradients may be had as products of few rows.
    """

    def __init__(self, blocks: list[Block], crew: Crew, kept: dict[int, Inverse | Eigen]) -> None:
        self.blocks, self.crew, self.kept = blocks, crew, kept
        self.stacks: list[stacks.Stack] = []
        self._memories: list[_Memory] = []
        self.lean: dict[int, Lean] = {}
        self._stale = True
        # Where some ranks get what others computed, all must add up slopes in one order, or they would drift apart.
        self._handed_on = any(number < crew.world for number in crew.workers)

    def renew(self) -> None:
        """The inverses have changed."""
        self._stale = True

    def find(self) -> Direction:
        if self._stale:
            self._prepare()
        gradients = self._gradients()
        due: list[stacks.Slot] = []
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        for stack in self.stacks:
            for slot in stack.slots:
                given = gradients.get(slot.block.index)
                if given is None:
                    stack.gradient_of(slot.block).zero_()
                    continue
                due.append(slot)
                for place, gradient in zip(slot.gradients, given, strict=True):
                    if place is not None and gradient is not None:
                        into.append(place)
                        out_of.append(gradient)
        for places, given_ in _in_one_go(into, out_of):
            torch._foreach_copy_(places, given_)
        slopes = []
        for memory in self._memories:
            with products.exactly(memory.values.device):
                for stack in memory.stacks:
                    stack.apply(self._rows(stack))
            slopes.append(torch.dot(memory.values, memory.gradients))
            stacks.finite(memory.values)
        if self._handed_on:
            return self._with_others(gradients)
        found = Direction(
            sum((one.to(slopes[0].device) for one in slopes[1:]), slopes[0]) if slopes else torch.zeros(())
        )
        found._memory = [memory.values for memory in self._memories]
        for slot in due:
            found.note(slot.block, slot.values)
        return found

    def _rows(self, stack: stacks.Stack) -> Rows | None:
        lean = self.lean.get(stack.blocks[0].index)
        return None if lean is None else lean.take()

    def _prepare(self) -> None:
        mine = [self.blocks[index] for index in sorted(self.crew.ready) if self.crew.works_on(index)]
        if not self.crew.several:
            for block in mine:
                if block.index not in self.lean and suits(block) and type(self.kept[block.index]) is Inverse:
                    self.lean[block.index] = Lean(block)
        groups = stacks.alike(mine, self.kept, self.lean)
        if [one.blocks for one in self.stacks] == groups:
            for stack in self.stacks:
                stack.renew(self.kept)
        else:
            self._memories, self.stacks = [], []
            by_device: dict[torch.device, list[list[Block]]] = {}
            for group in groups:
                by_device.setdefault(self.kept[group[0].index].tensors()[0].device, []).append(group)
            for device, there in by_device.items():
                self._memories.append(_Memory(there, self.kept, device))
                self.stacks += self._memories[-1].stacks
        self._stale = False

    def _gradients(self) -> dict[int, stacks.Pair]:
        """By the index of the block, in the shapes of its views; not of blocks that miss one.

        Ranks ask each other for those that are spread: all for the same, in the same order, whatever they work on.
        """
        found: dict[int, stacks.Pair] = {}
        whole: dict[int, Tensor] = {}

        def all_of(gradient: Tensor) -> Tensor:
            if not sharded.is_spread(gradient):
                return gradient
            if id(gradient) not in whole:
                whole[id(gradient)] = sharded.whole(gradient)
            return whole[id(gradient)]

        for index in sorted(self.crew.ready):
            block = self.blocks[index]
            weight, bias = block.weight.grad, None if block.bias is None else block.bias.grad
            if weight is not None and (block.bias is None or bias is not None):
                found[index] = block.seen(all_of(weight)), None if bias is None else block.seen(all_of(bias))
        return found

    def _with_others(self, gradients: dict[int, stacks.Pair]) -> Direction:
        """Where ranks work on some blocks only, and get the others' steps from each other."""
        due = [self.blocks[index] for index in gradients]
        mine = {block.index: stack for stack in self.stacks for block in stack.blocks}
        values = {block.index: mine[block.index].value_of(block) for block in due if block.index in mine}
        self.crew.hand_on(values, [block.index for block in due])
        found = Direction(torch.zeros(()))
        slopes = []
        for block in due:
            value, parts = values[block.index], block.views(values[block.index])
            for part, gradient in zip(parts, gradients[block.index], strict=True):
                if part is not None and gradient is not None:
                    slopes.append((part * gradient).sum())
            found._memory.append(value)
            found.note(block, parts)
        found.along = torch.stack(slopes).sum() if slopes else found.along
        return found
