"""Whether what K-FAC is given makes sense; what is wrong is named, with what would be right."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from diamond.optim import losses
from diamond.optim.compress import Compress
from diamond.optim.curving import CURVATURES
from diamond.optim.errors import OptimError
from diamond.optim.planning import Plan


def numbers(
    lr: Any,
    momentum: Any,
    damping: Any,
    weight_decay: Any,
    decay: Any,
    clip: Any,
    factor_every: Any,
    inverse_every: Any,
) -> None:
    for name, value, high in (
        ("lr", lr, math.inf), ("momentum", momentum, 1.0), ("damping", damping, math.inf),
        ("weight_decay", weight_decay, math.inf), ("decay", decay, 1.0),
        ("clip", 1.0 if clip is None else clip, math.inf),
    ):  # fmt: skip
        some = name in ("damping", "clip")  # without damping there may be no inverse, and with such a bound no step
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < high or (some and not value):
            also = {"lr": ", or 'auto'", "clip": ", or None for no bound"}.get(name, "")
            least = "above 0" if some else "of at least 0"
            raise OptimError(f"{name}={value!r}: give a number {least}{'' if high == math.inf else ', below 1'}{also}")
    for name, number in (("factor_every", factor_every), ("inverse_every", inverse_every)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptimError(f"{name}={number!r}: give a whole number of at least 1")


def kinds(model: Any, plan: Any, compress: Any, fallback: Any, exclude: Any, seed: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptimError(f"model={type(model).__name__}: give the model itself, not its parameters")
    for name, value, kind in (("plan", plan, Plan), ("compress", compress, Compress)):
        if value is not None and not isinstance(value, kind):
            raise OptimError(f"{name}={value!r}: give a diamond.optim.{kind.__name__}, or leave it out")
    if fallback is not None and not callable(fallback):
        raise OptimError(f"fallback={fallback!r}: give what makes an optimizer of parameters, as AdamW(lr=1e-3) does")
    if isinstance(exclude, str) or not all(isinstance(one, str) for one in exclude):
        raise OptimError(f"exclude={exclude!r}: give a list of names of modules, as in model.named_modules()")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptimError(f"seed={seed!r}: give a whole number")


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptimError(f"{name}={value!r}: give a whole number of at least 0")
    return value


def names(curvature: Any, sharing: Any, loss: Any, kind: Any) -> None:
    for name, text, known in (
        ("curvature", curvature, CURVATURES), ("sharing", sharing, ("expand", "reduce")),
        ("kind", kind, ("kfac", "ekfac")),
    ):  # fmt: skip
        if text not in known:
            raise OptimError(f"{name}={text!r} is not known; one of {', '.join(known)}")
    if not callable(loss) and loss != "auto" and loss not in losses.NAMES:
        raise OptimError(f"loss={loss!r} is not known; 'auto', one of {', '.join(losses.NAMES)}, or a function")
