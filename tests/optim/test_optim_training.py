"""The protocol by which optimizers are compared, on a problem that takes a moment."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from benchmarks import optim_problems as problems
from benchmarks import optim_runs as runs
from benchmarks import optim_training as training
from benchmarks.optim_methods import FOLDER, METHODS, Choice, LogUniform, Method
from benchmarks.optim_networks import perceptron
from benchmarks.optim_plots import curves
from benchmarks.optim_runs import Point, Run


def teacher_data(seed: int) -> dict[str, problems.Data]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(6, 2, generator=generator)
    inputs = torch.randn(300, 6, generator=generator)
    outputs = torch.tanh(inputs @ mix)
    parts = zip(problems.NUMBERS, inputs.split(100), outputs.split(100), strict=True)
    return {split: (one, other) for split, one, other in parts}


TOY = problems.Problem(
    name="toy",
    about="tanh of a matrix",
    device="cpu",
    samples=teacher_data,
    network=partial(perceptron, (6, 16, 2), nn.Tanh),
    loss=problems.regression_loss,
    measure=problems.relative_l2,
    batches=problems.shuffled,
    batch_size=25,
    steps=60,
    metric_name="relative L2 error",
    evaluations=20,
    heads=("2",),
    whole=True,
    targets=(0.5,),
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As the benchmark itself: matrices so small are slower with more, many times so beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)


def run_of(method: str, *metrics: float, seconds: float = 1.0, stopped: str = "") -> Run:
    curve = [Point(step, seconds * step, seconds * step / 2, metric) for step, metric in enumerate(metrics, 1)]
    return Run(method, 0, {}, len(metrics), curve, stopped)


# ---- the whole of it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> training.Report:
    protocol = training.Protocol(trials=2, seeds=2, steps=TOY.steps)
    return training.measure(TOY, list(METHODS.values()), protocol)


def test_every_method_gets_the_same_trials_and_seeds(report: training.Report) -> None:
    assert set(report.absent) == {"kfac-pytorch"}
    assert FOLDER in report.absent["kfac-pytorch"]
    assert set(report.trials) == set(METHODS) - {"kfac-pytorch"}
    assert all(
        len(found) == 2 and {run.seed for run in found} == {training.TUNING_SEED} for found in report.trials.values()
    )
    assert all([run.seed for run in found] == [0, 1] for found in report.runs.values())
    assert set(report.runs) == {*report.trials, training.EQUAL_TIME}


def test_adamw_alone_runs_to_the_whole_horizon_and_sets_the_target(report: training.Report) -> None:
    assert {run.steps for run in report.trials["adamw"]} == {TOY.steps}
    assert report.target == pytest.approx(sum(run.final for run in report.runs["adamw"]) / 2)
    reached = report.reached("adamw", report.target)
    assert reached is not None
    assert reached.step <= TOY.steps


def test_training_makes_errors_smaller(report: training.Report) -> None:
    for method in ("adamw", "soap", "lbfgs", "kfac"):
        for run in report.runs[method]:
            assert run.stopped == ""
            assert run.final < TOY.metric(TOY.model(run.seed), "test")


def test_clocks_only_go_forward(report: training.Report) -> None:
    for found in report.runs.values():
        for run in found:
            for earlier, later in itertools.pairwise(run.curve):
                assert earlier.step < later.step
                assert earlier.wall_s < later.wall_s
                assert earlier.device_s <= later.device_s


def test_the_result_file_has_every_run_and_a_picture(report: training.Report) -> None:
    bench = training.TrainingBench("optim_training_toy", packages=("torch",))
    training.present(report, bench)
    document = json.loads(json.dumps(bench._document(), allow_nan=False))
    assert document["script"] == "optim_training"
    assert document["protocol"]["threads"] == torch.get_num_threads()
    assert len(document["training"]) == 2 * len(report.runs)
    assert len(document["trials"]) == 2 * len(report.trials)
    names = [figure["name"] for figure in document["figures"]]
    assert "toy: to AdamW's error, times faster than the best first-order method" in names
    picture = ElementTree.fromstring(curves(document))
    lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2 * len(report.runs)
    shown = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert set(report.runs) <= shown


def test_a_method_that_always_fails_is_absent_with_its_trials_kept() -> None:
    def build(model: nn.Module, problem: problems.Problem, settings: dict[str, object]) -> torch.optim.Optimizer:
        raise ValueError("not today")

    method = Method(name="broken", build=build, space={})
    report = training.measure(TOY, [method], training.Protocol(trials=2, seeds=1, steps=10))
    assert report.absent == {"broken": "none of 2 trials came to its end; the first: ValueError: not today"}
    assert set(report.runs) == {"adamw"}
    bench = training.TrainingBench("toy")
    training.present(report, bench)
    assert [run["stopped"] for run in bench.more["trials"]] == [
        "",
        "",
        "ValueError: not today",
        "ValueError: not today",
    ]


def test_runs_are_repeated_exactly() -> None:
    settings = METHODS["adamw"].draw(TOY, 0, "time")
    again = [
        runs.train(TOY, METHODS["adamw"], settings, seed=4, split="test", steps=20, device="cpu") for _ in range(2)
    ]
    assert [one.metric for one in again[0].curve] == [one.metric for one in again[1].curve]


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(METHODS))
def test_settings_are_drawn_from_the_table_and_stay_the_same(name: str) -> None:
    method = METHODS[name]
    drawn = [method.draw(TOY, number, "time") for number in range(30)]
    assert drawn == [method.draw(TOY, number, "time") for number in range(30)]
    assert len({tuple(one.items()) for one in drawn}) > 5
    for option, space in method.space.items():
        values = [one[option] for one in drawn]
        if isinstance(space, LogUniform):
            assert all(0.999 * space.low <= value <= 1.001 * space.high for value in values)
            assert max(values) / min(values) > math.sqrt(space.high / space.low)
        else:
            assert isinstance(space, Choice)
            assert set(values) == set(space.values)
    assert ("share" in drawn[0]) == (method.scheduled and name != "adamw")
    assert "share" not in method.draw(TOY, 0, "final")


def test_lbfgs_is_left_out_where_data_come_in_parts() -> None:
    assert METHODS["lbfgs"].applies_to(problems.PROBLEMS["burgers"])
    assert not METHODS["lbfgs"].applies_to(problems.PROBLEMS["darcy"])


# ---- one run -------------------------------------------------------------------------------------------------------


def test_the_schedule_rises_and_falls() -> None:
    factors = [runs._factor(number, 100, 0.05) for number in range(100)]
    assert factors[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[5:]))
    assert 0 < factors[-1] < 1e-3
    assert runs._factor(0, 100, 0.0) == 1.0


def test_evaluations_come_early_and_at_the_end() -> None:
    stops = runs._stops(1000, 40)
    assert stops == sorted(set(stops))
    assert stops[0] == 1
    assert stops[-1] == 1000
    assert 20 <= len(stops) <= 40
    assert runs._stops(1, 40) == [1]


def test_a_diverging_run_is_stopped_and_counts_as_infinite() -> None:
    settings = {"lr": 1e30, "momentum": 0.9, "warmup": 0.0}
    run = runs.train(TOY, METHODS["sgd"], settings, seed=0, split="test", steps=60, device="cpu")
    assert run.stopped.startswith("diverged before step")
    assert run.final == math.inf
    assert run.to_json()["final"] is None


def test_an_optimizer_that_fails_says_why() -> None:
    def build(model: nn.Module, problem: problems.Problem, settings: dict[str, object]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=-1.0)

    method = Method(name="broken", build=build, space={})
    run = runs.train(TOY, method, {"warmup": 0.0}, seed=0, split="test", steps=5, device="cpu")
    assert run.stopped == "ValueError: Invalid learning rate: -1.0"
    assert run.final == math.inf


def test_a_run_over_its_time_limit_is_stopped() -> None:
    settings = METHODS["adamw"].draw(TOY, 0, "time")
    run = runs.train(TOY, METHODS["adamw"], settings, seed=0, split="test", steps=60, device="cpu", limit_s=1e-9)
    assert run.stopped.startswith("time limit")
    assert len(run.curve) == 1


def test_curves_are_thinned_but_keep_their_end() -> None:
    run = run_of("adamw", *(1 / step for step in range(1, 1001)))
    kept = run.to_json(most=50)["curve"]
    assert 50 <= len(kept) <= 51
    assert kept[-1][0] == 1000


# ---- what is made of the runs --------------------------------------------------------------------------------------


def toy_report(select: str = "time") -> training.Report:
    return training.Report(TOY, training.Protocol(seeds=2, select=select))


def test_settings_are_chosen_by_time_to_the_margin_below_adamw() -> None:
    slow_and_good, quick = run_of("kfac", 1.0, 0.9, 0.1), run_of("kfac", 0.9, 0.5, 0.4)
    only_just = run_of("kfac", 0.99, 0.99, 0.99)
    for select, best in (("time", quick), ("final", slow_and_good)):
        report = toy_report(select)
        report.trials = {"adamw": [run_of("adamw", 2.0, 1.5, 1.0)], "kfac": [only_just, slow_and_good, quick]}
        assert report.best("kfac") is best


def test_a_method_that_never_gets_there_is_chosen_by_its_end() -> None:
    report = toy_report()
    worse, better, broken = run_of("sgd", 4.0, 3.0), run_of("sgd", 4.0, 2.0), run_of("sgd", 4.0, 1.5, stopped="x")
    report.trials = {"adamw": [run_of("adamw", 2.0, 1.0)], "sgd": [worse, better, broken]}
    assert report.best("sgd") is better


def test_the_mean_over_seeds_decides_when_a_target_is_reached() -> None:
    report = toy_report()
    report.runs = {
        "adamw": [run_of("adamw", 3.0, 2.0, 0.9), run_of("adamw", 3.0, 2.0, 1.1)],
        "kfac": [run_of("kfac", 0.5, 0.5), run_of("kfac", 2.5, 1.3, seconds=3.0)],
        "sgd": [run_of("sgd", 0.1, 0.1), run_of("sgd", math.inf)],
    }
    assert report.target == 1.0
    assert report.reached("kfac", report.target) == Point(2, 4.0, 2.0, 0.9)
    assert report.reached("adamw", report.target) == Point(3, 3.0, 1.5, 1.0)
    assert report.reached("sgd", report.target) is None


def test_figures_say_who_never_reached_the_target() -> None:
    report = toy_report()
    report.trials = {"adamw": [run_of("adamw", 1.0)], "kfac": [run_of("kfac", 0.5)]}
    report.runs = {
        "adamw": [run_of("adamw", 3.0, 2.0, 1.0)],
        "kfac": [run_of("kfac", 1.0, 0.8)],
        "kfac-pytorch": [run_of("kfac-pytorch", 5.0, 4.0, 3.0, 2.0)],
    }
    bench = training.TrainingBench("toy")
    training.present(report, bench)
    found = {figure.name: figure for figure in bench.figures}
    wall = found["toy: to AdamW's error, wall seconds"]
    assert (wall.value, wall.peer) == (1.0, {"adamw": 3.0})
    assert "not reached by kfac-pytorch" in wall.note
    faster = found["toy: to AdamW's error, times faster than the best first-order method"]
    assert (faster.value, faster.holds) == (3.0, True)
    peer = found["toy: to AdamW's error, times faster than kfac-pytorch"]
    assert (peer.value, peer.holds) == (4.0, True)
    assert peer.note.startswith("at least")


def test_a_target_that_we_never_reach_is_a_missed_aim() -> None:
    report = toy_report()
    report.trials = {"adamw": [run_of("adamw", 1.0)], "kfac": [run_of("kfac", 5.0)]}
    report.runs = {"adamw": [run_of("adamw", 1.0)], "kfac": [run_of("kfac", 5.0, 4.0)]}
    bench = training.TrainingBench("toy")
    training.present(report, bench)
    faster = next(figure for figure in bench.figures if "times faster" in figure.name)
    assert (faster.value, faster.holds, faster.note) == (0.0, False, "kfac does not reach it")


def test_without_our_methods_adamw_is_what_is_shown() -> None:
    report = toy_report()
    report.trials = {"adamw": [run_of("adamw", 1.0)]}
    report.runs = {"adamw": [run_of("adamw", 2.0, 1.0)], "sgd": [run_of("sgd", 4.0, 3.0)]}
    bench = training.TrainingBench("toy")
    training.present(report, bench)
    (figure,) = bench.figures
    assert (figure.name, figure.value, figure.peer) == ("toy: relative L2 error at the end", 1.0, {"sgd": 3.0})


def test_half_of_the_trials_are_near_the_best_of_the_others() -> None:
    method, problem = METHODS["adamw"], problems.PROBLEMS["burgers"]
    best = method.draw(problem, 0, "time")
    near = [method.near(problem, number, "time", best) for number in range(50)]
    space = method.space["lr"]
    assert isinstance(space, LogUniform)
    reach = (space.high / space.low) ** (1 / 6) * 1.001
    assert all(best["lr"] / reach <= one["lr"] <= best["lr"] * reach for one in near)
    assert len({one["lr"] for one in near}) > 40 and all(space.low <= one["lr"] <= space.high for one in near)
    assert sum(one["beta2"] == best["beta2"] for one in near) > 25


def test_no_round_is_counted_that_not_all_methods_did() -> None:
    done = [Run(name, 0, {}, 1, stopped=stopped) for name, stopped in
            (("a", ""), ("b", ""), ("a", ""), ("b", training.LATE), ("a", ""), ("b", ""))]  # fmt: skip
    assert [run.method for run in training._whole_rounds(done, 2)] == ["a", "b"]
