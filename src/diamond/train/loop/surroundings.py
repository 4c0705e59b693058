"""What a process finds around it: its device, its own script."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch

from diamond.train.errors import TrainError


def device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def code_hash() -> str:
    """A hash of the script, to notice that it was changed between two jobs."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
    except OSError:
        return ""


def check(*, checkpoints: Any, seed: Any, save_every_s: Any, keep: Any, hang_after_s: Any) -> None:
    """What `run` is given, before anything begins.

    Raises:
        TrainError: it names the argument.
    """
    if not isinstance(checkpoints, (str, os.PathLike)) or not os.fspath(checkpoints):
        raise TrainError(f"checkpoints={checkpoints!r} is no folder", hint="give its path")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TrainError(f"seed={seed!r} is no seed", hint="give a whole number")
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise TrainError(f"keep={keep!r} would leave nothing to go on from", hint="keep at least 1; 2 is safer")
    for name, value, least in (("save_every_s", save_every_s, 0.0), ("hang_after_s", hang_after_s, 0.0)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and least <= value < math.inf):
            raise TrainError(f"{name}={value!r} is no time", hint="give seconds, 0 or more, or leave it out")
