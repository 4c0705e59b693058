"""Which way to go: what the curvature makes of the gradients, by parameter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diamond.optim import products, sharded, stacks
from diamond.optim.blocks import Block
from diamond.optim.crew import Crew
from diamond.optim.lean import Lean, Rows, suits
from diamond.optim.precondition import Inverse


class _Layout:
    """Which parameters a direction moves, and where in memory each of its parts lies.

    From step to step these are the same, and to find them again takes longer than the arithmetic of a small block.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.parts: list[Tensor] = []  # how each moves
        self._of: list[int] = []  # the parameter that each of the parts belongs to
        self._blocks: list[Block] = []  # and the block that it is of
        self._places: dict[int, int] = {}  # of parameters, by their identity
        self._last: list[int] = []  # where the tensors lay that were added to
        self._pairs: list[_Pairs] = []  # and how

    def note(self, block: Block, values: stacks.Pair) -> None:
        for parameter, part in ((block.weight, values[0]), (block.bias, values[1])):
            if parameter is not None and part is not None:
                place = self._places.setdefault(id(parameter), len(self.parameters))
                if place == len(self.parameters):
                    self.parameters.append(parameter)
                self._of.append(place)
                self._blocks.append(block)
                self.parts.append(part)

    def pairs(self, tensors: Sequence[Tensor], keep: bool) -> list[_Pairs]:
        """What is to be added up, for one tensor a parameter; `keep` where the same will be asked for again."""
        here = [one.data_ptr() for one in tensors] if keep else []
        if keep and here == self._last:  # views keep their memory, so nothing else can lie there
            return self._pairs
        found = _Pairs(), _Pairs()
        for of, block, part in zip(self._of, self._blocks, self.parts, strict=True):
            _sort_in(found, block.seen(tensors[of]), part)
        if keep:
            self._last, self._pairs = here, list(found)
        return list(found)


class _Pairs:
    """Tensors, and others that are to be copied or added to them, as lists that torch takes at once."""

    def __init__(self) -> None:
        self.into: list[Tensor] = []
        self.out_of: list[Tensor] = []


def _sort_in(pairs: tuple[_Pairs, _Pairs], into: Tensor, out_of: Tensor) -> None:
    """To the first where both lie in memory in one piece and in the same order, seen as vectors; otherwise to the
    second. A single one of these would make torch take all of them one by one."""
    if into.is_contiguous() and out_of.is_contiguous() and into.dtype == out_of.dtype:
        pairs[0].into.append(into.view(-1))
        pairs[0].out_of.append(out_of.view(-1))
    else:
        pairs[1].into.append(into)
        pairs[1].out_of.append(out_of)


@dataclass(eq=False)
class Direction:
    """Of one step.

    Attributes:
        along: the gradient's slope along it.
    """

    along: Tensor
    _layout: _Layout = field(default_factory=_Layout)
    _memory: list[Tensor] = field(default_factory=list)  # what the parts are views of

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that it moves, each once."""
        return self._layout.parameters

    def scale(self, by: Tensor) -> None:
        if self._memory:
            torch._foreach_mul_(self._memory, by)

    def unclip(self, clipped: Tensor | float) -> None:
        """As if gradients had not been multiplied by that."""
        self.scale(1 / torch.as_tensor(clipped, device=self.along.device))
        self.along = self.along / clipped**2

    def add_to(self, tensors: Sequence[Tensor], again: bool = True) -> None:
        """To one tensor a parameter, like it; `again` where the next direction will be added to the same ones."""
        here = [sharded.room_for(one) if sharded.is_spread(one) else one for one in tensors]
        keep = again and all(whole is one for one, whole in zip(tensors, here, strict=True))
        for pairs in self._layout.pairs(here, keep):
            if pairs.into:
                torch._foreach_add_(pairs.into, pairs.out_of)
        for one, whole in zip(tensors, here, strict=True):
            if whole is not one:
                sharded.held(one).add_(sharded.held(sharded.like(one, whole)))

    def tensors(self) -> list[Tensor]:
        """One a parameter, like it."""
        found = [torch.zeros_like(one, requires_grad=False) for one in self.parameters]
        self.add_to(found, again=False)
        return found


class _Memory:
    """Of the stacks of one device: all their gradients, and all that becomes of them."""

    def __init__(self, groups: list[list[Block]], kept: dict[int, Inverse], device: torch.device) -> None:
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

    def __init__(self, blocks: list[Block], crew: Crew, kept: dict[int, Inverse]) -> None:
        self.blocks, self.crew, self.kept = blocks, crew, kept
        self.stacks: list[stacks.Stack] = []
        self._memories: list[_Memory] = []
        self._last: tuple[list[nn.Parameter | None], _Layout] | None = None  # what moved, and where it lies
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
        moved: list[nn.Parameter | None] = []
        pairs = _Pairs(), _Pairs()
        for stack in self.stacks:
            for slot in stack.slots:
                block = slot.block
                given = gradients.get(block.index)
                if given is None:
                    stack.gradient_of(block).zero_()
                    continue
                due.append(slot)
                moved += (block.weight, block.bias)
                for flat, place, gradient in zip(slot.flat, slot.gradients, given, strict=True):
                    if place is None or gradient is None:
                        continue
                    if flat is not None and gradient.dtype == flat.dtype and gradient.is_contiguous():
                        pairs[0].into.append(flat)
                        pairs[0].out_of.append(gradient.view(-1))
                    else:
                        pairs[1].into.append(place)
                        pairs[1].out_of.append(gradient)
        for some in pairs:
            if some.into:
                torch._foreach_copy_(some.into, some.out_of)
        slopes = []
        for memory in self._memories:
            with products.exactly(memory.values.device):
                for stack in memory.stacks:
                    stack.apply(self._rows(stack))
            slopes.append(torch.dot(memory.values, memory.gradients))
            stacks.finite(memory.values)
        if self._handed_on:
            return self._with_others(gradients)
        along = sum((one.to(slopes[0].device) for one in slopes[1:]), slopes[0]) if slopes else torch.zeros(())
        return Direction(along, self._laid_out(due, moved), [memory.values for memory in self._memories])

    def _laid_out(self, due: list[stacks.Slot], moved: list[nn.Parameter | None]) -> _Layout:
        """The last one, if it is of the same."""
        last = self._last
        if last is None or len(last[0]) != len(moved) or not all(map(operator.is_, last[0], moved)):
            layout = _Layout()
            for slot in due:
                layout.note(slot.block, slot.values)
            self._last = last = moved, layout
        return last[1]

    def _rows(self, stack: stacks.Stack) -> Rows | None:
        lean = self.lean.get(stack.blocks[0].index)
        return None if lean is None else lean.take()

    def _prepare(self) -> None:
        mine = [self.blocks[index] for index in sorted(self.crew.ready) if self.crew.works_on(index)]
        if not self.crew.several:
            for block in mine:
                if block.index not in self.lean and suits(block):
                    self.lean[block.index] = Lean(block)
        groups = stacks.alike(mine, self.kept, self.lean)
        if [one.blocks for one in self.stacks] == groups:
            for stack in self.stacks:
                stack.renew(self.kept)
        else:
            self._memories, self.stacks, self._last = [], [], None
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
            found._layout.note(block, parts)
        found.along = torch.stack(slopes).sum() if slopes else found.along
        return found
