"""What a fresh installation needs before it can answer.

With one user: that user, their token, and the embedded endpoint. With many: a way in for the first administrator.
"""

from __future__ import annotations

import getpass
import re
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import check_name, is_reserved
from diamond.core.errors import Unauthenticated
from diamond.core.home import ClientConfig
from diamond.core.ids import new_id
from diamond.core.rundir import write_atomic
from diamond.server.services import accounts, agents, audit, codes, projects, tokens
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, Meta, UserRow

SETUP_VALID_S = 10 * 366 * 86_400.0  # until it is used, or the next start makes another


@dataclass(frozen=True, kw_only=True)
class BootstrapResult:
    user_token: str
    agent_token_file: Path | None


_ACCOUNTS = "accounts"  # in the table of single facts, once this installation was opened for many


def note_accounts(ctx: Context) -> None:
    """Remember that this installation has accounts, so that nobody opens it without them by mistake."""
    with ctx.db.write() as session:
        if session.get(Meta, _ACCOUNTS) is None:
            session.add(Meta(key=_ACCOUNTS, value="1"))


def has_accounts(ctx: Context) -> bool:
    with ctx.db.read() as session:
        return session.get(Meta, _ACCOUNTS) is not None


def prepare(ctx: Context, *, embedded: str | None) -> BootstrapResult:
    """Make what is missing and keep what is there; safe at every start."""
    with ctx.db.write() as session:
        user_id = _ensure_user(session, ctx.clock())
    saved = ClientConfig.load(ctx.home)
    user_token = saved.token if saved and _is_valid(ctx, saved.token, user_id=user_id) else None
    if user_token is None:
        with ctx.db.write() as session:
            user_token = tokens.issue(session, now=ctx.clock(), user_id=user_id, name="this machine's command line")
            audit.record(
                session, ctx.clock(), "token.created", "", user=user_id, why="the server was started for one user"
            )
    token_file = _ensure_embedded(ctx, embedded, user_id) if embedded else None
    return BootstrapResult(user_token=user_token, agent_token_file=token_file)


def prepare_multi_user(ctx: Context) -> str:
    """A fresh code for the first administrator, and void what earlier starts made; empty: there is one already."""
    now = ctx.clock()
    needed = accounts.setup_needed(ctx)
    with ctx.db.write() as session:
        codes.void(session, codes.SETUP, now)
        if not needed:
            return ""
        audit.record(session, now, "setup.code_made")
        return codes.make(session, codes.SETUP, now=now, lifetime_s=SETUP_VALID_S, short=True)


def _ensure_user(session: Session, now: float) -> str:
    """The one user: an administrator, if there are several from when there were many."""
    query = sa.select(UserRow).where(UserRow.disabled_at.is_(None)).order_by(UserRow.is_admin.desc(), UserRow.id)
    row = session.scalars(query.limit(1)).one_or_none()
    if row is None:
        return accounts.insert(session, now, name=_free_name(session), is_admin=True).id
    if not row.is_admin:
        row.is_admin = True
        audit.record(session, now, "user.made_administrator", row.id, name=row.name, by="single-user mode")
    projects.personal(session, row, now)
    return row.id


def _free_name(session: Session) -> str:
    """As the system calls whoever starts the server, as far as that can be a user name here."""
    try:
        found = getpass.getuser()
    except (OSError, KeyError):  # no passwd entry for this uid, as in many containers
        found = ""
    name = re.sub(r"[^a-z0-9._-]+", "-", found.lower()).lstrip("._-")[:30]
    if not name or is_reserved(name):  # root, as in many containers
        name = "user"
    free, number = check_name(name), 1
    while not accounts.is_free(session, free):
        number += 1
        free = f"{name}-{number}"
    return free


def _ensure_embedded(ctx: Context, name: str, user_id: str) -> Path:
    with ctx.db.write() as session:
        endpoint_id = session.scalars(sa.select(EndpointRow.id).where(EndpointRow.name == name)).one_or_none()
        if endpoint_id is None:
            endpoint_id = new_id("end")
            session.add(EndpointRow(id=endpoint_id, owner_id=user_id, name=name, created_at=ctx.clock(), revision=0))
    folder = ctx.home.agent(name)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_file = folder / "token"
    try:
        token = token_file.read_text().strip()
    except OSError:
        token = ""
    if not _is_valid(ctx, token, endpoint_id=endpoint_id):
        now = ctx.clock()
        with ctx.db.write() as session:
            if not tokens.has_expired(session, token, endpoint_id, now):
                # Without its token the agent's home is a new one: nothing of an earlier home can be found again.
                agents.release(ctx, session, session.get_one(EndpointRow, endpoint_id))
            token = tokens.issue(session, now=now, endpoint_id=endpoint_id, expires_at=now + ctx.agent_token_s)
        write_atomic(token_file, token.encode())
    return token_file


def _is_valid(ctx: Context, token: str, *, user_id: str | None = None, endpoint_id: str | None = None) -> bool:
    try:
        identity = tokens.authenticate(ctx, token)
    except Unauthenticated:
        return False
    return (identity.user_id, identity.endpoint_id) == (user_id, endpoint_id)
