"""An endpoint remembers which agent home speaks for it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("endpoints", sa.Column("instance", sa.Text(), nullable=True))
