"""Whether what K-FAC is given makes sense; what is wrong is named, with what would be right."""

from __future__ import annotations

import math
from typing import Any

from diamond.optim import losses
from diamond.optim.curving import CURVATURES
from diamond.optim.errors import OptimError


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
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < high:
            also = ", or 'auto'" if name == "lr" else ""
            raise OptimError(
                f"{name}={value!r}: give a number of at least 0{'' if high == math.inf else ', below 1'}{also}"
            )
    for name, number in (("factor_every", factor_every), ("inverse_every", inverse_every)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise OptimError(f"{name}={number!r}: give a whole number of at least 1")


def names(curvature: Any, sharing: Any, loss: Any, kind: Any) -> None:
    for name, text, known in (
        ("curvature", curvature, CURVATURES), ("sharing", sharing, ("expand", "reduce")),
        ("kind", kind, ("kfac", "ekfac")),
    ):  # fmt: skip
        if text not in known:
            raise OptimError(f"{name}={text!r} is not known; one of {', '.join(known)}")
    if not callable(loss) and loss != "auto" and loss not in losses.NAMES:
        raise OptimError(f"loss={loss!r} is not known; 'auto', one of {', '.join(losses.NAMES)}, or a function")
