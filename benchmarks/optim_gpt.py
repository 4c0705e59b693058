"""What optimizers make of a GPT over bytes in equal time, with K-FAC as it comes.

    [PYTHONPATH=src] python -m benchmarks.optim_gpt [--seconds S] [--repeat N] [--only ...] [--out FILE] [--quick]

A transformer of 11 million parameters learns the source code of Python's standard library, which ships with every
Python: 16,384 bytes a step, cross-entropy, in bf16 autocast and in fp32, with gradients clipped and not. Every run gets
the same time on the clock, which stands still during evaluations; rates follow a cosine over that time, for all
optimizers. AdamW is tuned first (rates of `RATES`, on validation data); the others come with defaults. What counts are
bits per byte of files that were not trained on. A second part says what K-FAC's steps are spent on. Everything,
every repetition included, is in the file that is written after every run. --quick trains a small model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks import harness
from benchmarks import optim_samples as samples
from benchmarks.optim_networks import Speaker
from diamond.optim import KFAC, Muon
from diamond.optim import kfac as kfac_module
from diamond.optim.curving import Curving

RATES = (3e-4, 1e-3, 2e-3, 4e-3)
DEFAULT_RATE = 1e-3  # torch's, for AdamW
METHODS = ("adamw", "adamw-tuned", "muon", "kfac")
CLIPS = ("none", "0.2", "1.0")
PRECISIONS = ("bf16", "fp32")
_LOOKS = 12  # evaluations along the way
_AT_ONCE = 10  # steps between looks at the clock, for which a GPU must be waited for


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int = 384
    depth: int = 6
    heads: int = 6
    context: int = 256
    batch: int = 64
    windows: int = 256  # that are evaluated


QUICK = Size(width=64, depth=2, heads=2, context=64, batch=16, windows=64)


@dataclass(kw_only=True)
class Run:
    """One repetition. `curve` has (step, seconds, bits of the training batches since the last look, bits of
    validation); `about` what K-FAC says of itself in the end."""

    method: str
    precision: str
    clip: str
    seed: int
    rate: float | None
    init: str
    steps: int = 0
    seconds: float = 0.0
    ms_per_step: float = 0.0
    bits: float | None = None
    best_bits: float | None = None
    curve: list[list[float]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def title(self) -> str:
        rate = "" if self.rate is None else f" lr={self.rate:g}"
        return f"{self.method}{rate}, {self.precision}, clip {self.clip}, seed {self.seed}"


class Bytes:
    """Windows of a text, from anywhere."""

    def __init__(self, size: Size, device: str) -> None:
        self.size = size
        self.text = {split: samples.source_text(split).to(device) for split in ("train", "validation")}
        self.along = torch.arange(size.context + 1, device=device)

    def batches(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        text = self.text["train"]
        while True:
            starts = torch.randint(len(text) - self.size.context, (self.size.batch, 1), generator=generator)
            yield text[starts.to(text.device) + self.along].long()

    def held_back(self) -> list[Tensor]:
        text = self.text["validation"]
        starts = torch.linspace(0, len(text) - self.size.context - 1, self.size.windows, device=text.device).long()
        return list(text[starts[:, None] + self.along].long().split(self.size.batch))


class Trainer:
    def __init__(self, run: Run, data: Bytes, device: str, seconds: float) -> None:
        self.run, self.data, self.device, self.seconds = run, data, device, seconds
        size = data.size
        torch.manual_seed(run.seed)
        self.model = Speaker(size.width, size.depth, size.heads, size.context)
        if run.init == "torch":
            for module in self.model.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    module.reset_parameters()
        self.model.to(device)
        self.optimizer = _optimizer(run, self.model)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.clip = None if run.clip == "none" else float(run.clip)
        self.spent, self.zeros, self.losses = 0.0, 0, [torch.zeros((), device=device)]

    def loss(self, batch: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.run.precision == "bf16"):
            return F.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def step(self, batch: Tensor) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * min(1.0, self.spent / self.seconds)))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.losses.append(loss.detach())

    def train(self, say: bool = True) -> None:
        batches = self.data.batches(self.run.seed)
        looks = 0
        self.look(say)
        while self.spent < self.seconds:
            began = time.perf_counter()
            for _ in range(_AT_ONCE):
                self.step(next(batches))
            _wait(self.device)
            self.spent += time.perf_counter() - began
            self.run.steps += _AT_ONCE
            if self.spent >= (looks + 1) * self.seconds / _LOOKS:
                looks = int(self.spent * _LOOKS / self.seconds)
                self.look(say)
                if not math.isfinite(self.run.curve[-1][3]):
                    self.run.error = "diverged"
                    break
        self.run.seconds = round(self.spent, 3)
        self.run.ms_per_step = round(1000 * self.spent / max(self.run.steps, 1), 3)
        self.run.bits = self.run.curve[-1][3]
        self.run.best_bits = min(point[3] for point in self.run.curve)
        self.run.about = _about(self.optimizer)

    @torch.no_grad()
    def look(self, say: bool) -> None:
        self.model.eval()
        pieces = self.data.held_back()
        total = sum(float(self.loss(one)) * len(one) for one in pieces) / sum(map(len, pieces))
        self.model.train()
        recent = float(torch.stack(self.losses).mean())
        self.losses = self.losses[-1:]
        bits = [round(one / math.log(2), 4) for one in (recent, total)]
        self.run.curve.append([self.run.steps, round(self.spent, 2), *bits])
        if say:
            print(
                f"    step {self.run.steps:5d}  {self.spent:6.1f} s  {bits[1]:.3f} bits {_said(self.optimizer)}",
                flush=True,
            )


def _optimizer(run: Run, model: nn.Module) -> Any:
    if run.method == "kfac":
        return KFAC(model)
    if run.method == "muon":
        return Muon(model, heads=("head",))
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=run.rate or DEFAULT_RATE, fused=fused)


def _said(optimizer: Any) -> str:
    if not isinstance(optimizer, KFAC):
        return ""
    return (
        f"length {optimizer.lengths.step:.3g} momentum {optimizer.lengths.momentum:.2f} damping {optimizer.damping:.1g}"
    )


def _about(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, KFAC):
        return {}
    return {
        "length": optimizer.lengths.step,
        "momentum": optimizer.lengths.momentum,
        "damping": optimizer.damping,
        "skipped": optimizer.skipped,
        "measures": optimizer.measures,
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- what K-FAC's steps are spent on ---------------------------------------------------------------------------------


@dataclass
class Part:
    calls: int = 0
    seconds: float = 0.0


@contextmanager
def timed(parts: dict[str, Part], owner: Any, name: str, part: str, device: str) -> Iterator[None]:
    """Calls of a function, with the work that a GPU does for them."""
    honest = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        _wait(device)
        began = time.perf_counter()
        try:
            return honest(*args, **options)
        finally:
            _wait(device)
            parts.setdefault(part, Part())
            parts[part].calls += 1
            parts[part].seconds += time.perf_counter() - began

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, honest)


def split(data: Bytes, device: str, precision: str, seconds: float) -> dict[str, Any]:
    """Milliseconds a step, on average over a run from its beginning, and how often each part was done."""
    found: dict[str, Any] = {}
    for method in ("adamw", "kfac"):
        run = Run(method=method, precision=precision, clip="1.0", seed=0, rate=None, init="gpt")
        trainer, parts = Trainer(run, data, device, seconds), {}
        batches = data.batches(0)
        for _ in range(3):  # what is only slow once does not count
            trainer.step(next(batches))
        inside = [timed(parts, trainer.optimizer, "step", "optimizer", device)]
        if isinstance(trainer.optimizer, KFAC):
            inside += [
                timed(parts, Curving, "_take_statistics", "factors", device),
                timed(parts, trainer.optimizer.crew, "reduce", "averages", device),
                timed(parts, trainer.optimizer.refreshing, "now", "inverses", device),
                timed(parts, kfac_module, "measure", "lengths", device),
                timed(parts, trainer.optimizer.directions, "find", "directions", device),
            ]
        steps = _timed_steps(trainer, batches, inside, parts, seconds)
        found[method] = {
            "steps": steps,
            **{
                name: {"calls": one.calls, "ms_per_step": round(1000 * one.seconds / steps, 3)}
                for name, one in parts.items()
            },
        }
    ours, peer = (found[name]["whole step"]["ms_per_step"] for name in ("kfac", "adamw"))
    found["times_adamw"] = round(ours / peer, 3)
    return found


def _timed_steps(
    trainer: Trainer, batches: Iterator[Tensor], inside: list[Any], parts: dict[str, Part], seconds: float
) -> int:
    steps = 0
    with ExitStack() as stack:
        for one in inside:
            stack.enter_context(one)
        stack.enter_context(timed(parts, trainer, "step", "whole step", trainer.device))
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            trainer.step(next(batches))
            steps += 1
    return steps


# ---- the protocol ----------------------------------------------------------------------------------------------------


class Protocol:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.size = QUICK if given.quick else Size()
        self.data = Bytes(self.size, self.device)
        self.tuning: list[Run] = []
        self.runs: list[Run] = []
        self.splits: dict[str, Any] = {}
        self.began = time.perf_counter()

    def one(self, into: list[Run], seconds: float, **about: Any) -> Run:
        run = Run(init=self.given.init, **about)
        into.append(run)
        print(f"  {run.title}  (at {time.perf_counter() - self.began:.0f} s)", flush=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                Trainer(run, self.data, self.device, seconds).train()
            except (RuntimeError, ValueError, TypeError) as error:  # the others are still worth measuring
                run.error = f"{type(error).__name__}: {error}"[:500]
        run.said = sorted({str(one.message)[:300] for one in said})
        bits = "-" if run.bits is None else f"{run.bits:.4f}"
        print(
            f"    -> {bits} bits, {run.steps} steps of {run.ms_per_step:.1f} ms {run.error} {run.said or ''}",
            flush=True,
        )
        self.write()
        return run

    def tune(self) -> float:
        """AdamW's rate, with half of the time for each."""
        for rate in RATES:
            self.one(
                self.tuning,
                self.given.seconds / 2,
                method="adamw",
                precision=self.given.precision[0],
                clip="1.0",
                seed=100,
                rate=rate,
            )
        known = [one for one in self.tuning if one.bits is not None and not one.error]
        return min(known, key=lambda one: one.bits or math.inf).rate or DEFAULT_RATE

    def warm_up(self) -> None:
        """So that the first run does not pay for what is loaded once."""
        for precision in self.given.precision:
            for method in METHODS:
                run = Run(method=method, precision=precision, clip="1.0", seed=0, rate=None, init="gpt")
                Trainer(run, self.data, self.device, 0.5).train(say=False)

    def all(self) -> None:
        given = self.given
        self.warm_up()
        tuned = given.rate or (self.tune() if "adamw-tuned" in given.only else DEFAULT_RATE)
        print(f"AdamW's rate: {tuned:g}", flush=True)
        rates: dict[str, float | None] = {"adamw": DEFAULT_RATE, "adamw-tuned": tuned}
        for seed in range(given.repeat):
            for precision in given.precision:
                for clip in given.clip:
                    for method in given.only:
                        if method == "adamw-tuned" and tuned == DEFAULT_RATE and "adamw" in given.only:
                            continue  # it is the same run
                        self.one(
                            self.runs, given.seconds, method=method, precision=precision, clip=clip, seed=seed,
                            rate=rates.get(method),
                        )  # fmt: skip
        if given.split:
            for precision in given.precision:
                self.splits[precision] = split(self.data, self.device, precision, given.split)
                print(f"  {precision}: {json.dumps(self.splits[precision])}", flush=True)
        self.write()

    def write(self) -> None:
        document = {
            "benchmark": "optim_gpt",
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {**harness.machine(), "device": _device_name(self.device)},
            "versions": harness.versions(()) | {"torch": torch.__version__},
            "text": "Python's standard library, one file of twenty held back",
            "size": {**asdict(self.size), "parameters": _parameters(self.size)},
            "asked": {name: value for name, value in vars(self.given).items() if name != "out"},
            "figures": self.figures(),
            "split": self.splits,
            "runs": [asdict(one) for one in self.runs],
            "tuning": [asdict(one) for one in self.tuning],
        }
        target = Path(self.given.out)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document, indent=1) + "\n")

    def figures(self) -> list[dict[str, Any]]:
        """For each method, precision and clip the mean over repetitions, against AdamW's in the same conditions."""
        found: dict[tuple[str, str, str], list[Run]] = {}
        for run in self.runs:
            found.setdefault((run.precision, run.clip, run.method), []).append(run)
        peers = {key[:2]: _mean_bits(runs) for key, runs in found.items() if key[2] == "adamw"}
        return [
            {
                "name": f"bits per byte, {method}, {precision}, clip {clip}",
                "value": _mean_bits(runs),
                "unit": "bits",
                "better": "lower",
                "peer": {"adamw": peers.get((precision, clip))},
                "runs": [run.bits for run in runs],
                "ms_per_step": round(sum(run.ms_per_step for run in runs) / len(runs), 2),
                "steps": [run.steps for run in runs],
            }
            for (precision, clip, method), runs in found.items()
        ]

    def table(self) -> None:
        print(f"\n{'precision':9} {'clip':5} {'method':12} {'bits':>8} {'steps':>7} {'ms/step':>8}")
        for figure in self.figures():
            _, method, precision, clip = figure["name"].split(", ")
            bits = "-" if figure["value"] is None else f"{figure['value']:.4f}"
            steps = sum(figure["steps"]) // len(figure["steps"])
            print(f"{precision:9} {clip[5:]:5} {method:12} {bits:>8} {steps:>7} {figure['ms_per_step']:>8}")
        for precision, one in self.splits.items():
            print(f"split, {precision}: a K-FAC step takes {one['times_adamw']:.2f} times AdamW's")
            print(f"  {json.dumps(one['kfac'])}")


