"""PowerSGD: a matrix M is sent as P·Qᵀ of small rank, found by one step of the power method from the last Q.

Two rounds: P = M·Q summed over the ranks and made orthonormal, then Q = Mᵀ·P summed. All matrices of a buffer travel
together. Vectors, and matrices that two factors do not make shorter, are sent as they are with the first round.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from diamond.optim.compress.codec import Dice, Layout, Rebuilt, Rounds, Send

_WEAK = 1e-6  # columns this small against the largest are begun anew
_DEPENDENT = 1e-12  # what is left of a column's squared length when rounding to float32 is all that is left
_TINY = 1e-100


class Matrix(NamedTuple):
    """Where a matrix lies in the buffer."""

    name: str
    key: int
    begin: int
    rows: int
    columns: int
    rank: int


class PowerSGD:
    """`warm` holds the last Q of every matrix by name, and belongs to whoever saves it."""

    def __init__(self, rank: int, warm: dict[str, torch.Tensor]) -> None:
        self.rank, self.warm = rank, warm
        self._fresh: dict[tuple[str, int], torch.Tensor] = {}

    def matrices(self, layout: Layout) -> list[Matrix]:
        """Those worth it. A tensor of more dimensions is a matrix of its first against the rest."""
        found, begin = [], 0
        for name, key, shape, size in zip(layout.names, layout.keys, layout.shapes, layout.sizes, strict=True):
            if len(shape) > 1 and size:
                rows, columns = shape[0], size // shape[0]
                rank = min(self.rank, rows, columns)
                if (rows + columns) * rank < size:
                    found.append(Matrix(name, key, begin, rows, columns, rank))
            begin += size
        return found

    def reduce(self, flat: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        found = self.matrices(layout)
        views = [_view(flat, one) for one in found]
        old = [self._begin(one.name, one, one.columns, dice) for one in found]
        lefts = [view @ q for view, q in zip(views, old, strict=True)]
        plain = _others(flat, found)
        total = yield Send("sum", _joined([*lefts, plain], flat))
        lefts = orthonormal(_parted(total, [left.shape for left in lefts]))
        came_plain = total[sum(left.numel() for left in lefts) :] / world
        rights = [view.T @ left for view, left in zip(views, lefts, strict=True)]
        own_rights = [right.clone() for right in rights]
        if rights:
            total = yield Send("sum", _joined(rights, flat))
            rights = [one / world for one in _parted(total, [right.shape for right in rights])]
        for one, before, right in zip(found, old, rights, strict=True):
            self._keep(one.name, before, right)
        average = _whole(flat, found, lefts, rights, came_plain)
        return Rebuilt(average, _whole(flat, found, lefts, own_rights, plain))

    def scatter(self, rows: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        """Row by row the same, but the second factor goes only to the rank whose row it is.

        So all know the first factor alone, and begin the next step with it: on the other side of the matrix.
        """
        found, flipped = self.matrices(layout), bool(dice.step % 2)
        names = [[f"{one.name}@{part}" for one in found] for part in range(world)]
        views = [[_view(row, one).T if flipped else _view(row, one) for one in found] for row in rows]
        lefts: list[list[torch.Tensor]] = [[] for _ in range(world)]
        if found:
            old = [
                [self._begin(name, one, view.shape[1], dice, part) for name, one, view in zip(*of_row, strict=True)]
                for part, of_row in enumerate(zip(names, [found] * world, views, strict=True))
            ]
            first = [view @ q for of_row in zip(views, old, strict=True) for view, q in zip(*of_row, strict=True)]
            total = yield Send("sum", _joined(first, rows))
            good = orthonormal(_parted(total, [one.shape for one in first]))
            lefts = [good[part * len(found) : (part + 1) * len(found)] for part in range(world)]
            for part in range(world):
                for name, before, left in zip(names[part], old[part], lefts[part], strict=True):
                    self._keep(name, before, left)
        rights = [
            [view.T @ left for view, left in zip(*of_row, strict=True)] for of_row in zip(views, lefts, strict=True)
        ]
        plain = [_others(row, found) for row in rows]
        sent = torch.stack([_joined([*right, rest], rows) for right, rest in zip(rights, plain, strict=True)])
        came = (yield Send("scatter", sent)).sum(0) / world
        mine = _parted(came, [right.shape for right in rights[0]])
        rest = came[sum(one.numel() for one in mine) :]
        average = _whole(rows[0], found, lefts[dice.rank], mine, rest, flipped)
        own = [_whole(rows[part], found, lefts[part], rights[part], plain[part], flipped) for part in range(world)]
        return Rebuilt(average, torch.stack(own))

    def _begin(self, name: str, one: Matrix, length: int, dice: Dice, part: int = 0) -> torch.Tensor:
        """The last factor. A column that has vanished would never come back, and is begun anew."""
        if (name, length) not in self._fresh:
            self._fresh[name, length] = dice.normal(one.key, length, one.rank, purpose=part)
        fresh, kept = self._fresh[name, length], self.warm.get(name)
        if kept is None or kept.shape != fresh.shape:
            return fresh
        size = kept.norm(dim=0)
        return torch.where(size > _WEAK * size.max(), kept, fresh)

    def _keep(self, name: str, before: torch.Tensor, now: torch.Tensor) -> None:
        """What is not finite belongs to a step that nobody takes."""
        if now.shape == before.shape:
            self.warm[name] = torch.where(torch.isfinite(now).all(), now, before)
        else:
            self.warm[name] = torch.nan_to_num(now, nan=0.0, posinf=0.0, neginf=0.0)


def orthonormal(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """The columns of each made orthonormal; what depends on earlier columns becomes nearly zero.

    By Cholesky factors of all Gram matrices at once, in double precision, because that squares the condition. The same
    operations on all ranks, so the same bits.
    """
    made: list[torch.Tensor] = list(matrices)
    for rank in {one.shape[1] for one in matrices}:
        chosen = [at for at, one in enumerate(matrices) if one.shape[1] == rank]
        doubles = [matrices[at].double() for at in chosen]
        # Columns of length one first: how independent they are does not depend on how long they are.
        doubles = [one / one.norm(dim=0).clamp_min(_TINY) for one in doubles]
        grams = torch.stack([one.T @ one for one in doubles])
        grams.diagonal(dim1=1, dim2=2).add_(_DEPENDENT)
        lower = torch.linalg.cholesky_ex(grams).L
        identity = torch.eye(rank, dtype=torch.float64, device=grams.device).expand_as(grams)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
        for at, one, factor in zip(chosen, doubles, inverse, strict=True):
            made[at] = (one @ factor.T).to(matrices[at].dtype)
    return made


def _view(flat: torch.Tensor, one: Matrix) -> torch.Tensor:
    return flat[one.begin : one.begin + one.rows * one.columns].view(one.rows, one.columns)


def _others(flat: torch.Tensor, found: list[Matrix]) -> torch.Tensor:
    """What lies between the matrices."""
    return torch.cat([flat[begin:end] for begin, end in _gaps(flat.numel(), found)])


def _gaps(numel: int, found: list[Matrix]) -> list[tuple[int, int]]:
    edges = [0, *(edge for one in found for edge in (one.begin, one.begin + one.rows * one.columns)), numel]
    return [(edges[at], edges[at + 1]) for at in range(0, len(edges), 2)]


def _joined(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([like.new_empty(0), *(one.reshape(-1) for one in tensors)])


def _parted(flat: torch.Tensor, shapes: list[torch.Size]) -> list[torch.Tensor]:
    parts, begin = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(flat[begin : begin + size].view(shape))
        begin += size
    return parts


def _whole(
    like: torch.Tensor,
    found: list[Matrix],
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    plain: torch.Tensor,
    flipped: bool = False,
) -> torch.Tensor:
    """The buffer of P·Qᵀ and of what was sent as it is."""
    flat = torch.empty_like(like)
    for one, left, right in zip(found, lefts, rights, strict=True):
        torch.matmul(right if flipped else left, (left if flipped else right).T, out=_view(flat, one))
    begin = 0
    for start, end in _gaps(flat.numel(), found):
        flat[start:end] = plain[begin : begin + end - start]
        begin += end - start
    return flat
