"""`plan(model, …)`: how K-FAC should run for this model on this machine, and what that is predicted to cost."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from diamond.optim import checks, costs, hardware, measuring
from diamond.optim.blocks import CONV, CONV_TRANSPOSE, EMBEDDING, LINEAR, NORM, Block, discover, unwrapped
from diamond.optim.errors import OptimError
from diamond.optim.kfac import _LENGTHS_EVERY
from diamond.optim.losses import first_tensor
from diamond.optim.pieces import LARGEST, chosen
from diamond.optim.planning import LAYER_STARTS, Plan, plan_blocks

_FORWARD = 1 / 3  # of a training step, where it was not measured
_LENGTHS_PASSES = 3  # forward passes: along two directions, and to see what the step really gives
_FIXED = ("workers", "factor_every", "inverse_every", "factor", "largest", "solver")


class _Group(NamedTuple):
    """The ranks that train together."""

    world: int
    group: Any = None
    together: bool = False  # whether others take part


class _Tried(NamedTuple):
    """A forward pass: its seconds, and the rows that each block saw, by its index."""

    forward_s: float
    positions: dict[int, int]


def plan(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    memory: str | float | None = None,
    measure: bool | float = False,
    inputs: Any = None,
    positions: int = 1024,
    step_s: float | None = None,
    overhead: float = 0.15,
    lr: float | str = "auto",
    exclude: Sequence[str] = (),
    widest: int = LARGEST,
    say: TextIO | bool | None = True,
    **fixed: Any,
) -> Plan:
    """Chooses periods, owners, workers and how statistics travel, and prints that with its predicted cost.

    Collective where `measure` or `inputs` are given: all ranks then get the same plan. Otherwise it only computes, and
    ranks get the same plan from the same arguments.

    Args:
        model: as it is given to KFAC.
        mesh: the ranks that train together (a DeviceMesh); all ranks where left out.
        memory: what K-FAC may take on each rank: "8GiB", a number of bytes, or None for any.
        measure: try solvers, products, small operations and collectives, for about three seconds or so many as are
            given; otherwise typical figures are taken.
        inputs: what the model is called with: a tensor, a tuple of arguments or a dictionary of named ones. Forward
            passes with it tell how long they take and how many rows each layer sees.
        positions: rows that enter a layer's statistics in a step on one rank (samples times places), without `inputs`.
        step_s: seconds of a training step without K-FAC, if they are known; otherwise they are estimated.
        overhead: the part of a step that K-FAC may take.
        lr: as KFAC's: "auto" measures how far to go, which takes forward passes.
        exclude, widest: as KFAC's `exclude` and `largest`.
        say: where the plan is printed, by the first rank: True for the standard output, None for nowhere.
        fixed: what is not to be chosen: workers, factor_every, inverse_every, factor, largest, solver.

    Raises:
        OptimError: an argument makes no sense, or the memory is too little: the message says how much is enough.
    """
    _check(model, memory, positions, widest, lr, fixed)
    _check_kinds(measure, step_s, overhead, say)
    checks.exclusions(model, exclude)
    group = _group(mesh)
    root = unwrapped(model)
    found = chosen(discover(root), exclude, widest)
    if not found:
        raise OptimError("model: no layer that K-FAC knows; see diamond.optim.coverage(model)")
    device = found[0].weight.device
    if measure:
        seen = measuring.measure(device, group.group, 3.0 if measure is True else measure)
    else:
        seen = hardware.typical(device.type, group.world)
    tried = None if inputs is None else _tried(root, found, inputs)
    if group.together and (measure or tried is not None):
        step_s, tried = _of_all(step_s, tried, len(found), device, group.group)
    if tried is not None and step_s is None:
        step_s = seen.with_starts(tried.forward_s / _FORWARD, LAYER_STARTS * len(found))
    made = plan_blocks(
        [_shape(one, tried.positions.get(one.index, positions) if tried else positions) for one in found],
        world=group.world,
        memory=memory,
        hardware=seen,
        step_s=step_s,
        overhead=overhead,
        widest=widest,
        lengths=0.0 if lr != "auto" else _LENGTHS_PASSES * (tried.forward_s / step_s if tried and step_s else _FORWARD),
        lengths_every=_LENGTHS_EVERY,
        **{"factor_dtype": "float32", **fixed},  # K-FAC keeps no other
    )
    if say and (not group.together or dist.get_rank(group.group) == 0):
        print(made.explain(), file=None if say is True else say)
    return made


def _check(model: Any, memory: Any, positions: Any, widest: Any, lr: Any, fixed: Mapping[str, Any]) -> None:
    """Before anything is measured."""
    if not isinstance(model, nn.Module):
        raise OptimError(f"model={type(model).__name__}: give the torch.nn.Module that is trained")
    if unknown := [name for name in fixed if name not in _FIXED]:
        known = [name for name, one in inspect.signature(plan).parameters.items() if one.kind is one.KEYWORD_ONLY]
        raise OptimError(f"{unknown[0]}: plan has no such argument; one of {', '.join([*known, *_FIXED])}")
    costs.parse_bytes(memory)
    for name, value in (("positions", positions), ("widest", widest)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptimError(f"{name}={value!r}: give a whole number of 1 or more")
    if lr != "auto" and not (_is_number(lr) and lr >= 0):
        raise OptimError(f"lr={lr!r}: give 'auto' or the number that KFAC will be given")


def _check_kinds(measure: Any, step_s: Any, overhead: Any, say: Any) -> None:
    for name, value, known, instead in (
        ("measure", measure, isinstance(measure, bool), "True, or the seconds that it may take"),
        ("step_s", step_s, step_s is None, "the seconds of a step, or None to have them estimated"),
        ("overhead", overhead, False, "a part of the step above 0, such as 0.15"),
    ):
        if not known and not _is_number(value):
            raise OptimError(f"{name}={value!r}: give {instead}")
    if say is not None and not isinstance(say, bool) and not hasattr(say, "write"):
        raise OptimError(f"say={say!r}: give True, None for nowhere, or a file that can be written to")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _group(mesh: Any) -> _Group:
    together = dist.is_available() and dist.is_initialized()
    everyone = dist.get_world_size() if together else 1
    if mesh is None:
        return _Group(everyone, None, everyone > 1)
    if not isinstance(mesh, DeviceMesh):
        raise OptimError(
            f"mesh={type(mesh).__name__}: give a DeviceMesh, as torch.distributed.init_device_mesh makes it, "
            "or leave it out for all ranks"
        )
    if mesh.size() == everyone:
        return _Group(everyone, None, everyone > 1)
    if mesh.ndim > 1:
        raise OptimError(
            f"mesh has {mesh.ndim} dimensions and {mesh.size()} of the {everyone} ranks: "
            "give the one dimension whose ranks share the work, such as mesh['dp']"
        )
    return _Group(mesh.size(), mesh.get_group(), mesh.size() > 1)


def _shape(block: Block, positions: int) -> costs.Block:
    return costs.Block(
        name=block.name, a=block.a, g=block.g, copies=block.copies, positions=max(1, positions),
        a_diagonal=block.a_diagonal, g_diagonal=block.kind == NORM, patches=block.kind in (CONV, CONV_TRANSPOSE),
    )  # fmt: skip


# ---- a forward pass --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _tried(root: nn.Module, blocks: Sequence[Block], inputs: Any) -> _Tried:
    """In evaluation mode, so that nothing of the model changes."""
    positions: dict[int, int] = {}

    def looking(block: Block) -> Any:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = first_tensor(args or tuple(kwargs.values()))
            positions[block.index] = positions.get(block.index, 0) + _rows(block, given, output)

        return look

    def forward() -> None:
        if isinstance(inputs, Mapping):
            root(**inputs)
        else:
            root(*(inputs if isinstance(inputs, tuple) else (inputs,)))

    training = [one for one in root.modules() if one.training]
    root.eval()
    hooks = [block.module.register_forward_hook(looking(block), with_kwargs=True) for block in blocks]
    try:
        try:
            forward()
        except (TypeError, RuntimeError) as error:
            raise OptimError(
                f"inputs: the model cannot be called with it ({error}); give a batch as the model takes it, in a tuple "
                "where it takes several arguments, or in a dictionary by their names"
            ) from error
        if positions and not any(positions.values()):
            raise OptimError("inputs: it is an empty batch; give one as in training, or leave it out")
        for hook in hooks:
            hook.remove()
        forward_s = measuring.Clock(blocks[0].weight.device).median(forward, limit_s=1.0)
    finally:
        for hook in hooks:
            hook.remove()
        for one in training:
            one.training = True
    return _Tried(forward_s, positions)


def _rows(block: Block, given: Tensor, output: Any) -> int:
    """That enter the statistics of this block, of one copy."""
    if block.kind == EMBEDDING:
        return given.numel()
    if block.kind == NORM:
        return given.numel() // max(1, block.weight.numel())
    if block.kind == CONV:
        return first_tensor(output).numel() // (block.copies * block.g)
    if block.kind == LINEAR:  # which may have no inputs, just a bias
        return math.prod(given.shape[:-1])
    return given.numel() // (block.copies * block.a)


def _of_all(
    step_s: float | None, tried: _Tried | None, blocks: int, device: torch.device, group: Any
) -> tuple[float | None, _Tried | None]:
    """The slowest rank's times and the most rows: so that all ranks plan alike."""
    forward_s, positions = tried or (0.0, {})
    mine = [step_s or 0.0, forward_s, *(positions.get(at, 0) for at in range(blocks))]
    most = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    step, forward, *rows = most.tolist()
    found = {at: int(number) for at, number in enumerate(rows) if number}
    return step or None, _Tried(forward, found) if forward else None
