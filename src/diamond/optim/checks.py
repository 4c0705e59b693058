"""Whether what K-FAC is given makes sense; what is wrong is named, with what would be right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from diamond.optim import losses
from diamond.optim.blocks import discover, unwrapped
from diamond.optim.compress import Compress
from diamond.optim.curving import CURVATURES
from diamond.optim.errors import OptimError
from diamond.optim.pieces import LARGEST, chosen
from diamond.optim.planning import Plan

_MOST = 5  # names that an error gives


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
    exclusions(model, exclude)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise OptimError(f"seed={seed!r}: give a whole number")
    if plan is not None:
        _planned(model, plan, exclude)


def exclusions(model: nn.Module, exclude: Any) -> None:
    """Each must be the name of a module, or of a block; those that K-FAC would not have covered anyway are fine."""
    wrong_kind = isinstance(exclude, str) or not isinstance(exclude, Collection)
    if wrong_kind or not all(isinstance(one, str) for one in exclude):
        raise OptimError(f"exclude={exclude!r}: give a list of names of modules, as in model.named_modules()")
    if not exclude:
        return
    root = unwrapped(model)
    known = dict.fromkeys(name for name, _ in root.named_modules() if name)
    known |= dict.fromkeys(block.name for block in discover(root))
    if unknown := [name for name in exclude if name not in known]:
        near = dict.fromkeys(one for name in unknown for one in _close(name, list(known)))
        raise OptimError(
            f"exclude: no module of the model is called {_listed(map(repr, unknown))}; "
            f"there {'are' if len(near) > 1 else 'is'} {_listed(near)}: see model.named_modules()"
        )


def _close(name: str, known: Sequence[str]) -> list[str]:
    """The same below or above another module, spelled much alike, or any."""
    related = [one for one in known if name.endswith(f".{one}") or one.endswith(f".{name}")]
    holding = [one for one in known if name.startswith(f"{one}.")]  # of a parameter its module
    return related or holding[-1:] or difflib.get_close_matches(name, known) or list(known)


def _listed(names: Iterable[str]) -> str:
    first = list(names)
    more = len(first) - _MOST
    return ", ".join(first[:_MOST]) + (f" and {more} more" if more > 0 else "")


def _planned(model: nn.Module, plan: Plan, exclude: Sequence[str]) -> None:
    """A plan says by their order who works on which blocks, so these must be the same."""
    here = [block.name for block in chosen(discover(unwrapped(model)), exclude, LARGEST)]
    there = [block.name for block in plan.blocks]
    if here == there:
        return
    lacking, beyond = ([one for one in a if one not in b] for a, b in ((here, there), (there, here)))
    said = [f"{_listed(lacking)} not planned for"] if lacking else []
    said += [f"{_listed(beyond)} planned for, but not here or excluded"] if beyond else []
    raise OptimError(
        f"plan: it has owners for {len(there)} blocks, and this model has {len(here)}: "
        f"{'; '.join(said) or 'the same ones in another order'}; plan again with this model, and give the same exclude "
        "to plan and KFAC"
    )


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptimError(f"{name}={value!r}: give a whole number of at least 0")
    return value


def names(curvature: Any, sharing: Any, loss: Any, kind: Any) -> None:
    if isinstance(kind, str) and kind.lower() == "ekfac":
        raise OptimError(
            "kind='ekfac' is no longer there: a step took ten times K-FAC's, and training diverged. Leave kind out for "
            "K-FAC, or use diamond.optim.SOAP, which also works in eigenbases of the curvature"
        )
    for name, text, known in (
        ("curvature", curvature, CURVATURES), ("sharing", sharing, ("expand", "reduce")),
        ("kind", kind, ("kfac",)),
    ):  # fmt: skip
        if text not in known:
            raise OptimError(f"{name}={text!r} is not known; one of {', '.join(known)}")
    if not callable(loss) and loss != "auto" and loss not in losses.NAMES:
        raise OptimError(f"loss={loss!r} is not known; 'auto', one of {', '.join(losses.NAMES)}, or a function")
