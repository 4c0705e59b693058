"""The simulator: time that is worked out by hand, restarts, failures, what tasks know, and what must always hold."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.core.errors import InvalidInput
from diamond.planner.pools.policies.fifo import Fifo
from diamond.planner.pools.profiles import Profiles
from diamond.planner.pools.simulation import Application, Arrival, Failure, Outcome, simulate
from diamond.planner.pools.snapshot import Decision, Demand, Placement, Shape, Snapshot
from tests.unit.planner.pool_worlds import REFERENCE, Rule, always, arrivals, as_asked, nodes, step_s, toy

WORK_STEPS = 300  # three epochs of a hundred
ONE_GPU_S = WORK_STEPS * step_s(1, 1, 16)[0]  # at the reference batch, whose gain is 1


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Application]:
    return toy(tmp_path_factory.mktemp("world"))


def test_one_task_takes_its_start_and_its_steps(world: dict[str, Application]) -> None:
    outcome = simulate(arrivals(30.0), as_asked(), nodes(1), applications=world)
    (task,) = outcome.tasks
    assert task.started_at == 60.0  # the next round
    assert task.ended_at == pytest.approx(60.0 + 30.0 + ONE_GPU_S)
    assert task.gpu_s == pytest.approx(30.0 + ONE_GPU_S)
    assert (task.restarts, task.lost_s) == (0, 0.0)
    assert [(one.at, one.placement) for one in outcome.timeline] == [
        (60.0, (("any0", 1),)),
        (pytest.approx(task.ended_at), ()),
    ]


def test_the_interval_does_not_change_how_fast_a_task_is(world: dict[str, Application]) -> None:
    ends = [
        simulate(arrivals(0.0), as_asked(), nodes(1), applications=world, interval_s=s).tasks[0].ended_at
        for s in (7.0, 60.0, 1e6)
    ]
    assert ends == pytest.approx([30.0 + ONE_GPU_S] * 3)


def test_a_move_that_keeps_the_shape_costs_a_start_unless_told_otherwise(world: dict[str, Application]) -> None:
    def to_and_fro(snapshot: Snapshot) -> Decision:
        there = f"any{round(snapshot.now / 60) % 2}"
        placed: dict[str, Placement] = {demand.id: ((there, 1),) for demand in snapshot.demands}
        return Decision(placed=placed, reasons=dict.fromkeys(placed, "moves"))

    policy = as_asked()
    policy.allocate = to_and_fro  # type: ignore[method-assign]
    charged, free = (
        simulate(arrivals(0.0), policy, nodes(2), applications=world, charge_moves=charge).tasks[0]
        for charge in (True, False)
    )
    assert free.ended_at == pytest.approx(30.0 + ONE_GPU_S)
    assert (free.restarts, free.lost_s) == (0, 0.0)
    assert charged.restarts == math.ceil(ONE_GPU_S / 30.0) - 1  # half of every round is lost
    assert charged.ended_at == pytest.approx(30.0 * (charged.restarts + 1) + ONE_GPU_S)
    assert charged.lost_s == pytest.approx(30.0 * charged.restarts)


def test_a_failed_node_undoes_what_no_checkpoint_holds(world: dict[str, Application]) -> None:
    fail = Failure(node="any0", at=100.0, until=130.0)
    (task,) = simulate(
        arrivals(0.0), as_asked(), nodes(1), applications=world, failures=[fail], checkpoint_s=50.0
    ).tasks
    # It trained from 30 to 100 and saved at 80: 20 s are undone, the next start is at 180.
    assert task.ended_at == pytest.approx(180.0 + 30.0 + ONE_GPU_S - 50.0)
    assert task.restarts == 1
    assert task.lost_s == pytest.approx(20.0 + 30.0)


def test_a_straggler_slows_only_what_runs_on_it(world: dict[str, Application]) -> None:
    slow = Failure(node="any0", at=0.0, speed=0.5)
    first, second = simulate(
        arrivals(0.0, 0.0, gpus=4), as_asked(), nodes(2), applications=world, failures=[slow]
    ).tasks
    assert first.ended_at - 30.0 == pytest.approx(2 * (second.ended_at - 30.0))


def test_tasks_wait_while_no_node_is_there(world: dict[str, Application]) -> None:
    gone = Failure(node="any0", at=0.0, until=600.0)
    (task,) = simulate(arrivals(0.0), as_asked(), nodes(1), applications=world, failures=[gone]).tasks
    assert (task.started_at, task.restarts) == (600.0, 0)


def test_an_oracle_tells_the_truth(world: dict[str, Application]) -> None:
    policy = always(2)
    (task,) = simulate(arrivals(0.0), policy, nodes(1), applications=world, knowledge="oracle").tasks
    first = policy.snapshots[0].demands[0]
    assert first.left is not None
    assert first.left.expected == WORK_STEPS * REFERENCE
    rates, batches = world["toy"].best("any", (2,))
    assert first.speed.goodput(Shape("any", 1, 2)) == pytest.approx(rates[0])
    assert batches[0].total(2) > REFERENCE  # it pays to have a larger batch
    ends = [0.0, *world["toy"].ends]
    needed = sum((ends[epoch + 1] - ends[epoch]) / rates[epoch] for epoch in range(3))
    assert task.ended_at == pytest.approx(30.0 + needed)


def test_an_unknown_task_may_have_twice_what_it_was_measured_on(world: dict[str, Application]) -> None:
    policy = Rule(lambda demand, snapshot: demand.max_gpus)
    (task,) = simulate(arrivals(0.0), policy, nodes(4), applications=world).tasks
    most = [snapshot.demands[0].max_gpus for snapshot in policy.snapshots]
    assert most[:4] == [1, 2, 4, 8]
    assert policy.snapshots[0].demands[0].left is None
    assert task.restarts == len(set(most)) - 1


def test_estimates_come_close_to_the_truth_once_measured(world: dict[str, Application]) -> None:
    policy = Rule(lambda demand, snapshot: min(4, demand.max_gpus))
    simulate(arrivals(0.0), policy, nodes(1), applications=world, interval_s=35.0)
    last = policy.snapshots[-1].demands[0]
    true = world["toy"].best("any", (4,))[0][2]
    assert last.speed.goodput(Shape("any", 1, 4)) == pytest.approx(true, rel=0.1)


def test_profiles_of_finished_tasks_serve_later_ones(world: dict[str, Application]) -> None:
    policy, profiles = always(1), Profiles()
    simulate(arrivals(0.0, 3000.0), policy, nodes(2), applications=world, knowledge="warm", profiles=profiles)
    first, second = (
        next(demand for shot in policy.snapshots for demand in shot.demands if demand.id == name)
        for name in ("t0", "t1")
    )
    assert first.left is None
    assert second.left is not None
    assert second.left.low < WORK_STEPS * REFERENCE < second.left.high
    assert second.max_gpus > first.max_gpus
    again = always(1)
    simulate(arrivals(0.0), again, nodes(2), applications=world, knowledge="warm", profiles=profiles)
    assert again.snapshots[0].demands[0].left is not None


def test_a_task_that_runs_serves_those_like_it_until_one_is_done(world: dict[str, Application]) -> None:
    policy = always(1)
    simulate(arrivals(0.0, 100.0), policy, nodes(2), applications=world, knowledge="warm")
    second = next(demand for shot in policy.snapshots for demand in shot.demands if demand.id == "t1")
    assert second.max_gpus > 1 and second.speed.doubt(Shape("any", 1, 1)) < 0.3
    assert second.left is None, "how much work it is nobody knows yet"
    apart = always(1)
    simulate(arrivals(0.0, 100.0), apart, nodes(2), applications=world)
    alone = next(demand for shot in apart.snapshots for demand in shot.demands if demand.id == "t1")
    assert alone.max_gpus == 1


def test_declared_work_is_off_by_what_was_said(world: dict[str, Application]) -> None:
    def said(error: float, seed: int) -> float:
        policy = as_asked()
        simulate(arrivals(0.0), policy, nodes(1), applications=world, declared=True, declared_error=error, seed=seed)
        first = policy.snapshots[0].demands[0]
        assert first.left is not None
        assert first.speed.goodput(Shape("any", 1, 1)) == pytest.approx(REFERENCE / step_s(1, 1, 16)[0])
        return first.left.expected / (WORK_STEPS * REFERENCE)

    assert said(1e-6, 0) == pytest.approx(1.0, rel=1e-4)
    assert said(0.2, 0) != said(0.2, 1)
    assert all(0.4 < said(0.2, seed) < 2.5 for seed in range(5))


def test_tasks_of_one_application_can_be_of_different_length(world: dict[str, Application]) -> None:
    def lasted(seed: int) -> list[float]:
        outcome = simulate(arrivals(0.0, 0.0), as_asked(), nodes(1), applications=world, variety=0.5, seed=seed)
        return [one.ended_at - 30.0 for one in outcome.tasks]

    assert lasted(0) == lasted(0)
    assert len({*lasted(0), *lasted(1)}) == 4
    assert all(ONE_GPU_S / 10 < seconds < ONE_GPU_S * 10 for seconds in lasted(2))
    alone = simulate(arrivals(0.0), as_asked(), nodes(1), applications=world, variety=0.5)
    assert alone.tasks[0].ended_at - 30.0 == pytest.approx(lasted(0)[0])  # whoever else is there


def test_work_is_not_told_before_anybody_knows_how_fast_it_goes(world: dict[str, Application]) -> None:
    policy = always(1)
    simulate(arrivals(0.0), policy, nodes(1), applications=world, declared=True)
    assert policy.snapshots[0].demands[0].left is None
    assert policy.snapshots[1].demands[0].left is not None


def test_recorded_tasks_run_as_long_as_they_did(world: dict[str, Application]) -> None:
    tasks = [Arrival("a", 0.0, gpus=3, duration_s=1000.0, limit_s=3600.0), Arrival("b", 10.0, gpus=2, duration_s=5.0)]
    policy = as_asked()
    first, second = simulate(tasks, policy, nodes(1)).tasks
    assert (first.started_at, first.ended_at) == (0.0, 1000.0)
    assert (second.started_at, second.ended_at) == (1020.0, 1025.0)
    assert len(policy.snapshots) == 3  # nobody is asked while nothing can have changed
    demand = policy.snapshots[0].demands[0]
    assert (demand.movable, demand.min_gpus, demand.left and demand.left.expected) == (False, 3, 3600.0)


def test_a_decision_that_cannot_be_names_the_policy(world: dict[str, Application]) -> None:
    def too_much(snapshot: Snapshot) -> Decision:
        return Decision(placed={demand.id: (("any0", 4),) for demand in snapshot.demands}, reasons={})

    policy = as_asked()
    policy.allocate = too_much  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"policy rule at 0 s: .*no reason"):
        simulate(arrivals(0.0), policy, nodes(1), applications=world)


def test_a_policy_that_never_starts_anything_is_given_up(
    world: dict[str, Application], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diamond.planner.pools.simulation.engine.PATIENCE", 5)
    with pytest.raises(RuntimeError, match="rule leaves all GPUs idle, with 1 tasks waiting"):
        simulate(arrivals(0.0), always(0), nodes(1), applications=world)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workload": []}, "workload: holds no task"),
        ({"nodes": nodes(1, gpus=0)}, "nodes: hold no GPU"),
        ({"interval_s": 0.0}, "interval_s: 0 s"),
        ({"knowledge": "all"}, "knowledge: 'all' is unknown"),
        ({"applications": {}}, "applications: t0: application 'toy' is unknown"),
        ({"workload": arrivals(0.0, gpus=9)}, "nodes: task t0 asks for 9 GPUs"),
        ({"workload": [Arrival("t0", 0.0, "toy", 1, 10**9)]}, "workload: task t0 asks for a batch of 1000000000"),
        ({"workload": arrivals(math.inf)}, "workload: t0: comes at inf s"),
        ({"restart_s": -1.0}, "restart_s: -1 s is no time"),
        ({"noise": math.nan}, "noise: nan is out of range"),
        ({"variety": 1000.0}, "variety: 1000 is out of range"),
        ({"seed": -1}, "seed: -1 is too small"),
        ({"max_gpus": 0}, "max_gpus: 0 is too small"),
        ({"failures": [Failure(node="x", at=0.0)]}, "failures: x is none of the nodes"),
        ({"failures": [Failure(node="any0", at=5.0, until=1.0)]}, "failures: .* cannot be"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    world: dict[str, Application], change: dict[str, object], message: str
) -> None:
    given_: dict[str, object] = {"workload": arrivals(0.0), "nodes": nodes(2), "applications": world, **change}
    with pytest.raises(InvalidInput, match=message):
        simulate(policy=as_asked(), **given_)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    at=st.lists(st.floats(0, 1500), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    knowledge=st.sampled_from(["estimated", "warm", "oracle"]),
    fails=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 2000), st.sampled_from([0.0, 0.4])), max_size=3),
    noise=st.sampled_from([0.0, 0.3]),
)
def test_whatever_a_policy_does_work_is_done_once_and_no_gpu_twice(
    world: dict[str, Application],
    at: list[float],
    sizes: list[int],
    knowledge: str,
    fails: list[tuple[int, float, float]],
    noise: float,
) -> None:
    def rule(demand: Demand, snapshot: Snapshot) -> int:
        turn = round(snapshot.now / 60) // 4 + len(demand.id)
        return max(1, min(demand.max_gpus, [*sizes, 1][turn % (len(sizes) + 1)]))

    def run() -> Outcome:
        return simulate(
            arrivals(*at),
            Rule(rule),
            nodes(3, gpus=2),
            applications=world,
            knowledge=knowledge,  # type: ignore[arg-type]
            noise=noise,
            failures=[Failure(node=f"any{n}", at=t, until=t + 500, speed=speed) for n, t, speed in fails],
        )

    outcome = run()
    assert len(outcome.tasks) == len(at)
    assert all(one.submitted_at <= one.started_at < one.ended_at for one in outcome.tasks)
    assert all(one.alone_s > 0 and one.contention >= 1 - 1e-9 for one in outcome.tasks)
    assert all(0 <= one.lost_gpu_s < one.gpu_s for one in outcome.tasks)
    assert outcome.summary()["utilisation"] <= 1 + 1e-9
    assert _held_gpu_s(outcome) == pytest.approx(sum(one.gpu_s for one in outcome.tasks))
    again = run()
    assert (again.tasks, again.timeline) == (outcome.tasks, outcome.timeline)
    assert json.loads(json.dumps(outcome.to_json()))["summary"]["tasks"] == len(at)


def _held_gpu_s(outcome: Outcome) -> float:
    """From the timeline alone; on the way, no node may hold more than its two GPUs."""
    held: dict[str, tuple[float, Placement]] = {}
    total = 0.0
    for index, (moment, task, placement) in enumerate(outcome.timeline):
        since, before = held.get(task, (moment, ()))
        total += (moment - since) * sum(gpus for _, gpus in before)
        held[task] = (moment, placement)
        if index + 1 < len(outcome.timeline) and outcome.timeline[index + 1].at > moment:
            used: dict[str, int] = {}
            for _, where in held.values():
                for node, gpus in where:
                    used[node] = used.get(node, 0) + gpus
            assert all(gpus <= 2 for gpus in used.values())
    return total


def test_kinds_of_gpus_have_their_own_times(tmp_path: Path) -> None:
    world = toy(tmp_path, kinds=("slow", "fast"))
    slow, fast = (
        simulate(arrivals(0.0), as_asked(), nodes(1, kind=kind), applications=world).tasks[0]
        for kind in ("slow", "fast")
    )
    assert slow.ended_at - 30.0 == pytest.approx(2 * (fast.ended_at - 30.0))
    probed, cold = always(1), always(1)
    both = [*nodes(1, kind="fast"), *nodes(1, kind="slow")]
    simulate(arrivals(0.0), probed, both, applications=world, probed=True)
    simulate(arrivals(0.0), cold, both, applications=world)
    first = probed.snapshots[0].demands[0]
    assert first.max_gpus == 2  # it was measured on one
    # A gradient's noise is not known before it has run: one round later, both kinds are told apart.
    speeds = [probed.snapshots[1].demands[0].speed.goodput(Shape(kind, 1, 1)) for kind in ("fast", "slow")]
    assert speeds[0] == pytest.approx(2 * speeds[1], rel=0.15)
    unprobed = [cold.snapshots[1].demands[0].speed.goodput(Shape(kind, 1, 1)) for kind in ("fast", "slow")]
    assert unprobed[0] == pytest.approx(unprobed[1], rel=0.15)


def test_gpus_of_a_kind_that_a_task_cannot_use_do_not_count(tmp_path: Path) -> None:
    pool = [*nodes(1, kind="fast"), *nodes(4, kind="slow")]
    with pytest.raises(InvalidInput, match="nodes: task t0 asks for 8 GPUs of a kind, and there are 4"):
        simulate(arrivals(0.0, gpus=8), Fifo(), pool, applications=toy(tmp_path, kinds=("fast",)))


def test_figures_of_a_log_that_were_worked_out_by_hand() -> None:
    """All eight GPUs for 120 min; behind it two tasks of four that came after 10 and 20 min, for 60 and 5 min."""
    minute = 60.0
    log = [
        Arrival("1", 0.0, gpus=8, duration_s=120 * minute, limit_s=180 * minute),
        Arrival("2", 10 * minute, gpus=4, duration_s=60 * minute, limit_s=90 * minute),
        Arrival("3", 20 * minute, gpus=4, duration_s=5 * minute, limit_s=10 * minute),
    ]
    outcome = simulate(log, Fifo(), nodes(2))
    assert [one.ended_at / minute for one in outcome.tasks] == pytest.approx([120.0, 180.0, 125.0])
    # Tasks in the pool: 1 until 10 min, 2 until 20, 3 until 120, 2 until 125, then 1.
    contention = [330 / 120, 385 / 170, 310 / 105]
    assert [one.contention for one in outcome.tasks] == pytest.approx(contention)
    shares = [8 / number for number in contention]
    alone = [120 * 8 / shares[0], 60 * 4 / shares[1], 5 * 4 / shares[2]]
    assert [one.rho for one in outcome.tasks] == pytest.approx([120 / alone[0], 170 / alone[1], 105 / alone[2]])
    found = outcome.summary()
    assert found["gpu_hours"] == pytest.approx(8 * 2 + 4 * 1 + 4 * 5 / 60)
    assert found["utilisation"] == pytest.approx(found["gpu_hours"] / (8 * 3))
    assert found["wait_mean_s"] == pytest.approx((0 + 110 + 100) * minute / 3)
