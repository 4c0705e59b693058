"""What `diamond.train` costs a training loop, and for how long a checkpoint holds it up.

    [PYTHONPATH=src] python -m benchmarks.train_overhead [--quick] [--check]

Run it where the accelerator is; without one it measures the CPU. A transformer is trained by the loop that people write
by hand and by the same loop with `diamond.train`, in turns, in one process: the ratio of their median step times. A
checkpoint's cost is what its steps took longer than their neighbours, and how long the call itself took; its peers are
`torch.save` and torch's own asynchronous checkpoint. Needs torch 2.9 or newer, and nothing of Diamond's server.

Started by torchrun, it compares both loops over all ranks instead, by hand with DistributedDataParallel:

    PYTHONPATH=src torchrun --standalone --nproc-per-node 2 -m benchmarks.train_overhead
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diamond.train as dt
from benchmarks.harness import Bench, median, options, percentile

os.environ["DIAMOND_TRAIN_QUIET"] = "1"
CUDA = torch.cuda.is_available()
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
WORDS, LENGTH = 1000, 256 if CUDA else 32


class Writer(nn.Module):
    """A small language model: `width` and `depth` make it as large as wanted."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        shown: torch.Tensor = self.head(self.layers(self.words(text)))
        return shown


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(text).float().flatten(0, 1), text.flatten())


def loader(batch_size: int) -> DataLoader[Any]:
    texts = torch.randint(WORDS, (4096, LENGTH), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(texts), batch_size=batch_size, shuffle=True, pin_memory=CUDA)


def shared_loader(batch_size: int) -> DataLoader[Any]:
    """As people write it for several ranks; `batch_size` is of each, as it is with Diamond."""
    data = loader(batch_size).dataset
    spread = torch.utils.data.DistributedSampler(data)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=batch_size, sampler=spread, pin_memory=CUDA)


def by_hand(width: int, depth: int, batch_size: int) -> Iterator[float]:
    """Step times of the loop that people write."""
    model: Any = Writer(width, depth).to(DEVICE)
    if WORLD > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[DEVICE.index] if CUDA else None)
    batches = shared_loader if WORLD > 1 else loader
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    while True:
        began = time.perf_counter()
        for (text,) in batches(batch_size):
            here = text.to(DEVICE, non_blocking=True)
            with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=CUDA):
                loss = loss_of(model, here)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            synchronize()
            now = time.perf_counter()
            yield now - began
            began = now


def with_diamond(width: int, depth: int, batch_size: int, folder: Path) -> Iterator[float]:
    model: Any = Writer(width, depth)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)
    with dt.run(checkpoints=folder, save_every_s=3600.0) as run:
        model, optimizer, batches = run.prepare(model, optimizer, loader(batch_size))
        began = time.perf_counter()
        for (text,) in run.steps(batches, until=10**9):
            loss = loss_of(model, text)
            run.backward(loss)
            run.step()
            synchronize()
            now = time.perf_counter()
            yield now - began
            began = now


def overhead(bench: Bench, quick: bool) -> None:
    width, depth, batch = (768, 12, 64) if CUDA else (128, 2, 16)
    rounds, steps = (4, 20) if quick else (12, 40)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        loops = {"by hand": by_hand(width, depth, batch), "diamond": with_diamond(width, depth, batch, Path(name))}
        for loop in loops.values():
            stack.callback(loop.close)  # type: ignore[attr-defined]
            for _ in range(10):
                next(loop)
        taken: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(rounds):
            for which in sorted(loops, reverse=bool(turn % 2)):
                next(loops[which])  # the first after a change finds caches cold
                taken[which] += [next(loops[which]) * 1000 for _ in range(steps)]
    ours, theirs = median(taken["diamond"]), median(taken["by hand"])
    ratio = 100 * (ours / theirs - 1)
    where = ("GPU" if CUDA else "CPU") + (f", {WORLD} ranks" if WORLD > 1 else "")
    if WORLD > 1:
        ours, theirs, ratio = _slowest(ours, theirs)
    note = f"{len(taken['diamond'])} steps each, in turns; p90 {percentile(taken['diamond'], 0.9):.2f} ms"
    bench.add(f"{where}: step time", ours, "ms", "lower", peer={"by hand": round(theirs, 4)},
              runs=[round(one, 3) for one in taken["diamond"]],
              peer_runs={"by hand": [round(one, 3) for one in taken["by hand"]]}, note=note)  # fmt: skip
    bench.add(f"{where}: step time more than by hand", ratio, "%", "lower", aim=1.0)


