"""Who computes what: ranks share the blocks, and send each other statistics, inverses and preconditioned gradients.

Every block has an owner, which alone averages its factors and inverts them, and workers, which keep its inverses and
precondition its gradient. With all ranks as workers nothing but inverses travels (least communication); with one, all
others get the preconditioned gradient in every step (least memory). Ranks stand in rows of as many as a block has
workers; a row works on the blocks of its owners, and a column hands the results on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diamond.optim.blocks import NORM, Block
from diamond.optim.compress import Count, average_factors, pack, unpack
from diamond.optim.errors import OptimError
from diamond.optim.factors import Sums
from diamond.optim.precondition import Inverse


@dataclass(frozen=True)
class Means:
    """Of one block over all ranks."""

    index: int
    a: Tensor
    g: Tensor | None


class Crew:
    """Of one optimizer. All ranks call the same methods in the same order.

    Args:
        blocks: of the model, the same on all ranks.
        owners: the rank of each block; dealt out by size where left out.
        workers: of each block; all ranks where left out.
        factor: how statistics travel, as `Compress.factor`; "tri" for None.
        group: which ranks; all where left out.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        owners: Sequence[int] | None = None,
        workers: Sequence[int] | None = None,
        factor: str | None = None,
        group: Any = None,
    ) -> None:
        together = dist.is_available() and dist.is_initialized()
        self._group: Any = group if group is not None or not together else dist.group.WORLD
        self.world = dist.get_world_size(self._group) if together else 1
        self.rank = dist.get_rank(self._group) if together else 0
        self.blocks, self.factor = list(blocks), factor or "tri"
        self.count = Count()
        self.used: set[int] = set()  # blocks that were ever used, on any rank
        self.fresh: set[int] = set()  # those of the last statistics
        self.ready: set[int] = set()  # those whose workers have an inverse
        self.terms = 0.0  # of the last statistics
        self.owners = list(owners) if owners is not None else _dealt(self.blocks, self.world)
        self.workers = list(workers) if workers is not None else [self.world] * len(self.blocks)
        self._check()
        self._rows: dict[int, Any] = {}
        self._columns: dict[int, Any] = {}
        for number in sorted({one for one in self.workers if 1 < one < self.world or (self.world > 1 and one == 1)}):
            self._rows[number], self._columns[number] = self._groups(number)

    @property
    def several(self) -> bool:
        return self.world > 1

    def owns(self, index: int) -> bool:
        return self.owners[index] == self.rank

    def works_on(self, index: int) -> bool:
        number = self.workers[index]
        return self.owners[index] // number == self.rank // number

    # ---- statistics --------------------------------------------------------------------------------------------------

    def reduce(self, sums: dict[int, Sums], terms: float) -> list[Means]:
        """Means over all ranks, of the blocks that were used anywhere and that this rank owns."""
        if not self.several:
            complete = [one for one in sums.values() if _complete(one)]
            self._note((one.block.index for one in complete), terms)
            return [_means(one, one.positions, terms) for one in complete]
        counts = self._counts(sums, terms)
        terms = float(counts[-1])
        used = [block for block in self.blocks if counts[block.index] > 0]
        self._note((block.index for block in used), terms)
        found = []
        waiting = [(owner, self._towards(owner, mine, sums)) for owner, mine in self._by_owner(used)]
        for owner, travelling in waiting:
            arrived = travelling.wait()
            if owner == self.rank:
                for block, a, g in arrived:
                    found.append(_means(Sums(block, a, g), float(counts[len(self.blocks) + block.index]), terms))
        return found

    def _note(self, fresh: Iterable[int], terms: float) -> None:
        self.fresh, self.terms = set(fresh), terms
        self.used |= self.fresh

    def _counts(self, sums: dict[int, Sums], terms: float) -> Tensor:
        """Of each block whether it was used and its positions, and the terms of the loss; over all ranks."""
        number = len(self.blocks)
        counts = torch.zeros(2 * number + 1, dtype=torch.float64, device=self._device())
        for index, one in sums.items():
            if _complete(one):
                counts[index] = 1
                counts[number + index] = one.positions
        counts[-1] = terms
        dist.all_reduce(counts, group=self._group)
        return counts.cpu()

    def _by_owner(self, used: list[Block]) -> Iterator[tuple[int, list[Block]]]:
        for owner in range(self.world):
            mine = [block for block in used if self.owners[block.index] == owner]
            if mine:
                yield owner, mine

    def _towards(self, owner: int, blocks: list[Block], sums: dict[int, Sums]) -> _Travelling:
        """The sums of these blocks on their way to their owner, where they are added up."""
        device = self._device()
        matrices: list[Tensor] = []
        vectors: list[Tensor] = []
        for block in blocks:
            one = sums.get(block.index)
            a, g = (one.a, one.g) if one is not None and _complete(one) else (None, None)
            a = torch.zeros(block.a_shape, device=device) if a is None else a
            (vectors if block.a_diagonal else matrices).extend(a.unbind(0))
            if block.kind != NORM:
                g = torch.zeros(block.g_shape, device=device) if g is None else g
                matrices.extend(g.unbind(0))
        return _Travelling(self, owner, blocks, matrices, vectors)

    # ---- inverses ----------------------------------------------------------------------------------------------------

    def spread(self, kept: dict[int, Inverse], fresh: Iterable[int]) -> None:
        """Hands the owners' inverses of these blocks to their workers; those that an owner could not find are not."""
        if not self.several:
            self.ready = set(kept)
            return
        for index in self._found(kept, sorted(fresh)):
            self.ready.add(index)
            number = self.workers[index]
            if number == 1 or not self.works_on(index):
                continue
            mine = _in_order(kept[index]) if self.owns(index) else _room_for(self.blocks[index], self._device())
            group = self._group if number == self.world else self._rows[number]
            for tensor in mine.tensors():
                if self.owns(index):
                    self.note_sent("inverse broadcast", tensor)
                dist.broadcast(tensor, src=self._global(self.owners[index]), group=group)
            kept[index] = mine

    def _found(self, kept: dict[int, Inverse], wanted: list[int]) -> Iterator[int]:
        """Of these blocks those that their owners have an inverse of."""
        told = torch.zeros(len(wanted), device=self._device())
        for place, index in enumerate(wanted):
            told[place] = float(index in kept and self.owns(index))
        dist.all_reduce(told, group=self._group)
        yield from (index for index, there in zip(wanted, told.tolist(), strict=True) if there)

    # ---- preconditioned gradients ------------------------------------------------------------------------------------

    def hand_on(self, found: dict[int, Tensor], due: list[int]) -> None:
        """Completes `found`, which holds what this rank computed, by what others did of the blocks `due`."""
        if not self.several:
            return
        for number in sorted({self.workers[index] for index in due if self.workers[index] < self.world}):
            for row in range(self.world // number):
                theirs = [i for i in due if self.workers[i] == number and self.owners[i] // number == row]
                if not theirs:
                    continue
                source = row * number + self.rank % number
                shapes = [(self.blocks[i].copies, self.blocks[i].g, self.blocks[i].a) for i in theirs]
                if source == self.rank:
                    flat = torch.cat([found[i].reshape(-1) for i in theirs])
                    self.note_sent("step broadcast", flat)
                else:
                    size = sum(a * b * c for a, b, c in shapes)
                    flat = torch.empty(size, device=self._device())
                dist.broadcast(flat, src=self._global(source), group=self._columns[number])
                parts = torch.split(flat, [a * b * c for a, b, c in shapes])
                for i, part, shape in zip(theirs, parts, shapes, strict=True):
                    found[i] = part.reshape(shape)

    def mean(self, numbers: Tensor, terms: float) -> Tensor:
        """Of what each rank found as a mean over so many terms."""
        if not self.several:
            return numbers
        weighted = torch.cat([numbers.reshape(-1).double() * terms, numbers.new_tensor([terms], dtype=torch.float64)])
        dist.all_reduce(weighted, group=self._group)
        return (weighted[:-1] / weighted[-1]).reshape(numbers.shape).to(numbers.dtype)

    def total(self, numbers: Tensor) -> Tensor:
        if self.several:
            dist.all_reduce(numbers, group=self._group)
        return numbers

    def note_sent(self, what: str, tensor: Tensor) -> None:
        """Counts what this rank hands to a collective; each byte of it leaves a rank once."""
        nbytes = tensor.numel() * tensor.element_size()
        self.count.sent[what] = self.count.sent.get(what, 0) + nbytes
        self.count.traffic += nbytes

    def all_say(self, yes: bool) -> bool:
        """Whether every rank does, so that none waits for others that do something else."""
        if not self.several:
            return yes
        said = torch.tensor([float(not yes)], device=self._device())
        dist.all_reduce(said, group=self._group)
        return not float(said)

    def each(self, what: Any) -> list[Any]:
        """What every rank has to say, by rank."""
        if not self.several:
            return [what]
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, what, group=self._group)
        return said

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _groups(self, number: int) -> tuple[Any, Any]:
        """This rank's row of so many, and its column. Every rank makes all of them: so torch wants it."""
        row = column = None
        ranks = range(self.world)
        for first in range(0, self.world, number):
            members = [self._global(rank) for rank in ranks if rank // number == first // number]
            made = dist.new_group(members) if number > 1 else None
            row = made if first // number == self.rank // number else row
        for place in range(number):
            members = [self._global(rank) for rank in ranks if rank % number == place]
            made = dist.new_group(members) if number < self.world else None
            column = made if place == self.rank % number else column
        return row, column

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)

    def _device(self) -> torch.device:
        return self.blocks[0].weight.device if self.blocks else torch.device("cpu")

    def _check(self) -> None:
        for name, given in (("owners", self.owners), ("workers", self.workers)):
            if len(given) != len(self.blocks):
                raise OptimError(
                    f"plan: {len(given)} {name} for {len(self.blocks)} blocks; plan with the same model and the same "
                    "exclude"
                )
        again = "; plan again with the ranks that train now"
        for block, owner, number in zip(self.blocks, self.owners, self.workers, strict=True):
            if not 0 <= owner < self.world:
                raise OptimError(f"plan: {block.name} belongs to rank {owner}, and there are {self.world}{again}")
            if number < 1 or self.world % number:
                raise OptimError(f"plan: {number} workers for {block.name} do not divide {self.world} ranks{again}")


class _Travelling:
    """Statistics on their way to one owner."""

    def __init__(
        self, crew: Crew, owner: int, blocks: list[Block], matrices: list[Tensor], vectors: list[Tensor]
    ) -> None:
        self._crew, self._blocks, self._mine = crew, blocks, owner == crew.rank
        self._packed = pack(matrices, crew.factor)
        self._vectors = torch.cat([one.reshape(-1) for one in vectors]) if vectors else None
        self._lengths = [one.numel() for one in vectors]
        self._works: list[Any] = []
        self._matrices: list[Tensor] | None = None
        to = crew._global(owner)
        plain = sum(one.numel() * one.element_size() for one in [*matrices, *vectors])
        if self._packed.summable:
            crew.count.add_plain("factor", plain, "scatter", crew.world)
        if self._vectors is not None:
            crew.note_sent("factor reduce", self._vectors)
            self._works.append(dist.reduce(self._vectors, dst=to, group=crew._group, async_op=True))
        if not matrices:
            self._matrices = []
        elif self._packed.summable:
            crew.note_sent("factor reduce", self._packed.buffer)
            self._works.append(dist.reduce(self._packed.buffer, dst=to, group=crew._group, async_op=True))
        else:  # coded ones cannot be added on the wire
            means = average_factors(matrices, crew.factor, group=crew._group, count=crew.count)
            self._matrices = [one * crew.world for one in means]

    def wait(self) -> Iterator[tuple[Block, Tensor, Tensor | None]]:
        for work in self._works:
            work.wait()
        return self._unpacked() if self._mine else iter(())

    def _unpacked(self) -> Iterator[tuple[Block, Tensor, Tensor | None]]:
        found = self._matrices if self._matrices is not None else unpack(replace(self._packed))
        matrices = iter(found)
        vectors = iter(torch.split(self._vectors, self._lengths) if self._vectors is not None else ())
        for block in self._blocks:
            side = vectors if block.a_diagonal else matrices
            a = torch.stack([next(side) for _ in range(block.a_shape[0])])
            g = None if block.kind == NORM else torch.stack([next(matrices) for _ in range(block.g_shape[0])])
            yield block, a, g


def _complete(one: Sums) -> bool:
    return one.a is not None and (one.block.kind == NORM or one.g is not None)


def _means(one: Sums, positions: float, terms: float) -> Means:
    assert one.a is not None
    by = terms if one.block.kind == NORM else positions
    return Means(one.block.index, one.a / by, None if one.g is None else one.g / terms)


def _dealt(blocks: Sequence[Block], world: int) -> list[int]:
    """The largest first, each to the rank that has least to invert."""
    load = [0.0] * world
    owners = [0] * len(blocks)

    def work(block: Block) -> float:
        inputs = math.prod(block.a_shape) * (1 if block.a_diagonal else block.a_shape[-1])
        return inputs + math.prod(block.g_shape) * block.g_shape[-1]

    for block in sorted(blocks, key=work, reverse=True):
        rank = load.index(min(load))
        owners[block.index] = rank
        load[rank] += work(block)
    return owners


def _in_order(mine: Inverse) -> Inverse:
    """In the memory order in which others get it: products of the same numbers in another order round otherwise."""
    return Inverse(mine.a.contiguous(), None if mine.g is None else mine.g.contiguous())


def _room_for(block: Block, device: torch.device) -> Inverse:
    """For what an owner sends."""
    a = torch.empty(block.a_shape, device=device)
    g = None if block.kind == NORM else torch.empty(block.g_shape, device=device)
    return Inverse(a, g)
