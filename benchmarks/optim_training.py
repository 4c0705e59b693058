"""How long optimizers take to reach what a tuned AdamW reaches.

    python -m benchmarks.optim_training PROBLEM [--methods NAME ...] [--trials N] [--seeds K] [--quick] [--check]

Every method gets the same number of trials, half of them drawn at random from the spaces of
`benchmarks/optim_methods.py`, half near the best of these, all on validation data. AdamW is tuned first, for its metric
at the horizon. The others are chosen by their time to 95 % of that (`--select final`: by their metric at the horizon),
and may choose a shorter horizon, which "adamw-short" does for AdamW, too. The best setting of each is then trained from
several seeds, methods in turns, and measured on test data. The target is AdamW's metric at the horizon, the mean over
seeds; a method reaches it when its own mean does. Times are of training alone: the clock stands still during
evaluations. torch uses one thread unless `--threads` says otherwise.
With `--jobs` so many trainings run beside each other, each in a process of its own, methods mixed. With `--within` as
many rounds of trials and of seeds are done as fit into that time, for every method the same.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from benchmarks.harness import RESULTS, Bench, Figure
from benchmarks.optim_methods import FIRST_ORDER, METHODS, OURS, REFERENCE, Method, Settings
from benchmarks.optim_plots import PLOTS, curves
from benchmarks.optim_problems import PROBLEMS, Problem
from benchmarks.optim_runs import Point, Run, train

TUNING_SEED = 1000  # no measured run has it
MARGIN = 0.95  # of AdamW's validation metric: a setting that only just reaches it may miss with another seed
PATIENCE = 4.0  # a run may take so many times as long as the longest of AdamW
EQUAL_TIME = "adamw, equal time"
TUNING = 0.55  # of the time, where that is bounded
LATE = "not begun in time"
PEER_AIM = 3.0  # times faster than kfac-pytorch


@dataclass(frozen=True, kw_only=True)
class Protocol:
    trials: int = 12
    seeds: int = 5
    steps: int = 1000
    select: str = "time"
    device: str = "cpu"
    jobs: int = 1
    within_s: float = math.inf


@dataclass
class Report:
    """All runs of one problem."""

    problem: Problem
    protocol: Protocol
    trials: dict[str, list[Run]] = field(default_factory=dict)
    failed: list[Run] = field(default_factory=list)  # trials of methods none of whose came to an end
    runs: dict[str, list[Run]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    began_at: float = field(default_factory=time.time)

    @property
    def target(self) -> float:
        return mean([run.final for run in self.runs[REFERENCE]])

    def reached(self, method: str, target: float) -> Point | None:
        """Where the mean over seeds comes down to the target; None if it never does."""
        return next((point for point in mean_curve(self.runs[method]) if point.metric <= target), None)

    def ours(self) -> str | None:
        """The one of our methods that did best in tuning: test data have no say in it."""
        known = [name for name in OURS if name in self.trials]
        return min(known, key=lambda name: _score(self.best(name), self._bound(name)), default=None)

    def best(self, method: str) -> Run:
        return min(self.trials[method], key=lambda run: _score(run, self._bound(method)))

    def _bound(self, method: str) -> float | None:
        """What a trial is to reach soon; None where its end alone counts."""
        if method == REFERENCE or self.protocol.select == "final":
            return None
        return MARGIN * min(run.final for run in self.trials[REFERENCE])


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def mean_curve(runs: list[Run]) -> list[Point]:
    """Over the seeds, as far as all of them came."""
    found = []
    for points in zip(*(run.curve for run in runs), strict=False):
        times = mean([one.wall_s for one in points]), mean([one.device_s for one in points])
        found.append(Point(points[0].step, *times, mean([one.metric for one in points])))
    return found


def _score(run: Run, bound: float | None) -> tuple[int, float]:
    """Lower is better: whoever reaches the bound, by the time it takes, comes before everyone who does not."""
    point = None if bound is None else run.reached(bound)
    return (1, run.final) if point is None else (0, point.device_s)


# ---- the protocol --------------------------------------------------------------------------------------------------


def measure(problem: Problem, methods: list[Method], protocol: Protocol) -> Report:
    report = Report(problem, protocol)
    chosen = [METHODS[REFERENCE], *(one for one in methods if one.name != REFERENCE)]
    chosen = [one for one in chosen if _can_be_measured(one, report)]
    _tune(chosen[:1], report)  # how long AdamW takes bounds what the others may
    _tune(chosen[1:], report)
    rounds = min(map(len, report.trials.values()))  # the others may have had time for fewer
    report.trials = {name: runs[:rounds] for name, runs in report.trials.items()}
    chosen = [one for one in chosen if one.name in report.trials]
    _measure_in_turns(chosen, report)
    _equal_time(report)
    return report


def _can_be_measured(method: Method, report: Report) -> bool:
    why = method.missing()
    if not why and not method.applies_to(report.problem):
        why = "it needs all training data in every step"
    if why:
        report.absent[method.name] = why
    return not why


@dataclass(frozen=True)
class Order:
    """A training to be done."""

    method: Method
    settings: Settings
    seed: int
    split: str
    steps: int
    limit_s: float
    begin_by: float = math.inf  # seconds since the epoch


def _tune(methods: list[Method], report: Report) -> None:
    protocol = report.protocol
    found: dict[str, list[Run]] = {method.name: [] for method in methods}
    anywhere = -(-protocol.trials // 2)
    for numbers in (range(anywhere), range(anywhere, protocol.trials)):
        orders = [
            Order(method, _settings(method, number, found[method.name], report), TUNING_SEED, "validation",
                  protocol.steps, _limit(report), report.began_at + TUNING * protocol.within_s)
            for number in numbers
            for method in methods
        ]  # fmt: skip
        for run in _whole_rounds(_trained(orders, report), len(methods)):
            found[run.method].append(run)
            taken = run.curve[-1].device_s if run.curve else 0.0
            print(f"  {run.method}: {run.final:.5g} in {taken:.1f} s {run.stopped} {run.settings}", flush=True)
    for name, runs in found.items():
        if any(math.isfinite(run.final) for run in runs):
            report.trials[name] = runs
        elif name == REFERENCE:
            raise SystemExit(f"no trial of {REFERENCE} came to its end; the first: {runs[0].stopped}")
        else:
            report.failed += runs
            report.absent[name] = f"none of {len(runs)} trials came to its end; the first: {runs[0].stopped}"


def _settings(method: Method, number: int, known: list[Run], report: Report) -> Settings:
    problem, select = report.problem, report.protocol.select
    if not known:
        return method.draw(problem, number, select)
    best = min(known, key=lambda run: _score(run, report._bound(method.name)))
    return method.near(problem, number, select, best.settings)


def _measure_in_turns(methods: list[Method], report: Report) -> None:
    """So that whatever else the machine does concerns all alike."""
    protocol, steps = report.protocol, report.protocol.steps
    best = {method.name: report.best(method.name).settings for method in methods}
    if report.protocol.jobs == 1:  # the first run finds everything cold; in a pool, trials have warmed it
        cold = [Order(one, best[one.name], TUNING_SEED, "validation", min(steps, 5), math.inf) for one in methods]
        list(_trained(cold, report))
    orders = [
        Order(method, best[method.name], seed, "test", steps, _limit(report), report.began_at + protocol.within_s)
        for seed in range(report.protocol.seeds)
        for method in (methods if seed % 2 == 0 else reversed(methods))
    ]
    for run in _whole_rounds(_trained(orders, report), len(methods)):
        report.runs.setdefault(run.method, []).append(run)
        print(f"  {run.method} seed {run.seed}: {run.final:.5g} {run.stopped}", flush=True)
    if REFERENCE not in report.runs:
        raise SystemExit("no seed of all methods fits into the time: give more, or fewer trials or methods")
    if not math.isfinite(report.target):
        raise SystemExit(f"{REFERENCE} diverged with a seed, so there is no target: tune it with more trials")


def _equal_time(report: Report) -> None:
    """AdamW once more, with as many steps as fit into the time of our run."""
    ours = report.ours()
    if ours is None:
        return
    known, base = mean_curve(report.runs[ours]), mean_curve(report.runs[REFERENCE])[-1]
    if not known:
        return
    steps = max(1, round(known[-1].device_s / base.device_s * base.step))
    settings = report.best(REFERENCE).settings
    seeds = range(len(report.runs[REFERENCE]))
    orders = [Order(METHODS[REFERENCE], settings, seed, "test", steps, math.inf) for seed in seeds]
    runs = list(_trained(orders, report))
    for run in runs:
        run.method = EQUAL_TIME
    report.runs[EQUAL_TIME] = runs


def _trained(orders: list[Order], report: Report) -> Iterable[Run]:
    """In the order in which they were given."""
    problem, device = report.problem, report.protocol.device
    if report.protocol.jobs == 1:
        return (_train(problem, order.method, order, device) for order in orders)
    named = [
        (problem.name, problem.evaluations, order.method.name, replace(order, method=None), device) for order in orders
    ]  # type: ignore[arg-type]
    return _pool(report.protocol.jobs).map(_train_by_name, *zip(*named, strict=True))


def _whole_rounds(runs: Iterable[Run], each: int) -> Iterator[Run]:
    """As many as were begun in time, for all methods alike."""
    waiting: list[Run] = []
    for run in runs:
        waiting.append(run)
        if len(waiting) == each:
            if any(one.stopped == LATE for one in waiting):
                return
            yield from waiting
            waiting = []


def _train(problem: Problem, method: Method, order: Order, device: str) -> Run:
    if time.time() > order.begin_by:
        return Run(method.name, order.seed, order.settings, order.steps, stopped=LATE)
    return train(
        problem, method, order.settings, seed=order.seed, split=order.split, steps=order.steps, device=device,
        limit_s=order.limit_s,
    )  # fmt: skip


def _train_by_name(problem: str, evaluations: int, method: str, order: Order, device: str) -> Run:
    """In another process, which makes its own problems and methods: they hold functions, which cannot be sent."""
    return _train(replace(PROBLEMS[problem], evaluations=evaluations), METHODS[method], order, device)


@cache
def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(torch.get_num_threads(),),
    )


def _limit(report: Report) -> float:
    taken = [run.curve[-1].device_s for run in report.trials.get(REFERENCE, []) if not run.stopped]
    return max(10.0, PATIENCE * max(taken, default=math.inf))  # of a toy even hiccups of the machine are long


# ---- what comes out ------------------------------------------------------------------------------------------------


@dataclass
class TrainingBench(Bench):
    """With figures to four digits, as errors may be small, and with the runs beside them."""

    more: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, better: str, **rest: Any) -> Figure:
        self.figures.append(Figure(name=name, value=_digits(value), unit=unit, better=better, **rest))
        return self.figures[-1]

    def _document(self) -> dict[str, Any]:
        return {**super()._document(), "script": "optim_training", **self.more}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def present(report: Report, bench: TrainingBench) -> None:
    problem, device = report.problem, "GPU" if report.protocol.device.startswith("cuda") else "CPU"
    bench.absent.update(report.absent)
    ours = report.ours()
    if ours is not None:
        _times(report, bench, ours, report.target, "AdamW's error", device, aims=True)
        for target in problem.targets:
            _times(report, bench, ours, target, f"{target:g}", device, aims=False)
    _ends(report, bench, ours or REFERENCE)
    bench.more = {
        "problem": {"name": problem.name, "about": problem.about, "metric": problem.metric_name},
        "protocol": {**_protocol(report), "threads": torch.get_num_threads(), "ours": ours},
        "target": _digits(report.target),
        "trials": [run.to_json(1) for runs in (*report.trials.values(), report.failed) for run in runs],
        "training": [run.to_json() for runs in report.runs.values() for run in runs],
    }


def _protocol(report: Report) -> dict[str, Any]:
    """As it was done: with a bound on the time, fewer rounds may be than were asked for."""
    known = {name: value for name, value in report.protocol.__dict__.items() if value != math.inf}
    return known | {"trials": len(report.trials[REFERENCE]), "seeds": len(report.runs[REFERENCE])}


def _ends(report: Report, bench: TrainingBench, shown: str) -> None:
    problem = report.problem
    finals = {name: _digits(mean([run.final for run in runs])) for name, runs in report.runs.items()}
    finals = {name: value for name, value in finals.items() if math.isfinite(value)}
    if shown in finals:
        own = [_digits(run.final) for run in report.runs[shown]]
        bench.add(f"{problem.name}: {problem.metric_name} at the end", finals.pop(shown), problem.metric_name,
                  "lower", peer=finals, runs=own, note=shown)  # fmt: skip


def _times(
    report: Report, bench: TrainingBench, ours: str, target: float, label: str, device: str, *, aims: bool
) -> None:
    name = f"{report.problem.name}: to {label}"
    points = {method: report.reached(method, target) for method in report.runs if method != EQUAL_TIME}
    never = ", ".join(method for method, point in points.items() if point is None)
    note = f"{ours}; target {target:.4g}" + (f"; not reached by {never}" if never else "")
    mine = points[ours]
    for what, unit in (("wall_s", "wall seconds"), ("device_s", f"{device} seconds"), ("step", "steps")):
        others = {method: _digits(getattr(one, what)) for method, one in points.items() if one and method != ours}
        if mine is not None:
            own = [getattr(one, what) for run in report.runs[ours] if (one := run.reached(target))]
            bench.add(f"{name}, {unit}", getattr(mine, what), unit.split()[-1], "lower",
                      peer=others, runs=[_digits(one) for one in own], note=note)  # fmt: skip
    if not aims:
        return
    first_order = [one.wall_s for method in FIRST_ORDER if (one := points.get(method))]
    ratio = 0.0 if mine is None else min(first_order) / mine.wall_s
    bench.add(f"{name}, times faster than the best first-order method", ratio, "times", "higher",
              aim=report.problem.aim, note=note if mine else f"{ours} does not reach it")  # fmt: skip
    other = points.get("kfac-pytorch")
    # where it never arrives, the time of its whole run is the least it takes
    least = other or next(reversed(mean_curve(report.runs.get("kfac-pytorch", []))), None)
    if least is not None:
        ratio = 0.0 if mine is None else least.wall_s / mine.wall_s
        bench.add(f"{name}, times faster than kfac-pytorch", ratio, "times", "higher", aim=PEER_AIM,
                  note=note if other else f"at least: kfac-pytorch did not reach it; {note}")  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of optimizers to what a tuned AdamW reaches.")
    parser.add_argument("problem", choices=sorted(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=list(METHODS))
    parser.add_argument("--trials", type=int, help="of each method, 12")
    parser.add_argument("--seeds", type=int, help="measured with the best setting, 5")
    parser.add_argument("--steps", type=int, help="the horizon, the problem's own")
    parser.add_argument("--threads", type=int, default=1, help="of torch, 1")
    parser.add_argument("--jobs", type=int, default=1, help="trainings beside each other, 1")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="no training begins later")
    parser.add_argument("--select", choices=("time", "final"), default="time", help="what settings are chosen by")
    parser.add_argument("--device", help="cpu or cuda; what the problem is meant for")
    parser.add_argument("--quick", action="store_true", help="1 trial, 1 seed, a fortieth of the steps")
    parser.add_argument("--check", action="store_true", help="exit 1 when an aim does not hold")
    parser.add_argument("--keep", action="store_true", help="write the result file even with --quick")
    return parser.parse_args()


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    problem = PROBLEMS[options.problem]
    device = options.device or problem.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"{problem.name} is meant for a GPU, and torch finds none: give --device cpu to run it anyway")
    if options.quick:
        problem = replace(problem, evaluations=10)
    protocol = Protocol(
        trials=options.trials or (1 if options.quick else 12),
        seeds=options.seeds or (1 if options.quick else 5),
        steps=options.steps or max(10, problem.steps // (40 if options.quick else 1)),
        select=options.select,
        device=device,
        jobs=options.jobs,
        within_s=options.within or math.inf,
    )
    bench = TrainingBench(f"optim_training_{problem.name.replace('-', '_')}", packages=("torch", "numpy"))
    if device.startswith("cuda"):
        bench.versions["device"] = torch.cuda.get_device_name()
    print(f"{problem.name}: {problem.about}\n{protocol}", flush=True)
    present(measure(problem, [METHODS[name] for name in options.methods], protocol), bench)
    outcome = bench.finish(options)
    if (not options.quick or options.keep) and (RESULTS / f"{bench.name}.json").exists():
        PLOTS.mkdir(exist_ok=True)
        (PLOTS / f"{bench.name.replace('_', '-')}.svg").write_text(curves(bench._document()))
    return outcome


if __name__ == "__main__":
    raise SystemExit(main())
