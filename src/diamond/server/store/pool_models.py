"""The tables of pools. What a pool's pilots and tasks are doing is in the tables of tasks and jobs."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from diamond.server.store.models import Base


class PoolRow(Base):
    """Nodes that pilots hold. Its name is its owner's own, among pools that are not closed."""

    __tablename__ = "pools"
    __table_args__ = (sa.Index(None, "owner_id", "name"), sa.Index(None, "project_id"))
    id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    project_id: Mapped[str | None]  # whose members may run tasks in it; None: its owner alone
    endpoint_id: Mapped[str] = mapped_column(sa.ForeignKey("endpoints.id"))
    name: Mapped[str]
    spec: Mapped[dict[str, Any]]
    created_at: Mapped[float]
    closed_at: Mapped[float | None]
    # What was decided last, as services.pool_rounds keeps it, and what past tasks teach (planner.pools.profiles).
    plan: Mapped[dict[str, Any]] = mapped_column(default=dict)
    profiles: Mapped[dict[str, Any] | None] = mapped_column(deferred=True)


class PoolDecisionRow(Base):
    """A task of a pool was given another number of slots."""

    __tablename__ = "pool_decisions"
    __table_args__ = (sa.Index(None, "pool_id", "id"), sa.Index(None, "task_id"))
    id: Mapped[str] = mapped_column(primary_key=True)
    pool_id: Mapped[str] = mapped_column(sa.ForeignKey("pools.id"))
    task_id: Mapped[str]
    at: Mapped[float]
    slots: Mapped[int]
    before: Mapped[int]
    reason: Mapped[str]
    goodput: Mapped[float | None]
