"""Pools, and where in one a job runs."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "pools",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=True),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("closed_at", sa.Double(), nullable=True),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("profiles", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_pools_owner_id_users")),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoints.id"], name=op.f("fk_pools_endpoint_id_endpoints")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pools")),
    )
    op.create_index(op.f("ix_pools_owner_id_name"), "pools", ["owner_id", "name"], unique=False)
    op.create_index(op.f("ix_pools_project_id"), "pools", ["project_id"], unique=False)
    op.create_table(
        "pool_decisions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("pool_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("before", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("goodput", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["pool_id"], ["pools.id"], name=op.f("fk_pool_decisions_pool_id_pools")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pool_decisions")),
    )
    op.create_index(op.f("ix_pool_decisions_pool_id_id"), "pool_decisions", ["pool_id", "id"], unique=False)
    op.create_index(op.f("ix_pool_decisions_task_id"), "pool_decisions", ["task_id"], unique=False)
    op.add_column("tasks", sa.Column("pool_id", sa.Text(), nullable=True))
    op.create_index(op.f("ix_tasks_pool_id_state"), "tasks", ["pool_id", "state"], unique=False)
    op.add_column("jobs", sa.Column("place", sa.JSON(), nullable=True))
