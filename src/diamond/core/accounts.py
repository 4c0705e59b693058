"""People and their credentials, as the API shows them. No password, token or hash is ever among it, but once."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diamond.core.compat import StrEnum
from diamond.core.errors import InvalidInput

USER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,38}")
# Names that people would take for somebody else: the server itself, whoever runs it, everybody, or the person of whom
# an endpoint's rules know no name.
RESERVED_NAMES = frozenset(
    {
        "admin", "administrator", "anonymous", "diamond", "everybody", "everyone", "nobody", "root", "server", "system",
        "unknown",
    }
)  # fmt: skip
MIN_PASSWORD = 12
MAX_PASSWORD = 256
SCOPE_FIELD = "scopes"  # of the error that says a token lacks one: clients know by it that another sign-in helps


class Scope(StrEnum):
    """What a token may be used for, of what its user may do."""

    READ = "read"
    LAUNCH = "launch"
    AGENT = "agent"
    ADMIN = "admin"


# For whoever is asked to approve a token, or wonders what one is good for.
SCOPE_MEANS = {
    Scope.READ: "look at everything you see",
    Scope.LAUNCH: "and run: tasks, images, shells; make projects, notifications and secrets of your own",
    Scope.AGENT: "make endpoints and enrol their agents",
    Scope.ADMIN: "everything you can do: also tokens, password, invitations, who is in a project and what it shares",
}
_IMPLIES = {
    Scope.READ: {Scope.READ},
    Scope.LAUNCH: {Scope.READ, Scope.LAUNCH},
    Scope.AGENT: {Scope.AGENT},
    Scope.ADMIN: set(Scope),
}
ALL_SCOPES = frozenset(Scope)


def all_of(scopes: tuple[Scope, ...]) -> frozenset[Scope]:
    """With what they imply."""
    return frozenset(implied for scope in scopes for implied in _IMPLIES[scope])


def parse_scopes(raw: object, field: str = "scopes") -> tuple[Scope, ...]:
    """``["read", "launch"]`` or ``"read,launch"``, in the order of `Scope`, each once.

    Raises:
        InvalidInput: naming the one that is none.
    """
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not items:
        raise InvalidInput(f"must be a list of {', '.join(Scope)}", field=field)
    wanted = set()
    for item in items:
        try:
            wanted.add(Scope(str(item).strip()))
        except ValueError:
            raise InvalidInput(f"{str(item)[:40]!r} is none of {', '.join(Scope)}", field=field) from None
    return tuple(scope for scope in Scope if scope in wanted)


def is_reserved(name: str) -> bool:
    """Whether nobody may be called so, also with a dot or a dash around it."""
    return name.strip("._-") in RESERVED_NAMES


def check_name(name: str, field: str = "name") -> str:
    """The name, if a new account may have it, wherever it comes from.

    Raises:
        InvalidInput: it has the wrong form, or is reserved.
    """
    if not USER_NAME.fullmatch(name):
        raise InvalidInput(
            f"{name[:60]!r} cannot be a user name",
            hint="1 to 39 of a-z, 0-9, dot, hyphen and underscore, the first a letter or digit",
            field=field,
        )
    if is_reserved(name):
        raise InvalidInput(
            f"{name!r} is reserved and cannot be a user name",
            hint="choose another one, such as your name at your institute",
            field=field,
        )
    return name


@dataclass(frozen=True, kw_only=True)
class LinkedIdentity:
    """An account at an identity provider that signs its user in here."""

    id: str
    provider: str
    label: str
    created_at: float
    used_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class User:
    """Somebody with an account, as they and administrators see them."""

    id: str
    name: str
    full_name: str = ""
    email: str = ""
    is_admin: bool = False
    has_password: bool = False
    created_at: float = 0.0
    seen_at: float | None = None
    disabled_at: float | None = None
    identities: tuple[LinkedIdentity, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Token:
    """A user's token, as lists show it: `value` only in the answer that made it."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    created_at: float
    expires_at: float | None = None
    used_at: float | None = None
    used_from: str = ""
    revoked_at: float | None = None
    current: bool = False  # the one that asked
    value: str = ""


@dataclass(frozen=True, kw_only=True)
class BrowserSession:
    id: str
    method: str
    address: str
    browser: str
    created_at: float
    used_at: float
    expires_at: float
    current: bool = False


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody one works with: no more of them than that."""

    name: str
    full_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """An account for whoever shows its code: `code` and `url` only in the answer that made it."""

    id: str
    name: str = ""  # as was suggested; whoever accepts chooses
    email: str = ""
    project: str = ""
    role: str = ""  # projects.Role, in that project
    is_admin: bool = False
    invited_by: str = ""
    created_at: float = 0.0
    expires_at: float = 0.0
    code: str = ""
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """An identity provider to sign in with, at /sign-in/NAME."""

    name: str
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class SignInMethods:
    """What a sign-in page or a client may offer."""

    multi_user: bool
    password: bool
    providers: tuple[Provider, ...] = ()
    setup_needed: bool = False  # nobody can administer this installation yet: see /setup
