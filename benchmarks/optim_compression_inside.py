"""One rank of `optim_compression.py`: trains the same network with one way to compress after the other.

RANK=0 MASTER_ADDR=… python optim_compression_inside.py DATA    one job a line on standard input, one answer each
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from diamond.optim.compress import Compress, attach

BATCH = 32  # of a rank
POINTS = 128
TORCH = "torch powersgd:"
ONE_BUCKET_MB = 100


def network(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inside, outside in ((POINTS, width), (width, width), (width, width)):
        layers += [nn.Linear(inside, outside), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, POINTS))


def wrapped(method: dict[str, Any] | str, seed: int, width: int) -> tuple[DistributedDataParallel, Any]:
    if isinstance(method, dict):
        model = DistributedDataParallel(network(seed, width))
        return model, attach(model, Compress(**method, seed=seed))
    if method.startswith(TORCH):
        # In one bucket: with the default ones the ranks crashed here on Gloo with mismatched collectives, probably
        # because its later rounds are issued from callbacks, in an order that differs between ranks.
        model = DistributedDataParallel(network(seed, width), bucket_cap_mb=ONE_BUCKET_MB)
        # From the second step on is as early as it allows while it keeps errors and factors.
        state = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=int(method.removeprefix(TORCH)),
            start_powerSGD_iter=2,
            random_seed=seed,
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model, None
    return DistributedDataParallel(network(seed, width)), None


class Line:
    """What left this rank, as the kernel counts it."""

    def __init__(self) -> None:
        self._begin = self._sent()

    def since(self) -> int:
        return self._sent() - self._begin

    @staticmethod
    def _sent() -> int:
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
        raise RuntimeError("there is no eth0 here")


def work(job: dict[str, Any], data: dict[str, torch.Tensor]) -> dict[str, Any]:
    rank = dist.get_rank()
    model, wire = wrapped(job["method"], job["seed"], job["width"])
    steps = job["steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    # Ranks draw from their own halves of the training data.
    inputs, wanted = data["inputs"][rank::2], data["wanted"][rank::2]
    dice = torch.Generator().manual_seed(1000 * job["seed"] + rank)
    times: list[float] = []
    dist.barrier()
    line = Line()
    for _ in range(steps):
        begin = time.perf_counter()
        chosen = torch.randint(0, inputs.shape[0], (BATCH,), generator=dice)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[chosen]), wanted[chosen]).backward()
        optimizer.step()
        schedule.step()
        times.append(time.perf_counter() - begin)
    # Of all steps: what is sent uncompressed at the beginning counts.
    told = {"error": held_out(model.module, data), "step_s": times, "bytes_a_step": line.since() / steps}
    if wire is not None:
        told |= {"ratio": wire.ratio, "relative_error": wire.relative_error.mean}
    return told


def held_out(model: nn.Module, data: dict[str, torch.Tensor]) -> float:
    """Relative L2 error, the mean over solutions never seen."""
    with torch.no_grad():
        away = model(data["test_inputs"]) - data["test_wanted"]
    return float((away.norm(dim=1) / data["test_wanted"].norm(dim=1)).mean())


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data = torch.load(sys.argv[1])
    for line in sys.stdin:
        told = work(json.loads(line), data)
        if rank == 0:
            print(json.dumps(told), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
