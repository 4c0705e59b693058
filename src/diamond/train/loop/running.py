"""One training run, from its first step to its last, over any number of processes and jobs.

    with run() as r:
        model, optimizer, loader = r.prepare(model, optimizer, loader)
        for batch in r.steps(loader, until=10_000):
            loss = model(batch).mean()
            r.backward(loss); r.step()
            r.log(loss=loss)

The same script runs alone, under torchrun and under Diamond. It goes on where it stopped, saves itself, ends in time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from diamond.train import cohort, metrics
from diamond.train.ending import Ending, exit_code
from diamond.train.errors import Continued, TrainError
from diamond.train.loop import beside, compiling, dice, parallel, surroundings
from diamond.train.loop.batches import Batches, Piece
from diamond.train.loop.buckets import Buckets
from diamond.train.loop.checkpoints import Checkpoints
from diamond.train.loop.control import Control, Decision
from diamond.train.loop.growing import Growing
from diamond.train.loop.kept import Kept
from diamond.train.loop.measuring import Measuring
from diamond.train.loop.saving import Saver
from diamond.train.scaling import BatchSize, End


def run(
    *,
    checkpoints: str | os.PathLike[str] = "checkpoints",
    seed: int = 0,
    parallel: str = "auto",
    precision: str = "auto",
    save_every_s: float | None = None,
    keep: int = 2,
    resume: bool = True,
    check_loss: bool = True,
    hang_after_s: float | None = None,
    batch: int | str | None = None,
    max_batch: int | None = None,
    accumulate: int = 1,
    lr_rule: str | None = None,
    lr_warmup: int | None = None,
    compile: bool | str = False,
    noise_by_group: bool = False,
    new_data: bool = False,
) -> Run:
    """Begin a run, or go on with it.

    Args:
        checkpoints: folder of its checkpoints; the same one in every job of the run.
        seed: of the order of samples and of everything random.
        parallel: ``ddp``, ``fsdp``, ``hybrid`` (sharded inside a node, copied across), ``none``; ``auto`` looks at
            the model and the device.
        precision: ``bf16``, ``fp32``; ``auto`` takes bf16 on GPUs that compute in it.
        save_every_s: seconds between checkpoints; None weighs what saving costs against what a failure would.
        keep: how many checkpoints stay.
        resume: False begins anew and leaves the old ones until newer ones replace them.
        check_loss: stop when the loss is no longer a number.
        hang_after_s: seconds without a step after which the process counts as hung; None: ten minutes, or twenty times
            the longest step so far.
        batch: samples of an optimizer step, on all ranks together. None keeps what the run began with; ``"grow"`` lets
            it follow the ranks, or the planner (``DIAMOND_GLOBAL_BATCH``).
        max_batch: the most it may grow to.
        accumulate: how many batches of the loader each rank computes for a step, where `batch` is no number.
        lr_rule: ``linear``, ``sqrt``, ``adascale``, ``none``: the learning rate of a batch that is not the first one's.
        lr_warmup: steps that a larger learning rate takes to be reached.
        compile: torch.compile the model; a text is its mode (``default``, ``reduce-overhead``, ``max-autotune``).
        noise_by_group: measure the gradient's noise for each parameter group of the optimizer as well.
        new_data: go on although the data are other ones than the checkpoint's, from the beginning of a new epoch.
    """
    surroundings.check(
        checkpoints=checkpoints, seed=seed, save_every_s=save_every_s, keep=keep, hang_after_s=hang_after_s
    )
    cohort.join().look_after(hang_after_s)
    return Run(
        checkpoints=Path(checkpoints), seed=seed, kind=parallel, precision=precision, save_every_s=save_every_s,
        keep=keep, resume=resume, check_loss=check_loss, size=BatchSize(batch, accumulate, max_batch), lr_rule=lr_rule,
        lr_warmup=lr_warmup, compile_mode=compiling.mode_of(compile), noise_by_group=noise_by_group,
        new_data=new_data,
    )  # fmt: skip


_FIRST = "give prepare() the loader that is trained on before any other: its place in the data is what is kept"


class Run:
    """See `run`. Use as a context manager.

    Attributes:
        step_number: optimizer steps done, over all jobs of the run.
        rank, world, device, is_main: this process's place.
    """

    def __init__(
        self, *, checkpoints: Path, seed: int, kind: str, precision: str, save_every_s: float | None, keep: int,
        resume: bool, check_loss: bool, size: BatchSize, lr_rule: str | None, lr_warmup: int | None,
        compile_mode: str | None, noise_by_group: bool, new_data: bool,
    ) -> None:  # fmt: skip
        if kind != "auto" and kind not in parallel.KINDS:
            raise TrainError(f"parallel={kind!r} is unknown", hint=f"use auto or one of {', '.join(parallel.KINDS)}")
        if precision not in ("auto", "bf16", "fp32"):
            raise TrainError(f"precision={precision!r} is unknown", hint="use auto, bf16 or fp32")
        self._folder, self._seed, self._precision = checkpoints, seed, precision
        self._kind, self._why = kind, parallel.AS_SAID
        self._save_every_s, self._keep, self._resume, self._check_loss = save_every_s, keep, resume, check_loss
        self._growing = Growing(size, lr_rule, lr_warmup, noise=self._noise_scale, say=self.say)
        self._compile_mode, self._new_data = compile_mode, new_data
        self._cohort = cohort.join()  # before anything is known of the place: a standby waits here for one
        self._pulse = self._cohort.pulse
        self._place = metrics.context()
        self.rank, self.world = self._place.rank, self._place.world_size
        self.device = surroundings.device(self._place.local_rank)
        self._kept = Kept()
        self.step_number = 0
        self._schedulers: list[Any] = []
        self._batches: Batches | None = None
        self._checkpoints: Checkpoints | None = None
        self._control: Control | None = None
        self._ending = Ending()
        self._bad: torch.Tensor | None = None
        self._piece: Piece | None = None
        self._called = [False, False]  # backward, step: since the loop's last turn
        self._save_asked = False  # in the midst of a step
        self._step_s = 0.0
        self._measuring = Measuring(self._place, self.device, by_group=noise_by_group)
        self._measuring.facts = self._facts

    @property
    def state(self) -> dict[str, Any]:
        """What else to keep: numbers, text, tensors by name. Saved and brought back with the rest."""
        return self._kept.own

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def samples(self) -> int:
        """Trained on, over all jobs of the run."""
        return self._batches.seen if self._batches is not None else 0

    @property
    def lr_scale(self) -> float:
        """What the learning rate of the last step was multiplied by, as its batch was not the run's first."""
        return self._growing.lr_scale

    @property
    def measures(self) -> dict[str, Any]:
        """What the run last measured of itself (docs/training.md says what), on rank 0; empty before that."""
        return dict(self._measuring.last)

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        groups: tuple[Any, Any] = (None, None)
        store: Any = None
        if self.world > 1:
            with parallel.watching(self._cohort):
                groups = parallel.connect(self.device)
            store = dist.distributed_c10d._get_default_store()
        self._control = Control(groups[0], self.rank, self.world)
        saver = Saver(
            self._folder, rank=self.rank, world=self.world, group=groups[1], store=store, keep=self._keep,
            cuda=self.device.type == "cuda",
        )  # fmt: skip
        saver.on_safe = self._cohort.saved
        if self.is_main:
            saver.begin()
        self._checkpoints = Checkpoints(
            saver, self._kept, self._control, device=self.device, seed=self._seed, every_s=self._save_every_s,
            checks=self._check_loss, say=self.say,
        )  # fmt: skip
        self._checkpoints.more = self._measuring.state
        dice.seed_all(self._seed, self.rank, self.step_number)
        self._ending.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.leave_alone()
        if error is not None and kind is not Continued and self.world > 1:
            parallel.leave_if_peer_lost(error, self._cohort)
        assert self._checkpoints is not None and self._control is not None
        if isinstance(error, Exception) and not (self.world > 1 and parallel.is_peer_lost(error)):
            self._checkpoints.failed()
        if kind is None and self._kept.model is not None:
            self._checkpoints.save_and_wait(self.step_number, self._position())
        if kind is None or kind is Continued:
            self._control.drain()
            self._measuring.finish(self.step_number, self.say)
            self._checkpoints.saver.close()
            if dist.is_initialized() and self.world > 1:
                dist.destroy_process_group()
        self._pulse.rest()

    def say(self, text: str) -> None:
        """On rank 0's standard error, whose lines are in the task's log."""
        if self.is_main:
            sys.stderr.write(f"diamond.train: {text}\n")
            sys.stderr.flush()

    # ---- preparing ---------------------------------------------------------------------------------------------------

    def prepare(self, *things: Any) -> Any:
        """Model, optimizer, loader, and anything else with a state (schedulers, EMA), in any order; they come back in
        the same order, ready for this many ranks and with the state of the last checkpoint, if there is one.

        The first loader is trained on; further ones are gone through as they are, by every rank. Schedulers follow
        `step`; ReduceLROnPlateau is stepped by the script, with its metric, on every rank.
        """
        models = [one for one in things if beside.is_model(one)]
        if len(models) != 1 or self._kept.model is not None:
            raise TrainError(
                f"prepare() was given {len(models)} models"
                if self._kept.model is None
                else "prepare() was called twice",
                hint="call it once, with one nn.Module; several models can be parts of one",
            )
        before = parallel.names_of(models[0])
        model = self._spread(models[0].to(self.device))
        made: list[Any] = []
        for one in things:
            if one is models[0]:
                made.append(model)
            elif isinstance(one, torch.optim.Optimizer):
                if self._kept.optimizer is not None:
                    raise TrainError("prepare() was given two optimizers", hint="put their parameters in groups of one")
                parallel.follow(one, before, model)
                self._kept.optimizer = one
                made.append(one)
            elif isinstance(one, DataLoader):
                made.append(self._loader(one))
            else:
                self._keep_beside(one)
                made.append(one)
        self._kept.model = model
        self._kept.begin()
        self._growing.begin(self._batches, self._kept.optimizer)
        assert self._control is not None
        self._kept.buckets = Buckets(model, self._control.all_agree)
        self._measuring.watch(
            model, self._kept.optimizer, buckets=self._kept.buckets, group=self._control.group, kind=self._kind,
            precision=self._precision,
        )  # fmt: skip
        self._go_on()
        return made[0] if len(made) == 1 else tuple(made)

    def _keep_beside(self, thing: Any) -> None:
        """Whatever else has a state."""
        assert self._control is not None
        if isinstance(thing, AveragedModel):
            place = {"world": self.world, "num_nodes": self._place.num_nodes}
            self._kept.averages.append(beside.spread(thing, self._kind, self.device, **place))
            return
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TrainError(
                f"prepare() cannot use a {type(thing).__name__}",
                hint="it takes a model, an optimizer, DataLoaders, and objects with state_dict and load_state_dict",
            )
        self._kept.others.append(thing)
        if isinstance(thing, ReduceLROnPlateau):  # the script steps it, with what it looks at
            beside.look_together(thing, self._control.mean)
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            self._schedulers.append(thing)

    def _loader(self, loader: DataLoader[Any]) -> Batches | beside.HeldOut:
        if self._batches is not None:  # the first one is trained on
            return beside.HeldOut(loader, seed=self._seed, device=self.device)
        known: dict[str, Any] = {"seed": self._seed, "rank": self.rank, "world": self.world, "device": self.device}
        assert self._control is not None
        self._batches = Batches(
            loader, **known, size=self._growing.size, wish=self._growing.wish(self.world), same=self._control.all_same,
            new_data=self._new_data,
        )  # fmt: skip
        self._kept.data = self._batches.state
        return self._batches

    def _spread(self, model: nn.Module) -> nn.Module:
        if self._kind == "auto":
            ranks_here = max(1, self.world // self._place.num_nodes)
            sizes = parallel.Sizes(
                train_bytes=parallel.train_bytes(model), device_bytes=parallel.device_bytes(self.device, ranks_here),
                world=self.world, num_nodes=self._place.num_nodes,
            )  # fmt: skip
            self._kind, self._why = parallel.chosen(sizes)
        if self._precision == "auto":
            can = self.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            self._precision = "bf16" if can else "fp32"
        if self._precision == "bf16":
            parallel.cast(model, self.device, torch.bfloat16)
        if self._compile_mode is not None:
            assert self._control is not None
            compiling.compile_if_able(
                model, self._compile_mode, self._kind, self.device, agree=self._control.all_agree, say=self.say
            )
        return parallel.spread(model, self._kind, self.device, world=self.world, num_nodes=self._place.num_nodes)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def steps(
        self, loader: Batches | beside.HeldOut, *, until: int | None = None, until_samples: int | None = None
    ) -> Iterator[Any]:
        """Batches, until so many optimizer steps, or samples, have been done over all jobs of the run.

        A step whose batch does not fit at once comes in several pieces; `step` changes the model after the last. The
        last step takes no more samples than are wanted.
        """
        if isinstance(loader, beside.HeldOut):
            raise TrainError("steps() was given another loader than the first of prepare()", hint=_FIRST)
        if self._kept.model is None or loader is not self._batches:
            raise TrainError("steps() needs what prepare() made of the loader", hint="call prepare() first")
        end = End(until, until_samples)
        end.check()
        self._growing.plan(end, loader)
        self.say(self._opening(end))
        if end.is_reached(self.step_number, loader.seen):
            self.say("nothing is left to do: the loop ends at once")
        self._measuring.opens(loader, end, self.step_number)
        assert self._checkpoints is not None
        self._checkpoints.begins()
        while not end.is_reached(self.step_number, loader.seen):
            began_at = self.step_number
            for piece in loader.pieces(end.left(loader.seen)):
                self._piece, self._called = piece, [False, False]
                self._exchange(self._measuring.begins(self.step_number + 1, piece))
                began = time.monotonic()
                self._pulse.at(cohort.LOOP, self.step_number)
                try:
                    yield piece.batch
                except GeneratorExit:  # `break`: what comes after the loop is outside of it
                    self._piece = None
                    raise
                self._check_calls()
                if piece.is_last:
                    self._measuring.after(self.step_number, piece.samples)
                    self._after_step(time.monotonic() - began)
                    if end.is_reached(self.step_number, loader.seen):
                        break
                self._pulse.at(cohort.DATA, self.step_number)
            else:
                if self.step_number == began_at and loader.taken == 0:
                    raise TrainError("the loader is empty", hint="check the dataset, batch_size and drop_last")
                loader.next_epoch()
        self._piece = None

    def _exchange(self, wanted: bool) -> None:
        """Whether the coming backward pass exchanges gradients as usual."""
        assert self._kept.model is not None and self._kept.buckets is not None
        parallel.sync_gradients(self._kept.model, wanted)
        if wanted:
            self._kept.buckets.watch()

    def _opening(self, end: End) -> str:
        many = f"{self.world} ranks ({self._kind})" if self.world > 1 else "one process"
        return f"{end.told(self.step_number, self.samples)}, {many} on {self.device.type}, {self._precision}"

    def _check_calls(self) -> None:
        for called, name, when in zip(self._called, ("backward(loss)", "step()"), ("before", "after"), strict=True):
            if not called:
                other = "step()" if name != "step()" else "backward(loss)"
                raise TrainError(
                    f"run.{name} was not called for the last batch",
                    hint=f"call it once for every batch, {when} run.{other}; `continue` only after both",
                )

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of `loss`, the mean over the batch's samples."""
        piece = self._in_loop("backward")
        self._pulse.at(cohort.BACKWARD, self.step_number)
        if self._check_loss:
            bad = ~torch.isfinite(loss.detach()).all()
            self._bad = bad if self._bad is None else self._bad | bad
        (loss * piece.weight if piece.weight != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        assert self._kept.buckets is not None
        self._kept.buckets.watched()
        self._measuring.computed(self.step_number + 1, piece)
        self._called[0] = True

    def step(self) -> None:
        """Change the model, if this was the last piece of a step; schedulers given to `prepare` follow."""
        piece = self._in_loop("step")
        self._pulse.at(cohort.STEP, self.step_number)
        is_first, self._called[1] = not self._called[1], True
        if piece.is_last and self._kept.optimizer is not None:
            assert self._checkpoints is not None
            self._measuring.waited(self._checkpoints.saver.staged(), in_step=True)
            self._growing.step(self._kept.optimizer, self.step_number)
            self._kept.optimizer.zero_grad(set_to_none=not self._measuring.keeps_gradients(self.step_number + 2))
            for scheduler in self._schedulers:
                scheduler.step()
            self.step_number += 1
        if piece.is_last and is_first:
            # Now, not when the loop comes round: whoever saves from here on saves a model that has seen this batch.
            assert self._batches is not None
            self._batches.advance(piece.samples)
        self._measuring.stepped(self.step_number, is_last=piece.is_last)

    def log(self, **values: Any) -> None:
        """Metrics of the step just done; of pieces before the last nothing is recorded."""
        if self._piece is None or self._piece.is_last:
            metrics.log(values, step=self.step_number)

    def _in_loop(self, name: str) -> Piece:
        if self._piece is None:
            raise TrainError(f"run.{name}() outside of the loop", hint="call it in `for batch in run.steps(loader, …)`")
        return self._piece

    def _after_step(self, took_s: float) -> None:
        assert self._control is not None
        self._step_s = took_s if not self._step_s else 0.9 * self._step_s + 0.1 * took_s
        self._pulse.steps += 1
        self._pulse.at(cohort.SAVING, self.step_number)
        decided = self._control.answer()
        if self._control.is_due(self.step_number) or (self._ending.heard and self.world == 1):
            wish = Decision(self._wants_stop(), self._wants_save(), self._is_bad(), self._measuring.is_due())
            decided = self._control.ask(self.step_number, wish, self._step_s) or decided
        if decided is None:
            decided = Decision()
        if decided.bad:
            raise TrainError(
                f"the loss is not a number any more, at step {self.step_number} or just before it",
                hint="lower the learning rate, clip gradients, or look at the data; check_loss=False goes on anyway",
            )
        if decided.measure:
            self._measuring.tell(self.step_number)
        if decided.stop:
            self._leave(decided.stop)
        if decided.save or self._save_asked:
            self._save()

    def _is_bad(self) -> bool:
        """Whether a loss was none since it was last asked. On a GPU that waits for it: so only now and then."""
        bad, self._bad = self._bad, None
        return bool(bad) if bad is not None else False

    # ---- saving and going on -----------------------------------------------------------------------------------------

    def _wants_stop(self) -> int:
        if self._ending.is_final:
            return self._ending.heard
        assert self._checkpoints is not None
        needed = 1.5 * self._checkpoints.needed_s() + 3 * self._step_s
        return signal.SIGUSR1 if self.is_main and self._ending.is_near(needed) else 0

    def _wants_save(self) -> bool:
        assert self._checkpoints is not None
        return self.is_main and (self._ending.is_news() or self._checkpoints.is_due())

    def save(self) -> None:
        """Save now, beside the usual rhythm. Call it on every rank at the same step.

        A checkpoint lies between two steps. In the body of the loop, after `step` has changed the model, it is made at
        once and counts the batch as trained on; before that, it is made when the batch's turn is over. What the body
        itself keeps in `state` after a save is not in it.
        """
        if self._piece is not None and not (self._piece.is_last and self._called[1]):
            self._save_asked = True
        else:
            self._save(is_last_word=self._piece is None)

    def _save(self, *, is_last_word: bool = True) -> None:
        assert self._checkpoints is not None
        self._save_asked = False
        began = time.monotonic()
        self._checkpoints.save(self.step_number, self._position(), is_last_word=is_last_word)
        self._measuring.waited(time.monotonic() - began)

    def _leave(self, number: int) -> None:
        assert self._checkpoints is not None
        self._checkpoints.save_and_wait(self.step_number, self._position())
        self.say(f"saved at step {self.step_number}, ending in time to be continued")
        raise Continued(exit_code(number, is_main=self.is_main))

    def _position(self) -> dict[str, float]:
        return {**self._batches.position(), **self._growing.position()} if self._batches is not None else {}

    def _noise_scale(self) -> float | None:
        """Of the gradient, in samples, where it is measured: the same on every rank."""
        return self._measuring.noise_scale

    def _facts(self) -> dict[str, Any]:
        """What others than `Measuring` know and belongs into its lines."""
        assert self._checkpoints is not None
        return {"parallel_why": self._why, **self._growing.told(), "saves": self._checkpoints.told()}

    def _go_on(self) -> None:
        assert self._checkpoints is not None and self._control is not None
        if not self._resume:
            self._checkpoints.anew()
            return
        found = self._checkpoints.resume(rank=self.rank, world=self.world)
        if found is None:
            return
        self._cohort.saved()
        self.step_number = found.step
        self._measuring.load(found.meta.get("noise", {}))
        if self._batches is not None and found.meta["data"]:
            self._batches.go_to(found.meta["data"], self._checkpoints.data)
            if self._batches.epoch != found.meta["data"]["epoch"]:
                self.say(f"the data are other ones than before: epoch {self._batches.epoch} begins with them")
            self._growing.go_on(self._batches, found.meta["data"], found.step)
