"""Who comes in with an identity of a provider: whom an account is made for, and which account an identity opens.

An identity (issuer and subject) belongs to one user for ever. Nobody is taken for the owner of an account because of an
e-mail address: an account is opened by identities that were linked to it, by its own user, while signed in.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session

from diamond.core.accounts import LinkedIdentity, Provider, is_reserved
from diamond.core.enrolment import token_hash
from diamond.core.errors import Conflict, InvalidInput, NotFound, Unauthenticated
from diamond.core.ids import is_id, new_id
from diamond.server.identity_file import Allow, ProviderConfig
from diamond.server.provider_link import Person, Refused
from diamond.server.services import accounts, audit, codes, sessions, throttling
from diamond.server.services.context import Context
from diamond.server.store.acting import Actor, acting
from diamond.server.store.identity_models import CodeRow, IdentityRow
from diamond.server.store.models import UserRow

KIND = "oidc"
VALID_S = 600.0
MAX_IDENTITIES = 20
BEGUN = throttling.Limit(what="sign-ins begun from this address", times=120, within_s=60.0)
NOT_UNDER_WAY = throttling.Limit(what="sign-ins from this address that were not under way", times=30, within_s=60.0)
_MAX_NAME = 39


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """What a sign-in was begun for.

    Attributes:
        next_path: where to go on.
        user_id: who is linking another identity to their account; None: somebody signs in.
        session_id: the session in which they began.
    """

    next_path: str
    user_id: str | None = None
    session_id: str = ""


def providers(ctx: Context) -> list[Provider]:
    """What the sign-in page offers beside a password, in the order of the operator's file."""
    return [Provider(name=config.name, title=config.title) for config in ctx.identity.configs()]


def check_rate(ctx: Context, *, address: str) -> None:
    """Raises RateLimited when too many sign-ins have been begun from this address: each costs a row, and a question to
    the provider."""
    ctx.throttle.count(ctx.clock(), (BEGUN, throttling.network_of(address)))


def begin(ctx: Context, provider: str, state: str, key: str, ticket: Ticket) -> None:
    """Remember that this browser, which holds `key`, is on its way to the provider. For ten minutes, for one return."""
    now = ctx.clock()
    row = CodeRow(
        id=new_id("cod"), kind=KIND, hash=_hash(provider, state, key), user_id=ticket.user_id, created_at=now,
        expires_at=now + VALID_S, data={"next": ticket.next_path, "session": ticket.session_id},
    )  # fmt: skip
    with ctx.db.write() as session:
        # Anybody can begin one: those that are over go at once.
        session.execute(sa.delete(CodeRow).where(CodeRow.kind == KIND, CodeRow.expires_at <= now))
        session.add(row)


def check_invitation(ctx: Context, code: str, *, address: str) -> None:
    """Raises Unauthenticated for a code that is none, before anybody goes to a provider with it."""
    with ctx.throttle.trying(ctx.clock(), (throttling.CODES_FROM_ADDRESS, throttling.network_of(address))):
        codes.look(ctx, codes.INVITATION, code)


def take(ctx: Context, provider: str, state: str, key: str, *, address: str) -> Ticket:
    """What the browser that comes back had begun. Works once, in the same browser, for the same provider.

    Raises:
        Refused: there is no such sign-in under way.
        RateLimited: too many such answers came from this address.
    """
    now = ctx.clock()
    live = (CodeRow.kind == KIND, CodeRow.used_at.is_(None), CodeRow.expires_at > now)
    mine = CodeRow.hash == _hash(provider, state, key)
    taken = sa.update(CodeRow).where(mine, *live).values(used_at=now).returning(CodeRow.user_id, CodeRow.data)
    try:
        with ctx.throttle.trying(now, (NOT_UNDER_WAY, throttling.network_of(address))):
            with ctx.db.write() as session:
                found = session.execute(taken, execution_options={"synchronize_session": False}).one_or_none()
            if found is None:
                raise Unauthenticated("no such sign-in")
    except Unauthenticated:
        raise Refused(
            "state",
            "This sign-in is not under way in this browser: it was finished already, took longer than ten minutes, or "
            "was begun elsewhere.",
            hint="Begin again from the sign-in page. The browser must accept cookies from this site.",
        ) from None
    return Ticket(next_path=found.data["next"], user_id=found.user_id, session_id=found.data["session"])


def _hash(provider: str, state: str, key: str) -> str:
    """Of all three together: a state is worth nothing in another browser, or with another provider."""
    return token_hash(f"{provider}\n{state}\n{key}")


