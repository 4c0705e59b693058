"""What K-FAC keeps between steps, so that a run can go on: with as many ranks bit by bit, or with others.

`state_dict` of the optimizer holds what this rank has, for the same rank of as many. `sharded_state` is for
torch.distributed.checkpoint: every block is saved by its owner and read by its owner of the day.

    state = sharded_state(optimizer)
    dcp.save({"model": …, "optimizer": state}, checkpoint_id=folder)
    …
    state = sharded_state(optimizer)
    dcp.load({"model": …, "optimizer": state}, checkpoint_id=folder)
    load_sharded(optimizer, state)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diamond.optim.blocks import NORM, Block
from diamond.optim.errors import OptimError
from diamond.optim.factors import Average
from diamond.optim.intact import check_inside, check_lr, is_auto
from diamond.optim.lengths import Lengths
from diamond.optim.precondition import Inverse
from diamond.optim.sharded import data_rank, held

if TYPE_CHECKING:
    from diamond.optim.kfac import KFAC

Make = Callable[[], Tensor]
_VERSION = 1
KIND = "kfac"
_ANOTHER_SIZE = "diamond.optim.keeping.sharded_state is for checkpoints that other numbers of ranks can read"
_NUMBERS = (
    "steps", "skipped", "damping", "measures", "_rate", "_reference",
    "_factors_at", "_inverses_at", "_lengths_at", "_calm", "_stuck",
)  # fmt: skip
_LATER = {"stuck": 0, "watched": False, "brake": None}  # what states that were written before it was kept come without


def memory_bytes(optimizer: KFAC) -> dict[str, int]:
    """Bytes that this rank holds, by what they are for."""
    averages = [average._sum for one in optimizer.factors for average in (one.a, one.g)]
    inverses = [tensor for one in optimizer.kept.values() for tensor in one.tensors()]
    steps = [value for one in optimizer.state.values() for value in one.values()]
    fallback = [value for one in optimizer._fallback.state.values() for value in one.values()]
    found: dict[str, list[Any]] = {"factors": averages, "inverses": inverses, "last steps": steps, "fallback": fallback}
    return {name: sum(map(_nbytes, tensors)) for name, tensors in found.items()}


def _nbytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    part = held(value)
    return part.numel() * part.element_size()


# ---- for the same rank of as many ------------------------------------------------------------------------------------


def state(optimizer: KFAC) -> dict[str, Any]:
    crew = optimizer.crew
    return {
        "version": _VERSION,
        "kind": KIND,
        "blocks": _described(optimizer.blocks),
        "rank": crew.rank,
        "owners": list(crew.owners),
        "workers": list(crew.workers),
        "numbers": _numbers(optimizer),
        "used": sorted(crew.used),
        "ready": sorted(crew.ready),
        "factors": {one.block.name: {"a": one.a.state(), "g": one.g.state()} for one in optimizer.factors},
        "kept": {optimizer.blocks[index].name: _parts(one) for index, one in optimizer.kept.items()},
        "coming": {optimizer.blocks[index].name: _parts(one) for index, one in optimizer.refreshing.coming().items()},
        "generators": optimizer._curving.state(),
        "fallback": optimizer._fallback.state_dict(),
        "wire": None if optimizer.wire is None else optimizer.wire.state_dict(),
    }


def check(optimizer: KFAC, given: Any) -> None:
    """Before anything is changed."""
    if not isinstance(given, Mapping):
        raise OptimError("state_dict: it has no part 'kfac', so KFAC has not written it")
    wanted = state(optimizer)
    _complete(given, wanted)
    _check_about(optimizer, given)
    crew = optimizer.crew
    if (given["rank"], given["owners"], given["workers"]) != (crew.rank, crew.owners, crew.workers):
        raise OptimError(
            f"state_dict: rank {given['rank']} has written it, and the blocks were shared otherwise than by rank "
            f"{crew.rank} now; load each rank's own, with the same plan and as many ranks ({_ANOTHER_SIZE})"
        )
    if (given["wire"] is None) != (optimizer.wire is None):
        raise OptimError("state_dict: gradients were compressed otherwise; give the same compress=")
    wanted["numbers"] = {name: one for name, one in wanted["numbers"].items() if name not in _LATER}
    check_inside(optimizer, given, wanted)
    check_lr(optimizer, given["numbers"])
    for name, averages in given["factors"].items():
        _check_finite(name, [one["sum"] for one in averages.values()])
    for name, parts in [*given["kept"].items(), *given["coming"].items()]:
        _check_finite(name, list(parts.values()))


def load(optimizer: KFAC, given: Mapping[str, Any]) -> None:
    """What `check` found to be right."""
    places = {block.name: block.index for block in optimizer.blocks}
    for name, averages in given["factors"].items():
        factors = optimizer.factors[places[name]]
        factors.a, factors.g = (_average(averages[side], factors.block) for side in "ag")
    optimizer.kept.clear()
    for name, parts in given["kept"].items():
        optimizer.kept[places[name]] = _inverse(_moved(parts, optimizer.blocks[places[name]]), "inverse")
    coming = {places[name]: _moved(parts, optimizer.blocks[places[name]]) for name, parts in given["coming"].items()}
    optimizer.refreshing.put(
        given["numbers"]["due"], {index: _inverse(parts, "inverse") for index, parts in coming.items()}
    )
    optimizer.crew.used, optimizer.crew.ready = set(given["used"]), set(given["ready"])
    optimizer._fallback.load_state_dict(copy.deepcopy(given["fallback"]))
    for kept in optimizer.state.values():  # torch's own loading keeps the tensors it is given, and steps change them
        kept["last_step"] = kept["last_step"].clone()
    if optimizer.wire is not None:
        optimizer.wire.load_state_dict(given["wire"])
    optimizer._curving.load(given["generators"])
    _set_numbers(optimizer, given["numbers"])


def _average(given: Mapping[str, Any], block: Block) -> Average:
    value = given["sum"]
    if value is None:
        return Average()
    return Average(value.to(held(block.weight).device, copy=True), given["weight"])


def _moved(parts: Mapping[str, Any], block: Block) -> dict[str, Any]:
    device = held(block.weight).device
    return {key: one.to(device, copy=True) if isinstance(one, Tensor) else one for key, one in parts.items()}


def _parts(one: Inverse) -> dict[str, Any]:
    return {"inverse_a": one.a, "inverse_g": one.g}


def _inverse(parts: Mapping[str, Any], what: str) -> Inverse:
    return Inverse(parts[f"{what}_a"], parts.get(f"{what}_g"))


def _numbers(optimizer: KFAC) -> dict[str, Any]:
    found: dict[str, Any] = {name.lstrip("_"): getattr(optimizer, name) for name in _NUMBERS}
    found["auto"] = is_auto(optimizer)
    found["bad"] = 0 if optimizer._bad is None else int(optimizer._bad)
    found["lengths"] = [optimizer.lengths.step, optimizer.lengths.momentum, None, optimizer.lengths.still]
    found["batch"] = optimizer._batch
    found["along"] = None if optimizer._along is None else float(optimizer._along)
    found["armed"], found["again"] = optimizer._curving.armed, optimizer._curving.again
    found["due"] = optimizer.refreshing.due
    found["watched"] = optimizer._watch.on
    found["brake"] = None if optimizer._brake is None else float(optimizer._brake)
    return found


def _set_numbers(optimizer: KFAC, written: Mapping[str, Any]) -> None:
    given = _LATER | dict(written)
    optimizer.directions.renew()
    for name in _NUMBERS:
        setattr(optimizer, name, given[name.lstrip("_")])
    first = next(iter(optimizer.root.parameters()))
    optimizer._bad = torch.tensor(given["bad"], dtype=torch.int32, device=held(first).device) if given["bad"] else None
    optimizer.lengths, optimizer._batch = Lengths(*given["lengths"]), given.get("batch", [])
    along = given["along"]
    optimizer._along = None if along is None else torch.tensor(along, device=held(first).device)
    brake = given["brake"]
    optimizer._brake = None if brake is None else torch.tensor(brake, device=held(first).device)
    optimizer._watch.end()
    if given["watched"]:
        optimizer._watch.begin()
    optimizer._curving.disarm()
    if given["armed"]:
        optimizer._curving.arm(again=given["again"])


# ---- checks ----------------------------------------------------------------------------------------------------------


def _described(blocks: list[Block]) -> dict[str, list[Any]]:
    """Pieces only where there are several."""
    found: dict[str, list[Any]] = {one.name: [one.kind, one.copies, one.g, one.a] for one in blocks}
    for one in blocks:
        found[one.name] += [one.g_pieces, one.a_pieces] if one.g_pieces * one.a_pieces > 1 else []
    return found


def _complete(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if missing := sorted(set(wanted) - set(given)):
        raise OptimError(f"state_dict: {', '.join(missing)} missing; load what KFAC has written, unchanged")


def _check_about(optimizer: KFAC, given: Mapping[str, Any]) -> None:
    if given["version"] != _VERSION:
        raise OptimError(f"state: it is of version {given['version']!r}, and this reads version {_VERSION}")
    if given["kind"] != KIND:
        what = ", which is no longer there: it diverged" if given["kind"] == "ekfac" else ""
        raise OptimError(
            f"state: it is of kind={given['kind']!r}{what}; load the model's weights alone, "
            "and begin with a new optimizer"
        )
    wanted, there = _described(optimizer.blocks), {name: list(one) for name, one in given["blocks"].items()}
    different = [
        *(f"{name} is not in it" for name in wanted if name not in there),
        *(f"{name} is not in this model" for name in there if name not in wanted),
        *(
            f"{name} is {_shape(there[name])} in it and {_shape(wanted[name])} here"
            for name in wanted
            if name in there and there[name] != wanted[name]
        ),
    ]
    if different:
        more = f", and {len(different) - 5} more" if len(different) > 5 else ""
        raise OptimError(f"state: it is of another model: {'; '.join(different[:5])}{more}")


def _shape(described: list[Any]) -> str:
    kind, copies, g, a, *pieces = described
    return f"{kind} {copies}x{g}x{a}" + (f" split in {pieces[0]}x{pieces[1]}" if pieces else "")


def _check_finite(name: str, values: list[Any]) -> None:
    for one in values:
        if isinstance(one, Tensor) and not bool(torch.isfinite(one).all()):
            raise OptimError(f"state: what is kept of {name} is not finite; load an earlier checkpoint")


# ---- for any number of ranks -----------------------------------------------------------------------------------------


def sharded_state(optimizer: KFAC) -> dict[str, Any]:
    """For torch.distributed.checkpoint, both to save it and to load into it. All ranks call it.

    What is not known yet is there as zeros, so that a new optimizer can load it. What gradient compression remembers is
    not kept; use state_dict with as many ranks.

    Raises:
        OptimError: the fallback's state is no numbers and tensors of its parameters' shapes.
    """
    tensors = {key: make() for key, make in _entries(optimizer).items()}
    return {"about": json.dumps(_about(optimizer)), **tensors}


def load_sharded(optimizer: KFAC, given: Mapping[str, Any]) -> None:
    """Takes what torch.distributed.checkpoint has read into a `sharded_state`. All ranks call it.

    Raises:
        OptimError: it is of another model, kind or lr, a part is missing, or a number in it is not finite.
    """
    if "about" not in given:
        raise OptimError("state: about is missing; load into what sharded_state gives")
    try:
        about = json.loads(given["about"])
    except (TypeError, ValueError) as error:
        raise OptimError("state: about is not what sharded_state has written; load an earlier checkpoint") from error
    _check_about(optimizer, about)
    check_lr(optimizer, about["numbers"])
    entries = _entries(optimizer)
    _complete(given, entries)
    for block in optimizer.blocks:
        if optimizer.crew.owns(block.index):
            _check_finite(block.name, [given[key] for key in given if key.startswith(f"block.{block.name}.")])
    optimizer.kept.clear()
    optimizer.refreshing.put(about["numbers"]["due"], {})
    for block in optimizer.blocks:
        if optimizer.crew.owns(block.index):
            _take_block(optimizer, block, given, about["known"][block.name])
    places = {block.name: block.index for block in optimizer.blocks}
    optimizer.crew.used = {places[name] for name in about["used"]}
    optimizer.crew.ready = set()
    optimizer.crew.spread(optimizer.kept, sorted(optimizer.crew.used))
    _take_parameters(optimizer, given, about, entries)
    for group, values in zip(optimizer.param_groups, about["groups"], strict=True):
        group.update(values)
    _take_dice(optimizer, about["dice"], about["numbers"]["steps"])
    _set_numbers(optimizer, about["numbers"])


def _about(optimizer: KFAC) -> dict[str, Any]:
    """All that is no tensor, the same on every rank."""
    mine: dict[str, Any] = {"known": {}, "dice": {}}
    for block in optimizer.blocks:
        if optimizer.crew.owns(block.index):
            factors, kept = optimizer.factors[block.index], optimizer.kept.get(block.index)
            mine["known"][block.name] = {
                "a": factors.a.weight,
                "g": factors.g.weight,
                "kept": kept is not None,
                "coming": block.index in optimizer.refreshing.coming(),
            }
    mine["dice"] = {name: bytes(one.tolist()).hex() for name, one in optimizer._curving.state().items()}
    each = optimizer.crew.each(mine)
    named = list(_named(optimizer))
    return {
        "version": _VERSION,
        "kind": KIND,
        "blocks": _described(optimizer.blocks),
        "numbers": _numbers(optimizer),
        "groups": [_plain(group) for group in optimizer.param_groups],
        "known": {name: one for said in each for name, one in said["known"].items()},
        "dice": [said["dice"] for said in each],
        "used": [optimizer.blocks[index].name for index in sorted(optimizer.crew.used)],
        "last": [name for name, one in named if "last_step" in optimizer.state.get(one, {})],
        "fallback": [name for name, one in named if optimizer._fallback.state.get(one)],
    }


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group of parameters what schedulers change."""
    found = {key: float(one) if isinstance(one, Tensor) else one for key, one in group.items() if key != "params"}
    return {key: one for key, one in found.items() if isinstance(one, (int, float, str, bool, type(None)))}


