"""A task's batch and technique in words, and who chooses its batch."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.core.fields import GLOBAL_BATCH
from diamond.core.pools import PoolNode, PoolPlace, PoolTask
from diamond.core.tasks import TaskSpec
from diamond.core.training import Measure
from diamond.planner.pools.snapshot import Demand, Shape, Work
from diamond.planner.pools.speeds import Linear
from diamond.planner.pools.trained import AtBestBatch, Window, speed
from diamond.server.services import pool_batches
from diamond.server.services.pool_placing import spec_there
from diamond.server.web import pool_words

SAID: dict[str, Any] = {
    "grows": True, "first_batch": 128, "per_rank": 64, "global_batch": 512, "until_samples": 10**6, "samples": 250_000,
    "noise_scale": 2100.0, "parallel": "fsdp", "parallel_why": "too large for a rank",
}  # fmt: skip
SPEC = TaskSpec(run="true")


def place(batch: int | None = None) -> PoolPlace:
    return PoolPlace(pool_id="pol_1", nodes=(PoolNode(pilot="job_1", slots=2),), global_batch=batch)


def told(spec: TaskSpec = SPEC, wish: int | None = None, *, is_news: bool = True, **said: Any) -> PoolTask:
    latest = Measure(t=1.0, step=9, **{**SAID, **said})
    found = pool_batches.fields(spec, latest, latest.noise_scale, place(wish), is_news=is_news)
    return PoolTask(task_id="tsk_1", name="n", owner="o", state="RUNNING", step=9, **found)


@pytest.mark.parametrize(
    ("wish", "said", "words"),
    [
        (512, {}, "batch 512 (first 128): gradients are noisy enough for it (noise scale 2,100)"),
        (
            512,
            {"max_batch": 512},
            "batch 512 (first 128): gradients are noisy enough for it, and it is the most it may have "
            "(noise scale 2,100)",
        ),
        (
            128,
            {"global_batch": 128, "noise_scale": 90.0},
            "batch 128, its first: gradients are not noisy enough for a larger one (noise scale 90)",
        ),
        (
            128,
            {"global_batch": 128},
            "batch 128, its first: a larger one would not be faster there (noise scale 2,100)",
        ),
        (
            None,
            {},
            "batch 512: it follows the ranks; Diamond chooses when it next moves (noise scale 2,100)",
        ),
        (None, {"noise_scale": None}, "batch 512: it follows the ranks until the noise of its gradients is measured"),
        (None, {"max_batch": 64}, "batch 512: its max_batch is below the batch it began with"),
        (
            None,
            {"until_samples": None},
            "batch 512: it follows the ranks; its end is counted in steps, which a larger one makes later",
        ),
        (None, {"grows": False}, 'batch 512: it stays as it began (batch= names it, batch="grow" lets Diamond choose)'),
        (None, {"grows": None}, "batch 512: as its program has it"),
        (None, {"global_batch": None}, ""),
    ],
)
def test_a_batch_in_words(wish: int | None, said: dict[str, Any], words: str) -> None:
    found = told(wish=wish, **said)
    assert found.batch_reason == words
    assert found.batch_chosen is (wish is not None)
    assert found.parallel_reason == "fsdp, the model in shards over all ranks (too large for a rank)"


def test_the_users_own_batch_wins() -> None:
    spec = TaskSpec(run="true", envs={GLOBAL_BATCH: "300", "A": "b"})
    assert told(spec).batch_reason == f"batch 512: {GLOBAL_BATCH} in its envs says so"
    assert pool_batches.growth_of(spec, Measure(t=1.0, step=9, **SAID), 2100.0, None) is None
    assert spec_there(spec, place(999)).envs == {GLOBAL_BATCH: "300", "A": "b"}
    assert spec_there(SPEC, place(999)).envs == {GLOBAL_BATCH: "999"}
    assert spec_there(SPEC, place()).envs == {}


def test_a_job_that_has_said_nothing_yet_has_the_batch_it_was_given() -> None:
    assert told(wish=1024, is_news=False).batch == 1024
    assert told(wish=1024).batch == 512, "it may have made less of it"
    assert pool_batches.fields(SPEC, None, None, None, is_news=False) == {}


def test_progress_is_told_in_samples_where_the_end_is() -> None:
    assert pool_words.progress(told()) == "250,000 of 1,000,000 samples (25%)"
    assert pool_words.progress(told(until_samples=None)) == "step 9"


def test_what_is_wished_and_left() -> None:
    shape = Shape("cpu", 1, 2)
    growth = pool_batches.growth_of(SPEC, Measure(t=1.0, step=9, **SAID), 2100.0, None)
    found = speed("cpu", [Window(1, 1, 512, 8.0, 64, 0.0)], None, None, growth)
    assert isinstance(found, AtBestBatch)
    asks = Demand(id="t", submitted_at=0.0, speed=found, left=Work(1000.0, 1000.0, 1000.0))
    batch = pool_batches.wished(asks, shape)
    assert batch is not None and batch >= 128 and pool_batches.why(asks, batch).startswith(f"batch {batch:,}")
    assert pool_batches.left_there(asks, shape) == pytest.approx(
        1000.0 * found.efficiency(batch) / found.efficiency(512)
    )
    assert pool_batches.left_there(asks, None) == 1000.0
    other = Demand(id="t", submitted_at=0.0, speed=Linear(), left=Work(7.0, 7.0, 7.0))
    assert (pool_batches.wished(other, shape), pool_batches.why(other, None)) == (None, "")
    assert (pool_batches.wished(None, shape), pool_batches.left_there(other, shape)) == (None, 7.0)
