"""People's own accounts: coming in, signing in, and what they change themselves. What administrators do is in `users`.

Passwords are hashed and checked outside of transactions. Whoever shows a wrong name, a wrong password, or an account
that has none or is closed gets the same answer after the same time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.accounts import Person, Scope, User, check_name
from diamond.core.errors import Conflict, Forbidden, Unauthenticated
from diamond.core.projects import Role
from diamond.server.services import (
    access,
    audit,
    codes,
    known_browsers,
    passwords,
    projects,
    seen,
    sessions,
    throttling,
    tokens,
)
from diamond.server.services.account_rows import (
    MAX_FULL_NAME,
    checked_email,
    checked_full_name,
    insert,
    is_free,
    locked,
    revoke_tokens,
    taken,
    themselves,
    to_user,
    to_users,
)
from diamond.server.services.context import Context
from diamond.server.store.acting import Actor, acting
from diamond.server.store.identity_models import CodeRow, IdentityRow, MemberRow, ProjectRow
from diamond.server.store.models import UserRow

__all__ = (
    "MAX_FULL_NAME", "accept", "accept_invitation", "change", "change_password", "check_name", "checked_email",
    "checked_full_name", "create", "first_token", "insert", "is_free", "locked", "may_invite", "me", "offers_passwords",
    "people", "revoke_tokens", "setup", "setup_needed", "sign_in", "taken", "themselves", "to_user", "to_users",
    "use_reset",
)  # fmt: skip
FIRST_TOKEN_S = 90 * 86_400.0
_WRONG = "the name or the password is wrong"


def create(
    ctx: Context,
    *,
    name: str,
    password: str | None = None,
    full_name: str = "",
    email: str = "",
    is_admin: bool = False,
) -> User:
    """A new account. Without a password only an identity can sign in to it."""
    name = check_name(name)
    if password is not None:
        passwords.check(password, name)
    password_hash = passwords.hashed(password) if password is not None else None
    with ctx.db.write() as session:
        row = insert(
            session, ctx.clock(), name=name, password_hash=password_hash, full_name=full_name, email=email,
            is_admin=is_admin,
        )  # fmt: skip
        return to_user(session, row)


def me(ctx: Context, user_id: str) -> User:
    with ctx.db.read() as session:
        return to_user(session, session.get_one(UserRow, user_id))


def change(
    ctx: Context, user_id: str, *, full_name: str | None = None, email: str | None = None, saw: str | None = None
) -> User:
    """What users say of themselves; None: as it is. `saw`: `mark_of` what they were shown; Conflict if that changed."""
    now = ctx.clock()
    with ctx.db.write() as session:
        row = locked(session, UserRow.id == user_id)
        told = f"{row.full_name or 'no full name'}, {row.email or 'no e-mail'}"
        seen.check(saw, "your profile was", told, row.full_name, row.email)
        changed = {}
        if full_name is not None and (new := checked_full_name(full_name)) != row.full_name:
            row.full_name = changed["full_name"] = new
        if email is not None and (new := checked_email(email)) != row.email:
            row.email = changed["email"] = new
        if changed:
            audit.record(session, now, "user.changed", user_id, fields=sorted(changed))
        session.flush()
        return to_user(session, row)


def mark_of(user: User) -> str:
    return seen.mark(user.full_name, user.email)


def people(ctx: Context, user_id: str) -> list[Person]:
    """Everybody with whom the user shares a project, by name."""
    shared = sa.select(MemberRow.user_id).where(MemberRow.project_id.in_(access.projects_of(user_id)))
    query = sa.select(UserRow).where(UserRow.id.in_(shared), UserRow.disabled_at.is_(None)).order_by(UserRow.name)
    with ctx.db.read() as session:
        return [Person(name=row.name, full_name=row.full_name) for row in session.scalars(query)]


def sign_in(
    ctx: Context, name: str, password: str, *, address: str, browser: str, replaces: str = "", device: str = ""
) -> str:
    """Begin a session with a password; the value of its cookie.

    Args:
        replaces: the cookie the browser had, whose session ends.
        device: what tells this browser from others (known_browsers.new_value); once the password was right, it is
            known to the account.

    Raises:
        Unauthenticated: in the same words and after the same time, whatever it was that does not fit.
        RateLimited: too many wrong ones for this account, or from this address.
    """
    name, network = name.strip()[:100].replace("\x00", ""), throttling.network_of(address)
    with ctx.db.read() as session:
        query = sa.select(UserRow).where(UserRow.name.in_({name, name.lower()}))
        known = next(iter(sorted(session.scalars(query), key=lambda row: row.name != name)), None)
        keys = _counted_by(session, known, name.lower(), network, device, ctx.clock())
    with ctx.throttle.trying(ctx.clock(), *keys):
        right, better = passwords.matches(password, known.password_hash if known else None)
        if known is None or not right or known.disabled_at is not None or not _may_use_password(ctx, known):
            _note_refusal(ctx, known.id if known else "", address)
            raise _wrong()
        with ctx.db.write() as session, acting(themselves(known, address)):
            row = locked(session, UserRow.id == known.id)
            if row.password_hash != known.password_hash or row.disabled_at is not None:
                raise _wrong()  # changed or closed while we compared
            row.password_hash = better or row.password_hash
            known_browsers.note(session, row.id, device, ctx.clock())
            cookie = sessions.begin(
                ctx, session, row, method="password", address=address, browser=browser, replaces=replaces
            )
    if replaces:
        ctx.hub.notify("credentials")
    return cookie


def _counted_by(
    session: Session, known: UserRow | None, name: str, network: str, device: str, now: float
) -> list[tuple[throttling.Limit, str]]:
    """Against what a wrong password counts. Nobody can keep others out by being wrong in their name elsewhere."""
    if known is not None and known_browsers.is_known(session, known.id, device, now):
        # Not even somebody in the same network: this browser is alone with its mistakes.
        own = f"{known.id} in {device}"
        return [(throttling.PASSWORDS_OF_ACCOUNT, own), (throttling.PASSWORDS_OF_ACCOUNT_HOURLY, own)]
    here = f"{name} from {network}"
    keys = [(throttling.PASSWORDS_OF_ACCOUNT, here), (throttling.PASSWORDS_OF_ACCOUNT_HOURLY, here)]
    if known is None or not known_browsers.has_come_from(session, known.id, network):
        keys.append((throttling.PASSWORDS_FROM_STRANGERS, name))
    return [*keys, (throttling.PASSWORDS_FROM_ADDRESS, network)]


def _may_use_password(ctx: Context, row: UserRow) -> bool:
    """Where the operator wants identities alone, an administrator comes in with a password until they have linked one:
    the first one has nothing else."""
    if ctx.identity.local_accounts:
        return True
    with ctx.db.read() as session:
        return row.is_admin and not to_user(session, row).identities


def offers_passwords(ctx: Context) -> bool:
    """Whether a sign-in page should ask for one."""
    if ctx.identity.local_accounts:
        return True
    query = sa.select(UserRow).where(
        UserRow.is_admin, UserRow.disabled_at.is_(None), UserRow.password_hash.is_not(None)
    )
    with ctx.db.read() as session:
        return any(not user.identities for user in to_users(session, list(session.scalars(query))))


def _require_passwords(ctx: Context) -> None:
    if not ctx.identity.local_accounts:
        raise Forbidden(
            "this installation has no passwords of its own", hint="sign in with an identity provider: see /sign-in"
        )


def _note_refusal(ctx: Context, user_id: str, address: str) -> None:
    """Not with the name as typed: people type their password there."""
    with acting(Actor(name="", address=address)):
        audit.refuse(ctx, "session.refused", user_id, method="password")


def _wrong() -> Unauthenticated:
    return Unauthenticated(_WRONG, hint="check both; an administrator can give you a code for a new password")


def change_password(ctx: Context, user_id: str, old: str, new: str, *, keep_session: str = "") -> None:
    """The user changes their own password; every session of theirs but `keep_session` ends.

    Raises:
        Conflict: they have none.
        Forbidden: the old one is wrong.
    """
    with ctx.db.read() as session:
        known = session.get_one(UserRow, user_id)
    if known.password_hash is None:
        raise Conflict(
            "your account has no password: you come in another way",
            hint="an administrator can give you a code to set one",
            field="old_password",
        )
    passwords.check(new, known.name, field="new_password")
    with ctx.throttle.trying(ctx.clock(), (throttling.PASSWORDS_OF_ACCOUNT, f"{known.id} signed in")):
        if not passwords.matches(old, known.password_hash)[0]:
            raise Forbidden("is wrong", hint="type the password you have now", field="old_password")
    password_hash = passwords.hashed(new)
    with ctx.db.write() as session:
        row = locked(session, UserRow.id == user_id)
        if row.password_hash != known.password_hash:
            raise Conflict("the password was changed meanwhile", hint="sign in with the new one", field="old_password")
        _set_password(session, row, password_hash, ctx.clock(), keep_session=keep_session)
    ctx.hub.notify("credentials")


def _set_password(session: Session, row: UserRow, password_hash: str, now: float, *, keep_session: str = "") -> None:
    row.password_hash = password_hash
    sessions.end_all(session, row.id, now, but=keep_session)
    known_browsers.forget(session, row.id)
    codes.void(session, codes.RESET, now, CodeRow.user_id == row.id)
    audit.record(session, now, "user.password_changed", row.id)


def use_reset(ctx: Context, code: str, password: str, *, address: str = "") -> User:
    """Set a new password with the code an administrator gave; all sessions end, and tokens where that was asked."""
    with _trying_code(ctx, address):
        found = codes.look(ctx, codes.RESET, code)
        with ctx.db.read() as session:
            known = session.get_one(UserRow, found.user_id)
        if not _may_use_password(ctx, known):
            _require_passwords(ctx)
        passwords.check(password, known.name)
        password_hash, now = passwords.hashed(password), ctx.clock()
        with ctx.db.write() as session:
            used = codes.use(session, codes.RESET, code, now)
            row = locked(session, UserRow.id == used.user_id)
            with acting(themselves(row, address)):
                _set_password(session, row, password_hash, now)
                if used.data.get("revoke_tokens"):
                    revoke_tokens(session, row.id, now)
            session.flush()
            user = to_user(session, row)
    ctx.hub.notify("credentials")
    return user


def accept_invitation(
    ctx: Context, code: str, *, name: str, password: str, full_name: str = "", email: str = "", address: str = ""
) -> User:
    """A new account for whoever was invited, with the project and role that goes with it.

    Raises:
        Unauthenticated: the code is none that works.
        Conflict: the name is taken; the code can be used again.
    """
    _require_passwords(ctx)
    with _trying_code(ctx, address):
        codes.look(ctx, codes.INVITATION, code)
        passwords.check(password, check_name(name))
        password_hash = passwords.hashed(password)
        with ctx.db.write() as session:
            row = accept(
                session, ctx.clock(), code, name=name, password_hash=password_hash, full_name=full_name, email=email,
                address=address,
            )  # fmt: skip
            return to_user(session, row)


def accept(
    session: Session,
    now: float,
    code: str,
    *,
    name: str,
    password_hash: str | None,
    full_name: str = "",
    email: str = "",
    address: str = "",
) -> UserRow:
    """The part of `accept_invitation` inside a transaction, also for those who come with an identity."""
    used = codes.use(session, codes.INVITATION, code, now)
    data = used.data
    if not may_invite(session, used.created_by or "", data.get("project_id"), is_admin=bool(data.get("is_admin"))):
        raise Unauthenticated("whoever invited you may no longer do so", hint="ask an administrator to invite you")
    row = insert(
        session, now, name=name, password_hash=password_hash, full_name=full_name,
        email=email or str(data.get("email", "")), is_admin=bool(data.get("is_admin")), address=address,
    )  # fmt: skip
    project = session.get(ProjectRow, data["project_id"]) if data.get("project_id") else None
    with acting(themselves(row, address)):
        audit.record(session, now, "invitation.accepted", used.id, invited_by=used.created_by)
        if project is not None and project.removed_at is None:
            role = Role(data["role"])
            session.add(MemberRow(project_id=project.id, user_id=row.id, role=role.value, created_at=now))
            audit.record(session, now, "project.member_added", project.id, user=row.name, role=role.value)
    session.flush()
    return row


def may_invite(session: Session, user_id: str, project_id: str | None, *, is_admin: bool) -> bool:
    """Administrators anybody; owners of a project into that project."""
    inviter = session.get(UserRow, user_id)
    if inviter is None or inviter.disabled_at is not None:
        return False
    if inviter.is_admin:
        return True
    return not is_admin and project_id is not None and access.role_in(session, user_id, project_id) is Role.OWNER


def _trying_code(ctx: Context, address: str) -> AbstractContextManager[None]:
    return ctx.throttle.trying(ctx.clock(), (throttling.CODES_FROM_ADDRESS, throttling.network_of(address)))


def setup_needed(ctx: Context) -> bool:
    """Whether there is no administrator who could sign in."""
    with ctx.db.read() as session:
        return _lacks_administrator(session)


def _lacks_administrator(session: Session) -> bool:
    has_identity = (
        sa.select(IdentityRow.id).where(IdentityRow.user_id == UserRow.id, IdentityRow.removed_at.is_(None)).exists()
    )
    can_come = sa.or_(UserRow.password_hash.is_not(None), has_identity)
    query = sa.select(UserRow.id).where(UserRow.is_admin, UserRow.disabled_at.is_(None), can_come)
    return session.scalars(query.limit(1)).one_or_none() is None


def setup(
    ctx: Context, code: str, *, name: str, password: str, full_name: str = "", email: str = "", address: str = ""
) -> User:
    """The first administrator, with the code the server printed. One who is here already by that name becomes it.

    Raises:
        Unauthenticated: the code is none that works.
        Conflict: there is an administrator.
    """
    with _trying_code(ctx, address):
        codes.look(ctx, codes.SETUP, code)
        with ctx.db.read() as session:
            existing = session.scalars(sa.select(UserRow.id).where(UserRow.name == name)).one_or_none()
        if existing is None:
            check_name(name)
        passwords.check(password, name)
        password_hash, now = passwords.hashed(password), ctx.clock()
        with ctx.db.write() as session:
            codes.use(session, codes.SETUP, code, now)
            if not _lacks_administrator(session):
                raise Conflict("this installation has an administrator", hint="sign in, or ask them for an invitation")
            if existing is not None:
                row = locked(session, UserRow.id == existing)
                _take_over(session, row, password_hash, now, full_name=full_name, email=email, address=address)
            else:
                row = insert(
                    session, now, name=name, password_hash=password_hash, full_name=full_name, email=email,
                    is_admin=True, address=address,
                )  # fmt: skip
            codes.void(session, codes.SETUP, now)
            user = to_user(session, row)
    ctx.hub.notify("credentials")
    return user


def _take_over(
    session: Session, row: UserRow, password_hash: str, now: float, *, full_name: str, email: str, address: str
) -> None:
    row.is_admin, row.disabled_at = True, None
    row.full_name = checked_full_name(full_name) or row.full_name
    row.email = checked_email(email) or row.email
    with acting(themselves(row, address)):
        _set_password(session, row, password_hash, now)
        audit.record(session, now, "user.made_administrator", row.id, name=row.name, by="setup code")
    projects.personal(session, row, now)
    session.flush()


def first_token(ctx: Context, user: User, name: str, *, address: str = "") -> str:
    """A token for somebody who has just come in without a browser."""
    with acting(Actor(user_id=user.id, name=user.name, address=address)):
        return tokens.create(ctx, user.id, name, (Scope.ADMIN,), FIRST_TOKEN_S, held=frozenset(Scope)).value
