"""People: accounts, sessions, projects with members and quotas, secrets, the audit log, notifications."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_FOREVER = "the audit log is never changed"


def upgrade() -> None:
    _make_tables()
    _give_everybody_a_project()
    _protect_audit()
    _begin_noticing()


def _make_tables() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=True),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("previous", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_action_seq"), "audit", ["action", "seq"], unique=False)
    op.create_index(op.f("ix_audit_at"), "audit", ["at"], unique=False)
    op.create_index(op.f("ix_audit_object_seq"), "audit", ["object", "seq"], unique=False)
    op.create_index(op.f("ix_audit_user_id_seq"), "audit", ["user_id", "seq"], unique=False)
    op.create_table(
        "quotas",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "subject_id", name=op.f("pk_quotas")),
    )
    op.create_table(
        "usage",
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("node_seconds", sa.Double(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.Column("stored_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "project_id", "day", name=op.f("pk_usage")),
    )
    op.create_index(op.f("ix_usage_project_id_day"), "usage", ["project_id", "day"], unique=False)
    op.create_table(
        "codes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=True),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["created_by"], ["users.id"], name=op.f("fk_codes_created_by_users")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_codes_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_codes")),
        sa.UniqueConstraint("hash", name=op.f("uq_codes_hash")),
    )
    op.create_index(op.f("ix_codes_kind_expires_at"), "codes", ["kind", "expires_at"], unique=False)
    op.create_table(
        "identities",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("issuer", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_identities_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_identities")),
        sa.UniqueConstraint("issuer", "subject", name=op.f("uq_identities_issuer_subject")),
    )
    op.create_index(op.f("ix_identities_user_id"), "identities", ["user_id"], unique=False)
    op.create_table(
        "logins",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("device_hash", sa.Text(), nullable=False),
        sa.Column("user_code_hash", sa.Text(), nullable=False),
        sa.Column("token_hash", sa.Text(), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("lifetime_s", sa.Double(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("polled_at", sa.Double(), nullable=True),
        sa.Column("decided_at", sa.Double(), nullable=True),
        sa.Column("user_id", sa.Text(), nullable=True),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_logins_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_logins")),
        sa.UniqueConstraint("device_hash", name=op.f("uq_logins_device_hash")),
        sa.UniqueConstraint("user_code_hash", name=op.f("uq_logins_user_code_hash")),
    )
    op.create_index(op.f("ix_logins_expires_at"), "logins", ["expires_at"], unique=False)
    op.create_table(
        "notice_rules",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("channel", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("sealed_key", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("paused_at", sa.Double(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=False),
        sa.Column("since_seq", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_notice_rules_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notice_rules")),
    )
    op.create_index(op.f("ix_notice_rules_user_id"), "notice_rules", ["user_id"], unique=False)
    op.create_table(
        "projects",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("personal_of", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["personal_of"], ["users.id"], name=op.f("fk_projects_personal_of_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
        sa.UniqueConstraint("personal_of", name=op.f("uq_projects_personal_of")),
    )
    op.create_table(
        "secrets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("sealed", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["created_by"], ["users.id"], name=op.f("fk_secrets_created_by_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_secrets")),
        sa.UniqueConstraint("kind", "subject_id", "name", name=op.f("uq_secrets_kind_subject_id_name")),
    )
    op.create_table(
        "sessions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("browser", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_sessions_user_id_users")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
        sa.UniqueConstraint("hash", name=op.f("uq_sessions_hash")),
    )
    op.create_index(op.f("ix_sessions_user_id"), "sessions", ["user_id"], unique=False)
    op.create_table(
        "endpoint_shares",
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["endpoints.id"], name=op.f("fk_endpoint_shares_endpoint_id_endpoints")
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_endpoint_shares_project_id_projects")),
        sa.PrimaryKeyConstraint("endpoint_id", "project_id", name=op.f("pk_endpoint_shares")),
    )
    op.create_index(op.f("ix_endpoint_shares_project_id"), "endpoint_shares", ["project_id"], unique=False)
    op.create_table(
        "members",
        sa.Column("project_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_members_project_id_projects")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_members_user_id_users")),
        sa.PrimaryKeyConstraint("project_id", "user_id", name=op.f("pk_members")),
    )
    op.create_index(op.f("ix_members_user_id"), "members", ["user_id"], unique=False)
    op.create_table(
        "notices",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("rule_id", sa.Text(), nullable=False),
        sa.Column("event_seq", sa.BigInteger(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rule_id"], ["notice_rules.id"], name=op.f("fk_notices_rule_id_notice_rules"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
        sa.UniqueConstraint("rule_id", "event_seq", name=op.f("uq_notices_rule_id_event_seq")),
    )
    op.create_index(op.f("ix_notices_next_at"), "notices", ["next_at"], unique=False)
    op.add_column("endpoints", sa.Column("silence_told", sa.Double(), nullable=True))
    op.add_column("images", sa.Column("project_id", sa.Text(), nullable=True))
    op.create_index(op.f("ix_images_project_id_id"), "images", ["project_id", "id"], unique=False)
    op.add_column("jobs", sa.Column("num_nodes", sa.Integer(), server_default="1", nullable=False))
    op.add_column("jobs", sa.Column("num_gpus", sa.Integer(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("stored_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("jobs", sa.Column("charged_at", sa.Double(), nullable=True))
    op.create_index(op.f("ix_jobs_charged_at"), "jobs", ["charged_at"], unique=False)
    # What ended before anybody counted is not counted.
    jobs = sa.table("jobs", *(sa.column(name) for name in ("state", "created_at", "ended_at", "charged_at")))
    over = jobs.c.state.in_(("SUCCEEDED", "FAILED", "CANCELLED"))
    op.execute(jobs.update().where(over).values(charged_at=sa.func.coalesce(jobs.c.ended_at, jobs.c.created_at)))
    op.add_column("tasks", sa.Column("project_id", sa.Text(), nullable=True))
    op.add_column("tasks", sa.Column("visibility", sa.Text(), server_default="private", nullable=False))
    op.create_index(op.f("ix_tasks_project_id_id"), "tasks", ["project_id", "id"], unique=False)
    op.create_index(op.f("ix_tasks_owner_id_state"), "tasks", ["owner_id", "state"], unique=False)
    op.create_index(op.f("ix_tasks_project_id_state"), "tasks", ["project_id", "state"], unique=False)
    op.add_column("tokens", sa.Column("name", sa.Text(), server_default="", nullable=False))
    op.add_column("tokens", sa.Column("scopes", sa.JSON(), nullable=True))
    op.add_column("tokens", sa.Column("expires_at", sa.Double(), nullable=True))
    op.add_column("tokens", sa.Column("used_at", sa.Double(), nullable=True))
    op.add_column("tokens", sa.Column("used_from", sa.Text(), server_default="", nullable=False))
    op.create_index(op.f("ix_tokens_user_id"), "tokens", ["user_id"], unique=False)
    op.add_column("users", sa.Column("full_name", sa.Text(), server_default="", nullable=False))
    op.add_column("users", sa.Column("email", sa.Text(), server_default="", nullable=False))
    op.add_column("users", sa.Column("is_admin", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("users", sa.Column("password_hash", sa.Text(), nullable=True))
    op.add_column("users", sa.Column("disabled_at", sa.Double(), nullable=True))
    op.add_column("users", sa.Column("seen_at", sa.Double(), nullable=True))


def _give_everybody_a_project() -> None:
    """What there was belongs to its owner's own project. Until now, "project" meant everybody here."""
    connection = op.get_bind()
    users = sa.table("users", sa.column("id"), sa.column("name"), sa.column("created_at"), sa.column("is_admin"))
    projects = sa.table(
        "projects", *(sa.column(name) for name in ("id", "name", "title", "personal_of", "created_at", "removed_at"))
    )
    members = sa.table("members", *(sa.column(name) for name in ("project_id", "user_id", "role", "created_at")))
    rows = connection.execute(sa.select(users.c.id, users.c.name, users.c.created_at).order_by(users.c.id)).all()
    for number, (user_id, name, created_at) in enumerate(rows):
        project_id = "prj_" + user_id.partition("_")[2]
        connection.execute(
            projects.insert().values(id=project_id, name=name, title="", personal_of=user_id, created_at=created_at)
        )
        owner = {"project_id": project_id, "user_id": user_id, "role": "owner", "created_at": created_at}
        connection.execute(members.insert().values(**owner))
        if number == 0:
            connection.execute(users.update().where(users.c.id == user_id).values(is_admin=True))
        for table_name in ("tasks", "images"):
            table = sa.table(table_name, sa.column("owner_id"), sa.column("project_id"))
            connection.execute(table.update().where(table.c.owner_id == user_id).values(project_id=project_id))
    images = sa.table("images", sa.column("visibility"))
    connection.execute(images.update().where(images.c.visibility == "project").values(visibility="public"))


def _protect_audit() -> None:
    connection = op.get_bind()
    counters = sa.table("counters", sa.column("name"), sa.column("value"))
    connection.execute(counters.insert().values(name="audit", value=0))
    if connection.dialect.name == "sqlite":
        for what in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{what.lower()} BEFORE {what} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{_FOREVER}'); END"
            )
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION audit_is_forever() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{_FOREVER}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
        "FOR EACH STATEMENT EXECUTE FUNCTION audit_is_forever()"
    )


def _begin_noticing() -> None:
    """Notices are of what happens from now on; none of what happened before there were any."""
    op.execute(
        "INSERT INTO meta (key, value) SELECT 'notices_cursor', CAST(value AS TEXT) FROM counters WHERE name = 'events'"
    )
