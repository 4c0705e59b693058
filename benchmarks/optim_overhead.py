"""What K-FAC adds to a training step, by component, for models the size of ResNet-50 and GPT-2 small.

    [PYTHONPATH=src] python -m benchmarks.optim_overhead [--quick] [--check]

Run it where the accelerator is. A model is trained by AdamW and by K-FAC with the periods that its plan chose, in one
process on data from a seed. Components are timed alone: what a step that takes the curvature costs more, inverting all
factors, preconditioning all gradients, measuring how far to go; and put together as they fall due. --quick trains small
ones, to see that it works.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.harness import Bench, median, options
from diamond.optim import KFAC, plan

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Residual(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.inside = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        straight = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.beside: nn.Module = nn.Identity() if same else straight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.inside(x) + self.beside(x))


def residual_net(quick: bool) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """50 layers of convolutions, as for pictures of 224 by 224 points in 1000 kinds."""
    widths, numbers = ((16, 32), (1, 1)) if quick else ((64, 128, 256, 512), (3, 4, 6, 3))
    first = widths[0]
    layers: list[nn.Module] = [
        nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    inputs = first
    for stage, (width, number) in enumerate(zip(widths, numbers, strict=True)):
        for place in range(number):
            layers.append(Residual(inputs, width, 2 if place == 0 and stage else 1))
            inputs = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10 if quick else 1000)]
    batch, side = (4, 32) if quick else (128, 224)
    pictures = torch.randn(batch, 3, side, side, device=DEVICE).to(memory_format=torch.channels_last)
    model = nn.Sequential(*layers).to(DEVICE).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, pictures, torch.randint(10 if quick else 1000, (batch,), device=DEVICE)


class Attending(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Writer(nn.Module):
    def __init__(self, words: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Attending(width) for _ in range(depth)), nn.LayerNorm(width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        shown: torch.Tensor = self.head(self.layers(self.words(text) + self.places(places)))
        return shown.flatten(0, 1)


def writer(quick: bool) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Twelve layers of attention, 768 wide; the words of the head are many, and left to the fallback."""
    words, width, depth, length, batch = (500, 64, 2, 32, 4) if quick else (50257, 768, 12, 1024, 16)
    model = Writer(words, width, depth, length).to(DEVICE)
    text = torch.randint(words, (batch, length), device=DEVICE)
    return model, text, text.roll(-1, 1).flatten()


REPEATS = 2


def seconds(call: Callable[[], Any], times: int) -> list[float]:
    found = []
    for _ in range(times):
        synchronize()
        began = time.perf_counter()
        call()
        synchronize()
        found.append(time.perf_counter() - began)
    return found


def together(call: Callable[[], Any], times: int) -> float:
    """Seconds of each, one after the other as in a training: nobody waits for the GPU before the last."""
    synchronize()
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize()
    return (time.perf_counter() - began) / times


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