def _mean_bits(runs: list[Run]) -> float | None:
    known = [run.bits for run in runs if run.bits is not None]
    return round(sum(known) / len(known), 4) if known and len(known) == len(runs) else None


def _parameters(size: Size) -> int:
    model = Speaker(size.width, size.depth, size.heads, size.context)
    return sum(one.numel() for one in model.parameters())


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, help="of training, for every run; 20, or 6 with --quick")
    parser.add_argument("--repeat", type=int, default=1, help="seeds, 0 and on")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--clip", nargs="+", choices=CLIPS, default=list(CLIPS), help="gradients' norm")
    parser.add_argument("--rate", type=float, help="of the tuned AdamW, where it was found before")
    parser.add_argument("--init", choices=("gpt", "torch"), default="gpt", help="weights of deviation 0.02, or torch's")
    parser.add_argument("--split", type=float, default=6.0, metavar="S", help="seconds for the second part; 0: none")
    parser.add_argument("--out", help="result file; $OUT/optim_gpt.json, or in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="a small model, for a CPU")
    given = parser.parse_args()
    given.seconds = given.seconds or (6.0 if given.quick else 20.0)
    folder = Path(os.environ["OUT"]) if os.environ.get("OUT") else harness.RESULTS
    given.out = given.out or str(folder / "optim_gpt.json")
    return given


def main() -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    protocol = Protocol(_options())
    protocol.all()
    protocol.table()


if __name__ == "__main__":
    main()
