"""The tables of people and what they may do: accounts, sessions, projects, quotas, secrets, audit, notifications."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from diamond.server.store.models import Base


class IdentityRow(Base):
    """Somebody an identity provider vouches for. `issuer` and `subject` together never change hands."""

    __tablename__ = "identities"
    __table_args__ = (sa.UniqueConstraint("issuer", "subject"), sa.Index(None, "user_id"))
    id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    issuer: Mapped[str]
    subject: Mapped[str]
    provider: Mapped[str]  # by the name the operator gave it
    label: Mapped[str]  # an address or a name, to tell identities apart; nothing is decided by it
    created_at: Mapped[float]
    used_at: Mapped[float | None]
    removed_at: Mapped[float | None]  # unlinked; the row stays, so that nobody else can ever have it


class SessionRow(Base):
    """A browser that is signed in; only the hash of its cookie is kept."""

    __tablename__ = "sessions"
    __table_args__ = (sa.Index(None, "user_id"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    hash: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    method: Mapped[str]  # "password", "loopback", or the provider's name
    address: Mapped[str]
    browser: Mapped[str]
    created_at: Mapped[float]
    used_at: Mapped[float]
    expires_at: Mapped[float]
    ended_at: Mapped[float | None]


class KnownBrowserRow(Base):
    """A browser in which an account's password was given rightly; only the hash of its cookie is kept."""

    __tablename__ = "known_browsers"
    user_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"), primary_key=True)
    hash: Mapped[str] = mapped_column(primary_key=True)
    used_at: Mapped[float]


