"""Recorded pools: times that are worked out by hand, nodes that come and go, tasks that say nothing, odd records."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diamond.core.errors import InvalidInput
from diamond.core.pool_records import JobRecord, NodeRecord, PoolRecord, TaskRecord, WindowRecord
from diamond.planner.pools.policies import POLICIES, named
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.simulation.recorded import node_times, truths
from diamond.planner.pools.simulation.replayed import Phase, Replayed
from diamond.planner.pools.simulation.replaying import Agreement, replay

BATCH = 64
STEPS = 400


def task(number: int = 1, *, at: float = 0.0, slots: int = 2, step_s: float = 0.5, **more: Any) -> TaskRecord:
    """Given its slots at once, runs a second later, trains ten seconds after that, ends three after its last step."""
    trained_s = STEPS * step_s
    job = JobRecord(
        asked_at=at, started_at=at + 1.0, ended_at=at + 14.0 + trained_s, slots=slots, nodes=1, first_at=at + 11.0,
        first_samples=0.0, told_at=at + 16.0, last_at=at + 11.0 + trained_s / 2, last_samples=BATCH * STEPS / 2,
        reason="COMPLETED",
    )  # fmt: skip
    made = TaskRecord(
        id=number, least=slots, most=slots, sizes="one", submitted_at=at, ended_at=at + 14.0 + trained_s,
        state="SUCCEEDED", total_samples=float(BATCH * STEPS), global_batch=BATCH, like=(number,), restart_s=10.0,
        windows=(WindowRecord(nodes=1, slots=slots, global_batch=BATCH, step_s=step_s),), jobs=(job,),
    )  # fmt: skip
    return replace(made, **more)


def pool(*tasks: TaskRecord, nodes: tuple[NodeRecord, ...] = (), **more: Any) -> PoolRecord:
    last = max((one.ended_at or 0.0 for one in tasks), default=0.0)
    made = PoolRecord(
        slots_per_node=2,
        most_nodes=4,
        recorded_at=last,
        tasks=tasks,
        nodes=nodes or (NodeRecord(began_at=0.0, slots=2),),
    )
    return replace(made, **more)


def test_a_task_alone_takes_just_as_long_again() -> None:
    found = replay(pool(task()), Goodput())
    assert found.tasks[0].predicted_s == pytest.approx(214.0)
    assert (found.recorded_mean_s, found.ratio) == (214.0, pytest.approx(1.0))
    assert found.predicted_utilisation == pytest.approx(213.0 / 214.0)
    assert found.recorded_utilisation == pytest.approx(213.0 / 214.0)


def test_one_after_the_other_where_both_do_not_fit() -> None:
    found = replay(pool(task(1), task(2, at=20.0)), Goodput())
    first, second = found.outcome.tasks
    assert first.ended_at == pytest.approx(214.0)
    assert second.started_at == pytest.approx(first.ended_at + 1.0)
    assert found.tasks[1].predicted_s == pytest.approx(214.0 - 20.0 + 214.0)


def test_speeds_are_those_of_jobs_rather_than_of_the_last_window() -> None:
    made = task()
    odd = replace(made, windows=(replace(made.windows[0], step_s=5.0),))
    (truth,) = truths(pool(odd))
    assert truth.rate(1, 2) == pytest.approx(BATCH / 0.5)


def test_sizes_it_never_had_are_filled_in_with_tasks_like_it() -> None:
    """One that ran on one slot alone, beside one of the same code that was measured on four as well."""
    small = task(1, slots=1, step_s=1.0, least=1, most=4, sizes="even", like=(7,))
    known = (WindowRecord(nodes=1, slots=1, global_batch=BATCH, step_s=1.0),)
    hindered = (*known, WindowRecord(nodes=2, slots=4, global_batch=BATCH, step_s=0.9))
    rates = []
    for windows in (known, hindered):
        other = task(2, slots=1, step_s=1.0, least=1, most=4, sizes="even", like=(7,), windows=windows)
        rates.append(truths(pool(small, other))[0].rate(2, 4))
    assert rates[1] == pytest.approx(BATCH / 0.9, rel=0.2)
    assert rates[0] > 1.2 * rates[1]


def test_a_task_that_says_nothing_of_itself_lasts_as_long_as_it_did() -> None:
    silent = replace(task(), windows=(), total_samples=None, restart_s=None)
    (job,) = silent.jobs
    silent = replace(silent, jobs=(replace(job, first_at=None, first_samples=None, last_at=None, told_at=None),))
    assert replay(pool(silent), Goodput()).tasks[0].predicted_s == pytest.approx(214.0)


def test_a_lost_node_takes_the_task_back_to_its_last_checkpoint() -> None:
    nodes = (
        NodeRecord(began_at=0.0, ended_at=111.0, slots=2, reason="NODE_FAIL"),
        NodeRecord(began_at=120.0, slots=2),
    )
    made = task(saves_s=40.0, ended_at=400.0)
    (one,) = replay(pool(made, nodes=nodes), Goodput()).outcome.tasks
    # 100 s of training by then, of which 20 are lost; it begins again a second after the next node came.
    assert one.ended_at == pytest.approx(120.0 + 1.0 + 10.0 + 120.0 + 3.0)
    assert one.restarts == 1


@pytest.mark.parametrize("told", [True, False])
def test_on_a_node_that_was_gone_before_anybody_noticed_nothing_came_forward(told: bool) -> None:
    """Its job told of itself until 61 s, or never, after it began at 1 s; the scheduler noticed at 111 s."""
    nodes = (
        NodeRecord(began_at=0.0, ended_at=111.0, slots=2, reason="NODE_FAIL"),
        NodeRecord(began_at=120.0, slots=2),
    )
    whole = task(at=120.0)
    heard = {"first_at": 11.0, "first_samples": 0.0, "told_at": 16.0, "last_at": 61.0, "last_samples": 100.0 * BATCH}
    lost = JobRecord(
        asked_at=0.0, started_at=1.0, ended_at=112.0, slots=2, nodes=1, reason="NODE_FAIL", **(heard if told else {})
    )
    made = replace(whole, submitted_at=0.0, saves_s=40.0, jobs=(lost, *whole.jobs))
    found = replay(pool(made, nodes=nodes), Goodput())
    (one,) = found.outcome.tasks
    assert node_times(pool(made, nodes=nodes))[0].silent_at == (61.0 if told else 1.0)
    kept_s = 50.0 - 20.0 if told else 0.0
    assert one.ended_at == pytest.approx(120.0 + 214.0 - kept_s)
    assert one.restarts == 1


def test_a_lost_node_is_lost_when_the_pool_heard_of_its_jobs() -> None:
    """A scheduler dates the end of a node back to when it noticed; the pool could do nothing before it was told."""
    nodes = (
        NodeRecord(began_at=0.0, ended_at=94.0, slots=2, reason="NODE_FAIL"),
        NodeRecord(began_at=100.0, slots=2),
    )
    whole = task(at=112.0)
    lost = JobRecord(asked_at=0.0, started_at=1.0, ended_at=112.0, slots=2, nodes=1, reason="NODE_FAIL")
    made = replace(whole, submitted_at=0.0, jobs=(lost, *whole.jobs))
    found = replay(pool(made, nodes=nodes), Goodput())
    assert node_times(pool(made, nodes=nodes))[0].lost_at == 112.0
    assert found.ratio == pytest.approx(1.0, abs=0.02)


def moved(asked_at: float) -> TaskRecord:
    """On one slot from 1 s on, training from 11 s; asked to stop then, it ends at 60 s, and goes on with two slots."""
    first = JobRecord(
        asked_at=0.0, started_at=1.0, ended_at=60.0, slots=1, nodes=1, first_at=11.0, first_samples=0.0, told_at=16.0,
        last_at=51.0, last_samples=40.0 * BATCH, stop_asked_at=asked_at, reason="CONTINUED",
    )  # fmt: skip
    last = JobRecord(
        asked_at=61.0, started_at=62.0, ended_at=72.0 + 178.0 + 3.0, slots=2, nodes=1, first_at=72.0,
        first_samples=44.0 * BATCH, told_at=77.0, last_at=172.0, last_samples=244.0 * BATCH, reason="COMPLETED",
    )  # fmt: skip
    windows = tuple(
        WindowRecord(nodes=1, slots=slots, global_batch=BATCH, step_s=step_s) for slots, step_s in ((1, 1.0), (2, 0.5))
    )
    return task(least=1, most=2, sizes="even", can_move=True, ended_at=253.0, jobs=(first, last), windows=windows)


@pytest.mark.parametrize(("asked_at", "heeding_s"), [(50.0, 5.0), (5.0, 0.0)], ids=["training", "starting"])
def test_it_trains_on_until_it_has_heard_that_it_should_stop(asked_at: float, heeding_s: float) -> None:
    """What it saved was reached at 55 s, so five seconds after it was asked, and it took five more to end."""
    (truth,) = truths(pool(moved(asked_at)))
    assert (truth.costs.heeding_s, truth.costs.stopping_s) == (pytest.approx(heeding_s), pytest.approx(5.0))


def test_a_task_that_is_asked_to_stop_in_a_replay() -> None:
    """One that trains goes on until it has heard of it, one that is being started ends after that."""
    (truth,) = truths(pool(moved(50.0)))
    one = Replayed(truth)
    one.give((("n1", 1),))
    _until(one, 21.0)
    assert (one.phase, one.done) == (Phase.TRAINING, pytest.approx(10.0 * BATCH))
    one.ask_to_stop()
    assert one.is_leaving and one.until == pytest.approx(26.0)
    _until(one, 27.0)
    assert (one.phase, one.done, one.until) == (Phase.STOPPING, pytest.approx(15.0 * BATCH), pytest.approx(31.0))
    other = Replayed(truth)
    other.give((("n1", 1),))
    _until(other, 4.0)
    other.ask_to_stop()
    assert (other.phase, other.until) == (Phase.STOPPING, pytest.approx(11.0 + 5.0))
    _until(other, 17.0)
    assert (other.phase, other.done) == (Phase.WAITING, 0.0)


def test_a_task_that_is_done_before_it_hears_of_it_ends() -> None:
    (truth,) = truths(pool(moved(50.0)))
    one = Replayed(truth, done=(STEPS - 3) * float(BATCH))
    one.give((("n1", 1),))
    _until(one, 12.0)
    one.ask_to_stop()
    _until(one, 14.5)
    assert (one.phase, one.done) == (Phase.ENDING, truth.total)


def _until(one: Replayed, now: float) -> None:
    while one.until <= now:
        one.advance(one.until)
        one.step()
    one.advance(now)


def test_a_node_that_leaves_is_left_by_those_that_can_move() -> None:
    nodes = (
        NodeRecord(began_at=0.0, ended_at=200.0, slots=2, walltime_s=200.0, reason="TIME_LIMIT"),
        NodeRecord(began_at=130.0, slots=2),
    )
    made = task(can_move=True, ended_at=400.0)
    (one,) = replay(pool(made, nodes=nodes), Goodput()).outcome.tasks
    leaving_at = 200.0 - 20.0
    assert node_times(pool(made, nodes=nodes))[0].leaving_at == leaving_at
    assert one.restarts == 1
    # Nothing is lost but the way: looked at, stopped (nothing was seen of what that takes), queued, started.
    assert one.ended_at == pytest.approx(214.0 + 11.0, abs=3.0)


def test_nodes_that_were_there_at_the_end_stay() -> None:
    found = node_times(pool(task(), nodes=(NodeRecord(began_at=0.0, ended_at=300.0, slots=2, reason="CANCELLED"),)))
    assert (found[0].leaving_at, found[0].lost_at) == (math.inf, math.inf)


def test_tasks_that_never_ran_are_left_out_and_unfinished_ones_not_compared() -> None:
    waiting = replace(task(2), jobs=(), state="PENDING", ended_at=None)
    running = replace(task(3, at=5.0), state="RUNNING", ended_at=None)
    found = replay(pool(task(1), waiting, running, recorded_at=220.0), Goodput())
    assert ([one.task for one in found.tasks], found.left_out, len(found.outcome.tasks)) == ([1], 1, 1)


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (pool(), "tasks"),
        (pool(replace(task(), jobs=())), "tasks"),
        (pool(replace(task(), state="FAILED")), "tasks"),
        (replace(pool(task()), nodes=()), "nodes"),
    ],
)
def test_a_record_that_cannot_be_replayed_is_refused(record: PoolRecord, field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        replay(record, Goodput())
    assert refused.value.field == field and refused.value.hint


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_finishes_all_tasks(name: str) -> None:
    free = {"least": 1, "most": 8, "is_free": True, "can_move": True, "sizes": "even"}
    tasks = [task(number, at=30.0 * number, **(free if number % 2 else {})) for number in range(1, 7)]
    nodes = tuple(NodeRecord(began_at=float(number), slots=2) for number in range(2))
    found = replay(pool(*tasks, nodes=nodes), named(name))
    assert len(found.tasks) == 6 and found.policy == name
    assert all(one.predicted_s >= 13.0 for one in found.tasks)


ODD = st.sampled_from([0.0, 1e-9, 1.0, 1e9, 1e10])
NUMBERS = st.one_of(st.floats(0.0, 1e3), st.floats(0.0, 300.0), st.floats(0.0, 1.0), ODD)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_was_recorded_can_be_replayed(data: st.DataObject) -> None:
    """Times in any order, speeds from nothing to absurd: every task that ran ends, or the record is refused."""

    def maybe(values: st.SearchStrategy[float]) -> float | None:
        return data.draw(st.none() | values)

    tasks = []
    for number in range(1, data.draw(st.integers(1, 3)) + 1):
        jobs = tuple(
            JobRecord(
                asked_at=data.draw(NUMBERS), started_at=maybe(NUMBERS), ended_at=maybe(NUMBERS),
                slots=data.draw(st.integers(1, 4)), nodes=data.draw(st.integers(1, 2)), first_at=maybe(NUMBERS),
                first_samples=maybe(NUMBERS), last_at=maybe(NUMBERS), last_samples=maybe(NUMBERS),
                told_at=maybe(NUMBERS), reason=data.draw(st.sampled_from(["", "CONTINUED", "NODE_FAIL"])),
            )
            for _ in range(data.draw(st.integers(1, 3)))
        )  # fmt: skip
        windows = tuple(
            WindowRecord(nodes=data.draw(st.integers(1, 2)), slots=data.draw(st.integers(1, 4)),
                         global_batch=data.draw(st.integers(0, 100)), step_s=data.draw(NUMBERS))
            for _ in range(data.draw(st.integers(0, 2)))
        )  # fmt: skip
        total = maybe(st.floats(0.0, 1e6))
        tasks.append(task(number, jobs=jobs, windows=windows, total_samples=total, least=1, most=2, can_move=True))
    nodes = (NodeRecord(began_at=data.draw(st.floats(0.0, 1e4)), slots=2),)
    record = pool(*tasks, nodes=nodes)
    ran = [one for one in record.tasks if any(job.started_at is not None for job in one.jobs)]
    found = replayed(record)
    if isinstance(found, InvalidInput):
        assert found.field == "tasks" and found.hint
        return
    assert len(found.tasks) == len(ran)
    assert all(0.0 <= one.predicted_s < math.inf for one in found.tasks)


def replayed(record: PoolRecord) -> Agreement | InvalidInput:
    try:
        return replay(record, Goodput())
    except InvalidInput as error:
        return error


def test_a_loss_is_that_of_the_nearest_jobs() -> None:
    """A job of the first node, heard of last at 61 s, ends at 112 s; one of the second, at 70 s, ends at 150 s."""
    tasks = []
    for number, (last, end) in enumerate(((61.0, 112.0), (70.0, 150.0)), start=1):
        lost = JobRecord(asked_at=0.0, started_at=1.0, ended_at=end, slots=1, nodes=1, last_at=last, reason="NODE_FAIL")
        whole = task(number, at=200.0, slots=1)
        tasks.append(replace(whole, submitted_at=0.0, jobs=(lost, *whole.jobs)))
    gone = (NodeRecord(began_at=0.0, ended_at=end, slots=1, reason="NODE_FAIL") for end in (100.0, 160.0))
    found = node_times(pool(*tasks, nodes=(*gone, NodeRecord(began_at=0.0, slots=2))))
    assert [(one.lost_at, one.silent_at) for one in found[:2]] == [(112.0, 61.0), (150.0, 70.0)]


def test_a_loss_is_not_that_of_a_job_from_before_the_node() -> None:
    lost = JobRecord(asked_at=0.0, started_at=1.0, ended_at=80.0, slots=1, nodes=1, reason="NODE_FAIL")
    whole = task(at=200.0)
    young = NodeRecord(began_at=100.0, ended_at=105.0, slots=2, reason="NODE_FAIL")
    held = (young, NodeRecord(began_at=0.0, slots=2))
    made = replace(whole, submitted_at=0.0, jobs=(lost, *whole.jobs))
    assert node_times(pool(made, nodes=held))[0].lost_at == 105.0
