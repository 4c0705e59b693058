"""A callback for Lightning: it saves as often as is worth it, ends in time, and goes on exactly there.

    from diamond.train.adapters.lightning import DiamondCallback, last_checkpoint

    trainer = Trainer(..., callbacks=[DiamondCallback("checkpoints")])
    trainer.fit(model, loader, ckpt_path=last_checkpoint("checkpoints"))

The Trainer makes the checkpoints and reads them again. It knows how many batches of an epoch it has trained on, but not
which, and draws anew what is random; this keeps both, and puts them back (`position`).
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diamond.train.adapters import position, whole
from diamond.train.adapters.keeper import Keeper, Plan
from diamond.train.errors import TrainError
from diamond.train.loop import dice
from diamond.train.metrics import log

# One library under two names, whose classes are not each other's: that of the script, as far as it can be told.
if "lightning.pytorch" not in sys.modules and ("pytorch_lightning" in sys.modules or find_spec("lightning") is None):
    from pytorch_lightning.callbacks import Checkpoint
    from pytorch_lightning.loggers import Logger
else:
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.loggers import Logger

_NAME = re.compile(r"step-(\d+)\.ckpt")


def last_checkpoint(dirpath: str | os.PathLike[str] = "checkpoints") -> str | None:
    """The newest checkpoint of `DiamondCallback(dirpath)` that is whole, for `ckpt_path`; None where there is none.

    Raises:
        TrainError: there were whole ones once, and all are damaged now.
    """
    return whole.newest(dirpath, _NAME)


class DiamondCallback(Checkpoint):  # type: ignore[misc]
    """Give it to the Trainer, on every rank; the Trainer adds no checkpoints of its own then.

    Args:
        dirpath: folder of the checkpoints, the same in every job of the run.
        save_every_s: seconds between them; None weighs what saving costs against what a failure would.
        keep: how many stay.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] = "checkpoints", *, save_every_s: float | None = None, keep: int = 2
    ) -> None:
        super().__init__()
        self._folder = Path(dirpath)
        self._keeper = Keeper(save_every_s=save_every_s, keep=keep)
        self._device: Any = None
        self._trainer: Any = None
        self._step = -1
        self._is_due = False  # to save; it waits while an epoch ends
        self._loaded: dict[str, Any] | None = None
        self._at_epoch: dict[str, Any] = {}  # what was random when the epoch's order was drawn
        self._is_placed = False

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        known = any(isinstance(one, _Metrics) for one in trainer.loggers)
        # Elsewhere the Trainer's own loggers show them.
        if trainer.is_global_zero and os.environ.get("DIAMOND_METRICS_FILE") and not known:
            trainer.loggers = [*trainer.loggers, _Metrics(trainer)]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._device, self._step = trainer, trainer.strategy.root_device, trainer.global_step
        hint = "give the Trainer plugins=[LightningEnvironment()], and devices and num_nodes as they were started"
        self._keeper.begin(trainer.global_step, _plan(trainer), world=trainer.world_size, join_hint=hint)
        self._place(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step > self._keeper.saved_at:
            self._save(trainer)
        self._keeper.end(trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._keeper.hush()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._keeper.hush()

    # ---- after every step --------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._is_placed:
            self._at_epoch = _plain(dice.state(self._device))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._is_placed = False
        step = trainer.global_step
        if step == self._step:  # gradients are still added up
            return
        self._step = step
        decided = self._keeper.after_step(step)
        self._is_due = self._is_due or decided.save
        ends_epoch = _ends_epoch(trainer)
        if decided.stop and not _is_last_step(trainer, ends_epoch):
            self._save(trainer, is_last=True)
            raise self._keeper.leave(decided.stop, step)
        # What the Trainer does after this batch (a validation, the end of the epoch) it would leave out, going on here.
        if self._is_due and not ends_epoch and not position.validates(trainer.fit_loop):
            self._save(trainer)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _save(self, trainer: Any, *, is_last: bool = False) -> None:
        began, step = time.monotonic(), trainer.global_step
        final = self._folder / f"step-{step:09}.ckpt"
        unfinished = final.with_suffix(".unfinished")
        self._is_due = False
        try:
            if self._keeper.is_main:
                self._folder.mkdir(parents=True, exist_ok=True)
                for left in self._folder.glob("step-*.unfinished"):  # by a process that was killed
                    _remove(left)
            trainer.save_checkpoint(unfinished, weights_only=False)  # waits for all ranks
            if self._keeper.is_main:
                self._finish(unfinished, final)
        except OSError as error:
            if is_last:
                raise TrainError(
                    f"the last checkpoint could not be written: {error}",
                    hint=f"make room in {self._folder}; the run goes on from the checkpoint before it",
                ) from error
            if self._keeper.world > 1:  # the others wait for this rank
                raise
            whole.say(f"cannot write to {self._folder}: {error}; training goes on, and saving is tried again")
            self._keeper.missed()
            return
        self._keeper.safe(time.monotonic() - began)
        self._keeper.saved(step, began)

    def _finish(self, unfinished: Path, final: Path) -> None:
        if unfinished.is_dir():
            whole.seal(unfinished)
        whole.sync(unfinished)
        if final.is_dir():
            _remove(final)
        os.replace(unfinished, final)
        whole.sync(self._folder)
        for old in whole.numbered(self._folder, _NAME)[self._keeper.keep :]:
            _remove(old)

    # ---- what is random, and the place in the data -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._trainer is None:
            return {}
        taken = 0 if _ends_epoch(self._trainer) else self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        mine = {"epoch": self._at_epoch, "now": _plain(dice.state(self._device))}
        return {"taken": taken, "dice": self._keeper.gathered(mine)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict if "dice" in state_dict else None

    def _place(self, trainer: Any) -> None:
        """Draw the epoch's order from known dice, and pass over what was trained on already."""
        state, self._loaded = self._loaded, None
        mine = self._own_dice(state, trainer.global_step)
        loop = trainer.fit_loop
        if position.draws_anew(trainer):
            return
        if position.knows_itself(loop):
            _restore(mine and mine["now"], self._device)
            return
        taken = state["taken"] if state is not None else 0
        _restore(mine and mine["epoch" if taken else "now"], self._device)
        self._at_epoch, self._is_placed = _plain(dice.state(self._device)), True
        if state is not None and not taken:
            position.end_epoch(loop)
        position.begin_epoch(loop)
        if taken:
            position.skip(loop, taken)
            _restore(mine and mine["now"], self._device)
            # Said of every loader that has no state of its own; this one is where it was.
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch")

    def _own_dice(self, state: dict[str, Any] | None, step: int) -> dict[str, Any] | None:
        if state is None:
            return None
        if len(state["dice"]) == self._keeper.world:
            mine: dict[str, Any] = state["dice"][self._keeper.rank]
            return mine
        if self._keeper.is_main:
            whole.say(
                f"the checkpoint is of {len(state['dice'])} ranks, this run has {self._keeper.world}: samples of the "
                "epoch that was interrupted may come twice or not at all; the next epoch is whole again"
            )
        dice.seed_all(step, self._keeper.rank)
        return None


class _Metrics(Logger):  # type: ignore[misc]
    """What the Trainer logs, to Diamond's curves."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer

    @property
    def name(self) -> str:
        return "diamond"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        kept = {name: value for name, value in metrics.items() if name not in ("step", "t")}
        log(kept, step=self._trainer.global_step)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They are in the task already."""


def _ends_epoch(trainer: Any) -> bool:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch or progress.current.ready >= trainer.num_training_batches)


def _is_last_step(trainer: Any, ends_epoch: bool) -> bool:
    """Whether training ends by itself now."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    return ends_epoch and trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1


def _plan(trainer: Any) -> Plan:
    steps, named = trainer.estimated_stepping_batches, str(trainer.precision)
    kind = type(trainer.strategy).__name__.removesuffix("Strategy").lower()
    return Plan(
        until=int(steps) if math.isfinite(steps) and steps > 0 else 0,
        per_rank=int(getattr(trainer.train_dataloader, "batch_size", None) or 0),
        accumulate=trainer.accumulate_grad_batches,
        parallel="none" if kind == "singledevice" else kind,
        precision="bf16" if named.startswith("bf16") else "fp16" if named.startswith("16") else f"fp{named[:2]}",
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """As what Lightning reads back without trusting the file: nothing but numbers, text and tensors."""
    if (drawn := state["numpy"]) is not None:
        return {**state, "numpy": [drawn[0], drawn[1].tolist(), *drawn[2:]]}
    return state


def _restore(state: dict[str, Any] | None, device: Any) -> None:
    if state is not None:
        drawn = state["numpy"]
        dice.restore({**state, "numpy": tuple(drawn) if drawn is not None else None}, device)
