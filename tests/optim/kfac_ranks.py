"""What ranks do in tests of K-FAC on several. A program of its own: every rank is a process.

RANK=0 WORLD_SIZE=2 python kfac_ranks.py FOLDER SCENE…    writes FOLDER/SCENE.WORLD.RANK.pt for each scene

The tests call the scenes themselves, too, to see what one process does.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from diamond.optim import KFAC, Compress, OptimError
from diamond.optim.blocks import discover, unwrapped
from diamond.optim.keeping import load_sharded, sharded_state
from diamond.optim.planning import Block, Plan, plan_blocks
from diamond.optim.sharded import whole

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(sys.argv[1]) if __name__ == "__main__" else Path()
GLOBAL_BATCH = 24
DAMPING = 1e-2
REPLICATED = Replicate()


class Net(nn.Module):
    """Sizes that ranks cannot share evenly, a norm, and a scale that is the fallback's."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 14)
        self.norm = nn.LayerNorm(14)
        self.second = nn.Linear(14, 10)
        self.last = nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.spare = nn.Linear(4, 4) if spare else None  # never used

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.norm(torch.tanh(self.first(x)))))) * self.scale


class Experts(nn.Module):
    """Samples whose first number is positive go to one expert, the others to another; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.entry = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.exit = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.entry(x))
        found = torch.zeros_like(seen)
        for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=False):
            if bool(chosen.any()):
                found = found.index_put((chosen,), expert(seen[chosen]))
        return self.exit(torch.tanh(found))


def batch(step: int, size: int = GLOBAL_BATCH) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(step))
    return x, torch.stack([x[:, :3].sum(1), x[:, 3] * x[:, 4], x[:, 5].sin()], 1)


def mine(step: int) -> tuple[Tensor, Tensor]:
    return tuple(one.chunk(WORLD)[RANK] for one in batch(step))  # type: ignore[return-value]


def planned(model: nn.Module, workers: int = 0, factor: str = "tri") -> Plan:
    blocks = [
        Block(name=one.name, a=one.a, g=one.g, copies=one.copies, a_diagonal=one.a_diagonal) for one in discover(model)
    ]
    found = plan_blocks(blocks, world=WORLD, workers=workers or WORLD, factor_every=2, inverse_every=3)
    return replace(found, factor=factor)


def train(model: nn.Module, optimizer: KFAC, steps: range) -> None:
    for step in steps:
        x, y = mine(step)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def held_out_loss(model: nn.Module) -> float:
    x, y = batch(1000, 400)
    with torch.no_grad():
        return float(F.mse_loss(model(x), y))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([whole(one.detach()).reshape(-1) for one in model.parameters()]).clone()


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options) if WORLD > 1 else model


def told(model: nn.Module, optimizer: KFAC) -> dict[str, Any]:
    return {
        "weights": weights(model),
        "memory": optimizer.memory_bytes(),
        "sent": dict(optimizer.crew.count.sent),
        "owners": optimizer.crew.owners,
        "lengths": (optimizer.lengths.step, optimizer.lengths.momentum),
        "factors": {
            one.block.name: (one.a.mean(), one.g.mean() if one.g.known else None)
            for one in optimizer.factors
            if one.known
        },
    }


# ---- scenes ----------------------------------------------------------------------------------------------------------


def modes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way to share the work; one process has but one."""
    for lr in (0.05, "auto"):
        for workers in [number for number in (1, 2, 4) if WORLD % number == 0]:
            for factor in ("tri", "none", "bf16-tri") if (workers, lr) == (1, 0.05) else ("tri",):
                yield f"{lr} {workers} {factor}", {"lr": lr, "plan": (workers, factor)}


def every_mode() -> dict[str, Any]:
    found = {}
    for name, options in modes():
        plan = planned(Net(), *options.pop("plan"))
        model = ddp(Net())
        optimizer = KFAC(model, curvature="ggn-exact", damping=DAMPING, plan=plan, **options)
        train(model, optimizer, range(6))
        found[name] = told(model, optimizer)
    return found


def split_and_aside() -> dict[str, Any]:
    """Factors in pieces, and inverses computed aside; kept by one rank and by all."""
    found = {}
    for name, options in (("pieces", {"largest": 4}), ("aside", {"inverses": "aside"})):
        for workers in {1, WORLD}:
            model = ddp(Net())
            plan = planned(Net(), workers)
            optimizer = KFAC(model, 0.05, curvature="ggn-exact", damping=DAMPING, plan=plan, **options)
            train(model, optimizer, range(6))
            found[f"{name} {workers}"] = told(model, optimizer)
    return found


def drift() -> dict[str, Any]:
    """Twenty steps with random curvature."""
    found = {}
    for lr, workers in ((0.05, WORLD), ("auto", 1), ("auto", 2)):
        model = ddp(Net())
        optimizer = KFAC(model, lr, damping=DAMPING, plan=planned(Net(), workers))
        before = held_out_loss(model)
        train(model, optimizer, range(20))
        found[f"{lr} {workers}"] = {"weights": weights(model), "losses": (before, held_out_loss(model))}
    return found


def uneven() -> dict[str, Any]:
    """The first rank has most of the batch. Its gradients are DDP's affair; the factors are of all samples alike."""
    sizes = [GLOBAL_BATCH - 4 * (WORLD - 1), *[4] * (WORLD - 1)]
    model = ddp(Net())
    optimizer = KFAC(model, 0.05, curvature="ggn-exact", damping=DAMPING)
    x, y = (one.split(sizes)[RANK] for one in batch(0))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return told(model, optimizer)


def experts() -> dict[str, Any]:
    """Sorted, so that ranks meet different experts; of four ranks some meet but one."""
    found = {}
    for lr in (0.05, "auto"):
        model = ddp(Experts(), find_unused_parameters=True)
        optimizer = KFAC(model, lr, curvature="ggn-exact", damping=DAMPING, plan=planned(Experts(), 1))
        for step in range(6):
            x, y = batch(step)
            order = x[:, 0].argsort()
            x, y = (one[order].chunk(WORLD)[RANK] for one in (x, y))
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        found[f"{lr}"] = told(model, optimizer) | {"used": sorted(optimizer.crew.used)}
    return found


def static_graph() -> dict[str, Any]:
    model = ddp(Net(), static_graph=True)
    optimizer = KFAC(model, 0.05, curvature="ggn-exact", damping=DAMPING)
    if WORLD == 1:
        optimizer._curving.disarm()  # ranks let the first step pass
    train(model, optimizer, range(8))
    return told(model, optimizer)


def not_finite() -> dict[str, Any]:
    """In the third step the last rank has a sample that is none."""
    found = {}
    for lr in (0.05, "auto"):
        torch.manual_seed(0)
        model = ddp(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        optimizer = KFAC(model, lr)
        before = held_out_loss(model)
        for step in range(12):
            x, y = mine(step)
            if step == 2 and RANK == WORLD - 1:
                x = torch.full_like(x, torch.nan)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        losses = (before, held_out_loss(model))
        found[str(lr)] = {"weights": weights(model), "skipped": optimizer.skipped, "losses": losses}
    return found


def sharded_by(how: str, **options: Any) -> nn.Module:
    """The net, spread over all ranks."""
    model = Net()
    if how in ("tensors", "shards of tensors"):
        mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("shard", "tensor"))
        first = ColwiseParallel(output_layouts=Replicate())
        ways = {"first": first, "second": ColwiseParallel(), "last": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], ways)
        if how == "tensors":
            return model
        return fully_shard(model, mesh=mesh["shard"])
    if how == "replicas of shards":
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("shard",))
    fully_shard(model.first, mesh=mesh, **options)
    fully_shard(model.second, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def spread_models() -> dict[str, Any]:
    found = {}
    ways = {1: ("whole",), 2: ("shards", "tensors"), 4: ("shards", "replicas of shards", "shards of tensors")}[WORLD]
    for how in ways:
        curvatures = [(0.05, "ggn-exact"), ("auto", "ggn-exact"), (0.05, "ggn-mc"), (0.05, "empirical")]
        for lr, curvature in curvatures[: 2 if WORLD == 4 else 4]:
            model = Net() if how == "whole" else sharded_by(how)
            optimizer = KFAC(model, lr, curvature=curvature, damping=DAMPING)
            parts = WORLD // 2 if "tensors" in how else WORLD  # ranks that share tensors see the same samples
            for step in range(5):
                x, y = (one.chunk(parts)[RANK * parts // WORLD] for one in batch(step))
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                with torch.no_grad():
                    model(x)  # under FSDP2 it leaves whole parameters behind
            found[f"{how} {lr} {curvature}"] = told(model, optimizer)
    return found


def fsdp_options() -> dict[str, Any]:
    """Gradients collected over two pieces of a batch; parameters kept whole; the work of one rank a block; bfloat16."""
    found = {}
    for name in ("pieces", "whole", "one worker", "bfloat16"):
        precision = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if name == "bfloat16" else {}
        model: Any = Net() if WORLD == 1 else sharded_by("shards", **precision)
        plan = planned(Net(), 1) if name == "one worker" else None
        lr = "auto" if name in ("whole", "one worker") else 0.05  # the others cannot see the same as one process
        optimizer = KFAC(model, lr, curvature="ggn-exact", damping=DAMPING, plan=plan)
        for step in range(6):
            optimizer.zero_grad()
            parts = [one.chunk(2) for one in mine(step)] if name == "pieces" else [[one] for one in mine(step)]
            for place, (x, y) in enumerate(zip(*parts, strict=True)):
                if WORLD > 1:
                    model.set_requires_gradient_sync(place == len(parts[0]) - 1)
                    model.set_reshard_after_backward(name != "whole")
                (F.mse_loss(model(x), y) / len(parts[0])).backward()
            optimizer.step()
        found[name] = told(model, optimizer)
    return found


def refused() -> dict[str, str]:
    """What cannot be done is said, and nobody hangs."""
    late = Net()
    optimizer = KFAC(late, 0.05)
    fully_shard(late, mesh=init_device_mesh("cpu", (WORLD,)))
    F.mse_loss(late(batch(0)[0]), batch(0)[1]).backward()
    other = ddp(nn.Sequential(nn.Linear(6, 3)))
    lossless = KFAC(other, 0.05)
    other(batch(0)[0]).abs().max().backward()
    tries: dict[str, Any] = {
        "late": optimizer.step,
        "lossless": lossless.step,
        "fsdp1": lambda: KFAC(FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))),
        "replicas": lambda: KFAC(nn.DataParallel(Net())),
        "plan": lambda: KFAC(ddp(Net()), plan=replace(planned(Net()), owners=(7,) * 4)),
        "workers": lambda: KFAC(ddp(Net()), plan=replace(planned(Net()), workers=(3,) * 4)),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
        except OptimError as error:
            found[name] = str(error)
    return found


def compressed() -> dict[str, Any]:
    found = {}
    for lr in (0.05, "auto"):
        model = ddp(Net())
        optimizer = KFAC(model, lr, damping=DAMPING, compress=Compress(grad="powersgd:2", factor="bf16-tri"))
        before = held_out_loss(model)
        train(model, optimizer, range(30))
        assert optimizer.wire is not None
        losses = (before, held_out_loss(model))
        found[str(lr)] = {"weights": weights(model), "losses": losses, "ratio": optimizer.wire.ratio}
    return found


# ---- state -----------------------------------------------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def made(how: str) -> nn.Module:
    if how == "fsdp" and WORLD > 1:
        return sharded_by("shards")
    return ddp(Net())


def continued() -> dict[str, Any]:
    """With a break and without; by then the factors are not updated in every step."""
    found = {}
    for how, lr, break_at in (("ddp", "auto", 10), ("ddp", 0.05, 11), ("fsdp", "auto", 11), ("fsdp", 0.05, 10)):
        options: dict[str, Any] = {"damping": DAMPING, "weight_decay": 1e-3, "plan": planned(Net(), 1)}
        options["inverses"] = "aside" if (how, lr) == ("ddp", 0.05) else "now"
        model = made(how)
        optimizer = KFAC(model, lr, **options)
        train(model, optimizer, range(break_at))
        state = {
            "model": model.state_dict(),
            "state_dict": optimizer.state_dict(),
            "sharded_state": sharded_state(optimizer),
        }
        state = through_a_file(state)
        train(model, optimizer, range(break_at, 15))
        found[f"{how} {lr}"] = ended = [weights(model)]
        for road, load in (("state_dict", KFAC.load_state_dict), ("sharded_state", load_sharded)):
            again = made(how)
            resumed = KFAC(again, lr, **options, seed=99)
            again.load_state_dict(state["model"])
            load(resumed, state[road])
            train(again, resumed, range(break_at, 15))
            ended.append(weights(again))
    return found


RUNS = (("ddp", 0.05), ("fsdp", "auto"), ("fsdp", 0.05))
LEGS = {"begun": range(5), "two": range(5, 9), "four": range(9, 13), "ended": range(13, 16)}


def leg(name: str, before: str | None, folder: Path = FOLDER) -> dict[str, Any]:
    """Part of a run that goes on with other numbers of ranks: from a checkpoint to the next."""
    found = {}
    for how, lr in RUNS:
        model: Any = made(how) if how == "fsdp" else ddp(Net(spare=True), find_unused_parameters=True)
        plan = planned(unwrapped(model), 1)
        optimizer = KFAC(model, lr, curvature="ggn-exact", damping=DAMPING, plan=plan)
        label = f"{how} {lr}"
        if before is not None:
            state = {"model": unwrapped(model).state_dict(), "optimizer": sharded_state(optimizer)}
            dcp.load(state, checkpoint_id=folder / before / label)
            unwrapped(model).load_state_dict(state["model"])
            load_sharded(optimizer, state["optimizer"])
        train(model, optimizer, LEGS[name])
        state = {"model": unwrapped(model).state_dict(), "optimizer": sharded_state(optimizer)}
        dcp.save(state, checkpoint_id=folder / name / label)
        found[label] = told(model, optimizer)
    return found


def two() -> dict[str, Any]:
    return leg("two", "begun")


def four() -> dict[str, Any]:
    return leg("four", "two")


def uninterrupted() -> dict[str, Any]:
    found = {}
    for how, lr in RUNS:
        model = Net(spare=how == "ddp")
        optimizer = KFAC(model, lr, curvature="ggn-exact", damping=DAMPING, plan=planned(model, 1))
        train(model, optimizer, range(16))
        found[f"{how} {lr}"] = told(model, optimizer)
    return found


def clipped_steps() -> dict[str, Any]:
    """Whole batches and two pieces of them, with gradients clipped from the second step on, and not."""
    found = {}
    for pieces in (1, 2):
        for clip in (None, 0.02):
            model = ddp(Net())
            optimizer = KFAC(model, curvature="ggn-exact", damping=DAMPING)
            for step in range(8):
                optimizer.zero_grad()
                for x, y in zip(*(one.chunk(pieces) for one in mine(0)), strict=True):
                    (F.mse_loss(model(x), y) / pieces).backward()
                if clip and step:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            found[f"{pieces} {clip}"] = weights(model)
    return found


SCENES = {
    one.__name__: one
    for one in (
        every_mode, drift, uneven, experts, static_graph, spread_models, fsdp_options, refused, compressed, continued,
        not_finite, split_and_aside, two, four, clipped_steps,
    )
}  # fmt: skip


def main(scenes: list[str]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/meeting.{WORLD}", rank=RANK, world_size=WORLD)
    for scene in scenes:
        torch.save(SCENES[scene](), FOLDER / f"{scene}.{WORLD}.{RANK}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2:])
