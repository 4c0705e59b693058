"""Bodies and answers of the routes about accounts."""

from __future__ import annotations

from dataclasses import dataclass

from diamond.core.accounts import BrowserSession, Invitation, Person, User


@dataclass(frozen=True, kw_only=True)
class AccountChange:
    """What is left out stays as it is."""

    full_name: str | None = None
    email: str | None = None


@dataclass(frozen=True, kw_only=True)
class PasswordChange:
    old_password: str
    new_password: str


@dataclass(frozen=True, kw_only=True)
class FirstAdministrator:
    """With `token_name`, the answer holds a token of that name: for those who come without a browser."""

    code: str
    name: str
    password: str
    full_name: str = ""
    email: str = ""
    token_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """With `token_name`, the answer holds a token of that name: for those who come without a browser."""

    code: str
    name: str
    password: str
    full_name: str = ""
    email: str = ""
    token_name: str = ""


@dataclass(frozen=True, kw_only=True)
class NewAccount:
    """`token` is shown this once, if one was asked for."""

    user: User
    token: str = ""


@dataclass(frozen=True, kw_only=True)
class NewPassword:
    code: str
    password: str


@dataclass(frozen=True, kw_only=True)
class NewInvitation:
    """`name` is a suggestion. `role` is the one in `project`: owner, member or viewer."""

    name: str = ""
    email: str = ""
    project: str = ""
    role: str = ""
    is_admin: bool = False


@dataclass(frozen=True, kw_only=True)
class InvitationList:
    invitations: list[Invitation]


@dataclass(frozen=True, kw_only=True)
class SessionList:
    sessions: list[BrowserSession]


@dataclass(frozen=True, kw_only=True)
class UserList:
    users: list[User]


@dataclass(frozen=True, kw_only=True)
class PersonList:
    people: list[Person]


@dataclass(frozen=True, kw_only=True)
class Closing:
    """`stopped`: how many of their live tasks were asked to stop."""

    user: User
    stopped: int


@dataclass(frozen=True, kw_only=True)
class AdminChange:
    is_admin: bool


@dataclass(frozen=True, kw_only=True)
class NewReset:
    """With `revoke_tokens`, their tokens die too when the code is used."""

    revoke_tokens: bool = False


@dataclass(frozen=True, kw_only=True)
class ResetCode:
    """Shown this once. The part of `url` after # never reaches a server."""

    user: str
    code: str
    url: str
    expires_at: float
