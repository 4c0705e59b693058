"""Tokens: made once, shown once, kept as hashes. How users come by one is in `logins`; agents' are in `enrolment`."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import ALL_SCOPES, Scope, Token, all_of
from diamond.core.enrolment import new_token, token_hash
from diamond.core.errors import Conflict, DiamondError, Forbidden, InvalidInput, NotFound, Unauthenticated
from diamond.core.ids import is_id, new_id
from diamond.core.logins import new_user_token
from diamond.server.services import audit, form_keys
from diamond.server.services.allowances import refusal
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.store.models import EndpointRow, TokenRow, UserRow

MAX_NAME = 100
LONGEST_S = 10 * 366 * 86_400.0
_NOTE_USE_EVERY_S = 60.0
_SHOW_EXPIRED_S = 30 * 86_400.0
_MADE_ALREADY = "the token is in the list; its value was shown then: if nobody kept it, revoke it and make another"


def hash_token(token: str) -> str:
    return token_hash(token)


def issue(
    session: Session,
    *,
    now: float,
    user_id: str | None = None,
    endpoint_id: str | None = None,
    name: str = "",
    scopes: tuple[Scope, ...] = (Scope.ADMIN,),
    expires_at: float | None = None,
) -> str:
    """A new token; the caller hands it out and keeps no copy."""
    assert (user_id is None) != (endpoint_id is None)
    token = new_user_token() if user_id else new_token()
    session.add(
        TokenRow(
            id=new_id("tok"), hash=hash_token(token), user_id=user_id, endpoint_id=endpoint_id, created_at=now,
            name=name, scopes=list(scopes) if user_id else None, expires_at=expires_at, used_from="",
        )
    )  # fmt: skip
    return token


def accept(
    ctx: Context,
    session: Session,
    *,
    user_id: str,
    sha256: str,
    name: str,
    scopes: tuple[Scope, ...],
    expires_at: float,
) -> TokenRow:
    """A token that its holder made: the server learns its hash alone.

    Raises:
        Conflict: it is known already, or the user has too many.
    """
    now = ctx.clock()
    _check_open(session, user_id)
    if session.scalars(sa.select(TokenRow.id).where(TokenRow.hash == sha256)).one_or_none() is not None:
        raise Conflict("this token is known here already", hint="start again: diamond login")
    _check_room(ctx, session, user_id, Conflict)
    row = TokenRow(
        id=new_id("tok"), hash=sha256, user_id=user_id, created_at=now, name=name, scopes=list(scopes),
        expires_at=expires_at, used_from="",
    )  # fmt: skip
    session.add(row)
    session.flush()
    return row


def _check_open(session: Session, user_id: str) -> None:
    """Holds the account as it is until the commit: whoever closes it must find every token it has."""
    query = sa.select(UserRow.disabled_at).where(UserRow.id == user_id).with_for_update(key_share=True)
    if session.scalars(query).one() is not None:
        raise Forbidden("this account is closed", hint="ask an administrator of this installation")


def _check_room(ctx: Context, session: Session, user_id: str, kind: type[DiamondError], *, field: str = "") -> None:
    live = (TokenRow.user_id == user_id, TokenRow.revoked_at.is_(None), _lives_at(ctx.clock()))
    have = session.execute(sa.select(sa.func.count()).select_from(TokenRow).where(*live)).scalar_one()
    if have >= ctx.allowances.tokens:
        cure = "revoke some: diamond token ls"
        raise refusal(kind, f"you have {have} tokens already", "tokens_per_user", cure=cure, field=field)


def _lives_at(at: float) -> sa.ColumnElement[bool]:
    return sa.or_(TokenRow.expires_at.is_(None), TokenRow.expires_at > at)


def create(
    ctx: Context,
    user_id: str,
    name: str,
    scopes: tuple[Scope, ...],
    lifetime_s: float | None,
    *,
    held: frozenset[Scope],
    once: str = "",
) -> Token:
    """A token for the user, its value in the answer only.

    Args:
        held: the scopes of the credential that asks; no token may do more than what made it.
        once: key of the form that asks. Raises Conflict if that made one already.
    """
    if not name.strip() or len(name) > MAX_NAME or not name.isprintable():
        raise InvalidInput(f"must be 1 to {MAX_NAME} printable characters", hint="say what it is for", field="name")
    if not scopes:
        raise InvalidInput(f"must be a list of {', '.join(Scope)}", field="scopes")
    if lifetime_s is not None and not 1 <= lifetime_s <= LONGEST_S:
        raise InvalidInput("must be from one second to ten years", field="expires_in_s")
    if beyond := all_of(scopes) - held:
        raise InvalidInput(
            f"{', '.join(sorted(beyond))}: your own credential may not do that",
            hint="sign in again to get one that may: diamond login",
            field="scopes",
        )
    now = ctx.clock()
    with ctx.db.write() as session:
        form_keys.check(session, user_id, once, _MADE_ALREADY)
        _check_open(session, user_id)
        _check_room(ctx, session, user_id, InvalidInput, field="name")
        expires_at = now + lifetime_s if lifetime_s is not None else None
        value = issue(session, now=now, user_id=user_id, name=name.strip(), scopes=scopes, expires_at=expires_at)
        session.flush()
        row = session.scalars(sa.select(TokenRow).where(TokenRow.hash == hash_token(value))).one()
        form_keys.note(session, user_id, once, row.id, now, _MADE_ALREADY)
        audit.record(session, now, "token.created", row.id, name=row.name, scopes=scopes, expires_at=expires_at)
    return _to_token(row, "", value)


def list_tokens(ctx: Context, user_id: str, *, current: str = "") -> list[Token]:
    """Those that are not revoked, nor expired long ago, newest first. `current`: the id of the one that asks."""
    with ctx.db.read() as session:
        recent = _lives_at(ctx.clock() - _SHOW_EXPIRED_S)
        query = sa.select(TokenRow).where(TokenRow.user_id == user_id, TokenRow.revoked_at.is_(None), recent)
        return [_to_token(row, current) for row in session.scalars(query.order_by(TokenRow.id.desc()))]


def revoke(ctx: Context, user_id: str, token_id: str) -> Token:
    """Make a token useless at once; harmless when it was already.

    Raises:
        NotFound: the user has no such token.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        query = sa.select(TokenRow).where(TokenRow.id == token_id, TokenRow.user_id == user_id)
        row = session.scalars(query.with_for_update()).one_or_none() if is_id(token_id, "tok") else None
        if row is None:
            raise NotFound(f"you have no token {token_id[:60]!r}", hint="`diamond token ls` lists yours")
        if row.revoked_at is None:
            row.revoked_at = now
            audit.record(session, now, "token.revoked", row.id, name=row.name)
    ctx.hub.notify("credentials")
    return _to_token(row, "")


