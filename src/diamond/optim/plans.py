"""`plan(model, …)`: how K-FAC should run for this model on this machine, and what that is predicted to cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

import torch.distributed as dist
from torch import nn

from diamond.optim import costs, hardware
from diamond.optim.blocks import NORM, discover, unwrapped
from diamond.optim.errors import OptimError
from diamond.optim.kfac import chosen
from diamond.optim.planning import Plan, plan_blocks


def plan(
    model: nn.Module,
    *,
    mesh: Any = None,
    memory: str | float | None = None,
    measure: bool = False,
    positions: int = 1024,
    step_s: float | None = None,
    overhead: float = 0.15,
    exclude: Sequence[str] = (),
    widest: int = 8192,
    say: TextIO | None = sys.stdout,
    **fixed: Any,
) -> Plan:
    """Chooses periods, owners, workers, precision and compression, and prints them with their predicted cost.

    Args:
        model: as it is given to KFAC.
        mesh: the ranks that train together (a DeviceMesh); all ranks where left out.
        memory: what K-FAC may take on each rank: "8GiB", a number of bytes, or None for any.
        measure: try solvers, products and collectives for a few seconds; otherwise typical figures are taken.
        positions: rows that enter a layer's statistics in a step on one rank: samples times places.
        step_s: seconds of a training step without K-FAC, if they are known.
        overhead: the part of a step that K-FAC may take.
        exclude, widest: as KFAC's `exclude` and `largest`.
        say: where the plan is printed (by the first rank); None for nowhere.
        fixed: what is not to be chosen: workers, factor_every, inverse_every, factor_dtype, factor, largest, solver.
    """
    root = unwrapped(model)
    found = chosen(discover(root), exclude, widest)
    if not found:
        raise OptimError("model: no layer that K-FAC knows; see diamond.optim.coverage(model)")
    together = dist.is_available() and dist.is_initialized()
    world = mesh.size() if mesh is not None else dist.get_world_size() if together else 1
    device = found[0].weight.device
    seen = hardware.measure(device) if measure else hardware.typical(device.type, world)
    blocks = [
        costs.Block(
            name=one.name, a=one.a, g=one.g, copies=one.copies, positions=positions,
            a_diagonal=one.a_diagonal, g_diagonal=one.kind == NORM,
        )
        for one in found
    ]  # fmt: skip
    made = plan_blocks(blocks, world=world, memory=memory, hardware=seen, step_s=step_s, overhead=overhead, **fixed)
    if say is not None and (not together or dist.get_rank() == 0):
        print(made.explain(), file=say)
    return made
