"""The policies Diamond is compared with: what no decision may do, and what makes each of them what it is."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.core.errors import InvalidInput
from diamond.planner.pools.policies import POLICIES, named
from diamond.planner.pools.policies.pollux import Pollux
from diamond.planner.pools.policies.sia import Sia
from diamond.planner.pools.policies.tiresias import THRESHOLD_S
from diamond.planner.pools.simulation import Arrival, simulate
from diamond.planner.pools.snapshot import Decision, Demand, Node, Placement, Shape, Snapshot, Work, faults

BASELINES = ("fifo", "srtf", "tiresias", "pollux", "sia")


@dataclass(frozen=True)
class Scales:
    """Goodput as a power of the GPUs, by kind; `nan` and the like are passed on as they are."""

    power: float = 1.0
    kinds: Mapping[str, float] = field(default_factory=dict)
    rest: float = 1.0

    def goodput(self, shape: Shape) -> float:
        return self.kinds.get(shape.gpu_type, self.rest) * float(shape.gpus**self.power) / shape.nodes**0.1

    def doubt(self, shape: Shape) -> float:
        return 0.0


def nodes(number: int, gpus: int, kind: str = "a100") -> tuple[Node, ...]:
    return tuple(Node(name=f"{kind}-{index:03}", gpu_type=kind, gpus=gpus) for index in range(number))


def task(name: str, gpus: int = 1, *, left: float | None = None, at: float = 0.0, **more: object) -> Demand:
    """Rigid unless `max_gpus` is given too."""
    given_ = {"speed": Scales(), "min_gpus": gpus, "max_gpus": gpus, "submitted_at": at, **more}
    return Demand(id=name, left=None if left is None else Work(left, left, left), **given_)  # type: ignore[arg-type]


def pool(*demands: Demand, of: tuple[Node, ...], now: float = 1000.0, **more: object) -> Snapshot:
    return Snapshot(now=now, nodes=of, demands=demands, **more)  # type: ignore[arg-type]


def given_gpus(decision: Decision) -> dict[str, int]:
    return {name: sum(gpus for _, gpus in placement) for name, placement in decision.placed.items()}


def decided(name: str, snapshot: Snapshot) -> dict[str, int]:
    decision = named(name).allocate(snapshot)
    assert faults(snapshot, decision) == []
    return given_gpus(decision)


speeds = st.builds(
    Scales,
    power=st.sampled_from([0.0, 0.5, 1.0]),
    kinds=st.dictionaries(st.sampled_from(["a100", "t4"]), st.sampled_from([1.0, 2.0, 3.0, 1e9, 0.0, float("nan")])),
    rest=st.sampled_from([1.0, 1.0, 1.0, 0.0, float("inf")]),
)


@st.composite
def demands(draw: st.DrawFn, number: int) -> Demand:
    least = draw(st.sampled_from([1, 1, 1, 2, 4, 5]))
    left = draw(st.sampled_from([None, 0.0, 50.0, 1e4, float("nan")]))
    return task(
        f"task-{number}",
        left=left,
        at=draw(st.sampled_from([0.0, 500.0, 1000.0])),
        speed=draw(speeds),
        min_gpus=least,
        max_gpus=least + draw(st.integers(0, 12)),
        sizes=draw(st.sampled_from([None, None, None, None, (1, 2, 4, 8), (3, 6), ()])),
        gpu_types=draw(st.sampled_from([None, None, None, frozenset({"a100"}), frozenset({"h100"})])),
        movable=draw(st.sampled_from([True, True, False])),
        priority=draw(st.integers(-1, 1)),
        owner=draw(st.sampled_from(["", "alice", "bob"])),
        attained_s=draw(st.sampled_from([0.0, 100.0, 1e5])),
        running_s=draw(st.sampled_from([0.0, 100.0])),
        restarts=draw(st.integers(0, 3)),
    )


def place_some(draw: st.DrawFn, tasks: list[Demand], there: list[Node]) -> dict[str, Placement]:
    """What runs, on nodes that had room; some of these are gone by now."""
    gone = [Node(name="gone", gpu_type="a100", gpus=4)]
    free = {node.name: node.gpus for node in [*there, *gone]}
    kinds = {node.name: node.gpu_type for node in [*there, *gone]}
    placed: dict[str, Placement] = {}
    for one in tasks:
        if draw(st.booleans()):
            kind = draw(st.sampled_from(sorted(set(kinds.values()))))
            wish, chosen = draw(st.integers(one.min_gpus, one.max_gpus)), []
            for name in sorted(name for name in free if kinds[name] == kind):
                gpus = min(free[name], wish - sum(number for _, number in chosen))
                chosen += [(name, gpus)] if gpus > 0 else []
            # What runs and cannot be moved was started as it allows; what can be moved may break its own new bounds.
            fits = sum(number for _, number in chosen) == wish and one.takes(wish) and one.runs_on(kind)
            if fits or (chosen and one.movable):
                placed[one.id] = tuple(chosen)
                free.update({name: free[name] - number for name, number in chosen})
    return placed


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    there = [*nodes(draw(st.integers(0, 3)), draw(st.integers(0, 5))), *nodes(draw(st.integers(0, 2)), 8, "t4")]
    tasks = [draw(demands(number)) for number in range(draw(st.integers(1, 7)))]
    return Snapshot(
        now=1000.0,
        nodes=tuple(there),
        demands=tuple(tasks),
        placed=place_some(draw, tasks, there),
        quotas=draw(st.sampled_from([{}, {}, {"alice": 0}, {"alice": 5}, {"": 9, "bob": 3}])),
        seconds=draw(st.sampled_from([0.0, 1.0])),
    )


@pytest.mark.parametrize("name", BASELINES)
@given(snapshot=snapshots())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_every_decision_can_be_carried_out_and_is_the_same_again(name: str, snapshot: Snapshot) -> None:
    decision = named(name).allocate(snapshot)
    assert faults(snapshot, decision) == []
    assert all(decision.reasons[one.id] for one in snapshot.demands)
    assert named(name).allocate(snapshot) == decision


@pytest.mark.parametrize("name", BASELINES)
def test_nothing_at_all_is_decided_too(name: str) -> None:
    assert decided(name, pool(of=())) == {}
    assert decided(name, pool(task("a"), of=())) == {}
    assert decided(name, pool(of=nodes(2, 4))) == {}


@pytest.mark.parametrize("name", BASELINES)
def test_a_node_that_lost_gpus_is_not_given_twice(name: str) -> None:
    tasks = (task("a", 4, attained_s=40.0, running_s=10.0), task("b", 4, attained_s=40.0, running_s=10.0))
    placed = {"a": (("a100-000", 4),), "b": (("a100-000", 4),)}  # it had eight
    assert decided(name, pool(*tasks, of=nodes(2, 4), placed=placed)) == {"a": 4, "b": 4}


@pytest.mark.parametrize("name", BASELINES)
def test_two_thousand_tasks_are_decided_within_seconds(name: str) -> None:
    tasks = [task(f"t{number}", at=float(number), max_gpus=16, min_gpus=1, left=1e3) for number in range(2000)]
    running = {f"t{number}": ((f"a100-{number // 8:03}", 1),) for number in range(200)}
    snapshot = pool(*tasks, of=nodes(32, 8), placed=running, now=3000.0)
    start = time.process_time()
    assert sum(decided(name, snapshot).values()) > 200
    assert time.process_time() - start < 8.0


@pytest.mark.parametrize("name", BASELINES)
def test_reasons_say_what_stands_in_the_way(name: str) -> None:
    tasks = (
        task("here"),
        task("elsewhere", gpu_types=frozenset({"h100"})),
        task("large", 16),
        task("capped", 2, owner="alice"),
        task("confused", sizes=(3,)),
        task("bound", 2, movable=False),
    )
    snapshot = pool(*tasks, of=nodes(1, 8), quotas={"alice": 1}, placed={"bound": (("a100-000", 2),)})
    reasons = named(name).allocate(snapshot).reasons
    assert reasons["here"].startswith("starts on 1 GPU of a100")
    assert reasons["elsewhere"] == "waits: it runs on h100 alone, and there is a100"
    assert reasons["large"] == "waits: it needs 16 GPUs of one kind, and there are 8"
    assert reasons["capped"] == "waits: it needs 2 GPUs, and its owner may hold 1"
    assert reasons["confused"] == "waits: no number of GPUs is both among its sizes and from 1 to 1"
    assert reasons["bound"] == "keeps 2 GPUs, as it cannot be moved"


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), -1.0])
def test_who_has_no_sound_estimate_takes_nothing_from_others(name: str, absurd: float) -> None:
    tasks = (task("absurd", 4, speed=Scales(rest=absurd), left=absurd), task("sound", 4, at=1.0, left=absurd))
    assert decided(name, pool(*tasks, of=nodes(1, 4))) == {"sound": 4}


def test_policies_go_by_name() -> None:
    assert set(BASELINES) | {"diamond"} == set(POLICIES)
    for name in BASELINES:
        assert named(name).name == name
    with pytest.raises(InvalidInput, match="no policy 'fofi'") as caught:
        named("fofi")
    assert caught.value.hint == "policies: diamond, fifo, pollux, sia, srtf, tiresias"


# First come, first served


def test_backfill_does_not_delay_the_head() -> None:
    tasks = (
        task("runs", 4, left=400.0),  # 100 s
        task("head", 8, left=800.0, at=1.0),
        task("long", 4, left=800.0, at=2.0),  # 200 s
        task("unknown", 4, at=3.0),
        task("short", 4, left=200.0, at=4.0),  # 50 s
    )
    snapshot = pool(*tasks, of=nodes(1, 8), placed={"runs": (("a100-000", 4),)})
    decision = named("fifo").allocate(snapshot)
    assert given_gpus(decision) == {"runs": 4, "short": 4}
    assert decision.reasons["head"] == "waits: 8 GPUs asked for, 4 free; expected in 100 s"
    assert decision.reasons["long"] == "waits: it would delay head, which came first"
    assert decision.reasons["short"].endswith("before its turn, as that does not delay head")


def test_backfill_uses_what_the_head_leaves_over() -> None:
    tasks = (task("runs", 4, left=400.0), task("head", 6, at=1.0), *(task(f"{n}", at=2.0 + n) for n in range(4)))
    placed = {"runs": (("a100-000", 4),)}
    assert decided("fifo", pool(*tasks, of=nodes(1, 8), placed=placed)) == {"runs": 4, "0": 1, "1": 1}


def test_fifo_goes_by_priority_and_never_moves_what_runs() -> None:
    tasks = (task("runs", 1, left=1e6), task("first", 8), task("urgent", 7, at=9.0, priority=1))
    snapshot = pool(*tasks, of=nodes(1, 8), placed={"runs": (("a100-000", 1),)})
    assert decided("fifo", snapshot) == {"runs": 1, "urgent": 7}


def test_fifo_spreads_a_task_rather_than_move_others() -> None:
    tasks = (task("a", 2), task("b", 2), task("c", 4))
    placed = {"a": (("a100-000", 2),), "b": (("a100-001", 2),)}
    decision = named("fifo").allocate(pool(*tasks, of=nodes(2, 4), placed=placed))
    assert decision.placed == {**placed, "c": (("a100-000", 2), ("a100-001", 2))}


def test_who_waits_for_a_quota_holds_up_nobody() -> None:
    tasks = (task("a", 2, owner="alice"), task("b", 2, owner="alice", at=1.0), task("c", 6, at=2.0))
    snapshot = pool(*tasks, of=nodes(1, 8), quotas={"alice": 3})
    decision = named("fifo").allocate(snapshot)
    assert given_gpus(decision) == {"a": 2, "c": 6}
    assert decision.reasons["b"] == "waits: 2 GPUs asked for, and its owner's quota has 1 left"


def test_on_a_log_of_rigid_tasks_diamond_keeps_none_waiting_longer_than_backfill_does() -> None:
    waits: dict[str, float] = {}
    for name in ("fifo", "diamond"):
        for seed in range(3):
            outcome = simulate(rigid_log(seed), named(name), nodes(4, 4))
            waits[name] = waits.get(name, 0.0) + outcome.summary()["wait_mean_s"]
    assert waits["fifo"] > 0.0
    assert waits["diamond"] <= 1.02 * waits["fifo"]


def rigid_log(seed: int) -> list[Arrival]:
    """Eighty tasks as accounting has them: sizes from 1 to 8, and limits of up to ten times what they take."""
    chance, at, found = random.Random(seed), 0.0, []
    for number in range(80):
        at += chance.expovariate(1 / 500)
        lasts = min(max(chance.lognormvariate(7.0, 1.3), 60.0), 20_000.0)
        limit = lasts * chance.choice([1.0, 2.0, 10.0])
        found.append(Arrival(f"j{number:03}", at, gpus=chance.choice([1, 1, 2, 4, 8]), duration_s=lasts, limit_s=limit))
    return found


# Shortest remaining time first


def test_a_short_task_overtakes_and_the_unknown_come_last() -> None:
    tasks = (task("long", 8, left=8e6), task("unknown", 8), task("short", 8, left=80.0, at=999.0))
    snapshot = pool(*tasks, of=nodes(1, 8), placed={"long": (("a100-000", 8),)})
    assert decided("srtf", snapshot) == {"short": 8}
    assert named("srtf").allocate(snapshot).reasons["long"].startswith("stops, and gives back 8 GPUs: ")
    assert decided("srtf", replace(snapshot, demands=tasks[:2])) == {"long": 8}


# Tiresias


def test_who_has_had_sixteen_gpu_hours_falls_behind() -> None:
    tasks = (task("old", 4, attained_s=THRESHOLD_S), task("new", 4, at=500.0), task("newer", 4, at=600.0))
    snapshot = pool(*tasks, of=nodes(1, 8), placed={"old": (("a100-000", 4),)})
    assert decided("tiresias", snapshot) == {"new": 4, "newer": 4}
    just_before = replace(tasks[0], attained_s=THRESHOLD_S - 1.0)
    assert decided("tiresias", replace(snapshot, demands=(just_before, *tasks[1:]))) == {"old": 4, "new": 4}


# Pollux


def elastic(name: str, power: float, **more: object) -> Demand:
    return task(name, speed=Scales(power), max_gpus=64, running_s=900.0, attained_s=900.0 * 64, **more)


def test_pollux_gives_gpus_where_they_scale() -> None:
    shares = decided("pollux", pool(elastic("scales", 0.95), elastic("does not", 0.1), of=nodes(2, 4)))
    assert shares["scales"] + shares["does not"] == 8
    assert shares["scales"] >= 6


def test_pollux_shares_alike_among_the_alike_and_starves_nobody() -> None:
    tasks = [elastic(f"t{number}", 0.8) for number in range(4)]
    assert decided("pollux", pool(*tasks, of=nodes(2, 4))) == {one.id: 2 for one in tasks}
    tasks = [elastic(f"t{number}", 0.8) for number in range(9)]
    assert sorted(decided("pollux", pool(*tasks, of=nodes(2, 4))).values()) == [1] * 8


def test_pollux_is_as_good_as_the_best_of_all_answers() -> None:
    powers, ages, now = (0.9, 0.6, 0.3), (900.0, 400.0, 50.0), 1000.0
    tasks = [elastic(f"t{number}", powers[number], at=now - ages[number]) for number in range(3)]
    snapshot = pool(*tasks, of=nodes(1, 6), placed={"t0": (("a100-000", 2),), "t1": (("a100-000", 1),)})

    def total(sizes: tuple[int, ...]) -> float:
        costs = []
        for power, age, size, had in zip(powers, ages, sizes, (2, 1, 0), strict=True):
            factor = 1.0 if size == had else age / (age + 30.0)
            costs.append(1 / (size**power / 2**power / 6 * factor * (size > 0) + 1e-3))
        return sum(costs)

    every = [(a, b, c) for a in range(7) for b in range(7 - a) for c in range(7 - a - b)]
    found = decided("pollux", snapshot)
    assert total(tuple(found.get(one.id, 0) for one in tasks)) == pytest.approx(min(map(total, every)))


def test_pollux_does_not_restart_a_young_task_for_little() -> None:
    tasks = (elastic("young", 0.05, at=990.0), elastic("old", 0.05, at=-1e6))
    placed = {"young": (("a100-000", 1),), "old": (("a100-000", 1),)}
    assert decided("pollux", pool(*tasks, of=nodes(1, 3), placed=placed)) == {"young": 1, "old": 2}


def test_growth_is_bounded_by_what_was_tried() -> None:
    fresh = task("fresh", max_gpus=16)
    ran = task("ran", max_gpus=16, attained_s=300.0, running_s=100.0)
    for policy in (Pollux(), Sia()):
        grown = given_gpus(policy.allocate(pool(fresh, ran, of=nodes(4, 4))))
        assert grown["fresh"] == 1
        assert grown["ran"] == (6 if policy.name == "pollux" else 4)
    for policy in (Pollux(growth=None), Sia(growth=None)):
        assert given_gpus(policy.allocate(pool(fresh, of=nodes(4, 4)))) == {"fresh": 16}


def test_pollux_keeps_a_quota_and_gives_the_rest_to_others() -> None:
    tasks = [elastic("a", 1.0, owner="alice"), elastic("b", 1.0, owner="alice"), elastic("c", 1.0)]
    shares = decided("pollux", pool(*tasks, of=nodes(2, 4), quotas={"alice": 3}))
    assert shares["c"] >= 4
    assert shares["a"] + shares["b"] == 3


# Sia


def test_sia_puts_a_task_where_it_is_relatively_faster() -> None:
    tasks = (
        task("large", 4, speed=Scales(kinds={"a100": 8.0, "t4": 1.0})),
        task("small", 4, speed=Scales(kinds={"a100": 9.0, "t4": 6.0})),
    )
    decision = named("sia").allocate(pool(*tasks, of=(*nodes(1, 4), *nodes(1, 4, "t4"))))
    assert decision.placed == {"large": (("a100-000", 4),), "small": (("t4-000", 4),)}
    assert decision.exact


def test_sia_takes_powers_of_two_and_whole_nodes_and_at_most_doubles() -> None:
    one = task("one", max_gpus=64, attained_s=1e4, running_s=1e4)
    steps = []
    placed: Mapping[str, Placement] = {}
    for _ in range(6):
        placed = named("sia").allocate(pool(one, of=nodes(3, 4), placed=placed, now=1e5)).placed
        steps.append(sum(gpus for _, gpus in placed["one"]))
    assert steps == [2, 4, 8, 12, 12, 12]


@pytest.mark.parametrize("powers", [(0.7, 0.4, 0.2, 0.8), (0.3, 0.9, 1.0, 0.3), (0.1, 0.5, 0.4, 0.5)])
def test_sia_is_as_good_as_the_best_of_all_answers(powers: tuple[float, ...]) -> None:
    had = (2, 1, 0, 0)
    tasks = [elastic(f"t{number}", power, at=900.0, restarts=1) for number, power in enumerate(powers)]
    placed = {"t0": (("a100-000", 2),), "t1": (("a100-000", 1),)}

    def total(sizes: tuple[int, ...]) -> float:
        costs = [
            (size**power * (1.0 if before in (0, size) else 70.0 / 130.0)) ** -0.5 if size else 1.1
            for size, power, before in zip(sizes, powers, had, strict=True)
        ]
        return sum(costs)

    every = [sizes for sizes in itertools.product((0, 1, 2, 4, 8), repeat=4) if sum(sizes) <= 8]
    found = decided("sia", pool(*tasks, of=nodes(1, 8), placed=placed))
    assert total(tuple(found.get(one.id, 0) for one in tasks)) == pytest.approx(min(map(total, every)), rel=1e-4)


def test_sia_without_time_for_the_solver_rounds_and_says_so() -> None:
    tasks = [elastic(f"t{number}", 0.5 + number / 20) for number in range(10)]
    snapshot = pool(*tasks, of=(*nodes(3, 4), *nodes(1, 8, "t4")), seconds=0.0)
    rounded = named("sia").allocate(snapshot)
    assert not rounded.exact
    assert faults(snapshot, rounded) == []
    assert sum(given_gpus(rounded).values()) >= 18
    assert named("sia").allocate(replace(snapshot, seconds=5.0)).exact