def _slowest(ours: float, theirs: float) -> tuple[float, float, float]:
    """Medians of the rank that took longest; they wait for each other, so all are nearly alike."""
    both = torch.tensor([ours, theirs], device=DEVICE)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    ours, theirs = both.tolist()
    return ours, theirs, 100 * (ours / theirs - 1)


def sized(gib: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that is so large with its optimizer's state, of 12 bytes a parameter; cheap to compute."""
    width = 2048
    number = max(1, round(gib * 1024**3 / 12 / width**2))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(number))).to(DEVICE)
    return model, torch.optim.Adam(model.parameters(), lr=1e-6, fused=CUDA)


def step(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()


def held_up(
    once: Callable[[], None], save: Callable[[], None], before_change: Callable[[], None], times: int
) -> tuple[list[float], list[float]]:
    """Seconds that a save's call took, and that its step and the next took longer than steps usually do."""
    usual = []
    for _ in range(8):
        began = time.perf_counter()
        once()
        synchronize()
        usual.append(time.perf_counter() - began)
    calls, extra = [], []
    for _ in range(times):
        began = time.perf_counter()
        save()
        calls.append(time.perf_counter() - began)
        for _ in range(2):
            once()
            synchronize()
        extra.append(max(0.0, time.perf_counter() - began - 2 * median(usual)))
        before_change()
    return calls, extra


def checkpoints(bench: Bench, gib: float, times: int) -> None:
    calls: dict[str, list[float]] = {}
    extra: dict[str, list[float]] = {}
    inputs = torch.randn(512, 2048, device=DEVICE)
    for name in ("torch.save", "DCP async", "diamond"):
        model, optimizer = sized(gib)
        folder = Path(tempfile.mkdtemp(prefix="diamond-train-"))
        try:
            calls[name], extra[name] = _one(name, model, optimizer, inputs, folder, times)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            del model, optimizer
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
    where = "GPU" if CUDA else "CPU"
    for label, found in (("training held up by a checkpoint", extra), ("the call alone", calls)):
        peers = {name: round(median(found[name]), 4) for name in found if name != "diamond"}
        bench.add(f"{where}, {gib:g} GiB: {label}", median(found["diamond"]), "s", "lower", peer=peers,
                  runs=found["diamond"], peer_runs={name: found[name] for name in peers})  # fmt: skip


def _one(
    name: str, model: Any, optimizer: Any, inputs: torch.Tensor, folder: Path, times: int
) -> tuple[list[float], list[float]]:
    def plain() -> None:
        step(model, inputs)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    plain()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if name == "torch.save":
        return held_up(plain, lambda: torch.save(state, folder / "state.pt"), lambda: None, times)
    if name == "DCP async":
        begun: list[Any] = []

        def save() -> None:
            begun.append(dcp.async_save(state, checkpoint_id=folder / str(len(begun)), no_dist=True))

        return held_up(plain, save, lambda: begun[-1].result(), times)
    with dt.run(checkpoints=folder, save_every_s=3600.0, keep=1, precision="fp32") as run:
        data = DataLoader(TensorDataset(torch.zeros(10**6)), batch_size=1)
        model, optimizer, batches = run.prepare(model, optimizer, data)
        turns = run.steps(batches, until=10**9)
        next(turns)

        def ours() -> None:
            run.backward(model(inputs).square().mean())
            run.step()
            next(turns)

        found = held_up(ours, run.save, lambda: run._checkpoints.saver.wait(), times)
        turns.close()  # type: ignore[attr-defined]
        run._checkpoints.saved_at = run.step_number
    return found


def main() -> int:
    chosen = options(__doc__ or "")
    name = "train_overhead_gpu" if CUDA else "train_overhead_cpu"
    bench = Bench(name if WORLD == 1 else f"{name}_ranks", packages=("torch",))
    if WORLD > 1:
        dist.init_process_group("nccl" if CUDA else "gloo")
        overhead(bench, chosen.quick)
        dist.barrier()
        dist.destroy_process_group()
        return bench.finish(chosen) if RANK == 0 else 0
    if CUDA:
        bench.versions["device"] = torch.cuda.get_device_name()
    overhead(bench, chosen.quick)
    for gib in (1.0, 10.0) if CUDA else (0.25,):
        checkpoints(bench, gib, 2 if chosen.quick else 5)
    return bench.finish(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
