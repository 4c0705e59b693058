"""The tables. Times are Unix seconds (UTC); JSON columns hold `core` dataclasses as `core.codec` encodes them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    # Named constraints, so that later migrations can drop them on both databases.
    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {dict[str, Any]: sa.JSON, list[Any]: sa.JSON, str: sa.Text, float: sa.Double}  # noqa: RUF012


def table_of(model: type[Base]) -> sa.Table:
    """The table itself, for statements that need no objects."""
    assert isinstance(model.__table__, sa.Table)
    return model.__table__


class Meta(Base):
    """Single facts about this database, such as its epoch."""

    __tablename__ = "meta"
    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class Counter(Base):
    """Numbers handed out under a row lock, so that commit order is number order on every database."""

    __tablename__ = "counters"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(sa.BigInteger)


class UserRow(Base):
    __tablename__ = "users"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    full_name: Mapped[str] = mapped_column(default="", server_default="")
    email: Mapped[str] = mapped_column(default="", server_default="")  # where notices go; proves nothing
    is_admin: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    password_hash: Mapped[str | None]
    disabled_at: Mapped[float | None]
    seen_at: Mapped[float | None]  # their last sign-in


class EndpointRow(Base):
    __tablename__ = "endpoints"
    id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    last_seen_at: Mapped[float | None]
    facts: Mapped[dict[str, Any] | None]
    usage: Mapped[dict[str, Any] | None]
    revision: Mapped[int] = mapped_column(sa.BigInteger, default=0)  # newest desired-state change
    instance: Mapped[str | None]  # the agent home that speaks for it; None until one has
    rotate_at: Mapped[float | None]  # when somebody asked its agent to take a new token; None once it has
    removed_at: Mapped[float | None]  # kept for the record of its tasks; its name is then no longer a valid one
    silence_told: Mapped[float | None]  # the `last_seen_at` after which its silence was told of
    # What has succeeded there, whatever its agent claims to have (services.proofs): since when anything has, and the
    # most cores and GPUs that one job had.
    proven_at: Mapped[float | None]
    proven_cpus: Mapped[int] = mapped_column(default=0, server_default="0")
    proven_gpus: Mapped[int] = mapped_column(default=0, server_default="0")


class TokenRow(Base):
    """A credential of a user or of an endpoint's agent; only its hash is kept."""

    __tablename__ = "tokens"
    __table_args__ = (sa.Index(None, "endpoint_id"), sa.Index(None, "user_id"))
    id: Mapped[str] = mapped_column(primary_key=True)
    hash: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[str | None] = mapped_column(sa.ForeignKey("users.id"))
    endpoint_id: Mapped[str | None] = mapped_column(sa.ForeignKey("endpoints.id"))
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    name: Mapped[str] = mapped_column(default="", server_default="")
    scopes: Mapped[list[Any] | None]  # None: all that its user may do (as before there were any)
    expires_at: Mapped[float | None]
    used_at: Mapped[float | None]
    used_from: Mapped[str] = mapped_column(default="", server_default="")


