"""What a fresh installation needs before it can answer: a user, a token, and the embedded endpoint."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import Unauthenticated
from diamond.core.home import ClientConfig
from diamond.core.ids import new_id
from diamond.core.rundir import write_atomic
from diamond.server.services import agents, tokens
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, UserRow


@dataclass(frozen=True, kw_only=True)
class BootstrapResult:
    user_token: str
    agent_token_file: Path | None


def prepare(ctx: Context, *, embedded: str | None) -> BootstrapResult:
    """Make what is missing and keep what is there; safe at every start."""
    with ctx.db.write() as session:
        user_id = _ensure_user(session, ctx.clock())
    saved = ClientConfig.load(ctx.home)
    user_token = saved.token if saved and _is_valid(ctx, saved.token, user_id=user_id) else None
    if user_token is None:
        with ctx.db.write() as session:
            user_token = tokens.issue(session, now=ctx.clock(), user_id=user_id)
    token_file = _ensure_embedded(ctx, embedded, user_id) if embedded else None
    return BootstrapResult(user_token=user_token, agent_token_file=token_file)


def _ensure_user(session: Session, now: float) -> str:
    found = session.scalars(sa.select(UserRow.id).order_by(UserRow.id).limit(1)).one_or_none()
    if found:
        return found
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # no passwd entry for this uid, as in many containers
        name = "user"
    row = UserRow(id=new_id("usr"), name=name, created_at=now)
    session.add(row)
    return row.id


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
        with ctx.db.write() as session:
            # Without its token the agent's home is a new one: nothing of an earlier home can be found again.
            agents.release(ctx, session, session.get_one(EndpointRow, endpoint_id))
            token = tokens.issue(session, now=ctx.clock(), endpoint_id=endpoint_id)
        write_atomic(token_file, token.encode())
    return token_file


def _is_valid(ctx: Context, token: str, *, user_id: str | None = None, endpoint_id: str | None = None) -> bool:
    try:
        identity = tokens.authenticate(ctx, token)
    except Unauthenticated:
        return False
    return (identity.user_id, identity.endpoint_id) == (user_id, endpoint_id)
