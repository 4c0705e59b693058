"""Which nodes: compact places, few moves, and nothing given twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.planner.pools.packing import Wanted, fewest_nodes, pack
from diamond.planner.pools.snapshot import Demand, Node, Placement, Shape, Snapshot


class Even:
    def goodput(self, shape: Shape) -> float:
        return float(shape.gpus)

    def doubt(self, shape: Shape) -> float:
        return 0.0


def pool(nodes: dict[str, int], placed: dict[str, Placement], names: str, fixed: str = "") -> Snapshot:
    return Snapshot(
        now=0.0,
        nodes=tuple(Node(name=name, gpu_type="a", gpus=gpus) for name, gpus in nodes.items()),
        demands=tuple(
            Demand(id=name, submitted_at=0.0, speed=Even(), max_gpus=64, movable=name not in fixed) for name in names
        ),
        placed=placed,
    )


def wanted(**gpus: int) -> dict[str, Wanted]:
    return {name: Wanted("a", number) for name, number in gpus.items()}


def used(placed: dict[str, Placement]) -> dict[str, int]:
    found: dict[str, int] = {}
    for placement in placed.values():
        for name, gpus in placement:
            found[name] = found.get(name, 0) + gpus
    return found


def test_who_keeps_its_number_keeps_its_place() -> None:
    before: dict[str, Placement] = {"x": (("n2", 2),), "y": (("n1", 1),)}
    after = pack(pool({"n1": 4, "n2": 4}, before, "xyz"), wanted(x=2, y=1, z=2))
    assert after == {**before, "z": (("n2", 2),)}


def test_small_tasks_make_room_for_a_whole_node() -> None:
    before: dict[str, Placement] = {"x": (("n1", 1),), "y": (("n2", 2),)}
    after = pack(pool({"n1": 4, "n2": 4}, before, "xyz"), wanted(x=1, y=2, z=4))
    assert after == {"x": (("n2", 1),), "y": (("n2", 2),), "z": (("n1", 4),)}


def test_a_task_is_spread_only_around_what_cannot_move() -> None:
    before: dict[str, Placement] = {"x": (("n1", 2),), "y": (("n2", 2),)}
    spread = pack(pool({"n1": 4, "n2": 4}, before, "xyz", fixed="xy"), wanted(x=2, y=2, z=4))
    assert spread["z"] == (("n1", 2), ("n2", 2))
    moved = pack(pool({"n1": 4, "n2": 4}, before, "xyz", fixed="x"), wanted(x=2, y=2, z=4))
    assert moved == {"x": (("n1", 2),), "y": (("n1", 2),), "z": (("n2", 4),)}


def test_several_nodes_are_cleared_for_a_large_task() -> None:
    nodes = {f"n{number}": 4 for number in range(4)}
    before: dict[str, Placement] = {"x": (("n0", 1),), "y": (("n1", 1),), "u": (("n2", 2),), "v": (("n3", 1),)}
    after = pack(pool(nodes, before, "xyuvz"), wanted(x=1, y=1, u=2, v=1, z=8))
    assert len(after["z"]) == 2
    assert after["u"] == before["u"]
    assert len(after) == 5
    assert max(used(after).values()) <= 4


def test_a_node_that_lost_gpus_is_not_overbooked() -> None:
    before: dict[str, Placement] = {"x": (("n1", 4),), "y": (("n1", 4),)}
    after = pack(pool({"n1": 4, "n2": 4}, before, "xy"), wanted(x=4, y=4))
    assert used(after) == {"n1": 4, "n2": 4}


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 0)])
def test_fewest_nodes(gpus: int, nodes: int) -> None:
    assert fewest_nodes(gpus, (4, 4)) == nodes


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([1, 2, 4, 8, 12]), max_size=20), st.data())
def test_powers_of_two_and_whole_nodes_are_never_spread(sizes: list[int], data: st.DataObject) -> None:
    """Whatever was where before: what fits by number is placed, on as few nodes as hold it."""
    names = [f"t{number}" for number in range(len(sizes))]
    nodes = {f"n{number}": 4 for number in range(8)}
    gpus: dict[str, int] = {}
    for name, size in zip(names, sizes, strict=True):
        if sum(gpus.values()) + size <= 32:
            gpus[name] = size
    before: dict[str, Placement] = {}
    for name in sorted(gpus):
        node = data.draw(st.sampled_from(sorted(nodes)))
        if gpus[name] <= 4 and used(before).get(node, 0) + gpus[name] <= 4 and data.draw(st.booleans()):
            before[name] = ((node, gpus[name]),)
    snapshot = Snapshot(
        now=0.0,
        nodes=tuple(Node(name=name, gpu_type="a", gpus=number) for name, number in nodes.items()),
        demands=tuple(Demand(id=name, submitted_at=0.0, speed=Even(), max_gpus=64) for name in gpus),
        placed=before,
    )
    after = pack(snapshot, {name: Wanted("a", number) for name, number in gpus.items()})
    assert set(after) == set(gpus)
    assert all(number <= 4 for number in used(after).values())
    for name, placement in after.items():
        assert sum(number for _, number in placement) == gpus[name]
        assert len(placement) == fewest_nodes(gpus[name], [4] * 8)