def _to_token(row: TokenRow, current: str, value: str = "") -> Token:
    return Token(
        id=row.id, name=row.name, scopes=_scopes(row), created_at=row.created_at, expires_at=row.expires_at,
        used_at=row.used_at, used_from=row.used_from, revoked_at=row.revoked_at, current=row.id == current, value=value,
    )  # fmt: skip


def _scopes(row: TokenRow) -> tuple[Scope, ...]:
    return (Scope.ADMIN,) if row.scopes is None else tuple(Scope(scope) for scope in row.scopes)


def authenticate(ctx: Context, token: str, address: str = "") -> Identity:
    """Who holds this token. `address` is noted as where it was used from.

    Raises:
        Unauthenticated: it is unknown, expired or revoked, or its user's account is closed.
    """
    with ctx.db.read() as session:
        row = session.scalars(sa.select(TokenRow).where(TokenRow.hash == hash_token(token))).one_or_none()
        if row is not None and row.revoked_at is not None and row.endpoint_id is not None:
            endpoint = session.get(EndpointRow, row.endpoint_id)
            if endpoint is not None and endpoint.removed_at is not None:
                raise Unauthenticated(
                    "the endpoint this agent spoke for was removed",
                    hint="stop it (`diamond agent stop`); to use this machine again: `diamond endpoint create NAME`",
                )
            raise Unauthenticated(
                "this agent's token was revoked",
                hint="its jobs go on; to let it speak again, enrol it anew: `diamond endpoint enroll NAME`",
            )
        if row is None or row.revoked_at is not None:
            raise Unauthenticated(
                "this token is not valid here", hint="sign in (`diamond login`), or set DIAMOND_TOKEN to one of yours"
            )
        now = ctx.clock()
        if row.expires_at is not None and row.expires_at <= now:
            if row.endpoint_id is not None:
                raise Unauthenticated(
                    "this agent's token has expired: the agent had not talked to the server for too long",
                    hint="its jobs go on; to let it speak again, enrol it anew: `diamond endpoint enroll NAME`",
                )
            raise Unauthenticated("this token has expired", hint="sign in again: `diamond login`")
        user = session.get(UserRow, row.user_id) if row.user_id else None
        if user is not None and user.disabled_at is not None:
            raise Unauthenticated("this account is closed", hint="ask an administrator of this installation")
    if row.used_at is None or now - row.used_at > _NOTE_USE_EVERY_S:
        _note_use(ctx, row.id, now, address)
    if user is None:
        return Identity(endpoint_id=row.endpoint_id, scopes=frozenset({Scope.AGENT}), via=row.id, until=row.expires_at)
    scopes = ALL_SCOPES if row.scopes is None else all_of(_scopes(row))
    return Identity(
        user_id=user.id, name=user.name, is_admin=user.is_admin, scopes=scopes, via=row.id, until=row.expires_at
    )


def has_expired(session: Session, token: str, endpoint_id: str, now: float) -> bool:
    """Whether this is a token of the endpoint that only time has made useless."""
    query = sa.select(TokenRow.expires_at).where(
        TokenRow.hash == hash_token(token), TokenRow.endpoint_id == endpoint_id, TokenRow.revoked_at.is_(None)
    )
    expires_at = session.scalars(query).one_or_none()
    return expires_at is not None and expires_at <= now


def _note_use(ctx: Context, token_id: str, now: float, address: str) -> None:
    seen = sa.update(TokenRow).where(TokenRow.id == token_id).values(used_at=now, used_from=address[:100])
    with ctx.db.write() as session:
        session.execute(seen, execution_options={"synchronize_session": False})
