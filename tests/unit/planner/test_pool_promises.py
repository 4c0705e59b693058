"""What docs/scheduling.md promises of Diamond's policy beyond single decisions that can be carried out."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.snapshot import Demand, Node, Shape, Snapshot, Work, faults
from diamond.planner.pools.valuing import Taste

EVERY = settings(max_examples=60, deadline=None, derandomize=True)
NODES = tuple(Node(name=f"n{number}", gpu_type="a", gpus=4) for number in range(4))
TOTAL, NOW = 16, 100_000.0


class Power:
    def __init__(self, power: float) -> None:
        self._power = power

    def goodput(self, shape: Shape) -> float:
        return float(shape.gpus**self._power)

    def doubt(self, shape: Shape) -> float:
        return 0.0


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Demand, ...]:
    found = []
    for number in range(draw(st.integers(1, 12))):
        least, left = draw(st.sampled_from([1, 1, 1, 2, 3, 4])), draw(st.floats(10.0, 1e5))
        found.append(
            Demand(
                id=f"t{number}",
                submitted_at=NOW - draw(st.sampled_from([0.0, 100.0, 1700.0, 1900.0, 5000.0])),
                speed=Power(draw(st.floats(0.1, 1.0))),
                min_gpus=least,
                max_gpus=draw(st.sampled_from([least, 8, 16])) if least <= 8 else least,
                priority=draw(st.sampled_from([0, 0, 2])),
                left=draw(st.sampled_from([None, Work(left, left / 2, left * 2)])),
            )
        )
    return tuple(found)


def snapshot_of(demands: tuple[Demand, ...], runs: int) -> Snapshot:
    """The first few run already, each with as much as is free on a node of its own."""
    placed = {
        one.id: ((node.name, size),)
        for one, node in zip(demands[:runs], NODES, strict=False)
        if one.takes(size := min(4, one.max_gpus))
    }
    return Snapshot(now=NOW, nodes=NODES, demands=demands, placed=placed, seconds=60.0)


@EVERY
@given(tasks(), st.integers(0, 4))
def test_where_all_fit_with_their_smallest_share_all_run(demands: tuple[Demand, ...], runs: int) -> None:
    assume(sum(one.min_gpus for one in demands) <= TOTAL)
    snapshot = snapshot_of(demands, runs)
    decision = Goodput().allocate(snapshot)
    assert faults(snapshot, decision) == []
    assert set(decision.placed) >= {one.id for one in demands}


@EVERY
@given(tasks(), st.integers(0, 4))
def test_whoever_is_owed_a_turn_runs_where_all_of_them_fit(demands: tuple[Demand, ...], runs: int) -> None:
    taste = Taste(wait_s=1800.0)
    owed = [one for one in demands if NOW - one.submitted_at >= taste.wait_s]
    assume(owed and sum(one.min_gpus for one in owed) <= TOTAL < sum(one.min_gpus for one in demands))
    decision = Goodput(taste).allocate(snapshot_of(demands, runs))
    assert set(decision.placed) >= {one.id for one in owed}
