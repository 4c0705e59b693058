"""Shares of endpoints are approved by an owner of the project; endpoints have proved themselves.

What a project's owner shared counts as approved. What a plain member shared waits: until now nobody had been asked.
Endpoints at which tasks have succeeded are taken for what ran there.
"""

import math
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def _table(name: str, columns: str) -> sa.TableClause:
    return sa.table(name, *map(sa.column, columns.split()))


_SHARES = _table("endpoint_shares", "endpoint_id project_id created_at approved_at approved_by")
_ENDPOINTS = _table("endpoints", "id owner_id proven_at proven_cpus proven_gpus")
_MEMBERS = _table("members", "project_id user_id role")
_JOBS = _table("jobs", "task_id endpoint_id state num_nodes num_gpus ended_at created_at")
_TASKS = sa.table("tasks", sa.column("id"), sa.column("kind"), sa.column("spec", sa.JSON()))


def upgrade() -> None:
    op.add_column("endpoint_shares", sa.Column("approved_at", sa.Double(), nullable=True))
    op.add_column("endpoint_shares", sa.Column("approved_by", sa.Text(), nullable=True))
    op.add_column("endpoints", sa.Column("proven_at", sa.Double(), nullable=True))
    for name in ("proven_cpus", "proven_gpus"):
        op.add_column("endpoints", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    _approve_those_of_owners()
    _note_what_ran()


def _approve_those_of_owners() -> None:
    by_owners = (
        sa.select(_SHARES.c.endpoint_id, _SHARES.c.project_id, _ENDPOINTS.c.owner_id)
        .join(_ENDPOINTS, _ENDPOINTS.c.id == _SHARES.c.endpoint_id)
        .join(
            _MEMBERS,
            sa.and_(_MEMBERS.c.project_id == _SHARES.c.project_id, _MEMBERS.c.user_id == _ENDPOINTS.c.owner_id),
        )
        .where(_MEMBERS.c.role == "owner")
    )
    connection = op.get_bind()
    for endpoint_id, project_id, owner_id in connection.execute(by_owners).all():
        share = sa.and_(_SHARES.c.endpoint_id == endpoint_id, _SHARES.c.project_id == project_id)
        connection.execute(
            sa.update(_SHARES).where(share).values(approved_at=_SHARES.c.created_at, approved_by=owner_id)
        )


def _note_what_ran() -> None:
    cpus = _TASKS.c.spec[("resources", "cpus")].as_string()
    ran = (
        sa.select(
            _JOBS.c.endpoint_id, cpus, _JOBS.c.num_nodes, sa.func.max(_JOBS.c.num_gpus),
            sa.func.min(sa.func.coalesce(_JOBS.c.ended_at, _JOBS.c.created_at)),
        )
        .join(_TASKS, _TASKS.c.id == _JOBS.c.task_id)
        .where(_JOBS.c.state == "SUCCEEDED", _TASKS.c.kind == "command")
        .group_by(_JOBS.c.endpoint_id, cpus, _JOBS.c.num_nodes)
    )  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    connection = op.get_bind()
    for endpoint_id, written, nodes, gpus, at in connection.execute(ran).all():
        most = found.setdefault(endpoint_id, {"proven_at": at, "proven_cpus": 0, "proven_gpus": 0})
        most["proven_at"] = min(most["proven_at"], at)
        most["proven_cpus"] = max(most["proven_cpus"], _cores(written) * max(1, nodes))
        most["proven_gpus"] = max(most["proven_gpus"], gpus)
    for endpoint_id, values in found.items():
        connection.execute(sa.update(_ENDPOINTS).where(_ENDPOINTS.c.id == endpoint_id).values(**values))


def _cores(written: str | None) -> int:
    """Of `cpus` in a task's file, such as 4, 0.5 or 4+."""
    try:
        return max(1, math.ceil(float((written or "1").rstrip("+"))))
    except ValueError:
        return 1
