"""In which order samples come, and who takes which: pure arithmetic, the same on every rank and at every world size.

An epoch is one order of all samples. An optimizer step takes the next `global_batch` of them, whoever computes it; how
many have been taken is the whole position in the data. So a run that goes on with more or fewer ranks neither repeats
nor misses one. Standard library only, Python 3.8 syntax, because this file runs in the user's environment.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)  # odd, with bits as if by chance
_WORD = (1 << 64) - 1
_ROUNDS = 6  # of the Feistel network; four already make a pseudo-random permutation of half the bits each


class Shuffle:
    """A pseudo-random order of 0..count-1 that takes no memory and begins anywhere.

    A Feistel network permutes the numbers below a power of four; those that fall outside are walked on until they do
    not (at most three more walks on average). `torch.randperm` would hold every index of the epoch, and a job that goes
    on in the middle of an epoch would make them all again.
    """

    def __init__(self, count: int, *, seed: int, epoch: int) -> None:
        if count < 0:
            raise ValueError(f"a dataset cannot hold {count} samples")
        self.count = count
        half = max(1, ((max(count, 2) - 1).bit_length() + 1) // 2)
        self.half, self._mask = half, (1 << half) - 1
        digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self.keys = [int.from_bytes(digest[8 * at : 8 * at + 8], "little") for at in range(_ROUNDS)]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.count:
            raise IndexError(position)
        number = position
        while True:
            number = self._step(number)
            if number < self.count:
                return number

    def _step(self, number: int) -> int:
        left, right = number >> self.half, number & self._mask
        for key in self.keys:
            mixed = (right ^ key) * MIX[0] & _WORD
            mixed = (mixed ^ mixed >> 29) * MIX[1] & _WORD
            left, right = right, left ^ (mixed >> 32 & self._mask)
        return left << self.half | right

    def take(self, begin: int, end: int) -> list[int]:
        return [self[position] for position in range(begin, end)]


class Micro(NamedTuple):
    """What one rank computes at once: samples by their place in the epoch, and what their loss counts.

    `weight` makes a plain mean over the ranks the mean over all samples of the step, however unevenly they are dealt.
    It is 0 for a rank that has nothing left to do and takes a sample of others, so that no collective waits for it.
    """

    begin: int
    end: int
    weight: float


def micro_batches(begin: int, end: int, *, rank: int, world: int, per_rank: int) -> list[Micro]:
    """How `rank` computes the samples [begin, end) of one optimizer step, at most `per_rank` of them at once.

    Every rank gets as many, so that all take part in the same collectives.
    """
    total = end - begin
    if total <= 0 or not 0 <= rank < world or per_rank < 1:
        raise ValueError(f"nothing to deal: {total} samples, rank {rank} of {world}, {per_rank} at once")
    shares = _shares(total, world)
    most = -(-shares[0] // per_rank)  # rank 0 has the most
    first = begin + sum(shares[:rank])
    pieces = _shares(shares[rank], most)
    found, at = [], first
    for size in pieces:
        if size:
            found.append(Micro(at, at + size, size * world / total))
            at += size
        else:
            found.append(Micro(begin, begin + 1, 0.0))
    return found


def _shares(total: int, parts: int) -> list[int]:
    """As even as it goes; the first ones get what is over."""
    even, over = divmod(total, parts)
    return [even + (at < over) for at in range(parts)]
