"""What a user's tasks are counted by, and the newest of a state, without reading the tasks."""

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_index(
        op.f("ix_tasks_owner_id_kind_state_ended_at"), "tasks", ["owner_id", "kind", "state", "ended_at"], unique=False
    )
