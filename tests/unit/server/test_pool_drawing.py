"""Pictures of a pool: boxes for slots, stacks and bands over time, and what the page says of fairness."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diamond.core.pools import Pilot, PoolDecision, PoolNode, PoolSpec, PoolTask
from diamond.server.services import pool_history
from diamond.server.services.pool_history import History, Hold, Stay, Who
from diamond.server.web import pool_drawing, pool_words

SPAN = 6000.0


def history(stays: list[tuple[int, float, float | None, int]], holds: list[tuple[float, float | None, int]]) -> History:
    numbers = {stay[0] for stay in stays}
    return History(
        since=0.0,
        now=SPAN,
        decided_at=SPAN,
        may_change=True,
        tasks={
            number: Who(number=number, task_id=f"tsk_{number}", name=f"t{number}", submitted_at=0.0, ended_at=None)
            for number in numbers
        },
        stays=tuple(
            Stay(
                number=number, slots=slots, nodes=(PoolNode(pilot="job_1", slots=slots),), started_at=start,
                ended_at=end, is_live=end is None, is_moving=False,
            )
            for number, start, end, slots in stays
        ),
        holds=tuple(Hold(slots=slots, started_at=start, ended_at=end) for start, end, slots in holds),
    )  # fmt: skip


times = st.floats(-SPAN, 1.5 * SPAN, allow_nan=False)
spans = st.tuples(st.integers(1, 9), times, st.none() | times, st.integers(1, 8))


@given(st.lists(spans, max_size=25))
def test_at_every_moment_the_stack_is_as_high_as_what_tasks_had(stays: list[tuple[int, float, float, int]]) -> None:
    known = history(list(stays), [])
    stack = pool_drawing.stack(known)
    for column in range(0, 600, 7):
        x = 100 * (column + 0.5) / 600
        there = sorted((r for r in stack.rects if r.x <= x < r.x + r.width), key=lambda r: -r.y)
        had = sum(
            stay.slots
            for stay in known.stays
            if pool_drawing._column(known, stay.started_at) <= column < pool_drawing._column(known, stay.ended_at)
        )
        assert sum(r.height for r in there) == pytest.approx(100 * had / stack.most, abs=0.1)
        bottom = 100.0
        for rect in there:  # upon each other: neither gaps nor one over another
            assert rect.y + rect.height == pytest.approx(bottom, abs=0.05)
            bottom = rect.y
    for rect in (*stack.rects, *(r for band in pool_drawing.bands(known) for r in band.rects)):
        assert 0 <= rect.x <= 100 and 0 < rect.width <= 100 and rect.y >= -0.02 and rect.height <= 100.02


def test_what_was_held_stands_behind() -> None:
    stack = pool_drawing.stack(history([(1, 1000, 3000, 2)], [(0, None, 4), (3000, 4500, 4)]))
    assert stack.most == 8 and [(r.x, r.width, r.y) for r in stack.held] == [
        (0.0, 50.0, 50.0), (50.0, 25.0, 0.0), (75.0, 25.0, 50.0),
    ]  # fmt: skip
    assert [(r.look, r.title) for r in stack.rects] == [("t0", "1, t1: 2 slots")]


def test_sixteen_tasks_look_different() -> None:
    assert len({pool_drawing.look_of(number) for number in range(1, 17)}) == 16


def test_sizes_one_after_the_other() -> None:
    stays = [(1, 1000.0 * n, 1000.0 * n + 900, slots) for n, slots in enumerate((1, 2, 2, 4))]
    (band,) = pool_drawing.bands(history(list(stays), []))
    assert band.words == "1 → 2 → 4 slots" and len(band.rects) == 4
    assert band.rects[0].title == "1 slot for 15m 00s"
    (long,) = pool_drawing.bands(history([(1, 100.0 * n, 100.0 * n + 90, n % 5 + 1) for n in range(40)], []))
    assert long.words == "… → 5 → 1 → 2 → 3 → 4 → 5 slots"


@pytest.mark.parametrize(("slots", "boxes"), [(8, 8), (64, 64), (256, 2)])
def test_boxes_of_a_node(slots: int, boxes: int) -> None:
    known = history([(1, 0.0, None, 3)], [])
    pilot = Pilot(task_id="tsk_p", job_id="job_1", state="RUNNING", host="n1.site.example", slots=slots)
    (line,) = pool_drawing.nodes([pilot], known)
    assert len(line.boxes) == boxes and line.host == "n1"
    assert line.words == f"1, t1: 3 slots; {slots - 3} slots free"
    (moving,) = pool_drawing.nodes([pilot], replace(known, stays=(replace(known.stays[0], is_moving=True),)))
    assert moving.boxes[0].look == "t0 moving" and "3 slots, moving" in moving.words
    (other,) = pool_drawing.nodes([replace(pilot, job_id="job_2", host="10.1.2.3")], known)
    assert {box.look for box in other.boxes} == {"free"} and other.host == "10.1.2.3"


def test_axes() -> None:
    known = history([], [])
    assert [(tick.at, tick.words) for tick in pool_drawing.ticks(known)] == [
        (100.0, "now"), (70.0, "−30 min"), (40.0, "−1 h"), (10.0, "−90 min"),
    ]  # fmt: skip
    assert [tick.words for tick in pool_drawing.levels(10)] == ["0", "5", "10"]
    assert [tick.words for tick in pool_drawing.levels(1)] == ["0", "1"]
    for span in (0.0, 1.0, 86_400.0 * 7, 86_400.0 * 400):
        assert 1 <= len(pool_drawing.ticks(replace(known, since=SPAN - span))) <= 250


TASK = PoolTask(
    task_id="tsk_1", name="t", owner="me", state="RUNNING", slots=2, least=1, most=8, goodput=10.0, alone=10.0,
    step=50, until=100, submitted_at=0.0, predicted_end_at=100.0,
)  # fmt: skip


def test_fairness_of_a_task_that_runs() -> None:
    """As fast as on its equal share, from its submission to its end: 1. Twice as fast: the rest takes half the time."""
    assert pool_history.fairness(TASK, 50.0) == pytest.approx(1.0)
    waited = replace(TASK, submitted_at=-100.0)
    assert pool_history.fairness(waited, 50.0) == pytest.approx(2.0)
    fast = replace(TASK, goodput=20.0, predicted_end_at=75.0)
    assert pool_history.fairness(fast, 50.0) == pytest.approx(0.75)
    for unknown in ({"goodput": None}, {"alone": 0.0}, {"until": None}, {"step": 100}, {"predicted_end_at": None}):
        assert pool_history.fairness(replace(TASK, **unknown), 50.0) is None, unknown


def test_words() -> None:
    assert pool_words.progress(TASK) == "50 of 100 steps (50%)" and pool_words.bounds(TASK) == "1..8"
    assert pool_words.of_task(TASK) == "2 slots, of 1..8"
    assert pool_words.of_task(replace(TASK, slots=8, nodes=2)) == "8 slots on 2 nodes, of 1..8"
    assert "one number" in pool_words.resizing(replace(TASK, least=2, most=2))
    assert "measures itself" in pool_words.resizing(TASK) and "saves" in pool_words.resizing(replace(TASK, moving=True))
    assert pool_words.resizing(replace(TASK, resizable=True)) == "can be resized"
    decision = PoolDecision(at=0.0, task_id="", task_name="t", slots=4, before=0, reason="")
    said = [pool_words.change(replace(decision, before=before)) for before in (0, 1, 4)]
    assert said == ["gets 4 slots", "1 → 4 slots", "goes on with 4 slots"]
    assert pool_words.change(replace(decision, slots=0, before=1)) == "makes room: 1 slot freed"
    spec = PoolSpec(name="p", endpoint="e", accelerators="A100:4", cpus="8", memory="16")
    assert pool_words.of_node(spec) == "4 A100 a node; 8 cores and 16 GiB each"
    assert pool_words.of_node(PoolSpec(name="p", endpoint="e", slots=1)) == "1 slot a node; 1 core each"
