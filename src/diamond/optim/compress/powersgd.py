"""PowerSGD: a matrix M is sent as P·Qᵀ of small rank, found by one step of the power method from the last Q.

Two rounds: P = M·Q summed over the ranks and made orthonormal, then Q = Mᵀ·P summed. All matrices of a buffer travel
together. Vectors, and matrices that two factors do not make shorter, are sent as they are with the first round.

Another exchange carries these thin factors, so that they may travel in few bits. P only has to span a subspace; what
is lost of Q is lost of M, and the error memory sees it. The columns of Q grow with the singular values, which would
leave the small ones no bits; all ranks know how long they were in the last step, and divide by that.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import torch

from diamond.optim.compress.codec import Dice, Exchange, Layout, Rebuilt, Rounds, Send
from diamond.optim.compress.memory import Room

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


class Start(NamedTuple):
    """Where the power method goes on: columns of length one, and how long they were."""

    unit: torch.Tensor
    size: torch.Tensor

    def factor(self) -> torch.Tensor:
        return self.unit * self.size


class PowerSGD:
    """`warm` holds the last Q of every matrix by name, and belongs to whoever saves it. `thin` carries the factors."""

    def __init__(self, rank: int, warm: dict[str, torch.Tensor], *, thin: Exchange) -> None:
        self.rank, self.warm, self.thin = rank, warm, thin
        self._fresh: dict[tuple[str, int], torch.Tensor] = {}
        self._for_average, self._for_own = Room(), Room()

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
        starts = _upright([self._start(one.name, one, one.columns, dice) for one in found])
        lefts = [view @ start.unit / start.size for view, start in zip(views, starts, strict=True)]
        first = yield from self.thin.reduce(
            _joined([*lefts, _others(flat, found)], flat), _layout_of(found, lefts, layout), dice, world
        )
        lefts = orthonormal(_parted(first.average, [left.shape for left in lefts]))
        rights = [view.T @ left / start.size for view, left, start in zip(views, lefts, starts, strict=True)]
        own_rights = rights
        if rights:
            shapes = [right.shape for right in rights]
            second = yield from self.thin.reduce(_joined(rights, flat), _layout_of(found, rights), dice, world)
            rights, own_rights = (
                [part * start.size for part, start in zip(_parted(both, shapes), starts, strict=True)]
                for both in (second.average, second.own)
            )
        for one, start, right in zip(found, starts, rights, strict=True):
            self._keep(one.name, start, right)
        done = sum(left.numel() for left in lefts)
        average = _whole(self._for_average.like(flat, layout), found, lefts, rights, first.average[done:])
        own = _whole(self._for_own.like(flat, layout), found, lefts, own_rights, first.own[done:])
        return Rebuilt(average, own)

    def scatter(self, rows: torch.Tensor, layout: Layout, dice: Dice, world: int) -> Rounds:
        """Row by row the same, but the second factor goes only to the rank whose row it is.

        So all know the first factor alone, and begin the next step with it: on the other side of the matrix.
        """
        found, flipped = self.matrices(layout), bool(dice.step % 2)
        views = [[_view(row, one).T if flipped else _view(row, one) for one in found] for row in rows]
        starts = [
            _upright(
                [
                    self._start(_of_row(one, part), one, view.shape[1], dice, part)
                    for one, view in zip(found, of_row, strict=True)
                ]
            )
            for part, of_row in enumerate(views)
        ]
        lefts = (yield from self._firsts(views, starts, found, dice, world)) if found else [[] for _ in rows]
        rights = [
            [view.T @ left / start.size for view, left, start in zip(*of_row, strict=True)]
            for of_row in zip(views, lefts, starts, strict=True)
        ]
        sent = torch.stack(
            [_joined([*right, _others(row, found)], rows) for right, row in zip(rights, rows, strict=True)]
        )
        came = yield from self.thin.scatter(sent, _layout_of(found, rights[0], layout), dice, world)

        def whole(flat: torch.Tensor, part: int) -> torch.Tensor:
            mine = _parted(flat, [right.shape for right in rights[part]])
            scaled = [one * start.size for one, start in zip(mine, starts[part], strict=True)]
            rest = flat[sum(one.numel() for one in mine) :]
            return _whole(torch.empty_like(rows[part]), found, lefts[part], scaled, rest, flipped)

        own = torch.stack([whole(came.own[part], part) for part in range(world)])
        return Rebuilt(whole(came.average, dice.rank), own)

    def _firsts(
        self, views: list[list[torch.Tensor]], starts: list[list[Start]], found: list[Matrix], dice: Dice, world: int
    ) -> Generator[Send, torch.Tensor, list[list[torch.Tensor]]]:
        """The first factors of all rows, in one round."""
        pairs = [pair for of_row in zip(views, starts, strict=True) for pair in zip(*of_row, strict=True)]
        products = [view @ start.unit / start.size for view, start in pairs]
        came = yield from self.thin.reduce(
            _joined(products, products[0]), _layout_of(found * world, products), dice, world
        )
        sums = _parted(came.average, [one.shape for one in products])
        good, count = orthonormal(sums), len(found)
        for at, (one, left) in enumerate(zip(sums, good, strict=True)):
            start = pairs[at][1]
            self._keep(_of_row(found[at % count], at // count), start, left * (one.norm(dim=0) * start.size))
        return [good[part * count : (part + 1) * count] for part in range(world)]

    def _start(self, name: str, one: Matrix, length: int, dice: Dice, part: int = 0) -> Start:
        """The last factor. A column that has vanished would never come back, and is begun anew."""
        if (name, length) not in self._fresh:
            fresh = dice.normal(one.key, length, one.rank, purpose=part)
            self._fresh[name, length] = fresh / fresh.norm(dim=0)
        fresh, kept = self._fresh[name, length], self.warm.get(name)
        if kept is None or kept.shape != fresh.shape:
            return Start(fresh, fresh.new_ones(one.rank))
        size = kept.norm(dim=0)
        good, most = size > _WEAK * size.max(), size.max()
        size = torch.where(good, size, torch.where(most > 0, most, torch.ones_like(most)))
        return Start(torch.where(good, kept / size, fresh), size)

    def _keep(self, name: str, start: Start, now: torch.Tensor) -> None:
        """What is not finite belongs to a step that nobody takes."""
        if now.shape == start.unit.shape:
            self.warm[name] = torch.where(torch.isfinite(now).all(), now, start.factor())
        else:
            self.warm[name] = torch.nan_to_num(now, nan=0.0, posinf=0.0, neginf=0.0)


def _upright(starts: list[Start]) -> list[Start]:
    """With columns made orthonormal. P spans the same, but its columns come out nearly orthogonal: otherwise the large
    singular vectors would be in all of them, and few bits would be spent on those again and again."""
    units = orthonormal([start.unit for start in starts])
    return [Start(unit, start.size) for unit, start in zip(units, starts, strict=True)]


def _of_row(one: Matrix, part: int) -> str:
    return f"{one.name}@{part}"


def _layout_of(found: list[Matrix], thin: list[torch.Tensor], layout: Layout | None = None) -> Layout:
    """Of thin factors, and of what is no matrix in `layout` after them."""
    matrices, whole = {one.name for one in found}, layout or Layout((), (), ())
    others = [at for at, name in enumerate(whole.names) if name not in matrices]
    return Layout(
        (*(one.name for one in found), *(whole.names[at] for at in others)),
        (*(one.key for one in found), *(whole.keys[at] for at in others)),
        (*(tuple(one.shape) for one in thin), *(whole.shapes[at] for at in others)),
    )


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
    flat: torch.Tensor,
    found: list[Matrix],
    lefts: list[torch.Tensor],
    rights: list[torch.Tensor],
    plain: torch.Tensor,
    flipped: bool = False,
) -> torch.Tensor:
    """`flat` filled with P·Qᵀ and with what was sent as it is."""
    for one, left, right in zip(found, lefts, rights, strict=True):
        torch.matmul(right if flipped else left, (left if flipped else right).T, out=_view(flat, one))
    begin = 0
    for start, end in _gaps(flat.numel(), found):
        flat[start:end] = plain[begin : begin + end - start]
        begin += end - start
    return flat
