"""Tokens of agents expire. Those there are get the default time, in which a live agent takes a new one."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_DEFAULT_S = 30 * 86_400.0


def upgrade() -> None:
    expire = sa.text(
        "UPDATE tokens SET expires_at = :at WHERE endpoint_id IS NOT NULL AND revoked_at IS NULL AND expires_at IS NULL"
    )
    op.get_bind().execute(expire, {"at": time.time() + _DEFAULT_S})
