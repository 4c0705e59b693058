"""How agents get, change and lose their right to speak for an endpoint.

A code (one hour, once, kept as a hash) is exchanged for a token that the agent made itself: the server only ever
learns a token's hash. A token dies when its successor has proved itself, or at once by `revoke`; so an agent that
keeps what it made before it says so can be killed between any two steps and still holds one that works.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond import __version__
from diamond.core import onefile
from diamond.core.endpoints import ONLINE_WITHIN_S
from diamond.core.enrolment import (
    CODE_VALID_S,
    AgentSelf,
    Enrolled,
    Enrolment,
    NewAgent,
    new_code,
    plain_code,
    token_hash,
)
from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound, Unauthenticated
from diamond.core.faults import fault_point
from diamond.core.ids import new_id
from diamond.core.states import FINAL_JOB_STATES
from diamond.server.services import access, agents, approvals, audit, proofs
from diamond.server.services.context import Context
from diamond.server.services.snapshots import is_online
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow, EnrolmentRow, JobRow, TokenRow, UserRow

_HASH = re.compile(r"[0-9a-f]{64}")
_NEVER = 1e18  # a Unix time after every other
_NEW_LINE = "get a new line with `diamond endpoint enroll NAME` on a machine that has your Diamond client"


@dataclass(frozen=True, kw_only=True)
class Code:
    endpoint: str
    code: str
    expires_at: float


def issue_code(ctx: Context, session: Session, row: EndpointRow) -> Code:
    """A fresh code for this endpoint; codes given out before and not used are void."""
    now = ctx.clock()
    session.execute(
        sa.update(EnrolmentRow)
        .where(EnrolmentRow.endpoint_id == row.id, EnrolmentRow.used_at.is_(None), EnrolmentRow.expires_at > now)
        .values(expires_at=now)
    )
    code = new_code()
    session.add(
        EnrolmentRow(
            id=new_id("enr"),
            endpoint_id=row.id,
            code_hash=token_hash(plain_code(code)),
            created_at=now,
            expires_at=now + CODE_VALID_S,
        )
    )
    return Code(endpoint=row.name, code=code, expires_at=now + CODE_VALID_S)


def renew_code(ctx: Context, user_id: str, name: str) -> Code:
    """A fresh code for an endpoint that exists. Its present agent goes on until the code is used."""
    with ctx.db.write() as session:
        row = locked(session, user_id, name)
        audit.record(session, ctx.clock(), "endpoint.code_made", row.id, name=row.name)
        return issue_code(ctx, session, row)


def offer(code: Code, *, url: str, pin: str, names: tuple[str, ...]) -> Enrolment:
    """A code with all that the line to paste needs: where the server is, and how an agent can be sure of it."""
    return Enrolment(
        endpoint=code.endpoint,
        code=code.code,
        expires_at=code.expires_at,
        url=url.rstrip("/"),
        pin=pin,
        names=names,
        agent_sha256=onefile.digest(),
    )


def exchange(ctx: Context, message: NewAgent) -> Enrolled:
    """An agent shows its code and names the token it will use. The same exchange may be repeated.

    Raises:
        Unauthenticated: the code is unknown, expired, or was used by somebody else.
        Conflict: another agent home speaks for the endpoint; the code stays valid.
    """
    plain, token = plain_code(message.code), _checked_hash(message.token_sha256)
    if not re.fullmatch(r"agt_[0-9a-z]{8,40}", message.instance):
        raise InvalidInput("is not the name of an agent's home", field="instance")
    now = ctx.clock()
    with ctx.db.write() as session:
        known = sa.select(EnrolmentRow.endpoint_id).where(EnrolmentRow.code_hash == token_hash(plain))
        endpoint_id = session.scalars(known).one_or_none() if plain else None
        if endpoint_id is None:
            raise Unauthenticated("this enrolment code is not valid here", hint=f"check every letter, or {_NEW_LINE}")
        row = session.scalars(sa.select(EndpointRow).where(EndpointRow.id == endpoint_id).with_for_update()).one()
        found = session.scalars(sa.select(EnrolmentRow).where(EnrolmentRow.code_hash == token_hash(plain))).one()
        if found.used_at is not None:
            # Whoever used it may ask again which endpoint it was for: their first answer may have been lost.
            if message.look and found.token_hash and _is_live(session, found.token_hash):
                return Enrolled(endpoint_id=row.id, endpoint_name=row.name, server_version=__version__)
            if found.token_hash != token or not _is_live(session, token):
                raise Unauthenticated(
                    "this enrolment code was used already",
                    hint=f"{_NEW_LINE}; if it was not you who used it, also run `diamond endpoint revoke NAME`",
                )
            return Enrolled(endpoint_id=row.id, endpoint_name=row.name, server_version=__version__)
        if found.expires_at <= now:
            raise Unauthenticated("this enrolment code has expired", hint=_NEW_LINE)
        if message.look:
            return Enrolled(endpoint_id=row.id, endpoint_name=row.name, server_version=__version__)
        if row.instance not in (None, message.instance):
            if not message.take_over:
                agents.refuse_second_home(ctx, session, row)
            agents.release(ctx, session, row)
        found.used_at, found.token_hash = now, token
        _accept(session, row, token, now, now + ctx.agent_token_s)
        _revoke(session, row, now, but=token)
        row.rotate_at = None
        host = message.hostname[:255].replace("\x00", "").encode(errors="replace").decode()
        _record(session, row, "endpoint.enrolled", now, hostname=host)
        if row.facts is not None:  # it may be another machine now
            proofs.forget(row)
            approvals.ask_anew(session, row, now, has_new_owner=False)
        session.flush()
        fault_point("server.enrolling")
        name = row.name
    fault_point("server.enrolled")
    ctx.hub.notify("events", f"endpoint:{endpoint_id}")
    return Enrolled(endpoint_id=endpoint_id, endpoint_name=name, server_version=__version__)


def accept_token(ctx: Context, endpoint_id: str, sha256: str) -> None:
    """The agent names the token it is about to use. Its present one goes on until the new one is confirmed."""
    token = _checked_hash(sha256)
    with ctx.db.write() as session:
        row = session.scalars(sa.select(EndpointRow).where(EndpointRow.id == endpoint_id).with_for_update()).one()
        now = ctx.clock()
        _accept(session, row, token, now, now + ctx.agent_token_s)
    fault_point("server.token_accepted")


def confirm_token(ctx: Context, endpoint_id: str, token: str) -> None:
    """The agent has shown that it holds `token`: every other one of its endpoint dies now."""
    with ctx.db.write() as session:
        row = session.scalars(sa.select(EndpointRow).where(EndpointRow.id == endpoint_id).with_for_update()).one()
        now = ctx.clock()
        died = _revoke(session, row, now, but=token_hash(token))
        if died or row.rotate_at is not None:
            _record(session, row, "endpoint.rotated", now)
        row.rotate_at = None
    ctx.hub.notify("events", f"rotation:{endpoint_id}")


def rotate(ctx: Context, user_id: str, name: str) -> tuple[str, bool]:
    """Ask the endpoint's agent to take a new token; its id, and whether it is there to hear that."""
    with ctx.db.write() as session:
        row = locked(session, user_id, name)
        if not _live_hashes(session, row.id):
            raise Conflict(f"endpoint {name} has no agent token to rotate", hint=f"`diamond endpoint enroll {name}`")
        row.rotate_at = ctx.clock()
        audit.record(session, row.rotate_at, "endpoint.rotation_asked", row.id, name=row.name)
        online = is_online(row.last_seen_at, ctx.clock())
        endpoint_id = row.id
    ctx.hub.notify(f"endpoint:{endpoint_id}")
    return endpoint_id, online