def refuse(ctx: Context, provider: str, refused: Refused, *, address: str) -> None:
    """Write down that somebody was not let in."""
    with acting(Actor(name="", address=address)):
        audit.refuse(ctx, "session.refused", method=provider, reason=refused.why)


def come_in(
    ctx: Context,
    config: ProviderConfig,
    person: Person,
    *,
    address: str,
    browser: str,
    replaces: str = "",
    invitation: str = "",
) -> str:
    """Sign in whoever the provider vouches for; the value of the session's cookie.

    Args:
        replaces: the cookie the browser had, whose session ends.
        invitation: the code of one, which stands for a rule of the allow-list.

    Raises:
        Refused: they may not come in, or their account is closed.
    """
    for is_last in (False, True):
        try:
            with ctx.db.write() as session:
                row = _user_of(session, ctx.clock(), config, person, invitation, address)
                with acting(accounts.themselves(row, address)):
                    cookie = sessions.begin(
                        ctx, session, row, method=config.name, address=address, browser=browser, replaces=replaces
                    )
            break
        except (exc.IntegrityError, Conflict):
            # Two browsers of the same person, or two people of the same name, at the same moment: now one is there.
            if is_last:
                raise
    if replaces:
        ctx.hub.notify("credentials")
    return cookie


def _user_of(
    session: Session, now: float, config: ProviderConfig, person: Person, invitation: str, address: str
) -> UserRow:
    known = _find(session, person)
    row = accounts.locked(session, UserRow.id == known.user_id) if known is not None else None
    if known is not None:
        session.refresh(known)  # it may have been unlinked while we waited for the account
    if known is not None and known.removed_at is not None:
        raise Refused(
            "unlinked",
            f"This identity at {config.title} was unlinked from its account here.",
            hint="Sign in another way and link it again on your account's page.",
        )
    if config.allow.every_sign_in or (known is None and not invitation):
        _check_allowed(config, person, is_known=known is not None or bool(invitation))
    if known is None or row is None:
        return _make(session, now, config, person, invitation, address)
    if row.disabled_at is not None:
        raise Refused("disabled", "Your account here is closed.", hint="Ask an administrator of this installation.")
    if invitation:
        raise Refused(
            "invitation",
            f"You have an account here already, {row.name}; the invitation was not used.",
            hint="Sign in as usual. The owner of a project can add you to it by that name.",
        )
    known.used_at = now
    known.label, known.provider = person.label, config.name
    return row


def _make(
    session: Session, now: float, config: ProviderConfig, person: Person, invitation: str, address: str
) -> UserRow:
    """An account for somebody who has none here."""
    full_name, email = person.full_name[: accounts.MAX_FULL_NAME], _usable(person.email)
    try:
        if invitation:
            wanted = str(codes.find(session, codes.INVITATION, invitation, now).data.get("name", ""))
            name = free_name(session, (wanted, *person.suggestions))
            row = accounts.accept(
                session, now, invitation, name=name, password_hash=None, full_name=full_name, email=email,
                address=address,
            )  # fmt: skip
        else:
            name = free_name(session, person.suggestions)
            row = accounts.insert(session, now, name=name, full_name=full_name, email=email, address=address)
    except Unauthenticated as error:
        raise Refused("invitation", error.message, hint=error.hint) from None
    with acting(accounts.themselves(row, address)):
        _add(session, now, row.id, config, person)
    return row


def _add(session: Session, now: float, user_id: str, config: ProviderConfig, person: Person) -> IdentityRow:
    row = IdentityRow(
        id=new_id("idn"), user_id=user_id, issuer=person.issuer, subject=person.subject, provider=config.name,
        label=person.label, created_at=now, used_at=now,
    )  # fmt: skip
    session.add(row)
    session.flush()
    audit.record(session, now, "identity.linked", row.id, provider=config.name, label=person.label)
    return row


def _find(session: Session, person: Person) -> IdentityRow | None:
    query = sa.select(IdentityRow).where(IdentityRow.issuer == person.issuer, IdentityRow.subject == person.subject)
    return session.scalars(query).one_or_none()


def _check_allowed(config: ProviderConfig, person: Person, *, is_known: bool) -> None:
    if (is_known or config.create_accounts) and fits(config.allow, person):
        return
    if config.create_accounts or is_known:
        message = f"{person.label or 'You'} at {config.title} may not sign in here: no rule of this installation fits."
    else:
        message = f"No account here belongs to {person.label or 'you'} at {config.title}."
    raise Refused(
        "not allowed",
        message,
        hint="Ask an administrator for an invitation. If you have an account already, sign in to it as you did before, "
        "and link this identity on your account's page.",
    )


