"""Jobs know their partition, what they continue and when they are expected to start; tasks count real failures."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    for name in ("partition", "gpu_type", "pending_reason"):
        op.add_column("jobs", sa.Column(name, sa.Text(), nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("chained", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("continues", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("after", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("expected_start_at", sa.Double(), nullable=True))
    op.add_column("tasks", sa.Column("expected_start_at", sa.Double(), nullable=True))
    op.add_column("tasks", sa.Column("failures", sa.Integer(), nullable=False, server_default="0"))
    # Until now every attempt but the newest had failed.
    op.execute("UPDATE tasks SET failures = attempt - 1 WHERE attempt > 1")