def wants_rotation(ctx: Context, endpoint_id: str) -> bool:
    with ctx.db.read() as session:
        asked = session.execute(sa.select(EndpointRow.rotate_at).where(EndpointRow.id == endpoint_id)).one_or_none()
    return asked is not None and asked[0] is not None


# An agent asks this with every poll, so the query is built once.
_TOKEN_WANTED = (
    sa.select(EndpointRow.rotate_at, TokenRow.expires_at)
    .join(
        TokenRow,
        sa.and_(TokenRow.endpoint_id == EndpointRow.id, TokenRow.revoked_at.is_(None)),
        isouter=True,
    )
    .where(EndpointRow.id == sa.bindparam("endpoint"))
)


def wants_new_token(ctx: Context, endpoint_id: str) -> bool:
    """Whether the endpoint's agent should replace its token now: its owner asked for that, or half of a live token's
    time is over. The oldest one decides, since an agent may have been killed before it took a newer one."""
    with ctx.db.read() as session:
        rows = session.execute(_TOKEN_WANTED, {"endpoint": endpoint_id}).all()
    due_at = ctx.clock() + ctx.agent_token_s / 2
    return any(
        asked_at is not None or (expires_at is not None and expires_at < due_at) for asked_at, expires_at in rows
    )


def revoke(ctx: Context, user_id: str, name: str) -> int:
    """Every token and code of the endpoint dies now; how many tokens did. Jobs go on at the endpoint."""
    with ctx.db.write() as session:
        row = locked(session, user_id, name)
        died = withdraw(session, row, ctx.clock())
        endpoint_id = row.id
    ctx.hub.notify("events", "planning", f"endpoint:{endpoint_id}")
    return died


