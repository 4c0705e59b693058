"""Who has which uploaded bytes. Owners of tasks and images have the bundles that those name; all else is proved anew,
by sending it once more."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_BATCH = 500


def upgrade() -> None:
    op.create_table(
        "holdings",
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("holder", "ref", name=op.f("pk_holdings")),
    )
    op.create_index(op.f("ix_holdings_ref"), "holdings", ["ref"], unique=False)
    connection = op.get_bind()
    holdings = sa.table("holdings", *(sa.column(name) for name in ("holder", "ref", "created_at")))
    found: dict[tuple[str, str], float] = {}
    for table_name, column in (("tasks", "spec"), ("images", "recipe")):
        table = sa.table(
            table_name, sa.column("owner_id"), sa.column("created_at"), sa.column(column, sa.JSON(none_as_null=True))
        )
        query = sa.select(table.c.owner_id, table.c.created_at, table.c[column])
        rows = connection.execute(query, execution_options={"yield_per": _BATCH})
        for owner_id, created_at, document in rows:
            for ref in _refs(document):
                found.setdefault((owner_id, ref), created_at)
    values = [{"holder": holder, "ref": ref, "created_at": at} for (holder, ref), at in sorted(found.items())]
    for first in range(0, len(values), _BATCH):
        connection.execute(holdings.insert(), values[first : first + _BATCH])


def _refs(document: Any) -> set[str]:
    """Bundles that a task's spec or an image's recipe names, whatever else is in it."""
    if not isinstance(document, dict):
        return set()
    image = document.get("image")
    folders = [
        document.get("file_mounts"),
        document.get("files"),
        image.get("files") if isinstance(image, dict) else None,
    ]
    refs = [
        document.get("workdir"),
        *(ref for folder in folders if isinstance(folder, dict) for ref in folder.values()),
    ]
    return {ref for ref in refs if isinstance(ref, str) and ref.startswith("bundle:")}