def _named(optimizer: KFAC) -> Iterator[tuple[str, Tensor]]:
    return ((name, one) for name, one in optimizer.root.named_parameters() if one.requires_grad)


def _entries(optimizer: KFAC) -> dict[str, Make]:
    """Of this rank, by their keys: what gives the tensors, those that are not known as zeros."""
    found: dict[str, Make] = {}
    for block in optimizer.blocks:
        if optimizer.crew.owns(block.index):
            found.update({f"block.{block.name}.{key}": make for key, make in _of_block(optimizer, block).items()})
    covered = set(optimizer.param_groups[0]["params"])
    met: dict[Any, dict[str, Any]] = {}
    for name, parameter in _named(optimizer):
        if parameter in covered:
            last = optimizer.state.get(parameter, {}).get("last_step")
            found[f"last.{name}"] = partial(_zeros_like, parameter) if last is None else partial(_itself, last)
        for key, make in _of_fallback(optimizer, parameter, met).items():
            found[f"fallback.{name}.{key}"] = make
    return found


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _zeros_like(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros_like(parameter, dtype=dtype).detach()


def _of_block(optimizer: KFAC, block: Block) -> dict[str, Make]:
    factors, kept = optimizer.factors[block.index], optimizer.kept.get(block.index)
    a, g = block.a_shape, block.g_shape
    shapes = {"a": a, "inverse_a": a} if block.kind == NORM else {"a": a, "g": g, "inverse_a": a, "inverse_g": g}
    known: dict[str, Any] = {"a": factors.a._sum, "g": factors.g._sum, **({} if kept is None else _parts(kept))}
    if optimizer.refreshing.aside:
        shapes |= {"coming_a": a} if block.kind == NORM else {"coming_a": a, "coming_g": g}
        coming = optimizer.refreshing.coming().get(block.index)
        known |= {} if coming is None else {"coming_a": coming.a, "coming_g": coming.g}
    device = held(block.weight).device
    found: dict[str, Make] = {}
    for key, shape in shapes.items():
        one = known.get(key)
        found[key] = partial(torch.zeros, shape, device=device) if one is None else one.contiguous
    return found


def _take_block(optimizer: KFAC, block: Block, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    beginning = f"block.{block.name}."
    parts = {key.removeprefix(beginning): one for key, one in given.items() if key.startswith(beginning)}
    factors = optimizer.factors[block.index]
    factors.a = Average(parts["a"], known["a"]) if known["a"] else Average()
    factors.g = Average(parts["g"], known["g"]) if known["g"] else Average()
    if known["kept"]:
        optimizer.kept[block.index] = _inverse(parts, "inverse")
    if known["coming"] and optimizer.refreshing.aside:
        optimizer.refreshing.coming()[block.index] = _inverse(parts, "coming")


def _take_parameters(
    optimizer: KFAC, given: Mapping[str, Any], about: Mapping[str, Any], entries: Mapping[str, Make]
) -> None:
    fallback = optimizer._fallback
    for name, parameter in _named(optimizer):
        optimizer.state.pop(parameter, None)
        if name in about["last"]:
            optimizer.state[parameter] = {"last_step": given[f"last.{name}"]}
        fallback.state.pop(parameter, None)
        if name in about["fallback"]:
            beginning = f"fallback.{name}."
            mine = [key for key in entries if key.startswith(beginning) and "." not in key.removeprefix(beginning)]
            fallback.state[parameter] = {key.removeprefix(beginning): given[key] for key in mine}


def _of_fallback(optimizer: KFAC, parameter: Tensor, met: dict[Any, dict[str, Any]]) -> dict[str, Make]:
    """What the fallback keeps of a parameter; zeros of the right shapes where it has not met it yet."""
    there = optimizer._fallback.state.get(parameter)
    shape: Any = parameter.shape
    if not there:
        # What an optimizer keeps is known only after a step, so a small stand-in makes one, for all that are alike.
        shape = torch.Size((2, 3, 4, 5, 6, 7)[: parameter.dim()])
        kind = (parameter.dtype, held(parameter).device, shape)
        if kind not in met:
            stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=kind[1]))
            stand_in.grad = torch.zeros_like(stand_in)
            tried = optimizer._make_fallback([stand_in])
            tried.step()
            met[kind] = dict(tried.state[stand_in])
    found: dict[str, Make] = {}
    for key, one in (there or met[kind]).items():
        if isinstance(one, Tensor) and (one.shape == shape or one.numel() == 1):
            if there:
                found[key] = partial(_itself, one)
            elif one.shape == shape:
                found[key] = partial(_zeros_like, parameter, one.dtype)
            else:
                found[key] = partial(torch.zeros_like, one)
        elif one is not None:
            raise OptimError(
                f"fallback: {type(optimizer._fallback).__name__} keeps {key}, which is no tensor of its parameter's "
                "shape, so other numbers of ranks cannot read it; save state_dict() on every rank"
            )
    return found


def _take_dice(optimizer: KFAC, dice: list[dict[str, str]], steps: int) -> None:
    rank = data_rank(optimizer.root, optimizer.crew.rank)
    curving = optimizer._curving
    if rank < len(dice):
        curving.load(
            {name: torch.tensor(list(bytes.fromhex(one)), dtype=torch.uint8) for name, one in dice[rank].items()}
        )
    else:  # a rank that was not there before: numbers that no other has had
        curving.reseed(steps)