def withdraw(session: Session, row: EndpointRow, now: float) -> int:
    """The part of `revoke` inside a transaction."""
    session.execute(
        sa.update(EnrolmentRow)
        .where(EnrolmentRow.endpoint_id == row.id, EnrolmentRow.used_at.is_(None), EnrolmentRow.expires_at > now)
        .values(expires_at=now)
    )
    died = _revoke(session, row, now)
    row.rotate_at = None
    if died:
        _record(session, row, "endpoint.revoked", now)
        if is_online(row.last_seen_at, now):
            row.last_seen_at = row.silence_told = now - ONLINE_WITHIN_S
    return died


def me(ctx: Context, endpoint_id: str) -> AgentSelf:
    """What an agent may know about itself."""
    with ctx.db.read() as session:
        row = session.get(EndpointRow, endpoint_id)
        if row is None:
            raise NotFound("this agent's endpoint was removed")
        return AgentSelf(
            endpoint_id=row.id,
            endpoint_name=row.name,
            instance=row.instance or "",
            server_version=__version__,
            rotate=row.rotate_at is not None,
        )


# Built once: putting a query together costs more than running it.
_IS_LIVE = TokenRow.revoked_at.is_(None)
_TOKENS_OF = (
    sa.select(
        TokenRow.endpoint_id,
        sa.func.count().filter(_IS_LIVE),
        # A token without an end outlives every other.
        sa.func.max(sa.func.coalesce(TokenRow.expires_at, _NEVER)).filter(_IS_LIVE),
    )
    .where(TokenRow.endpoint_id.in_(sa.bindparam("endpoints", expanding=True)))
    .group_by(TokenRow.endpoint_id)
)
_CODES_OF = sa.select(EnrolmentRow.endpoint_id).where(
    EnrolmentRow.endpoint_id.in_(sa.bindparam("endpoints", expanding=True)),
    EnrolmentRow.used_at.is_(None),
    EnrolmentRow.expires_at > sa.bindparam("now"),
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """How an endpoint's agent stands with the server, in one word (`Endpoint.access`), and until when."""

    word: str = "none"
    until: float | None = None


def access_of(session: Session, endpoint_ids: list[str], now: float) -> dict[str, Access]:
    stands: dict[str, Access] = {}
    for key, live, until in session.execute(_TOKENS_OF, {"endpoints": endpoint_ids}):
        word = "revoked" if not live else "expired" if until <= now else "enrolled"
        stands[str(key)] = Access(word=word, until=until if live and until < _NEVER else None)
    for key in session.scalars(_CODES_OF, {"endpoints": endpoint_ids, "now": now}):
        if stands.get(key, Access()).word != "enrolled":
            stands[key] = Access(word="code")
    return {key: stands.get(key, Access()) for key in endpoint_ids}


def refuse_busy(session: Session, row: EndpointRow) -> None:
    """Raises Conflict for an endpoint with live jobs: they run in the name of whoever owns it now."""
    live = [JobRow.endpoint_id == row.id, JobRow.state.not_in([state.value for state in FINAL_JOB_STATES])]
    count = session.execute(sa.select(sa.func.count()).select_from(JobRow).where(*live)).scalar_one()
    if count:
        raise Conflict(
            f"endpoint {row.name} has {count} live job{'s' if count > 1 else ''}",
            hint="stop its tasks or wait for them first",
        )


def locked(session: Session, user_id: str, name: str) -> EndpointRow:
    """An endpoint, for a change by its owner.

    Raises:
        NotFound: there is none, or the user does not see it.
        Forbidden: it is another's, shared for use.
    """
    named = [EndpointRow.name == (name if name.isprintable() else ""), EndpointRow.removed_at.is_(None)]
    query = sa.select(EndpointRow).where(*named, access.sees_endpoint(user_id)).with_for_update()
    row = session.scalars(query).one_or_none()
    if row is None:
        raise NotFound(f"there is no endpoint {name[:60]!r}", hint="`diamond endpoint ls` lists them")
    if row.owner_id != user_id:
        owner = session.get_one(UserRow, row.owner_id).name
        raise Forbidden(f"endpoint {name} is {owner}'s: it can be used, not changed", hint=f"ask {owner}")
    return row


def _accept(session: Session, row: EndpointRow, token: str, now: float, expires_at: float) -> None:
    known = session.scalars(sa.select(TokenRow).where(TokenRow.hash == token)).one_or_none()
    if known is None:
        session.add(
            TokenRow(
                id=new_id("tok"),
                hash=token,
                endpoint_id=row.id,
                created_at=now,
                expires_at=expires_at,
            )
        )
        session.flush()
    elif known.endpoint_id != row.id or known.revoked_at is not None:
        raise Conflict("this token cannot be used here", hint="let the agent make another: enrol again")


def _revoke(session: Session, row: EndpointRow, now: float, *, but: str = "") -> int:
    dying = sa.update(TokenRow).where(
        TokenRow.endpoint_id == row.id, TokenRow.revoked_at.is_(None), TokenRow.hash != but
    )
    return len(session.execute(dying.values(revoked_at=now).returning(TokenRow.id)).all())


def _live_hashes(session: Session, endpoint_id: str) -> list[str]:
    query = sa.select(TokenRow.hash).where(TokenRow.endpoint_id == endpoint_id, TokenRow.revoked_at.is_(None))
    return list(session.scalars(query))


def _is_live(session: Session, token: str) -> bool:
    row = session.scalars(sa.select(TokenRow).where(TokenRow.hash == token)).one_or_none()
    return row is not None and row.revoked_at is None


def _checked_hash(raw: str) -> str:
    if not _HASH.fullmatch(raw):
        raise InvalidInput("must be 64 lower-case hex digits: the SHA-256 of a token", field="sha256")
    return raw


def _record(session: Session, row: EndpointRow, kind: str, now: float, **data: str) -> None:
    record_event(session, at=now, kind=kind, owner_id=row.owner_id, endpoint_id=row.id, data={"name": row.name, **data})
