"""The user's loader, turned into one that begins at any sample and deals each out once, at any world size.

Random transformations are seeded by where in the epoch a batch begins: whoever loads it, after however many restarts,
it is the same batch. What the model draws (dropout) is not touched by that.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
)

from diamond.train.errors import TrainError
from diamond.train.loop.dice import Apart, seeded, undisturbed
from diamond.train.loop.orders import HOW, Order, setters
from diamond.train.loop.owndice import OwnDice
from diamond.train.order import MIX, Micro, Shuffle, micro_batches
from diamond.train.scaling import BatchSize

_Place = tuple[int, int, int]  # epoch, place in it, sample
_AS_LOADED = BatchSize()


class Piece(NamedTuple):
    """A micro-batch of this rank. With the last one of a step, `samples` is how many the step took on all ranks."""

    batch: Any
    weight: float
    is_last: bool
    samples: int


class Batches:
    """What `prepare` makes of a DataLoader.

    Attributes:
        per_rank: most samples that a rank computes at once: the loader's own batch size.
        global_batch: samples of an optimizer step, on all ranks together. Kept when the number of ranks changes, unless
            `size` lets it grow; `wish` is then the planner's.
        epoch, taken: the position: how many samples of which epoch have been trained on.
        seen: how many over all epochs.
        waited_s: how long the loop has waited for batches to be loaded.
    """

    def __init__(
        self, loader: DataLoader[Any], *, seed: int, rank: int, world: int, device: torch.device,
        size: BatchSize = _AS_LOADED, wish: int | None = None, same: Callable[[int], bool] = lambda number: True,
        new_data: bool = False,
    ) -> None:  # fmt: skip
        if loader.batch_size is None:
            raise TrainError(
                "the loader makes no batches, or by a batch_sampler of its own",
                hint="give DataLoader a batch_size (and a sampler, if the order matters)",
            )
        self.per_rank = int(loader.batch_size)
        self.epoch = self.taken = self.seen = 0
        self.waited_s = 0.0
        self._drop_last = bool(loader.drop_last)
        self._seed, self._rank, self._world, self._device = seed, rank, world, device
        self._size, self._wish = size, wish
        self._loader = loader
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._plan = _Plan()
        self._new_data = new_data
        self._order = None if self._is_stream else Order(loader, seed=seed, same=same)
        self._dice: dict[str, Any] | None = None  # a stream's own, when the epoch began
        self.global_batch = self._sized(None)
        if self._is_stream:
            if loader.num_workers and rank == 0:
                sys.stderr.write("diamond.train: an IterableDataset is read without its loader's workers\n")
            return
        if self.length == 0 or (self._drop_last and self.length < self.global_batch):
            raise TrainError(
                f"the loader holds {self.length} samples, less than one batch of {self.global_batch}",
                hint="lower batch_size (or batch and accumulate of run()), or leave drop_last out",
            )
        self._seeded = _Seeded(loader.dataset, self._seed)
        self._own = self._rebuilt(loader)
        # Keeping what the model draws apart costs a tenth of a millisecond a batch, where batches are made here.
        draws_here = not loader.num_workers and type(loader.dataset) is not TensorDataset
        self._guard: Callable[[], AbstractContextManager[None]] = undisturbed if draws_here else nullcontext

    @property
    def length(self) -> int:
        """Samples of an epoch; 0 for a stream."""
        return self._order.length if self._order is not None else 0

    def position(self) -> dict[str, int]:
        at = {"epoch": self.epoch, "taken": self.taken, "seen": self.seen, "global_batch": self.global_batch}
        samples = _samples(self._loader.dataset)
        return at if samples is None else {**at, "samples": samples}

    def state(self) -> dict[str, Any] | None:
        """What else it takes to go on from the position."""
        if self._order is not None:
            return self._order.state()
        return {"dice": self._dice} if self._dice else None

    def go_to(self, position: Mapping[str, float], state: Mapping[str, Any] | None = None) -> None:
        """Where another job stopped. Samples are counted, not steps: from there on a step may take more or fewer.

        Raises:
            TrainError: the data are other ones now, or come in another order.
        """
        self.epoch, self.taken = int(position["epoch"]), int(position["taken"])
        # Checkpoints without `seen` know no better.
        self.seen = int(position.get("seen", self.epoch * self.length + self.taken))
        self.global_batch = self._sized(int(position["global_batch"]))
        now, then = _samples(self._loader.dataset), position.get("samples")
        if now is not None and then is not None and now != then:
            self._is_other(f"the data set holds {now} samples, and held {int(then)} when the checkpoint was written")
        elif self._order is not None and not self._order.load(state, self.epoch):
            self._is_other(
                f"the sampler ({self._order.name}) gives another order of epoch {self.epoch} than before the restart",
                HOW,
            )
        elif self._order is None and state is not None:
            self._dice = dict(state["dice"])

    def _is_other(self, what: str, how: str = "give it the same data") -> None:
        """Where the run cannot go on in the midst of the epoch, it begins the next one, if that is wanted."""
        if not self._new_data:
            raise TrainError(
                what,
                hint=f"{how}; to go on with what there is now, from the beginning of a new epoch, say "
                "run(new_data=True)",
            )
        self.next_epoch()

    def _sized(self, kept: int | None) -> int:
        return self._within(self._size.samples(self.per_rank, self._world, kept=kept, wish=self._wish))

    @property
    def own_batch(self) -> int:
        """Samples of a step if nobody wished for more."""
        return self._within(self._size.samples(self.per_rank, self._world))

    def _within(self, samples: int) -> int:
        """No batch that grows is larger than the data: every step would be dropped, or be smaller than it is said."""
        return min(samples, self.length) if self._size.grows and self.length else samples

    def __len__(self) -> int:
        """Optimizer steps of an epoch."""
        if self._is_stream:
            raise TypeError("a stream has no length")
        return self.length // self.global_batch if self._drop_last else -(-self.length // self.global_batch)

    def __iter__(self) -> Iterator[Any]:
        raise TrainError(
            "the loader that is trained on gives its batches to run.steps() alone",
            hint="write `for batch in run.steps(loader, until=…)`; to go through the data for another reason, give "
            "prepare() a further DataLoader of them",
        )

    def pieces(self, limit: int | None = None) -> Iterator[Piece]:
        """From the position to the end of the epoch, at most `limit` samples. The caller counts what it has trained on
        (`advance`)."""
        most = sys.maxsize if limit is None else limit
        found = self._streamed(most) if self._is_stream else self._loaded(most)
        while True:
            began = time.perf_counter()
            piece = next(found, None)
            # Without the way to the device, which may have to wait for what the device still computes.
            self.waited_s += time.perf_counter() - began
            if piece is None:
                return
            yield piece._replace(batch=moved(piece.batch, self._device))

    def advance(self, samples: int) -> None:
        self.taken += samples
        self.seen += samples

    def next_epoch(self) -> None:
        self.epoch, self.taken, self._dice = self.epoch + 1, 0, None

    def _dealt(self, begin: int, end: int) -> list[Micro]:
        return micro_batches(begin, end, rank=self._rank, world=self._world, per_rank=self.per_rank)

    def _loaded(self, most: int) -> Iterator[Piece]:
        assert self._order is not None
        with undisturbed():
            self._seeded.set_epoch(self.epoch)
        order = self._order.of(self.epoch)
        length, stop = self.length, self.taken + most
        if self._drop_last:
            length -= (length - self.taken) % self.global_batch
        ends = [
            (begin, min(begin + self.global_batch, length, stop))
            for begin in range(self.taken, min(length, stop), self.global_batch)
        ]
        self._plan.set(self.epoch, order, itertools.chain.from_iterable(self._dealt(*step) for step in ends))
        with undisturbed():
            loaded = iter(self._own)
        for begin, end in ends:
            micros = self._dealt(begin, end)
            for at, micro in enumerate(micros):
                with self._guard():
                    batch = next(loaded)
                yield Piece(batch, micro.weight, at == len(micros) - 1, end - begin)

    def _streamed(self, most: int) -> Iterator[Piece]:
        """Every rank reads the whole stream and takes its part: the only way that keeps all of a stream whose parts
        nobody knows, whatever the number of ranks. All throw the same dice while they read, so it is the same."""
        dice, collate = Apart(self._seed, self.epoch), self._loader.collate_fn
        begin = self.taken
        stop = begin + most
        own = OwnDice(self._loader.dataset)
        if self._dice is not None:  # of this epoch, which was begun before
            own.load(self._dice)
        self._dice = own.state()
        with dice.in_use():
            for set_epoch in setters(self._loader.dataset):
                set_epoch(self.epoch)
            stream = iter(self._loader.dataset)
            passed = sum(1 for _ in itertools.islice(stream, begin))
        if passed < begin:
            if not self._new_data:
                raise TrainError(
                    f"the stream ({type(self._loader.dataset).__name__}) ended after {passed} samples, and {begin} "
                    "of it were trained on in this epoch before the restart",
                    hint="give it the same data; to go on with what there is now, say run(new_data=True)",
                )
            return
        while begin < stop:
            with dice.in_use():
                step = list(itertools.islice(stream, self.global_batch))
            if not step or (self._drop_last and len(step) < self.global_batch):
                return
            step = step[: stop - begin]
            micros = self._dealt(begin, begin + len(step))
            for at, micro in enumerate(micros):
                with undisturbed(), seeded(self._seed, self.epoch, micro.begin):  # each rank puts together its own
                    batch = collate(step[micro.begin - begin : micro.end - begin])
                yield Piece(batch, micro.weight, at == len(micros) - 1, len(step))
            begin += len(step)

    def _rebuilt(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        more: dict[str, Any] = {}
        if loader.num_workers:
            more = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.persistent_workers,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        return DataLoader(
            self._seeded,
            batch_sampler=self._plan,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            **more,
        )


class _Plan(Sampler[list[_Place]]):
    """What is to be loaded, micro-batch by micro-batch; read by the loader as far ahead as it likes."""

    def __init__(self) -> None:
        self._epoch = 0
        self._order: Sequence[int] | Shuffle = ()
        self._micros: Iterator[Micro] = iter(())

    def set(self, epoch: int, order: Sequence[int] | Shuffle, micros: Iterator[Micro]) -> None:
        self._epoch, self._order, self._micros = epoch, order, micros

    def __iter__(self) -> Iterator[list[_Place]]:
        read = _Blocks(self._order) if isinstance(self._order, Shuffle) else self._order
        for micro in self._micros:
            yield [(self._epoch, place, read[place]) for place in range(micro.begin, micro.end)]


class _Blocks:
    """A shuffle, read some thousands of places at once: one by one they cost as much as a small step."""

    def __init__(self, shuffle: Shuffle) -> None:
        self._shuffle = shuffle
        self._begin = 0
        self._found: list[int] = []

    def __getitem__(self, place: int) -> int:
        if not self._begin <= place < self._begin + len(self._found):
            self._begin = place
            end = min(place + _BLOCK, self._shuffle.count)
            self._found = self._many(torch.arange(place, end)).tolist()
        return self._found[place - self._begin]

    def _many(self, numbers: torch.Tensor) -> torch.Tensor:
        """`Shuffle.__getitem__` of all of them."""
        found = self._stepped(numbers)
        while (outside := found >= self._shuffle.count).any():
            found[outside] = self._stepped(found[outside])
        return found

    def _stepped(self, numbers: torch.Tensor) -> torch.Tensor:
        half, mask = self._shuffle.half, (1 << self._shuffle.half) - 1
        left, right = numbers >> half, numbers & mask
        for key in self._shuffle.keys:
            mixed = (right ^ _signed(key)) * _signed(MIX[0])
            mixed = (mixed ^ ((mixed >> 29) & _UPPER)) * _signed(MIX[1])  # a shift of signed numbers brings signs along
            left, right = right, left ^ ((mixed >> 32) & mask)
        return (left << half) | right


_BLOCK = 8192
_UPPER = (1 << 35) - 1


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


class _Seeded(Dataset[Any]):
    """The user's dataset, asked for whole batches, with the dice thrown by the batch's place."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._epoch = -1
        self._reseed: Callable[[int], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reseed": None}  # to another process

    def set_epoch(self, epoch: int) -> None:
        """Also in worker processes that live longer than an epoch, which have a copy of their own."""
        if epoch != self._epoch:
            self._epoch = epoch
            with seeded(self._seed, epoch, 0):
                for set_epoch in setters(self._dataset):
                    set_epoch(epoch)

    def __getitems__(self, places: list[_Place]) -> list[Any]:
        epoch, first, _ = places[0]
        self.set_epoch(epoch)
        wanted = [sample for _, _, sample in places]
        if type(self._dataset) is TensorDataset:  # draws nothing
            return [self._dataset[sample] for sample in wanted]
        if self._reseed is None:  # in each process its own
            self._reseed = OwnDice(self._dataset).seeder()
        with seeded(self._seed, epoch, first) as generator:
            self._reseed(generator.initial_seed())
            if hasattr(self._dataset, "__getitems__"):
                found: list[Any] = self._dataset.__getitems__(wanted)
                return found
            return [self._dataset[sample] for sample in wanted]

    def __getitem__(self, place: _Place) -> Any:
        return self.__getitems__([place])[0]

    def __len__(self) -> int:
        return len(self._dataset)


def _samples(dataset: Any) -> int | None:
    """How many there are, where it says so."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on the device, whatever it is made of."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        parts = {key: moved(value, device) for key, value in batch.items()}
        try:
            return type(batch)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch
