"""What ranks do in tests of compression. A program of its own that becomes several: every rank is a process.

python compress_ranks.py FOLDER WORLD SCENE…    writes FOLDER/SCENE.RANK.pt for each scene and each of WORLD ranks
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diamond.optim.compress import Compress, Count, Wire, attach, average_factors, collectives
from diamond.optim.errors import OptimError

EVERY = (
    "none", "bf16", "fp16", "powersgd:2", "powersgd:2:int8", "topk:0.05", "topk:0.05:int4", "randomk:0.05",
    "int8", "int4", "int2", "int1",
)  # fmt: skip
SMALL_BUCKET_MB = 0.01  # several buckets even of a small model


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def batch(step: int, rank: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(size, 12, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, torch.stack([inputs[:, :4].sum(1), inputs[:, 4] * inputs[:, 5], inputs[:, 6:].sin().sum(1)], 1)


def wrapped(model: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(model or net(), bucket_cap_mb=SMALL_BUCKET_MB)


def weights(model: nn.Module) -> torch.Tensor:
    parts = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.cat([one.detach().reshape(-1) for one in parts])


def gradients(model: nn.Module) -> torch.Tensor:
    found = [one.grad for one in model.parameters()]
    parts = [one.full_tensor() if isinstance(one, DTensor) else one for one in found if one is not None]
    return torch.cat([one.detach().reshape(-1) for one in parts])


def backward(model: nn.Module, step: int) -> float:
    inputs, wanted = batch(step, dist.get_rank())
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    return float(loss.detach())


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


class Spy:
    """Notes the bytes of every tensor handed to a collective, and hands it on."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._real = (dist.all_reduce, collectives._gather, dist.all_to_all_single)

    def __enter__(self) -> Spy:
        reduce, gather, exchange = self._real
        dist.all_reduce = self._noting(reduce, 0)
        collectives._gather = self._noting(gather, 1)
        dist.all_to_all_single = self._noting(exchange, 1)
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, collectives._gather, dist.all_to_all_single = self._real

    def _noting(self, call: Callable[..., Any], at: int) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            self.nbytes += given[at].numel() * given[at].element_size()
            return call(*given, **named)

        return noted


# ---- scenes ----------------------------------------------------------------------------------------------------------


def every_method() -> dict[str, Any]:
    """A few steps under DDP with each."""
    told: dict[str, Any] = {}
    ways = {grad: Compress(grad=grad, two_step_from=9, report_every=2) for grad in EVERY}
    ways |= {f"{grad} in two": Compress(grad=grad, two_step_from=2) for grad in ("int4", "powersgd:2:int8")}
    ways["int8 late"] = Compress(grad="int8", two_step_from=9, report_every=1, start_after=3)
    for name, compress in ways.items():
        model = wrapped()
        wire = attach(model, compress)
        with Spy() as spy:
            train(model, torch.optim.SGD(model.parameters(), lr=0.01), range(4))
        told[name] = {
            "weights": weights(model),
            "handed": spy.nbytes,
            "sent": wire.bytes_sent,
            "plain": wire.bytes_plain,
            "kinds": dict(wire.count.sent),
            "ratio": wire.ratio,
            "error": tuple(wire.relative_error),
        }
    plain = wrapped()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.01), range(4))
    return {"methods": told, "plain": weights(plain)}


def resumed() -> dict[str, Any]:
    """The same six steps in one go and in two lives."""
    told = {}
    for grad in ("topk:0.05:int8", "randomk:0.05", "powersgd:2:int8", "int4", "int1"):
        whole, _ = life(grad, range(6), None)
        _, saved = life(grad, range(3), None)
        torch.save(saved, Path(sys.argv[1]) / f"saved.{dist.get_rank()}")
        loaded = torch.load(Path(sys.argv[1]) / f"saved.{dist.get_rank()}")
        second, after = life(grad, range(3, 6), loaded)
        forgetful, _ = life(grad, range(3, 6), loaded | {"wire": None})
        told[grad] = {"whole": whole, "second": second, "forgetful": forgetful, "steps": after["wire"]["steps"]}
    return told


def life(grad: str, steps: range, saved: dict[str, Any] | None) -> tuple[torch.Tensor, dict[str, Any]]:
    model = wrapped()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wire = attach(model, Compress(grad=grad, two_step_from=2))
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if saved["wire"] is not None:
            wire.load_state_dict(saved["wire"])
    train(model, optimizer, steps)
    return weights(model), copy.deepcopy(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
    )


def not_finite() -> dict[str, Any]:
    """One gradient of one rank is spoiled in the third step."""
    told = {}
    for grad in EVERY:
        for bad in (float("nan"), float("inf")):
            model = wrapped()
            wire = attach(model, Compress(grad=grad, error_feedback=True if grad != "none" else None))
            for step in range(2):
                model.zero_grad()
                backward(model, step)
            before = copy.deepcopy(wire.state_dict())
            model.zero_grad()
            inputs, wanted = batch(2, dist.get_rank())
            factor = torch.ones(3)
            factor[1] = bad if dist.get_rank() == 0 else 1.0
            ((model(inputs) - wanted) * factor).square().mean().backward()
            spoiled, after = gradients(model), copy.deepcopy(wire.state_dict())
            model.zero_grad()
            backward(model, 3)
            told[f"{grad} {bad}"] = {
                "spoiled": spoiled,
                "memory": (before["memory"], after["memory"]),
                "warm": after["warm"],
                "next": gradients(model),
            }
    return told


