"""torch.compile of a model, in place, so that no name in a checkpoint changes; where it cannot be, the model stays.

What is compiled is inside of the wrapper: the whole model before DDP, each block before FSDP2, as torch advises, for it
cannot trace through their hooks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch
from torch import nn

from diamond.train.errors import TrainError
from diamond.train.loop import parallel

MODES = ("default", "reduce-overhead", "max-autotune")


def mode_of(wanted: bool | str) -> str | None:
    """The mode, None for none.

    Raises:
        TrainError: there is no such mode.
    """
    if isinstance(wanted, bool):
        return "default" if wanted else None
    if wanted not in MODES:
        raise TrainError(f"compile={wanted!r} is unknown", hint=f"use True, False or one of {', '.join(MODES)}")
    return wanted


def compile_if_able(
    model: nn.Module, mode: str, kind: str, device: torch.device, *, agree: Callable[[bool], bool],
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Compile the model before it is spread as `kind`: on all ranks, or, with a line that says why, on none."""
    problem = missing(device)
    if not agree(not problem):
        say(f"training goes on without torch.compile: {problem or 'a rank on another machine cannot'}")
        return
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled later runs as it is, with torch's warning
    parts = list(parallel.blocks(model)) if kind in ("fsdp", "hybrid") else []
    for part in parts or [model]:
        part.compile(mode=mode)


def missing(device: torch.device) -> str:
    """What compiling lacks on this machine, and how to mend it; empty if nothing. Tries it, which takes seconds."""
    if device.type == "cuda":  # Triton compiles a few lines of C for every kernel
        found = _compiler(os.environ.get("CC"), "gcc", "clang", "cc")
        what, variable = "C compiler (gcc, clang)", "CC"
    else:
        found = _compiler(os.environ.get("CXX"), "g++", "clang++")
        what, variable = "C++ compiler (g++, clang++)", "CXX"
    if not found:
        return f"there is no {what}; load one (`module load gcc`), add it to the image, or set {variable}"
    try:
        made = torch.compile(_trial, fullgraph=True)(torch.ones(7, device=device, requires_grad=True))
        torch.autograd.backward(made)
    except Exception as error:  # whatever a compiler, Triton or a full /tmp may do
        why = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:2])[:300]
        return f"a trial failed ({why or type(error).__name__}); mend the compiler, or leave compile out"
    return ""


def _compiler(*names: str | None) -> str | None:
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _trial(values: torch.Tensor) -> torch.Tensor:
    return (values.sin() * 2.0).sum()
