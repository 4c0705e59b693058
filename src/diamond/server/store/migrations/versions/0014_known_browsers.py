"""Browsers that an account has signed in with, and the network a login was begun from."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "known_browsers",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_known_browsers_user_id_users")),
        sa.PrimaryKeyConstraint("user_id", "hash", name=op.f("pk_known_browsers")),
    )
    op.add_column("logins", sa.Column("network", sa.Text(), nullable=False, server_default=""))