def losses() -> dict[str, float]:
    """The held-out loss after the same training, by method."""
    told = {}
    for name, compress in {
        "plain": None,
        "topk": Compress(grad="topk:0.01"),
        "topk forgetful": Compress(grad="topk:0.01", error_feedback=False),
        "powersgd": Compress(grad="powersgd:2:int8"),
        "int1 with memory": Compress(grad="int1", error_feedback=True),
    }.items():
        model = DistributedDataParallel(net())
        if compress is not None:
            attach(model, compress)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(150))
        inputs, wanted = batch(10**6, 0, 2000)
        with torch.no_grad():
            told[name] = float(nn.functional.mse_loss(model.module(inputs), wanted))
    return told


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp() -> dict[str, Any]:
    """Reduce-scatters of a model sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told: dict[str, Any] = {}
    for grad in EVERY:
        model = sharded(net(), mesh)
        wire = attach(model, Compress(grad=grad))
        with Spy() as spy:
            first = after_first(model)
            steps = 12 if grad in LEARNING and dist.get_world_size() == 2 else 3
            train(model, torch.optim.SGD(model.parameters(), lr=0.05), range(steps))
        told[grad] = {
            "first": first,
            "weights": weights(model),
            "loss": held_out(model),
            "handed": spy.nbytes,
            "sent": wire.bytes_sent,
            "ratio": wire.ratio,
            "error": wire.relative_error.last,
            "steps": dict(wire.steps),
        }
    model = sharded(net(), mesh)
    first = after_first(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), range(12))
    return {"methods": told, "first": first, "loss": held_out(model)}


LEARNING = ("none", "powersgd:2:int8", "topk:0.05", "int8")


def after_first(model: nn.Module) -> torch.Tensor:
    backward(model, 77)
    found = gradients(model)
    model.zero_grad()
    return found


def held_out(model: nn.Module) -> float:
    inputs, wanted = batch(10**6, 0, 500)
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), wanted))


def fsdp_resumed() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = {}
    for grad in ("topk:0.05", "powersgd:2", "int4"):
        whole = sharded(net(), mesh)
        attach(whole, Compress(grad=grad))
        train(whole, torch.optim.SGD(whole.parameters(), lr=0.05), range(6))
        model = sharded(net(), mesh)
        first = attach(model, Compress(grad=grad))
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), range(3))
        second: Wire = attach(model, Compress(grad=grad))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), range(3, 6))
        told[grad] = {"whole": weights(whole), "second": weights(model)}
    return told


def hybrid() -> dict[str, Any]:
    """Two replicas of two shards: the all-reduce between replicas is compressed."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    try:
        attach(sharded(net(), mesh), Compress(grad="int8"))
        refused = ""
    except OptimError as error:
        refused = str(error)
    told: dict[str, Any] = {}
    for grad in ("none", "powersgd:2", "topk:0.05", "int8"):
        model = net()
        with torch.no_grad():
            for one in model.parameters():
                one.add_(0.1 * mesh.get_local_rank("replicate"))  # replicas must not stay apart
        model = sharded(model, mesh["shard"])
        wire = attach(model, Compress(grad=grad), process_group=mesh["replicate"].get_group())
        first = after_first(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.05), range(12))
        told[grad] = {"first": first, "weights": weights(model), "loss": held_out(model), "ratio": wire.ratio}
    plain = sharded(net(), mesh)
    first = after_first(plain)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05), range(12))
    return {"methods": told, "refused": refused, "first": first, "loss": held_out(plain)}


def factors() -> dict[str, Any]:
    """Means of symmetric matrices over ranks."""
    dice = torch.Generator().manual_seed(dist.get_rank())
    mine = []
    for side in (1, 5, 40):
        samples = torch.randn(3 * side, side, generator=dice) * torch.logspace(-3, 3, side)
        product = samples.T @ samples
        mine.append((product + product.T) / 2)
    told: dict[str, Any] = {"mine": mine}
    for how in ("none", "tri", "bf16-tri", "int8-tri", "filtered8-tri", "filtered4-tri"):
        count = Count()
        with Spy() as spy:
            means = average_factors(mine, how, count=count)
        told[how] = {"means": means, "handed": spy.nbytes, "sent": sum(count.sent.values()), "plain": count.plain}
    return told


SCENES = (every_method, resumed, not_finite, losses, fsdp, fsdp_resumed, hybrid, factors)


def play(folder: Path, rank: int, world: int, wanted: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    for scene in SCENES:
        if scene.__name__ in wanted:
            torch.save(scene(), folder / f"{scene.__name__}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, world, wanted = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    # Forked, because importing torch takes longer than most scenes.
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=play, args=(folder, rank, world, wanted), daemon=True) for rank in range(world)]
    for one in ranks:
        one.start()
    left = list(ranks)
    while left:
        wait([one.sentinel for one in left])
        if any(one.exitcode for one in ranks):
            # The others would wait for it; ending ends them.
            sys.exit(1)
        left = [one for one in left if one.exitcode is None]


if __name__ == "__main__":
    main()
