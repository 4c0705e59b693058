"""Batches that Diamond chooses in a pool: who gets one, that it is in the job's environment, and that it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diamond.core.fields import GLOBAL_BATCH
from diamond.core.pool_records import PoolRecord
from diamond.core.pools import PoolTask
from diamond.core.reasons import Reason
from diamond.core.wire import JobOrder, Report, StreamChunk
from diamond.planner.pools.policies.goodput import Goodput
from diamond.planner.pools.simulation import recorded
from diamond.planner.pools.simulation.replaying import replay
from diamond.server.services import agents, pool_history, pool_records, pools
from diamond.server.services.context import Context
from tests.contract.store.test_pools import Site

SAMPLES = 6_400_000
PASS_S, EXCHANGE_S = 1.2, 0.2
ON_ONE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
GROWS = {
    "grows": True, "first_batch": 64, "per_rank": 64, "until_samples": SAMPLES, "noise_scale": 64_000.0,
    "parallel": "none", "parallel_why": "one rank holds all of it",
}  # fmt: skip


class Training(Site):
    """One task that says nothing, on a node of four slots."""

    def begin(self, **fields: Any) -> JobOrder:
        self.pool(nodes="1")
        self.hold()
        self.task_id = self.launch(**fields)
        self.round()
        return self.started()

    def started(self) -> JobOrder:
        order = self.order(self.task_id)
        assert order is not None
        self.run(order.job_id)
        return order

    def say(self, order: JobOrder, batch: int, samples: int, step_s: float, **more: Any) -> None:
        """A line of its training, as it is with `batch` samples a step."""
        assert order.place is not None
        line = {"t": self.clock(), "step": samples // 64, "until": 100_000, "samples": samples, "steps": 10,
                "step_s": step_s, "samples_per_s": batch / step_s, "world": order.place.slots, "nodes": 1,
                "global_batch": batch, "comm_s": 0.0 if order.place.slots == 1 else EXCHANGE_S, **more}  # fmt: skip
        raw = json.dumps(line).encode() + b"\n"
        chunk = StreamChunk.of(order.job_id, "train", self.sent.get(order.job_id, 0), raw)
        agents.report(self.ctx, self.id, Report(epoch=self.ctx.epoch, streams=(chunk,)))
        self.sent[order.job_id] = self.sent.get(order.job_id, 0) + len(raw)

    def moved(self, order: JobOrder) -> JobOrder:
        """It was measured, so it is asked to grow, and does."""
        self.clock.advance(300)
        self.round()
        self.end(order.job_id, Reason.CONTINUED)
        self.round()
        larger = self.started()
        assert larger.job_id != order.job_id and larger.place is not None and larger.place.slots > 1
        return larger

    @property
    def shown(self) -> PoolTask:
        return next(one for one in pools.get(self.ctx, self.user_id, "p").tasks if one.task_id == self.task_id)


@pytest.fixture
def site(ctx: Context, user_id: str, clock: Any) -> Training:
    return Training(ctx, user_id, clock)


def test_a_batch_is_chosen_with_the_slots(site: Training) -> None:
    order = site.begin()
    assert GLOBAL_BATCH not in order.spec.envs, "nothing is known of it"
    site.say(order, 64, 6400, 1.2, **GROWS)
    assert "Diamond chooses when it next moves (noise scale 64,000)" in site.shown.batch_reason
    larger = site.moved(order)
    assert larger.place is not None
    chosen = larger.place.global_batch
    assert chosen is not None and 64 * larger.place.slots < chosen <= 32 * 64
    assert larger.spec.envs == {GLOBAL_BATCH: str(chosen)}
    words = f"batch {chosen:,} (first 64): gradients are noisy enough for it (noise scale 64,000)"
    told = (site.shown.batch, site.shown.batch_chosen, site.shown.first_batch, site.shown.batch_reason)
    assert told == (chosen, True, 64, words), "also before the job has said anything itself"
    assert pools.get(site.ctx, site.user_id, "p").decisions[0].reason.endswith(f"; {words}")
    assert site.shown.parallel == "none" and site.shown.parallel_reason.endswith("(one rank holds all of it)")
    later = GROWS | {"parallel": "ddp", "parallel_why": "fits on each rank"}
    site.say(larger, chosen, 640_000, 1.4, **later)
    assert (site.shown.batch, site.shown.samples, site.shown.until_samples) == (chosen, 640_000, SAMPLES)
    assert site.shown.parallel_reason == "ddp, a copy of the model on each rank (fits on each rank)"


@ON_ONE
def test_the_end_is_predicted_at_the_batch_it_has(site: Training) -> None:
    order, samples = site.begin(), 6400
    site.say(order, 64, samples, PASS_S, **GROWS)
    while order.place is not None and order.place.slots < 4:
        order = site.moved(order)
        assert order.place is not None and order.place.global_batch is not None
        batch, samples = order.place.global_batch, samples + 64_000
        step_s = batch / order.place.slots / 64 * PASS_S + EXCHANGE_S
        site.say(order, batch, samples, step_s, **GROWS)
    site.clock.advance(60)
    site.round()
    with site.ctx.db.read() as session:
        decided_at = float(pools.find(session, site.user_id, "p").plan["at"])
    assert site.shown.slots == 4 and site.shown.predicted_end_at is not None and site.shown.goodput is not None
    assert site.shown.predicted_end_at - decided_at == pytest.approx((SAMPLES - samples) / batch * step_s, rel=0.1)
    assert site.shown.goodput < batch / step_s, "samples of a large batch are worth less"
    fair = pool_history.fairness(site.shown, decided_at)
    assert fair is not None and 0.0 < fair < 10.0


@ON_ONE
@pytest.mark.parametrize(("envs", "said"), [({GLOBAL_BATCH: "512"}, {}), ({}, {"until_samples": None})])
def test_who_chooses_for_themselves(site: Training, envs: dict[str, str], said: dict[str, Any]) -> None:
    order = site.begin(envs=envs)
    site.say(order, 64, 6400, 1.2, **(GROWS | said))
    larger = site.moved(order)
    assert larger.place is not None and larger.place.global_batch is None
    assert larger.spec.envs == envs
    assert not site.shown.batch_chosen and site.shown.batch_reason


@ON_ONE
def test_gradients_without_noise_keep_the_first_batch(site: Training) -> None:
    order = site.begin()
    site.say(order, 64, 6400, 1.2, **(GROWS | {"noise_scale": 3.0}))
    larger = site.moved(order)
    assert larger.spec.envs == {GLOBAL_BATCH: "64"}, "not one for each rank"
    assert site.shown.batch_reason == (
        "batch 64, its first: gradients are not noisy enough for a larger one (noise scale 3)"
    )


@ON_ONE
def test_what_is_hidden_for_a_while_is_remembered(site: Training) -> None:
    """Noise may hide the gradient altogether; the batch does not fall back for that."""
    order = site.begin()
    site.say(order, 64, 6400, 1.2, **GROWS)
    larger = site.moved(order)
    assert larger.place is not None and larger.place.global_batch is not None
    site.say(larger, larger.place.global_batch, 64_000, 1.4, **(GROWS | {"noise_scale": None}))
    site.end(larger.job_id, Reason.NODE_FAIL)
    site.round()
    again = site.started()
    assert again.place is not None and (again.place.global_batch or 0) > 64
    assert site.shown.noise_scale == 64_000.0


@ON_ONE
@pytest.mark.parametrize("scale", [None, 1e11], ids=["none", "chance"])
def test_the_least_that_the_noise_can_be_is_enough_to_choose(site: Training, scale: float | None) -> None:
    order = site.begin()
    site.say(order, 64, 6400, 1.2, **(GROWS | {"noise_scale": scale, "noise_scale_least": 640.0}))
    larger = site.moved(order)
    assert larger.place is not None and 64 < (larger.place.global_batch or 0) <= 8 * 640
    assert site.shown.noise_scale == 640.0 and "noise scale 640" in site.shown.batch_reason


@ON_ONE
def test_a_record_of_it_is_replayed(site: Training) -> None:
    """Each size with the batch it had there; samples are counted, not steps."""
    order = site.begin()
    site.say(order, 64, 6400, 1.2, **GROWS)
    larger = site.moved(order)
    assert larger.place is not None and larger.place.global_batch is not None
    batch, slots = larger.place.global_batch, larger.place.slots
    for samples in (64_000, 128_000):
        site.clock.advance(100)
        site.say(larger, batch, samples, 1.6, **GROWS)
    site.clock.advance(100)
    site.say(larger, batch, SAMPLES, 1.6, **GROWS)
    site.end(larger.job_id, Reason.COMPLETED)
    site.round()
    found: PoolRecord = pool_records.record(site.ctx, site.user_id, "p")
    (task,) = found.tasks
    assert task.total_samples == SAMPLES and task.jobs[-1].last_samples == SAMPLES
    assert task.jobs[-1].first_samples == 64_000 - 10 * batch
    assert {(one.slots, one.global_batch) for one in task.windows} == {(1, 64), (slots, batch)}
    (truth,) = recorded.truths(found)
    assert truth.batches == {(1, 1): 64, (1, slots): batch}
    assert truth.rate(1, 1) == pytest.approx(64 / 1.2)
    assert len(replay(found, Goodput()).tasks) == 1