class CodeRow(Base):
    """Something that works once: an invitation, a new password, the first administrator, a sign-in under way.

    `kind` says which; `data` holds what it is for. Only its hash is kept.
    """

    __tablename__ = "codes"
    __table_args__ = (sa.Index(None, "kind", "expires_at"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    hash: Mapped[str] = mapped_column(unique=True)
    user_id: Mapped[str | None] = mapped_column(sa.ForeignKey("users.id"))  # whom it is for
    created_by: Mapped[str | None] = mapped_column(sa.ForeignKey("users.id"))
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_at: Mapped[float | None]


class LoginRow(Base):
    """A terminal that asks to act for somebody: it shows `user_code`, they approve it in a browser, its token works."""

    __tablename__ = "logins"
    __table_args__ = (sa.Index(None, "expires_at"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    device_hash: Mapped[str] = mapped_column(unique=True)
    user_code_hash: Mapped[str] = mapped_column(unique=True)
    token_hash: Mapped[str]  # of the token that the terminal made and keeps
    scopes: Mapped[list[Any]]
    name: Mapped[str]  # of the token it will get
    lifetime_s: Mapped[float]  # of that token
    address: Mapped[str]
    network: Mapped[str] = mapped_column(default="", server_default="")  # that it counts against
    created_at: Mapped[float]
    expires_at: Mapped[float]
    polled_at: Mapped[float | None]
    decided_at: Mapped[float | None]
    user_id: Mapped[str | None] = mapped_column(sa.ForeignKey("users.id"))  # who approved; None and decided: refused
    used_at: Mapped[float | None]


class ProjectRow(Base):
    __tablename__ = "projects"
    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    title: Mapped[str] = mapped_column(default="")
    personal_of: Mapped[str | None] = mapped_column(sa.ForeignKey("users.id"), unique=True)
    created_at: Mapped[float]
    removed_at: Mapped[float | None]


class MemberRow(Base):
    __tablename__ = "members"
    __table_args__ = (sa.Index(None, "user_id"),)
    project_id: Mapped[str] = mapped_column(sa.ForeignKey("projects.id"), primary_key=True)
    user_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"), primary_key=True)
    role: Mapped[str]  # core.projects.Role
    created_at: Mapped[float]


class EndpointShareRow(Base):
    """The members of this project may use this endpoint, as far as its own policy lets them, once one of the project's
    owners has approved of it; until then its owner has only asked. See services.approvals."""

    __tablename__ = "endpoint_shares"
    __table_args__ = (sa.Index(None, "project_id"),)
    endpoint_id: Mapped[str] = mapped_column(sa.ForeignKey("endpoints.id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(sa.ForeignKey("projects.id"), primary_key=True)
    created_at: Mapped[float]  # when it was asked for
    approved_at: Mapped[float | None]  # None: it waits for an owner of the project
    approved_by: Mapped[str | None]  # id of that owner


class QuotaRow(Base):
    """Limits of one user or project; `limits` is a core.quotas.Limits."""

    __tablename__ = "quotas"
    kind: Mapped[str] = mapped_column(primary_key=True)  # "user", "project", "every-user", "every-project"
    subject_id: Mapped[str] = mapped_column(primary_key=True)  # empty for every-…
    limits: Mapped[dict[str, Any]]
    updated_at: Mapped[float]


class UsageRow(Base):
    """What a user used in a project on one day (UTC, counted from 1970): jobs that ended, and bytes that came to stay.

    Added to in the transaction that sets `jobs.charged_at`, so every job counts once. `project_id` is empty for none.
    """

    __tablename__ = "usage"
    __table_args__ = (sa.Index(None, "project_id", "day"),)
    user_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True)
    node_seconds: Mapped[float] = mapped_column(default=0.0)
    gpu_seconds: Mapped[float] = mapped_column(default=0.0)
    stored_bytes: Mapped[int] = mapped_column(sa.BigInteger, default=0)


class SecretRow(Base):
    """A value a task may be given by name, encrypted. Of a user, or of a project."""

    __tablename__ = "secrets"
    __table_args__ = (sa.UniqueConstraint("kind", "subject_id", "name"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]  # "user" or "project"
    subject_id: Mapped[str]
    name: Mapped[str]
    sealed: Mapped[str]  # services.sealing
    created_by: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    created_at: Mapped[float]
    updated_at: Mapped[float]
    used_at: Mapped[float | None]


class AuditRow(Base):
    """What somebody did. Never changed, never removed: triggers of both databases refuse it. See services.audit."""

    __tablename__ = "audit"
    __table_args__ = (
        sa.Index(None, "user_id", "seq"),
        sa.Index(None, "action", "seq"),
        sa.Index(None, "object", "seq"),
        sa.Index(None, "at"),
    )
    seq: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True, autoincrement=False)
    at: Mapped[float]
    action: Mapped[str]
    user_id: Mapped[str | None]
    user: Mapped[str]  # as they were called then
    via: Mapped[str]  # id of the token or session; empty: the server itself
    address: Mapped[str]
    object: Mapped[str]  # an id
    data: Mapped[dict[str, Any]]
    previous: Mapped[str]
    hash: Mapped[str]


class NoticeRuleRow(Base):
    """What a user wants to be told, and how."""

    __tablename__ = "notice_rules"
    __table_args__ = (sa.Index(None, "user_id"),)
    id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(sa.ForeignKey("users.id"))
    channel: Mapped[str]  # "email" or "webhook"
    target: Mapped[str]
    events: Mapped[list[Any]]
    sealed_key: Mapped[str] = mapped_column(default="")  # what webhooks are signed with
    created_at: Mapped[float]
    paused_at: Mapped[float | None]  # after many failures; the user can start it again
    failures: Mapped[int] = mapped_column(default=0)
    last_error: Mapped[str] = mapped_column(default="")
    since_seq: Mapped[int] = mapped_column(sa.BigInteger)  # only events after this one


class NoticeRow(Base):
    """A message on its way, made in the transaction that moves the cursor past its event: none is lost or doubled."""

    __tablename__ = "notices"
    __table_args__ = (sa.UniqueConstraint("rule_id", "event_seq"), sa.Index(None, "next_at"))
    id: Mapped[str] = mapped_column(primary_key=True)
    rule_id: Mapped[str] = mapped_column(sa.ForeignKey("notice_rules.id", ondelete="CASCADE"))
    event_seq: Mapped[int] = mapped_column(sa.BigInteger)
    subject: Mapped[str]
    body: Mapped[dict[str, Any]]
    attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[float | None]  # None: delivered or given up
    delivered_at: Mapped[float | None]
    error: Mapped[str] = mapped_column(default="")
    created_at: Mapped[float]
