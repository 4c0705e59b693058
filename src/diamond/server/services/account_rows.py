"""The rows of people's accounts: what may stand in them, making one, and how they are shown. `accounts` has what people
do with them."""

from __future__ import annotations

import re

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session

from diamond.core.accounts import LinkedIdentity, User, check_name
from diamond.core.errors import Conflict, InvalidInput
from diamond.core.ids import new_id
from diamond.server.services import audit, projects
from diamond.server.store.acting import Actor, acting, current
from diamond.server.store.identity_models import IdentityRow, ProjectRow
from diamond.server.store.models import TokenRow, UserRow

MAX_FULL_NAME = 200
MAX_EMAIL = 254
_EMAIL = re.compile(r"[^@\s,;<>\"]+@([^@\s,;<>\".]+\.)*[^@\s,;<>\".]+")


def insert(
    session: Session,
    now: float,
    *,
    name: str,
    password_hash: str | None = None,
    full_name: str = "",
    email: str = "",
    is_admin: bool = False,
    address: str | None = None,
) -> UserRow:
    """The part of `create` inside a transaction, with a project of their own.

    Args:
        address: where from, when it is the new user themselves who does this.

    Raises:
        Conflict: a user or a project is called so.
    """
    name = check_name(name)
    full_name, email = checked_full_name(full_name), checked_email(email)
    if not is_free(session, name):
        raise taken(name)
    row = UserRow(
        id=new_id("usr"), name=name, full_name=full_name, email=email, is_admin=is_admin,
        password_hash=password_hash, created_at=now,
    )  # fmt: skip
    session.add(row)
    try:
        session.flush()
        projects.personal(session, row, now)
    except exc.IntegrityError as error:
        raise taken(name) from error  # somebody else was faster
    with acting(themselves(row, address) if address is not None else current()):
        audit.record(session, now, "user.created", row.id, name=name, is_admin=is_admin)
    return row


def is_free(session: Session, name: str) -> bool:
    users = session.scalars(sa.select(UserRow.id).where(UserRow.name == name)).one_or_none()
    return users is None and session.scalars(sa.select(ProjectRow.id).where(ProjectRow.name == name)).first() is None


def taken(name: str) -> Conflict:
    return Conflict(f"the name {name!r} is taken by a user or a project", hint="choose another", field="name")


def themselves(row: UserRow, address: str) -> Actor:
    return Actor(user_id=row.id, name=row.name, address=address)


def to_user(session: Session, row: UserRow) -> User:
    return to_users(session, [row])[0]


def to_users(session: Session, rows: list[UserRow]) -> list[User]:
    known: dict[str, list[LinkedIdentity]] = {}
    query = sa.select(IdentityRow).where(IdentityRow.user_id.in_([row.id for row in rows])).order_by(IdentityRow.id)
    query = query.where(IdentityRow.removed_at.is_(None))
    for found in session.scalars(query):
        known.setdefault(found.user_id, []).append(
            LinkedIdentity(
                id=found.id, provider=found.provider, label=found.label, created_at=found.created_at,
                used_at=found.used_at,
            )
        )  # fmt: skip
    return [
        User(
            id=row.id, name=row.name, full_name=row.full_name, email=row.email, is_admin=row.is_admin,
            has_password=row.password_hash is not None, created_at=row.created_at, seen_at=row.seen_at,
            disabled_at=row.disabled_at, identities=tuple(known.get(row.id, ())),
        )
        for row in rows
    ]  # fmt: skip


def locked(session: Session, which: sa.ColumnElement[bool]) -> UserRow:
    """One user's row, for this transaction alone; what refers to it can still be written by others."""
    query = sa.select(UserRow).where(which).with_for_update(key_share=True).execution_options(populate_existing=True)
    return session.scalars(query).one()


def revoke_tokens(session: Session, user_id: str, now: float) -> int:
    """All of a user's, at once; how many. The caller notifies "credentials" after the commit."""
    dying = sa.update(TokenRow).where(TokenRow.user_id == user_id, TokenRow.revoked_at.is_(None))
    died = session.execute(dying.values(revoked_at=now).returning(TokenRow.id)).all()
    if died:
        audit.record(session, now, "token.all_revoked", user_id, count=len(died))
    return len(died)


def checked_full_name(text: str) -> str:
    text = " ".join(text.split())
    if len(text) > MAX_FULL_NAME or not text.isprintable():
        raise InvalidInput(f"must be at most {MAX_FULL_NAME} printable characters", field="full_name")
    return text


def checked_email(text: str) -> str:
    """An address as far as one can see; empty: none."""
    text = text.strip()
    if text and (len(text) > MAX_EMAIL or not text.isprintable() or not _EMAIL.fullmatch(text)):
        raise InvalidInput(f"{text[:60]!r} is no e-mail address", hint="name@example.org, or empty", field="email")
    return text