class EnrolmentRow(Base):
    """A code that an agent may exchange for a token of its endpoint, once; only its hash is kept."""

    __tablename__ = "enrolments"
    __table_args__ = (sa.Index(None, "endpoint_id"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(sa.ForeignKey("endpoints.id"))
    code_hash: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_at: Mapped[float | None]
    token_hash: Mapped[str | None]  # of the token it was exchanged for: the same exchange may be repeated


class ImageRow(Base):
    """A recipe under a name, of one owner. A name may have several, one for each state of its recipe."""

    __tablename__ = "images"
    __table_args__ = (
        sa.Index(None, "owner_id", "name", "id"),
        sa.Index(None, "visibility", "id"),
        sa.Index(None, "project_id", "id"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    name: Mapped[str]
    recipe: Mapped[dict[str, Any]] = mapped_column(deferred=True)
    recipe_digest: Mapped[str]
    visibility: Mapped[str]
    labels: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float]
    removed_at: Mapped[float | None]  # kept for the record of tasks that ran in it
    project_id: Mapped[str | None]  # None: its owner's own


class ReplicaRow(Base):
    """One result of an image at one endpoint, or the making of it. At most one of them is live."""

    __tablename__ = "replicas"
    __table_args__ = (
        sa.Index(
            "uq_replicas_live",
            "image_id",
            "endpoint_id",
            unique=True,
            sqlite_where=sa.text("state IN ('BUILDING', 'READY')"),
            postgresql_where=sa.text("state IN ('BUILDING', 'READY')"),
        ),
        sa.Index(None, "endpoint_id", "state"),
        sa.Index(None, "state"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    image_id: Mapped[str] = mapped_column(sa.ForeignKey("images.id"))
    endpoint_id: Mapped[str] = mapped_column(sa.ForeignKey("endpoints.id"))
    state: Mapped[str]
    origin: Mapped[str]
    task_id: Mapped[str | None]  # that makes (made) it; the task's outputs hold lock, bill of materials and definition
    facts: Mapped[dict[str, Any] | None]
    failure: Mapped[dict[str, Any] | None]
    digest: Mapped[str] = mapped_column(default="")
    size_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    detail: Mapped[str] = mapped_column(default="")
    created_at: Mapped[float]
    settled_at: Mapped[float | None]  # when it became READY, FAILED or GONE
    ready_at: Mapped[float | None]
    used_at: Mapped[float | None]


class ImageDraftRow(Base):
    """A recipe in the making, step by step. `version` grows with every change, so that a later writer is told."""

    __tablename__ = "image_drafts"
    __table_args__ = (sa.Index(None, "owner_id", "id"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    steps: Mapped[dict[str, Any]]
    version: Mapped[int]
    image_id: Mapped[str | None] = mapped_column(sa.ForeignKey("images.id"))  # once it was submitted
    created_at: Mapped[float]
    updated_at: Mapped[float]


class TemplateRow(Base):
    """A task to begin with. `version` grows with every change, so that a later writer is told."""

    __tablename__ = "templates"
    __table_args__ = (sa.Index(None, "owner_id", "id"), sa.Index(None, "project_id"))
    id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    project_id: Mapped[str | None]  # None: its owner's own
    visibility: Mapped[str] = mapped_column(default="private", server_default="private")
    name: Mapped[str]
    description: Mapped[str]
    spec: Mapped[dict[str, Any]] = mapped_column(deferred=True)  # fields of a task file
    version: Mapped[int]
    changed_by: Mapped[str]  # id of a user
    created_at: Mapped[float]
    updated_at: Mapped[float]


class HoldingRow(Base):
    """Somebody who is known to have some bytes: they sent all of them here. See services.holdings."""

    __tablename__ = "holdings"
    holder: Mapped[str] = mapped_column(primary_key=True)  # id of a user, or of an endpoint
    ref: Mapped[str] = mapped_column(primary_key=True)  # of a blob (sha256:…), or of a bundle of them (bundle:…)
    created_at: Mapped[float]
    size_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0, server_default="0")  # of what agents brought
    __table_args__ = (sa.Index(None, "ref"),)


class TaskRow(Base):
    __tablename__ = "tasks"
    __table_args__ = (
        sa.Index(None, "owner_id", "id"),
        sa.Index(None, "owner_id", "name", "id"),
        sa.Index(None, "state", "next_attempt_at"),
        sa.Index(None, "image_id", "kind"),
        sa.Index(None, "project_id", "id"),
        # Quotas count what is unfinished, among many that are not.
        sa.Index(None, "owner_id", "state"),
        sa.Index(None, "owner_id", "kind", "state", "ended_at"),
        sa.Index(None, "project_id", "state"),
        sa.Index(None, "pool_id", "state"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    owner_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    name: Mapped[str]
    spec: Mapped[dict[str, Any]] = mapped_column(deferred=True)
    state: Mapped[str]
    desired: Mapped[str]
    reason: Mapped[str | None]
    detail: Mapped[str] = mapped_column(default="")
    endpoint_id: Mapped[str | None] = mapped_column(sa.ForeignKey("endpoints.id"))
    attempt: Mapped[int] = mapped_column(default=0)
    exit_code: Mapped[int | None]
    priority: Mapped[int] = mapped_column(default=0)
    pending_reason: Mapped[str] = mapped_column(default="")
    expected_start_at: Mapped[float | None]
    failures: Mapped[int] = mapped_column(default=0, server_default="0")  # attempts that count against `retry`
    outputs: Mapped[list[Any]] = mapped_column(default=list, deferred=True)
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    next_attempt_at: Mapped[float | None]
    kind: Mapped[str] = mapped_column(default="command", server_default="command")
    work: Mapped[dict[str, Any] | None] = mapped_column(deferred=True)  # see services.image_work, services.pilots
    pool_id: Mapped[str | None]  # in which it runs, or, of a pilot, for which it holds a node
    # What it runs in, or looks after. No foreign key: SQLite cannot add one to a table others refer to.
    image_id: Mapped[str | None]
    project_id: Mapped[str | None]  # None: its owner's own
    visibility: Mapped[str] = mapped_column(default="private", server_default="private")


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        sa.UniqueConstraint("task_id", "attempt"),
        sa.Index(None, "endpoint_id", "revision"),
        # The queue and a full sync ask for live jobs only, which are few among many finished ones.
        sa.Index(None, "endpoint_id", "state"),
        # Live ones, and those that ended a moment ago: what quotas and fair shares add up.
        sa.Index(None, "charged_at"),
    )
    id: Mapped[str] = mapped_column(primary_key=True)
    task_id: Mapped[str] = mapped_column(sa.ForeignKey("tasks.id"))
    endpoint_id: Mapped[str] = mapped_column(sa.ForeignKey("endpoints.id"))
    attempt: Mapped[int]
    state: Mapped[str]
    desired: Mapped[str]
    revision: Mapped[int] = mapped_column(sa.BigInteger)  # the endpoint's revision at the last change of `desired`
    delivered_at: Mapped[float | None]  # when an agent was first told of it
    time_limit_s: Mapped[int | None]
    reason: Mapped[str | None]
    detail: Mapped[str] = mapped_column(default="")
    exit_code: Mapped[int | None]
    signal: Mapped[int | None]
    scheduler_id: Mapped[str | None]
    hosts: Mapped[list[Any]] = mapped_column(default=list)
    run_dir: Mapped[str] = mapped_column(default="")
    partition: Mapped[str] = mapped_column(default="", server_default="")
    gpu_type: Mapped[str] = mapped_column(default="", server_default="")
    chained: Mapped[bool] = mapped_column(default=False, server_default=sa.false())
    continues: Mapped[str | None]  # the job whose work directory it goes on in
    after: Mapped[str | None]  # the job it was queued behind, in advance
    num_nodes: Mapped[int] = mapped_column(default=1, server_default="1")  # for quotas and fair shares
    num_gpus: Mapped[int] = mapped_column(default=0, server_default="0")  # on all nodes together
    stored_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0, server_default="0")  # its outputs brought here
    stream_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0, server_default="0")  # its log and curves here
    charged_at: Mapped[float | None]  # when what it used was added to `usage`, once
    image: Mapped[dict[str, Any] | None]  # what it runs in, as its endpoint was told
    place: Mapped[dict[str, Any] | None]  # where in a pool it runs, likewise
    pending_reason: Mapped[str] = mapped_column(default="", server_default="")
    expected_start_at: Mapped[float | None]
    created_at: Mapped[float]
    queued_at: Mapped[float | None]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]


class EventRow(Base):
    __tablename__ = "events"
    __table_args__ = (sa.Index(None, "task_id", "seq"), sa.Index(None, "owner_id", "seq"))
    seq: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[float]
    kind: Mapped[str]
    owner_id: Mapped[str | None]
    task_id: Mapped[str | None]
    job_id: Mapped[str | None]
    endpoint_id: Mapped[str | None]
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class IdempotencyRow(Base):
    """A key a client sent with a creation, and what it made."""

    __tablename__ = "idempotency_keys"
    owner_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_hash: Mapped[str]
    task_id: Mapped[str] = mapped_column(sa.ForeignKey("tasks.id"))
    created_at: Mapped[float]
