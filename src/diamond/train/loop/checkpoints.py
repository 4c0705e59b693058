"""What a run saves, when, and how it goes on from it: between the loop and the files.

How often is weighed from what a checkpoint was measured to cost and how often this run failed. Must not know how files
are written (`saving`), nor what a step is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from diamond.train.ending import job_ends_at
from diamond.train.errors import TrainError
from diamond.train.loop import dice, surroundings
from diamond.train.loop.control import Control
from diamond.train.loop.kept import Kept
from diamond.train.loop.saving import SUSPECTS, Found, SaveFailed, Saver, packed, read_part
from diamond.train.rhythm import interval_s, mean_between_failures, percentile

_FIRST_SAVE_S = 60.0  # until it is known what saving costs


class Checkpoints:
    """Of one run. All ranks call the same methods at the same step; only rank 0 decides when.

    Attributes:
        saved_at: up to which step all is in the newest checkpoint; -1 after one that failed.
        ran_s, failures: for how long the run was trained before this process, and how often that ended badly.
        more: gives what else to keep of what was measured.
        data: what the position in the data needs beside numbers, of the checkpoint that the run goes on from.
    """

    def __init__(
        self, saver: Saver, kept: Kept, control: Control, *, device: torch.device, seed: int, every_s: float | None,
        checks: bool, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.saver = saver
        self._control, self._checks = control, checks
        self._from: Found | None = None
        self.data: Any = None
        self._has_begun = False
        self.saved_at = 0
        self.ran_s, self.failures = 0.0, 0
        self.more: Callable[[], dict[str, Any]] = dict
        self._kept, self._device, self._seed, self._every_s, self._say = kept, device, seed, every_s, say
        self._began_at, self._last = time.time(), time.monotonic()
        self._since = self._last

    # ---- when --------------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        return not self.saver.is_busy and time.monotonic() - self._last >= self.interval_s()

    def interval_s(self) -> float:
        if self._every_s is not None:
            return self._every_s
        if not self.saver.took_s:
            return self._first_s()
        blocks, takes = percentile(self.saver.blocked_s, 0.9), percentile(self.saver.took_s, 0.9)
        return interval_s(blocks, takes, mean_between_failures(self._ran_s() / 3600, self.failures))

    def _ran_s(self) -> float:
        return self.ran_s + time.monotonic() - self._since

    def needed_s(self) -> float:
        """How long saving takes at worst, from what was measured."""
        return percentile(self.saver.took_s, 0.99) or self._first_s()

    def _first_s(self) -> float:
        """Until when the first checkpoint is made, which tells what one costs: early in a short job."""
        ends = job_ends_at()
        return _FIRST_SAVE_S if ends is None else min(_FIRST_SAVE_S, max(1.0, 0.1 * (ends - self._began_at)))

    def told(self) -> dict[str, Any]:
        """How saving goes: how many so far in this process, what one costs on average, how often there is one."""
        blocked, took = self.saver.blocked_s, self.saver.took_s
        return {
            "count": len(took),
            "blocked_s": sum(blocked) / len(blocked) if blocked else None,
            "took_s": sum(took) / len(took) if took else None,
            "interval_s": self.interval_s(),
        }

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(self, step: int, position: Mapping[str, float], *, is_last_word: bool = True) -> None:
        """`is_last_word`: whether nothing of this step is still to come, as it is in the body of the loop."""
        self._last = time.monotonic()
        self._settle()
        if not self._are_numbers():
            raise TrainError(
                f"the weights are not numbers any more, after step {step}: nothing is saved",
                hint="lower the learning rate, clip gradients, or look at the data; the run goes on from the "
                "checkpoint before; check_loss=False saves anyway",
            )
        own = packed({**dice.state(self._device), "buffers": self._kept.of_rank()})
        common = packed(self._kept.small(), "run.state or an object of prepare()")
        try:
            self.saver.save(step, self._kept.tensors(rank=self.saver.rank), own, common, self._meta(step, position))
        except OSError as error:
            self._say(f"cannot write to {self.saver.folder}: {error}; training goes on, and saving is tried again")
            return
        if self._kept.averages:  # they change in the loop's body, whenever the script likes
            self.saver.staged()
        self.saved_at = step if is_last_word else step - 1

    def save_and_wait(self, step: int, position: Mapping[str, float]) -> None:
        """For when nothing comes after it."""
        self._settle()
        if step > self.saved_at:
            self.save(step, position)
        try:
            self.saver.wait()
        except SaveFailed as error:
            raise TrainError(
                f"the last checkpoint could not be written: {error}",
                hint=f"make room in {self.saver.folder}; the run goes on from the checkpoint before it",
            ) from error
        self.saver.annotate(step, {"meant_to_end": True})

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        try:
            self.saver.wait()
        except SaveFailed as error:
            self.saved_at = -1
            self._say(f"a checkpoint could not be written: {error}; the one before it is kept")

    def _meta(self, step: int, position: Mapping[str, float]) -> dict[str, Any]:
        return {
            "step": step,
            "seed": self._seed,
            "data": dict(position),
            "shapes": self._kept.shapes(),
            "code": surroundings.code_hash(),
            "ran_s": round(self._ran_s(), 3),
            "failures": self.failures,
            "noise": self.more(),
            "meant_to_end": False,  # until the run ends with it
        }

    # ---- going on ----------------------------------------------------------------------------------------------------

    def resume(self, *, rank: int, world: int) -> Found | None:
        """Bring back the newest checkpoint that is whole and good, if there is one.

        Raises:
            TrainError: there are checkpoints, but of another model, or none can be gone on from.
        """
        found = self._loaded()
        if found is None:
            return None
        self.saved_at = found.step
        self._remember(found)
        own: Path = found.path / f"rank-{rank}.pt"
        if found.world == world:
            kept = read_part(own)
            dice.restore(kept, self._device)
            self._kept.load_of_rank(kept.get("buffers", {}))  # checkpoints of earlier versions have none
        else:  # another number of ranks: what each drew is nobody's now
            dice.seed_all(self._seed, rank, found.step)
        self.saver.supersede(found)
        self._from = found
        self.data = read_part(found.path / "common.pt").get("data")  # checkpoints of earlier versions have none
        self._say(f"going on from {found.path} (step {found.step})")
        return found

    def anew(self) -> None:
        """The run begins, whatever is there; checkpoints of before go with the first new one."""
        self.saver.supersede(None)

    def _loaded(self) -> Found | None:
        passed = self._suspects()
        while (found := self.saver.newest_whole(self._control.all_agree, self._say, without=passed)) is not None:
            self._kept.check_same(found, self._say)
            self._kept.load(found, self.saver, self._say)
            if self._are_numbers():
                break
            self._say(f"the weights in {found.path} are not numbers; going back to the one before it")
            passed = {*passed, found.path.name}
        return found

    def _suspects(self) -> set[str]:
        """From which not to go on, as the last starts from there failed at once. If that leaves none, going back does
        not help: then from the newest again."""
        there = {path.name for path in self.saver.listed()}
        suspects = there.intersection(self.saver.suspects())
        # Ranks may see a shared folder a moment apart, and must ask each other alike.
        if self._control.all_agree(not suspects):
            return set()
        if not self._control.all_agree(bool(there - suspects)):
            self._say("every checkpoint was gone on from and failed at once; going on from the newest again")
            return set()
        for name in sorted(suspects, reverse=True):
            self._say(
                f"the last start from {self.saver.folder / name} failed before it saved anything; going back to "
                f"the one before it (remove {self.saver.folder / SUSPECTS} to go on from the newest)"
            )
        return suspects

    def begins(self) -> None:
        """To train."""
        self._has_begun = True

    def failed(self) -> None:
        """The run ends by an error of its own. If it went on from a checkpoint and made none since, that one may be
        to blame: the next start goes one further back."""
        if self._from is not None and self._has_begun and not self.saver.took_s:
            self.saver.suspect(self._from)

    def _are_numbers(self) -> bool:
        return not self._checks or self._control.all_agree(self._kept.are_numbers())

    def _remember(self, found: Found) -> None:
        """How the run fared. Whoever goes on from a checkpoint that was not made to end with comes after a failure;
        of several without a checkpoint in between one is seen, as nothing of the others is left."""
        self.ran_s = float(found.meta.get("ran_s", 0.0))
        self.failures = int(found.meta.get("failures", 0)) + (0 if found.meta.get("meant_to_end", True) else 1)
