"""What the logs and curves of a job take at the server, and how large what somebody sent is.

Both begin at nothing: what there is already is counted by the server when it starts.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("stream_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("holdings", sa.Column("size_bytes", sa.BigInteger(), server_default="0", nullable=False))
