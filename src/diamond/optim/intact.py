"""Whether a state that is to be loaded is whole, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diamond.optim.blocks import NORM, Block
from diamond.optim.errors import OptimError

if TYPE_CHECKING:
    from diamond.optim.kfac import KFAC

_UNCHANGED = "load what KFAC has written, unchanged"


def check_outside(optimizer: KFAC, state_dict: Any) -> None:
    """What every optimizer's state has, and the last steps in it."""
    if not isinstance(state_dict, Mapping):
        raise OptimError(f"state_dict: it is a {type(state_dict).__name__}; {_UNCHANGED}")
    missing = sorted({"state", "param_groups"} - set(state_dict)) if "kfac" in state_dict else []
    if missing:
        raise OptimError(f"state_dict: {', '.join(missing)} missing; {_UNCHANGED}")
    if "kfac" not in state_dict:
        return
    places = [place for group in state_dict["param_groups"] for place in group["params"]]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for place, parameter in zip(places, parameters, strict=False):
        last = state_dict["state"].get(place, {}).get("last_step")
        if last is None:
            continue
        if last.shape != parameter.shape:
            raise OptimError(f"state_dict: a last step has shape {tuple(last.shape)}, not {tuple(parameter.shape)}")
        if not bool(torch.isfinite(last).all()):
            raise OptimError("state_dict: a last step in it is not finite; load an earlier checkpoint")


def check_inside(optimizer: KFAC, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """The parts that KFAC adds, against those of an optimizer of this model."""
    _same_keys("numbers", given["numbers"], wanted["numbers"])
    _same_keys("factors", given["factors"], wanted["factors"])
    _same_keys("fallback", given["fallback"], wanted["fallback"])
    blocks = {block.name: block for block in optimizer.blocks}
    for name, averages in given["factors"].items():
        _same_keys(f"factors of {name}", averages, ("a", "g"))
        _check_shapes(f"factors of {name}", {side: one["sum"] for side, one in averages.items()}, blocks[name])
    for place in ("kept", "coming"):
        for name, parts in given[place].items():
            if name not in blocks:
                raise OptimError(f"state_dict: {place} has {name}, which is not in this model; {_UNCHANGED}")
            _check_shapes(f"{place} of {name}", parts, blocks[name])
            _same_keys(f"{place} of {name}", parts, ("inverse_a", "inverse_g"))
    for place in ("used", "ready"):
        if not set(given[place]) <= set(range(len(blocks))):
            raise OptimError(f"state_dict: {place} names blocks that there are not; {_UNCHANGED}")


def is_auto(optimizer: KFAC) -> bool:
    """Whether lr="auto" was asked for; it stays so when lengths cannot be measured and it has given up."""
    return bool(optimizer._given["lr"] == "auto")


def check_lr(optimizer: KFAC, numbers: Mapping[str, Any]) -> None:
    """With "auto" the lr of a group is a share of what is measured, otherwise the length itself; neither is the other.
    Which number it is does not matter: as with every optimizer, it comes with the state."""
    auto = is_auto(optimizer)
    if numbers.get("auto", auto) == auto:
        return
    written, here = ("a number for lr", "lr='auto'") if auto else ("lr='auto'", f"lr={optimizer._given['lr']!r}")
    raise OptimError(f"state_dict: written with {written}, and this optimizer has {here}; give KFAC the same lr")


def _same_keys(what: str, given: Any, wanted: Any) -> None:
    if not isinstance(given, Mapping) or (missing := sorted(set(wanted) - set(given))):
        lacking = ", ".join(missing) if isinstance(given, Mapping) else "all"
        raise OptimError(f"state_dict: {what}: {lacking} missing; {_UNCHANGED}")


def _check_shapes(what: str, parts: Mapping[str, Any], block: Block) -> None:
    """By the last letter of their names."""
    for key, one in parts.items():
        if not isinstance(one, Tensor) or (block.kind == NORM and key.endswith("g")):
            continue
        shape = block.g_shape if key.endswith("g") else block.a_shape
        if tuple(one.shape) != tuple(shape):
            raise OptimError(f"state_dict: {what}: {key} has shape {tuple(one.shape)}, not {tuple(shape)}")
