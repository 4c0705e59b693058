"""Which batch a task of a pool gets with its slots, and its batch and technique in words.

Diamond chooses the batch of trainings that let it (`batch="grow"`), count their end in samples and have measured how
noisy their gradients are. It goes into the job's environment; a user who sets it there, or a number in the script, has
chosen for themselves.
"""

from __future__ import annotations

from typing import Any

from diamond.core import training_words
from diamond.core.fields import GLOBAL_BATCH
from diamond.core.pools import PoolPlace
from diamond.core.tasks import TaskSpec
from diamond.core.training import Measure
from diamond.planner.pools.snapshot import Demand, Shape
from diamond.planner.pools.trained import AtBestBatch, Growth


def growth_of(spec: TaskSpec, latest: Measure | None, noise_scale: float | None, where: Shape | None) -> Growth | None:
    """What the choice rests on; None where it is not Diamond's, or cannot be made yet.

    With an end that is counted in steps, a larger batch only makes it later.
    """
    if latest is None or not latest.grows or latest.until_samples is None or GLOBAL_BATCH in spec.envs:
        return None
    if noise_scale is None or not latest.first_batch or not latest.per_rank or not latest.global_batch:
        return None
    found = Growth(latest.first_batch, latest.max_batch, latest.per_rank, noise_scale, latest.global_batch, where)
    return found if found.is_sane else None


def wished(demand: Demand | None, shape: Shape) -> int | None:
    """The batch to begin with there; None leaves it to the training."""
    return (demand.speed.best(shape) or None) if demand is not None and isinstance(demand.speed, AtBestBatch) else None


def why(demand: Demand | None, batch: int | None) -> str:
    """Of a batch that `wished` gave."""
    if demand is None or batch is None or not isinstance(demand.speed, AtBestBatch):
        return ""
    return _chosen(demand.speed.growth, batch)


def left_there(demand: Demand, shape: Shape | None) -> float | None:
    """What is left of it, so that over its goodput there it is the time it takes."""
    if demand.left is None:
        return None
    if shape is None or not isinstance(demand.speed, AtBestBatch):
        return demand.left.expected
    return demand.speed.work_on(demand.left.expected, shape)


def fields(
    spec: TaskSpec, latest: Measure | None, noise_scale: float | None, place: PoolPlace | None, *, is_news: bool
) -> dict[str, Any]:
    """What is told of a task's batch and technique, as `PoolTask` has them.

    Args:
        is_news: whether `latest` is of the job that runs, and not of one before.
    """
    if latest is None:
        return {}
    wish = place.global_batch if place is not None else None
    batch = wish if wish is not None and not is_news else latest.global_batch
    growth = growth_of(spec, latest, noise_scale, None)
    return {
        "batch": batch,
        "first_batch": latest.first_batch,
        "batch_chosen": wish is not None,
        "batch_reason": _batch(spec, latest, batch, wish, growth) if batch else "",
        "noise_scale": noise_scale,
        "parallel": latest.parallel,
        "parallel_reason": training_words.technique(latest),
        "samples": latest.samples,
        "until_samples": latest.until_samples,
    }


def _batch(spec: TaskSpec, latest: Measure, batch: int, wish: int | None, growth: Growth | None) -> str:
    if latest.grows is None:
        return f"batch {batch:,}: as its program has it"
    if not latest.grows:
        return f'batch {batch:,}: it stays as it began (batch= names it, batch="grow" lets Diamond choose)'
    if GLOBAL_BATCH in spec.envs:
        return f"batch {batch:,}: {GLOBAL_BATCH} in its envs says so"
    if latest.until_samples is None:
        return f"batch {batch:,}: it follows the ranks; its end is counted in steps, which a larger one makes later"
    if growth is None and latest.max_batch is not None and latest.max_batch < (latest.first_batch or 1):
        return f"batch {batch:,}: its max_batch is below the batch it began with"
    if growth is None:
        return f"batch {batch:,}: it follows the ranks until the noise of its gradients is measured"
    if wish is None:
        return f"batch {batch:,}: it follows the ranks; Diamond chooses when it next moves{_noise(growth)}"
    return _chosen(growth, batch)


def _chosen(growth: Growth, batch: int) -> str:
    if batch > growth.first:
        most = ", and it is the most it may have" if growth.most is not None and batch >= growth.most else ""
        return f"batch {batch:,} (first {growth.first:,}): gradients are noisy enough for it{most}{_noise(growth)}"
    if growth.noise_scale <= growth.first:
        return f"batch {batch:,}, its first: gradients are not noisy enough for a larger one{_noise(growth)}"
    return f"batch {batch:,}, its first: a larger one would not be faster there{_noise(growth)}"


def _noise(growth: Growth) -> str:
    return f" (noise scale {training_words.rate(growth.noise_scale)})"
