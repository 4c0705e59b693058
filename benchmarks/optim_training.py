"""How long optimizers take to reach what a tuned AdamW reaches.

    python -m benchmarks.optim_training PROBLEM [--methods NAME ...] [--trials N] [--seeds K] [--quick] [--check]

Every method gets the same number of trials, drawn at random from the spaces of `benchmarks/optim_methods.py`, all on
validation data. AdamW is tuned first, for its metric at the horizon. The others are chosen by their time to 95 % of
that (`--select final`: by their metric at the horizon), and may choose a shorter horizon, which "adamw-short" does for
AdamW, too. The best setting of each is then trained from several seeds, methods in turns, and measured on test data.
The target is AdamW's metric at the horizon, the mean over seeds; a method reaches it when its own mean does. Times are
of training alone: the clock stands still during evaluations. torch uses one thread unless `--threads` says otherwise.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.harness import RESULTS, Bench, Figure
from benchmarks.optim_methods import FIRST_ORDER, METHODS, OURS, REFERENCE, Method, Settings
from benchmarks.optim_plots import PLOTS, curves
from benchmarks.optim_problems import PROBLEMS, Problem
from benchmarks.optim_runs import Point, Run, train

TUNING_SEED = 1000  # no measured run has it
MARGIN = 0.95  # of AdamW's validation metric: a setting that only just reaches it may miss with another seed
PATIENCE = 10.0  # a run may take so many times AdamW's
EQUAL_TIME = "adamw, equal time"
PEER_AIM = 3.0  # times faster than kfac-pytorch


@dataclass(frozen=True, kw_only=True)
class Protocol:
    trials: int = 12
    seeds: int = 5
    steps: int = 1000
    select: str = "time"
    device: str = "cpu"


@dataclass
class Report:
    """All runs of one problem."""

    problem: Problem
    protocol: Protocol
    trials: dict[str, list[Run]] = field(default_factory=dict)
    failed: list[Run] = field(default_factory=list)  # trials of methods none of whose came to an end
    runs: dict[str, list[Run]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

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
    for method in chosen:
        _tune(method, report)
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


def _tune(method: Method, report: Report) -> None:
    problem, protocol = report.problem, report.protocol
    found: list[Run] = []
    for number in range(protocol.trials):
        settings = method.draw(problem, number, protocol.select)
        found.append(_train(report, method, settings, TUNING_SEED, "validation", protocol.steps, _limit(report)))
        run = found[-1]
        taken = run.curve[-1].device_s if run.curve else 0.0
        print(f"  {method.name} trial {number}: {run.final:.5g} in {taken:.1f} s {run.stopped} {settings}", flush=True)
    if any(math.isfinite(run.final) for run in found):
        report.trials[method.name] = found
    elif method.name == REFERENCE:
        raise SystemExit(f"no trial of {REFERENCE} came to its end; the first: {found[0].stopped}")
    else:
        report.failed += found
        report.absent[method.name] = f"none of {len(found)} trials came to its end; the first: {found[0].stopped}"


def _measure_in_turns(methods: list[Method], report: Report) -> None:
    """So that whatever else the machine does concerns all alike."""
    steps = report.protocol.steps
    for method in methods:  # the first run finds everything cold
        _train(report, method, report.best(method.name).settings, TUNING_SEED, "validation", min(steps, 5), math.inf)
    for seed in range(report.protocol.seeds):
        for method in methods if seed % 2 == 0 else reversed(methods):
            settings = report.best(method.name).settings
            run = _train(report, method, settings, seed, "test", steps, _limit(report))
            report.runs.setdefault(method.name, []).append(run)
            print(f"  {method.name} seed {seed}: {run.final:.5g} {run.stopped}", flush=True)
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
    runs = [
        _train(report, METHODS[REFERENCE], settings, seed, "test", steps, math.inf)
        for seed in range(report.protocol.seeds)
    ]
    for run in runs:
        run.method = EQUAL_TIME
    report.runs[EQUAL_TIME] = runs


def _train(
    report: Report, method: Method, settings: Settings, seed: int, split: str, steps: int, limit_s: float
) -> Run:
    device = report.protocol.device
    return train(report.problem, method, settings, seed=seed, split=split, steps=steps, device=device, limit_s=limit_s)


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
        "protocol": {**report.protocol.__dict__, "threads": torch.get_num_threads(), "ours": ours},
        "target": _digits(report.target),
        "trials": [run.to_json(1) for runs in (*report.trials.values(), report.failed) for run in runs],
        "training": [run.to_json() for runs in report.runs.values() for run in runs],
    }


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