def fits(allow: Allow, person: Person) -> bool:
    """Whether a rule lets this person in."""
    return (
        allow.everybody
        or person.subject in allow.subjects
        or (person.email != "" and person.email in allow.emails)
        or not person.groups.isdisjoint(allow.groups)
        or any(_is_within(domain, rule) for domain in person.domains for rule in allow.domains)
    )


def _is_within(domain: str, rule: str) -> bool:
    return domain.endswith(rule[1:]) if rule.startswith("*.") else domain == rule


def free_name(session: Session, suggestions: tuple[str, ...]) -> str:
    """A user name nobody has, as near to what was suggested as can be."""
    made = [name for text in suggestions if (name := _as_name(text)) and not is_reserved(name)]
    for name in made:
        if accounts.is_free(session, name):
            return name
    base = made[0] if made else "user"
    number = 2 if made else 1
    while not accounts.is_free(session, name := f"{base[: _MAX_NAME - 6]}-{number}"):
        number += 1
    return name


def _as_name(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9._-]+", "-", plain).strip("._-")[:_MAX_NAME].rstrip("._-")


def _usable(email: str) -> str:
    """What the provider calls an address may be none that mail can be sent to."""
    try:
        return accounts.checked_email(email)
    except InvalidInput:
        return ""


def link(ctx: Context, user_id: str, config: ProviderConfig, person: Person) -> LinkedIdentity:
    """Let an identity open the account of somebody who is signed in, and has just signed in at the provider too.

    Raises:
        Refused: it belongs to somebody else, or they have too many.
    """
    for is_last in (False, True):
        try:
            with ctx.db.write() as session:
                accounts.locked(session, UserRow.id == user_id)
                return _to_identity(_linked(session, ctx.clock(), user_id, config, person))
        except exc.IntegrityError:  # somebody else linked it at this moment: now it is theirs
            if is_last:
                raise
    raise AssertionError("unreachable")


def _linked(session: Session, now: float, user_id: str, config: ProviderConfig, person: Person) -> IdentityRow:
    row = _find(session, person)
    if row is None:
        mine = sa.select(sa.func.count()).select_from(IdentityRow).where(IdentityRow.user_id == user_id)
        if session.execute(mine).scalar_one() >= MAX_IDENTITIES:
            raise Refused("too many", f"Your account has {MAX_IDENTITIES} identities already.", hint="Use those.")
        return _add(session, now, user_id, config, person)
    if row.user_id != user_id:
        raise Refused(
            "belongs to another",
            f"{person.label or 'This identity'} at {config.title} belongs to another account here.",
            hint="An identity opens one account for ever. Sign in with it to get to that one.",
        )
    if row.removed_at is not None:
        row.removed_at, row.label, row.provider = None, person.label, config.name
        audit.record(session, now, "identity.linked", row.id, provider=config.name, label=person.label)
    return row


def unlink(ctx: Context, user_id: str, identity_id: str, *, keep_session: str = "") -> None:
    """An identity no longer opens its user's account; their other sessions end.

    Raises:
        NotFound: they have no such identity.
        Conflict: there would be no way left to sign in.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        user = accounts.locked(session, UserRow.id == user_id)
        linked = (IdentityRow.user_id == user_id, IdentityRow.removed_at.is_(None))
        rows = {row.id: row for row in session.scalars(sa.select(IdentityRow).where(*linked))}
        row = rows.get(identity_id) if is_id(identity_id, "idn") else None
        if row is None:
            raise NotFound(
                f"you have no identity {identity_id[:60]!r}",
                hint="`diamond user identities` lists yours, as /settings does",
            )
        issuers = {config.issuer for config in ctx.identity.configs()}
        others = any(other.issuer in issuers for other in rows.values() if other is not row)
        if not others and not (user.password_hash and ctx.identity.local_accounts):
            raise Conflict(
                f"{row.label} is the only way left to sign in to your account",
                hint="link another identity first, or ask an administrator for a code to set a password",
            )
        row.removed_at = now
        sessions.end_all(session, user_id, now, but=keep_session)
        audit.record(session, now, "identity.unlinked", row.id, provider=row.provider, label=row.label)
    ctx.hub.notify("credentials")


def _to_identity(row: IdentityRow) -> LinkedIdentity:
    return LinkedIdentity(
        id=row.id, provider=row.provider, label=row.label, created_at=row.created_at, used_at=row.used_at
    )
