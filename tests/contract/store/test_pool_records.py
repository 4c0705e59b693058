"""Records of pools: who may have one, what is in it, and that the simulator replays what the server really did."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diamond.core.codec import encode
from diamond.core.errors import Forbidden, NotFound
from diamond.core.pool_records import PoolRecord, TaskRecord, WindowRecord
from diamond.core.pools import PoolSpec
from diamond.core.tasks import TaskSpec
from diamond.planner.pools.pace import ENDING_S
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.profiles import Profiles
from diamond.planner.pools.simulation import recorded, replayed
from diamond.planner.pools.simulation.replaying import replay
from diamond.planner.pools.trained import Window, measurements
from diamond.server.services import endpoint_shares, pool_demands, pool_records, projects
from diamond.server.services.context import Context
from testing.context import Clock
from tests.contract.store.pool_run import BATCH, QUEUE_S, RESTART_S, STOP_S, Run, Training, workload

AGREES = 0.15


def recorded_run(ctx: Context, user_id: str, clock: Clock, trainings: list[Training], **more: Any) -> PoolRecord:
    Run(ctx, user_id, clock, trainings, **more).run()
    found = pool_records.record(ctx, user_id, "p")
    again = PoolRecord.parse(json.loads(json.dumps(encode(found), allow_nan=False)))
    assert again == found, "a file of it holds all of it"
    return found


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
def test_the_simulator_predicts_what_the_server_does(ctx: Context, user_id: str, clock: Clock) -> None:
    """Twelve trainings on eight slots, a node lost on the way: both go through the same looks and decisions."""
    trainings = workload(seed=3)
    record = recorded_run(ctx, user_id, clock, trainings, seed=3, lose=(300.0,))
    assert [task.state for task in record.tasks] == ["SUCCEEDED"] * 12
    assert sum(len(task.jobs) for task in record.tasks) > 24, "tasks were moved"
    assert [node.reason for node in record.nodes].count("NODE_FAIL") == 1
    jobs = [job for task in record.tasks for job in task.jobs]
    assert all((job.stop_asked_at is not None) is (job.reason == "CONTINUED") for job in jobs)
    found = replay(record, Goodput())
    assert len(found.tasks) == 12 and found.left_out == 0
    truly = sum(one.ended_at - clock_zero(trainings, record) - one.at for one in trainings if one.ended_at) / 12
    assert found.recorded_mean_s == pytest.approx(truly, rel=0.01)
    assert abs(found.ratio - 1.0) <= AGREES, found.to_json()
    assert abs(found.predicted_utilisation - found.recorded_utilisation) <= AGREES


def clock_zero(trainings: list[Training], record: PoolRecord) -> float:
    """The moment that the record counts from, by the clock of the run."""
    return float(trainings[0].ended_at or 0.0) - float(record.tasks[0].ended_at or 0.0)


def test_a_record_holds_what_was_true(ctx: Context, user_id: str, clock: Clock) -> None:
    secret = "python secret_program.py --password hunter2"
    training = Training(
        0.0, 600, 0.5, 0.01, {"run": secret, "name": "my name", "resources": {"accelerators": "A100:1..4"}}
    )
    record = recorded_run(ctx, user_id, clock, [training])
    (task,) = record.tasks
    assert (record.slot_kind, record.slots_per_node, record.most_nodes, len(record.nodes)) == ("A100", 2, 4, 4)
    assert (task.least, task.most, task.is_free, task.can_move, task.sizes) == (1, 4, False, True, "even")
    assert (task.submitted_at, task.total_samples, task.global_batch) == (0.0, 600 * BATCH, BATCH)
    assert task.restart_s is not None
    assert RESTART_S - 1 <= task.restart_s <= QUEUE_S + RESTART_S + ENDING_S + 5, "with all a move takes"
    assert {(one.nodes, one.slots) for one in task.windows} == {(job.nodes, job.slots) for job in task.jobs}
    text = json.dumps(encode(record))
    assert not [word for word in ("secret", "hunter", "my name", user_id, "tsk_", "job_", "usr_") if word in text]
    (truth,) = recorded.truths(record)
    assert truth.rate(1, 2) == pytest.approx(BATCH / training.step_s(1, 2), rel=0.1)
    costs = truth.costs
    assert (costs.queued_s, costs.starting_s) == (QUEUE_S, pytest.approx(RESTART_S, rel=0.1))
    assert len(task.jobs) == 1 or costs.stopping_s == pytest.approx(STOP_S, abs=1.0)
    assert costs.ending_s == pytest.approx(0.0, abs=1.0)


def test_only_who_runs_the_pool_may_have_it(ctx: Context, user_id: str, other_id: str, clock: Clock) -> None:
    from diamond.server.services import pools

    Run(ctx, user_id, clock, []).run()
    with pytest.raises(NotFound):
        pool_records.record(ctx, other_id, "p")
    projects.create(ctx, user_id, "lab")
    projects.set_member(ctx, user_id, "lab", "other", "member")
    spec = pools.get(ctx, user_id, "p").spec
    endpoint_shares.share(ctx, user_id, "lab", spec.endpoint)
    pools.create(ctx, user_id, {"name": "q", "endpoint": spec.endpoint, "accelerators": "A100:2", "project": "lab"})
    with pytest.raises(Forbidden, match="another's"):
        pool_records.record(ctx, other_id, "q")
    projects.set_member(ctx, user_id, "lab", "other", "owner")
    assert pool_records.record(ctx, other_id, "q").tasks == ()


def test_what_a_program_says_cannot_spoil_the_record(ctx: Context, user_id: str, clock: Clock) -> None:
    """Its clock may be anywhere, its numbers anything: the record is read again, and replayed."""
    run = Liar(ctx, user_id, clock, [Training(0.0, 300, 0.5, 0.01, {"run": "x"})])
    run.run()
    record = PoolRecord.parse(json.loads(json.dumps(encode(pool_records.record(ctx, user_id, "p")), allow_nan=False)))
    assert record.tasks[0].jobs[0].first_at is None
    found = replay(record, Goodput())
    assert len(found.tasks) == 1 and found.predicted_mean_s > 0


class Liar(Run):
    def measured(self, training: Training, nodes: int, slots: int, step_s: float) -> dict[str, Any]:
        return super().measured(training, nodes, slots, step_s) | {"t": 9e9, "until": 2**53, "global_batch": 2**53}


@pytest.mark.parametrize("tried", [(), (1,), (2, 4)])
@pytest.mark.parametrize("has_prior", [False, True])
@pytest.mark.parametrize("asked", [None, "1..8", "2..3", "2", "1..64"])
def test_a_replay_gives_a_task_the_bounds_it_had(asked: str | None, has_prior: bool, tried: tuple[int, ...]) -> None:
    pool = PoolSpec.parse({"name": "p", "endpoint": "e", "nodes": "1..4", "accelerators": "A100:2"})
    spec = TaskSpec.parse(
        {"run": "x", "pool": "p", **({"resources": {"accelerators": f"A100:{asked}"}} if asked else {})}
    )
    windows = tuple(Window(-(-slots // 2), slots, 64, 1.0) for slots in tried)
    past = Profiles()
    past.learn(["k"], measurements("A100", [Window(1, 1, 64, 1.0)]), total_work=1000.0)
    prior = past.similar(["k"]) if has_prior else None
    expected = pool_demands.bounds(pool, spec, pool_demands.Known(windows=windows), prior)
    low, high = pool_demands.bounds(pool, spec, pool_demands.Known(), None)
    task = TaskRecord(
        id=1, least=low, most=8 if asked is None else high, is_free=asked is None, submitted_at=0.0,
        windows=(WindowRecord(nodes=1, slots=1, global_batch=64, step_s=1.0),),
    )  # fmt: skip
    truth = recorded.Truth(task, True, 1.0, 64, recorded.Costs(), 0.0, "A100")
    task_there = replayed.Replayed(truth, windows={(one.nodes, one.slots): one for one in windows})
    assert replayed.bounds(task_there, prior, 2, 8) == expected
