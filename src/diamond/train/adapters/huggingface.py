"""A callback for the Hugging Face Trainer: it saves as often as is worth it, ends in time, and goes on exactly there.

    from diamond.train.adapters.huggingface import DiamondCallback, last_checkpoint

    trainer = Trainer(..., callbacks=[DiamondCallback()])
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))

The Trainer writes the checkpoints, as it always does, and reads them again. This seals each one when it is written, so
that one left half-written, or damaged later, is passed over.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from numbers import Real
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments

from diamond.train import metrics
from diamond.train.adapters import whole
from diamond.train.adapters.keeper import Keeper, Plan
from diamond.train.errors import TrainError

_NAME = re.compile(r"checkpoint-(\d+)")
_STATE = "trainer_state.json"  # what the Trainer's first rank writes last
_DEFAULT_STEPS = TrainingArguments.__dataclass_fields__["save_steps"].default


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint of the Trainer that is whole, for `resume_from_checkpoint`; None where there is none.

    Raises:
        TrainError: there were whole ones once, and all are damaged now.
    """
    return whole.newest(output_dir, _NAME, _fault)


def _fault(path: Path) -> str:
    if not (path / _STATE).is_file():
        return f"{_STATE} is missing"
    return whole.fault(path) or _rank_fault(path)


def _rank_fault(path: Path) -> str:
    """Ranks write their random numbers each for itself: the first may be done before the others."""
    world = metrics.context().world_size
    if world > 1 and next(path.glob("rng_state_*.pth"), None) is not None:
        missing = [rank for rank in range(world) if not (path / f"rng_state_{rank}.pth").exists()]
        if missing and not (path / whole.SEAL).exists():
            return f"rng_state_{missing[0]}.pth is missing"
    return ""


class DiamondCallback(TrainerCallback):  # type: ignore[misc]
    """Give it to the Trainer, on every rank.

    Args:
        save_every_s: seconds between checkpoints. None weighs what saving costs against what a failure would, unless
            the Trainer's own `save_strategy` or `save_steps` were set: those are left alone.
        keep: how many checkpoints stay, unless `save_total_limit` was set.
    """

    def __init__(self, *, save_every_s: float | None = None, keep: int = 2) -> None:
        self._save_every_s = save_every_s
        self._keeper = Keeper(save_every_s=save_every_s, keep=keep)
        self._takes_over = False  # what the Trainer was not told, this decides
        self._leaving = 0
        self._began = 0.0
        self._sealing: threading.Thread | None = None

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.ignore_data_skip:
            raise TrainError(
                "ignore_data_skip=True would train on samples again that were trained on before the job ended",
                hint="leave it out of the TrainingArguments, or train without DiamondCallback",
            )
        if args.save_only_model:
            raise TrainError(
                "save_only_model=True saves nothing that training could go on from",
                hint="leave it out of the TrainingArguments, or train without DiamondCallback",
            )
        if args.save_total_limit is None:
            args.save_total_limit = self._keeper.keep
        is_default = args.save_strategy == "steps" and args.save_steps == _DEFAULT_STEPS
        self._takes_over = is_default and not args.load_best_model_at_end
        self._keeper.by_time = self._takes_over or self._save_every_s is not None
        self._yield_steps(args, state)
        hint = "on machines without a GPU give TrainingArguments(use_cpu=True), or the Trainer does not join the ranks"
        self._keeper.begin(state.global_step, _plan(args, state), world=args.world_size, join_hint=hint)
        if self._keeper.is_main:
            _sweep(Path(args.output_dir), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._settle()
        self._keeper.end(state.global_step)

    def _yield_steps(self, args: Any, state: Any) -> None:
        if self._takes_over:
            state.save_steps = 0  # for the Trainer: only at the end

    # ---- after every step --------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        decided = self._keeper.after_step(state.global_step)
        if not control.should_training_stop:  # else it ends by itself now
            if decided.stop:
                self._leaving = decided.stop
                control.should_save = control.should_training_stop = True
                control.should_evaluate = False  # it may take longer than there is time
            elif decided.save:
                control.should_save = True
        self._began = time.monotonic()
        if control.should_save:
            self._before_saving(args, state)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._leaving:
            number, self._leaving = self._leaving, 0
            self._settle()
            ending = self._keeper.leave(number, state.global_step)
            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()
            raise ending
        self._began = time.monotonic()
        if control.should_save:
            self._before_saving(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()  # it comes before saving, and is no part of it

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # Elsewhere the Trainer shows them itself.
        if state.is_world_process_zero and os.environ.get("DIAMOND_METRICS_FILE"):
            values = {
                name: value
                for name, value in (logs or {}).items()
                if name not in ("step", "t") and (isinstance(value, Real) or hasattr(value, "item"))
            }
            metrics.log(values, step=state.global_step)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _before_saving(self, args: Any, state: Any) -> None:
        self._settle()
        if self._takes_over:
            state.save_steps = args.save_steps  # what a checkpoint says of it is compared when it is read

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._settle()
        self._yield_steps(args, state)
        self._keeper.barrier()  # every rank has written its part
        began, path = self._began, Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._keeper.is_main and path.is_dir():  # elsewhere are those of a search for hyperparameters
            self._sealing = threading.Thread(target=self._seal, args=(path, began), name="diamond-seal")
            self._sealing.start()
        self._keeper.saved(state.global_step, began)

    def _seal(self, path: Path, began: float) -> None:
        try:
            whole.seal(path)
        except OSError as error:  # a full disk, or the Trainer removed it: there are others
            whole.say(f"{path} could not be sealed: {error}")
        self._keeper.safe(time.monotonic() - began)

    def _settle(self) -> None:
        """Wait until the last checkpoint is sealed."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None


def _sweep(folder: Path, step: int) -> None:
    """Remove what was left half-written after the checkpoint that training goes on from: the Trainer counts it among
    those to keep, and would rather remove whole ones."""
    for path in whole.numbered(folder, _NAME):
        if int(path.name.rpartition("-")[2]) > step and (wrong := _fault(path)):
            whole.say(f"{path} is removed: it is not whole ({wrong})")
            shutil.rmtree(path, ignore_errors=True)


def _plan(args: Any, state: Any) -> Plan:
    kind = next((name for name in ("deepspeed", "fsdp") if getattr(args, name, None)), "")
    return Plan(
        until=state.max_steps,
        per_rank=args.train_batch_size,
        accumulate=args.gradient_accumulation_steps,
        parallel=kind or ("ddp" if args.world_size > 1 else "none"),
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
    )
