"""Codes that agents enrol with; endpoints can be asked for a new token, and removed."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "enrolments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("code_hash", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("token_hash", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoints.id"], name=op.f("fk_enrolments_endpoint_id_endpoints")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_enrolments")),
        sa.UniqueConstraint("code_hash", name=op.f("uq_enrolments_code_hash")),
    )
    op.create_index(op.f("ix_enrolments_endpoint_id"), "enrolments", ["endpoint_id"], unique=False)
    op.create_index(op.f("ix_tokens_endpoint_id"), "tokens", ["endpoint_id"], unique=False)
    op.add_column("endpoints", sa.Column("rotate_at", sa.Double(), nullable=True))
    op.add_column("endpoints", sa.Column("removed_at", sa.Double(), nullable=True))
