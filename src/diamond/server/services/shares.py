"""Fair shares between users in the service's own queue: what everybody has had, and so whose task is placed next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.quotas import DAY_S, day_of
from diamond.core.resources import Resources
from diamond.planner import shares
from diamond.planner.shares import Turns, Waiting
from diamond.server.services import usage
from diamond.server.store.identity_models import UsageRow
from diamond.server.store.models import JobRow, TaskRow

_AT_ONCE = 500


def in_turn(session: Session, waiting: Sequence[Waiting], now: float) -> tuple[list[Waiting], Turns]:
    """The tasks in the order in which they may be placed, and who keeps count while they are."""
    users = {one.user for one in waiting}
    if len(users) < 2:  # nobody to share with
        return shares.arrange(waiting), Turns()
    costs = _costs(session, [one.id for one in waiting])
    priced = [replace(one, cost=costs.get(one.id, one.cost)) for one in waiting]
    had = standings(session, users, now)
    return shares.arrange(priced, had), Turns(had)


def _costs(session: Session, task_ids: Sequence[str]) -> dict[str, float]:
    """What each task will be charged for, from its spec."""
    needs = sa.select(
        TaskRow.id, TaskRow.spec["num_nodes"].as_integer(), TaskRow.spec[("resources", "accelerators")].as_string()
    )
    found: dict[str, float] = {}
    for start in range(0, len(task_ids), _AT_ONCE):
        for task_id, nodes, gpus in session.execute(needs.where(TaskRow.id.in_(task_ids[start : start + _AT_ONCE]))):
            number = nodes or 1
            found[task_id] = shares.price(number, number * Resources(accelerators=gpus).gpus)
    return found


def standings(session: Session, user_ids: Iterable[str], now: float) -> dict[str, float]:
    """What each of these users has had by now, as `planner.shares` weighs it."""
    wanted = sorted(set(user_ids))
    had: defaultdict[str, float] = defaultdict(float)
    days = (
        sa.select(UsageRow.user_id, UsageRow.day, sa.func.sum(UsageRow.node_seconds), sa.func.sum(UsageRow.gpu_seconds))
        .where(UsageRow.user_id.in_(wanted), UsageRow.day >= day_of(now - shares.FORGOTTEN_S))
        .group_by(UsageRow.user_id, UsageRow.day)
    )
    for user_id, day, nodes, gpus in session.execute(days):
        had[user_id] += shares.faded(nodes + gpus, now - min(now, (day + 0.5) * DAY_S))
    live = (
        sa.select(
            TaskRow.owner_id, JobRow.num_nodes, JobRow.num_gpus, JobRow.state,
            JobRow.created_at, JobRow.started_at, JobRow.ended_at,
        )
        .join(TaskRow, TaskRow.id == JobRow.task_id)
        .where(JobRow.charged_at.is_(None), usage.of_live_jobs(TaskRow.owner_id).in_(wanted))
    )  # fmt: skip
    for user_id, nodes, gpus, state, created_at, started_at, ended_at in session.execute(live):
        start, end = usage.ran(created_at, started_at, ended_at, now)
        had[user_id] += shares.rate(nodes, gpus) * (end - start)
        if state not in usage.FINAL:
            had[user_id] += shares.price(nodes, gpus)
    return dict(had)
