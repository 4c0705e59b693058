"""Images, their replicas at endpoints, and drafts of recipes; tasks may build or move images, and run in them."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "images",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("recipe", sa.JSON(), nullable=False),
        sa.Column("recipe_digest", sa.Text(), nullable=False),
        sa.Column("visibility", sa.Text(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_images_owner_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_images")),
    )
    op.create_index(op.f("ix_images_owner_id_name_id"), "images", ["owner_id", "name", "id"], unique=False)
    op.create_index(op.f("ix_images_visibility_id"), "images", ["visibility", "id"], unique=False)
    op.create_table(
        "replicas",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("image_id", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=True),
        sa.Column("facts", sa.JSON(), nullable=True),
        sa.Column("failure", sa.JSON(), nullable=True),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("settled_at", sa.Double(), nullable=True),
        sa.Column("ready_at", sa.Double(), nullable=True),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["endpoint_id"], ["endpoints.id"], name=op.f("fk_replicas_endpoint_id_endpoints")),
        sa.ForeignKeyConstraint(["image_id"], ["images.id"], name=op.f("fk_replicas_image_id_images")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    live = sa.text("state IN ('BUILDING', 'READY')")
    op.create_index(
        "uq_replicas_live",
        "replicas",
        ["image_id", "endpoint_id"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )
    op.create_index(op.f("ix_replicas_endpoint_id_state"), "replicas", ["endpoint_id", "state"], unique=False)
    op.create_index(op.f("ix_replicas_state"), "replicas", ["state"], unique=False)
    op.create_table(
        "image_drafts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.Text(), nullable=False),
        sa.Column("steps", sa.JSON(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("image_id", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["image_id"], ["images.id"], name=op.f("fk_image_drafts_image_id_images")),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_image_drafts_owner_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_image_drafts")),
    )
    op.create_index(op.f("ix_image_drafts_owner_id_id"), "image_drafts", ["owner_id", "id"], unique=False)
    op.add_column("jobs", sa.Column("image", sa.JSON(), nullable=True))
    op.add_column("tasks", sa.Column("kind", sa.Text(), nullable=False, server_default="command"))
    op.add_column("tasks", sa.Column("work", sa.JSON(), nullable=True))
    op.add_column("tasks", sa.Column("image_id", sa.Text(), nullable=True))
    op.create_index(op.f("ix_tasks_image_id_kind"), "tasks", ["image_id", "kind"], unique=False)