def one(
    bench: Bench,
    name: str,
    build: Callable[[bool], tuple[nn.Module, torch.Tensor, torch.Tensor]],
    quick: bool,
    exclude: Sequence[str] = (),
) -> None:
    times = 3 if quick else 10
    torch.manual_seed(0)
    model, inputs, targets = build(quick)

    def backward() -> None:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            output = model(inputs)
        F.cross_entropy(output.float(), targets).backward()

    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA)

    def plain() -> None:
        backward()
        adam.step()
        adam.zero_grad()

    seconds(plain, 3)
    step = median(seconds(plain, times))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):  # as its forward passes are in training
        chosen = plan(model, measure=True, step_s=step, inputs=inputs, exclude=exclude)
    optimizer = KFAC(model, plan=chosen, exclude=exclude)

    def second() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds(second, 3)
    # As after some hundred steps, when what is measured stays much the same: one whole period of all parts.
    optimizer._period = lambda every: every  # type: ignore[method-assign]
    many, ours, theirs = 8 if quick else chosen.inverse_every, [], []
    for _ in range(1 if quick else REPEATS):
        optimizer._factors_at = optimizer._inverses_at = optimizer._lengths_at = optimizer.steps
        optimizer._curving.arm(again=True)
        ours.append(together(second, many))
        optimizer._curving.disarm()
        theirs.append(together(plain, many))
    optimizer.zero_grad()
    more = [100 * (one / other - 1) for one, other in zip(ours, theirs, strict=True)]
    bench.add(f"{name}: K-FAC's step, mean over a period of {chosen.inverse_every}", median(ours) * 1e3, "ms", "lower",
              peer={"AdamW": round(median(theirs) * 1e3, 3)}, runs=[round(1e3 * one, 3) for one in ours],
              peer_runs={"AdamW": [round(1e3 * one, 3) for one in theirs]})  # fmt: skip
    bench.add(f"{name}: K-FAC's step more than AdamW's", median(more), "%", "lower", aim=15.0,
              runs=[round(one, 2) for one in more])  # fmt: skip
    parts = measured(optimizer, backward, times)
    total = (
        parts["statistics"] / chosen.factor_every + parts["lengths"] / (4 * chosen.factor_every)
        + parts["inverses"] / chosen.inverse_every + parts["preconditioning"]
    )  # fmt: skip
    for part, took in parts.items():
        bench.add(f"{name}: {part}, whenever it falls due", took * 1e3, "ms", "lower")
    bench.add(f"{name}: step with AdamW", step * 1e3, "ms", "lower")
    bench.add(f"{name}: all parts more than the step, at the plan's periods", 100 * total / step, "%", "lower",
              note=f"factors every {chosen.factor_every}, inverses every {chosen.inverse_every} steps; "
                   f"predicted {100 * chosen.overhead:.1f} %; lengths "
                   f"{'were measured' if optimizer.measures else 'could not be measured'} in training")  # fmt: skip
    if CUDA:
        bench.add(f"{name}: memory at most", torch.cuda.max_memory_allocated() / 1024**3, "GiB", "lower")
        torch.cuda.reset_peak_memory_stats()


def measured(optimizer: KFAC, backward: Callable[[], None], times: int) -> dict[str, float]:
    """Seconds of every part, alone."""
    from diamond.optim.precondition import inverses_of

    def looking() -> None:
        """A forward and backward pass that takes the curvature, and nothing done with it."""
        optimizer._curving.disarm()
        optimizer._curving.arm(again=True)
        backward()

    optimizer._curving.disarm()
    seconds(backward, 2)
    usual = median(seconds(backward, times))
    seconds(looking, 1)
    statistics = median(seconds(looking, max(2, times // 2))) - usual
    taken = optimizer._curving.disarm()
    lengths = []
    if taken.seen is not None:
        with torch.no_grad():
            direction = optimizer.directions.find()
            lengths = seconds(lambda: optimizer._measure(taken.seen, direction), max(2, times // 2))
    with torch.no_grad():
        known = [factor for factor in optimizer.factors if factor.known]
        inverses = seconds(lambda: inverses_of(known, optimizer.damping, optimizer.solver, {}), max(2, times // 3))
        preconditioning = seconds(lambda: optimizer.directions.find(), times)
    return {
        "statistics": max(0.0, statistics),
        "lengths": median(lengths) if lengths else 0.0,
        "inverses": median(inverses),
        "preconditioning": median(preconditioning),
    }


def main() -> int:
    chosen = options(__doc__ or "")
    bench = Bench("optim_overhead_gpu" if CUDA else "optim_overhead_cpu", packages=("torch",))
    if CUDA:
        torch.set_float32_matmul_precision("high")
        bench.versions["device"] = torch.cuda.get_device_name()
    one(bench, "ResNet-50", residual_net, chosen.quick)
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
    one(bench, "GPT-2 small", writer, chosen.quick, exclude=("head",))
    return bench.finish(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
