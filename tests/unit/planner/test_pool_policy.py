"""Diamond's own policy: what each of its promises does in a case small enough to see."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from diamond.planner.pools.choosing import Problem, choose
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.snapshot import Decision, Demand, Node, Placement, Shape, Snapshot, Work, faults
from diamond.planner.pools.valuing import Taste


@dataclass(frozen=True)
class Power:
    """Goodput as a power of the GPUs, times a factor by kind."""

    power: float = 0.8
    kinds: dict[str, float] = field(default_factory=dict)
    unsure_from: int = 1000

    def goodput(self, shape: Shape) -> float:
        return self.kinds.get(shape.gpu_type, 1.0) * float(shape.gpus**self.power)

    def doubt(self, shape: Shape) -> float:
        return 1.0 if shape.gpus >= self.unsure_from else 0.0


def nodes(number: int, gpus: int = 4, kind: str = "a") -> tuple[Node, ...]:
    return tuple(Node(name=f"{kind}{index:03}", gpu_type=kind, gpus=gpus) for index in range(number))


def task(name: str, *, at: float = 0.0, most: int = 16, left: float | None = None, **more: object) -> Demand:
    work = None if left is None else Work(left, left, left)
    return Demand(id=name, submitted_at=at, max_gpus=most, left=work, **{"speed": Power(), **more})  # type: ignore[arg-type]


def pool(*demands: Demand, of: tuple[Node, ...], now: float = 1000.0, **more: object) -> Snapshot:
    return Snapshot(now=now, nodes=of, demands=demands, **{"seconds": 10.0, **more})  # type: ignore[arg-type]


def decide(snapshot: Snapshot, **taste: float) -> Decision:
    decision = Goodput(Taste(**taste)).allocate(snapshot)
    assert faults(snapshot, decision) == []
    return decision


def gpus(decision: Decision) -> dict[str, int]:
    return {name: sum(number for _, number in placement) for name, placement in decision.placed.items()}


def test_gpus_go_where_they_scale() -> None:
    decision = decide(pool(task("flat", speed=Power(0.1)), task("steep", speed=Power(1.0)), of=nodes(2)))
    assert gpus(decision) == {"flat": 4, "steep": 4}
    assert decision.exact
    assert decision.reasons["steep"] == "starts with 4 GPUs of a"
    crowd = [task(f"flat{number}", speed=Power(0.1)) for number in range(4)]
    assert gpus(decide(pool(*crowd, task("steep", speed=Power(1.0)), of=nodes(2))))["steep"] == 4


def test_nobody_waits_for_others_to_grow() -> None:
    steep, flat = task("steep", speed=Power(1.0)), task("flat", speed=Power(0.0))
    assert set(decide(pool(steep, flat, of=nodes(2))).placed) == {"steep", "flat"}


def test_a_task_runs_where_it_gains_most_from_the_kind() -> None:
    speedy = task("speedy", most=4, speed=Power(1.0, {"a": 1.0, "b": 4.0}))
    plain = task("plain", most=4, speed=Power(1.0, {"a": 1.0, "b": 1.2}))
    decision = decide(pool(speedy, plain, of=(*nodes(1), *nodes(1, kind="b"))))
    assert decision.placed == {"speedy": (("b000", 4),), "plain": (("a000", 4),)}


def test_what_has_less_left_comes_first_while_gpus_are_short_and_only_then() -> None:
    short, long = task("short", left=100.0, at=990.0), task("long", left=10_000.0, at=990.0)
    other = replace(long, id="other")
    assert gpus(decide(pool(long, other, short, of=nodes(1)))) == {"short": 2, "long": 1, "other": 1}
    assert gpus(decide(pool(short, long, of=nodes(8)))) == {"short": 16, "long": 16}


def test_who_is_late_already_is_not_put_behind() -> None:
    """Of two with as much left, short ones around them, only the one that came long ago is let off."""
    short, fresh = task("short", left=50.0, at=990.0, most=1), task("fresh", left=4000.0, at=999.0, most=1)
    late = replace(fresh, id="late", submitted_at=-20_000.0, running_s=20_000.0)
    assert gpus(decide(pool(short, fresh, late, of=nodes(1, gpus=2)))) == {"short": 1, "late": 1}


def test_a_small_gain_is_not_worth_a_restart() -> None:
    here: dict[str, Placement] = {"x": (("a000", 2),)}
    slow, steep = Power(0.05), Power(1.0)
    old = {"at": 0.0, "most": 4, "running_s": 900.0}
    kept = decide(pool(task("x", speed=slow, **old), of=nodes(1), placed=here))  # type: ignore[arg-type]
    assert kept.placed == here
    assert kept.reasons["x"] == "keeps 2 GPUs"
    grown = decide(pool(task("x", speed=steep, **old), of=nodes(1), placed=here))  # type: ignore[arg-type]
    assert gpus(grown) == {"x": 4}
    assert grown.reasons["x"] == "grows from 2 to 4 GPUs: 2 times as fast, worth a restart of 30 s"


def test_what_is_nearly_done_is_left_alone() -> None:
    here: dict[str, Placement] = {"x": (("a000", 2),)}
    snapshot = pool(task("x", speed=Power(1.0), left=60.0, running_s=900.0), of=nodes(1), placed=here)
    assert decide(snapshot).placed == here  # 30 s as it is; 15 s on twice as many, after a restart of 30 s


def test_an_immovable_task_stays_and_a_rigid_one_gets_its_size_or_nothing() -> None:
    here: dict[str, Placement] = {"still": (("a000", 3),)}
    still = task("still", movable=False, most=3, min_gpus=3)
    rigid = task("rigid", min_gpus=6, most=6)
    decision = decide(pool(still, rigid, of=nodes(2), placed=here))
    assert decision.placed == here
    assert decision.reasons["still"] == "keeps 3 GPUs: it cannot be moved"
    assert decision.reasons["rigid"].startswith("waits: tasks that cannot be moved hold what it needs")
    assert gpus(decide(pool(rigid, of=nodes(2)))) == {"rigid": 6}


def test_an_immovable_task_does_not_start_where_a_more_important_one_waits_for_room() -> None:
    here: dict[str, Placement] = {"still": (("a000", 4),)}
    still = task("still", movable=False, most=4)
    large = task("large", min_gpus=8, most=8, priority=1)
    small = task("small", movable=False, most=1)
    decision = decide(pool(still, large, small, of=nodes(2), placed=here))
    assert decision.placed == here
    assert gpus(decide(pool(still, large, replace(small, movable=True), of=nodes(2), placed=here)))["small"] == 1


def test_an_immovable_task_starts_before_its_turn_where_that_puts_nobody_off() -> None:
    """Eight GPUs, four of which are held for 100 s more; `large` needs six of them, so that two are to spare."""
    one = {"movable": False, "speed": Power(0.0)}
    still = task("still", left=100.0, min_gpus=4, most=4, **one)  # type: ignore[arg-type]
    large = task("large", at=1.0, left=500.0, min_gpus=6, most=6, **one)  # type: ignore[arg-type]
    later = {"at": 2.0, "restart_s": 0.0, **one}
    short = task("short", left=90.0, min_gpus=2, most=2, **later)  # type: ignore[arg-type]
    long = task("long", left=900.0, min_gpus=3, most=3, **later)  # type: ignore[arg-type]
    small = task("small", min_gpus=1, most=1, **later)  # type: ignore[arg-type]
    here: dict[str, Placement] = {"still": (("a000", 4),)}
    decision = decide(pool(still, large, short, long, small, of=nodes(2), placed=here))
    assert gpus(decision) == {"still": 4, "short": 2, "small": 1}
    held = "waits: tasks that cannot be moved hold what it needs; it is expected to start in 100 s"
    assert decision.reasons["large"] == held
    assert decision.reasons["long"] == "waits: it could not be moved out of the way of a task that comes first"
    first = replace(long, submitted_at=0.5)  # before large: nothing is kept from it
    assert gpus(decide(pool(still, large, first, of=nodes(2), placed=here))) == {"still": 4, "long": 3}


def test_a_higher_priority_is_served_first_and_a_lower_one_is_not_starved() -> None:
    high = [task(f"high{number}", priority=5, most=1) for number in range(4)]
    low = task("low", most=1)
    assert set(decide(pool(*high, low, of=nodes(1))).placed) == {one.id for one in high}
    turn = decide(pool(*high, low, of=nodes(1), now=2000.0), wait_s=1800.0)
    assert "low" not in turn.placed  # all have waited as long, and there is no room for all
    fresh = [replace(one, submitted_at=1990.0) for one in high]
    turn = decide(pool(*fresh, low, of=nodes(1), now=2000.0), wait_s=1800.0)
    assert turn.reasons["low"] == "starts with 1 GPU of a; its turn after waiting 33 min"


def test_quotas_bind_their_owner_alone() -> None:
    mine = [task(f"m{number}", owner="me") for number in range(3)]
    decision = decide(pool(*mine, task("yours", owner="you"), of=nodes(4), quotas={"me": 2}))
    got = gpus(decision)
    assert sum(got[name] for name in got if name.startswith("m")) == 2
    assert got["yours"] > 2
    waiting = next(one.id for one in mine if one.id not in got)
    assert decision.reasons[waiting] == "waits: its owner holds 2 of 2 GPUs allowed"


def test_a_deadline_that_can_be_kept_is_kept() -> None:
    others = [task(f"o{number}", left=10.0, at=990.0) for number in range(8)]
    due = task("due", left=4000.0, speed=Power(1.0), deadline=1000.0 + 30.0 + 1000.0)
    assert gpus(decide(pool(*others, due, of=nodes(3))))["due"] >= 4
    assert gpus(decide(pool(*others, replace(due, deadline=None), of=nodes(3)))).get("due", 0) < 4
    decide(pool(*others, replace(due, deadline=1001.0), of=nodes(3)))  # out of reach: like any other


@pytest.mark.parametrize(("load", "needed"), [(0.0, 1), (3.0, 4), (6.0, 8), (1e9, 16)])
def test_a_service_gets_what_its_load_needs_and_no_more(load: float, needed: int) -> None:
    service = task("web", load=load, speed=Power(1.0))
    trainings = [task(f"t{number}", speed=Power(1.0)) for number in range(8)]
    got = gpus(decide(pool(service, *trainings, of=nodes(4))))
    assert got["web"] == needed
    assert sum(got.values()) == 16


def test_what_is_not_known_is_tried_at_a_few_times_the_size() -> None:
    here: dict[str, Placement] = {"x": (("a000", 2),)}
    unsure = task("x", speed=Power(1.0, unsure_from=3), running_s=900.0)
    assert gpus(decide(pool(unsure, of=nodes(4), placed=here))) == {"x": 8}
    sure = replace(unsure, speed=Power(1.0))
    assert gpus(decide(pool(sure, of=nodes(4), placed=here))) == {"x": 16}


@dataclass(frozen=True)
class Measured:
    """On up to four GPUs; beyond, a guess that says they bring next to nothing, and that it may be wrong."""

    def goodput(self, shape: Shape) -> float:
        return float(min(shape.gpus, 4) + 0.05 * max(shape.gpus - 4, 0))

    def doubt(self, shape: Shape) -> float:
        return 1.0 if shape.gpus > 4 else 0.05


def test_a_size_that_nobody_tried_is_tried_beside_idle_gpus() -> None:
    alone = pool(
        task("x", speed=Measured(), left=1e6, running_s=7000.0),
        of=nodes(4),
        now=7200.0,
        placed={"x": (("a000", 4),)},
    )
    tried = decide(alone)
    assert gpus(tried) == {"x": 16}
    assert tried.reasons["x"] == "grows from 4 to 16 GPUs, to see how fast it is there, for a restart of 30 s"
    assert gpus(decide(alone, curiosity=0.0)) == {"x": 4}
    # Hope goes as far as twice the GPUs being twice as fast, whatever the doubt: they are not taken from sure gains.
    many = replace(alone, demands=(*alone.demands, task("sure", speed=Power(1.0), left=1e6)), nodes=nodes(2))
    assert gpus(decide(many, curiosity=50.0)) == {"x": 4, "sure": 4}


def test_among_long_tasks_the_one_with_least_left_comes_first_by_its_place_alone() -> None:
    def shares(*left: float) -> list[int]:
        found = gpus(decide(pool(*(task(f"t{n}", left=work) for n, work in enumerate(left)), of=nodes(4)), haste=1.0))
        return [found[f"t{number}"] for number in range(len(left))]

    near = shares(1.00e6, 0.95e6, 0.90e6)
    assert near == shares(1.00e6, 0.50e6, 0.01e6) == sorted(near)
    assert near[0] < near[2]
    assert len(set(shares(1e6, 1e6, 1e6, 1e6))) == 1


def test_sizes_are_kept_to() -> None:
    assert gpus(decide(pool(task("x", sizes=(3, 6)), of=nodes(2)))) == {"x": 6}
    decision = decide(pool(task("x", sizes=(5,), gpu_types=frozenset({"b"})), of=nodes(2)))
    assert decision.placed == {}
    assert "runs on b alone" in decision.reasons["x"]


@pytest.mark.parametrize("name", ["haste", "fairness", "sticky", "curiosity", "wait_s", "turn_s"])
def test_a_taste_that_cannot_be_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: -1"):
        Taste(**{name: -1.0})


def problem(seed: int, kinds: int, quota: bool) -> Problem:
    random = np.random.default_rng(seed)
    options = [sorted(random.choice([1, 2, 3, 4], size=3, replace=False)) for _ in range(6)]
    number = 6 * 3
    return Problem(
        start=np.arange(0, number + 1, 3),
        kind=np.arange(number) % kinds,
        gpus=np.concatenate(options).astype(np.int64),
        value=random.uniform(0.1, 5.0, number),
        capacity=np.full(kinds, 6, dtype=np.int64),
        owner=np.array([0, 0, -1, -1, -1, -1]) if quota else np.full(6, -1),
        bounds=np.array([3] if quota else [], dtype=np.int64),
        must=np.zeros(6, dtype=np.bool_),
        given=np.full(6, -1, dtype=np.int64),
    )


def best_of_all(given: Problem) -> float:
    """By trying everything: each of six tasks takes one of three rows, or none."""
    best = 0.0
    for index in range(4**6):
        picks = np.array([index // 4**task % 4 for task in range(6)])
        chosen = np.where(picks < 3, given.start[:-1] + picks, -1)
        left, unspent = given.room(chosen)
        if (left >= 0).all() and (unspent >= 0).all():
            best = max(best, given.total(chosen))
    return best


@pytest.mark.parametrize(("kinds", "quota"), [(1, False), (2, False), (1, True), (3, True)])
def test_the_choice_is_the_best_there_is(kinds: int, quota: bool) -> None:
    one = problem(kinds, kinds, quota)
    chosen, exact = choose(one, np.inf, lambda: 0.0)
    left, unspent = one.room(chosen)
    assert exact
    assert (left >= 0).all()
    assert (unspent >= 0).all()
    assert one.total(chosen) >= 0.997 * best_of_all(one)


def test_a_choice_without_time_is_no_worse_than_what_there_was_and_says_so() -> None:
    one = problem(0, 2, quota=False)
    begun = replace(one, given=np.array([0, -1, -1, -1, -1, -1]))
    chosen, exact = choose(begun, 0.0, lambda: 1.0)
    assert not exact
    assert begun.total(chosen) > begun.total(begun.given)
    assert (begun.room(chosen)[0] >= 0).all()
