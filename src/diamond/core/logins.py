"""How a terminal comes to act for somebody: it shows a code, they approve it in a browser that is signed in.

In the spirit of RFC 8628, with one difference: the terminal makes its token itself and tells the server only its
SHA-256, as agents do (`diamond.core.enrolment`). So nothing secret travels back, an answer that gets lost loses
nothing, and every question may be asked again.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from diamond.core.accounts import Scope
from diamond.core.compat import StrEnum
from diamond.core.enrolment import new_code, plain_code

VALID_S = 900.0
INTERVAL_S = 2.0
TOKEN_PREFIX = "dmdu_"  # noqa: S105 - what a user's token begins with
DEVICE_PATH = "/device"
USER_CODE_CHARS = 8
# Daily work: look, run, make one's own projects and notifications, bring clusters in. Accounts, tokens and who may do
# what are changed by whoever asks for `admin`.
DEFAULT_SCOPES = (Scope.READ, Scope.LAUNCH, Scope.AGENT)


def new_user_code() -> str:
    """``XXXX-XXXX``: 40 bits, typed once within a quarter of an hour by somebody who is signed in."""
    return new_code(USER_CODE_CHARS)


def plain_user_code(text: str) -> str:
    """As it is compared, however it was typed. Empty when it cannot be one."""
    return plain_code(text, USER_CODE_CHARS)


def new_user_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


class LoginState(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    REFUSED = "refused"
    EXPIRED = "expired"


@dataclass(frozen=True, kw_only=True)
class NewLogin:
    """Terminal -> server. POST /api/v1/logins

    Attributes:
        name: of the token, as its user will find it in lists.
        token_sha256: of the token that the terminal made and keeps.
    """

    name: str
    token_sha256: str
    scopes: tuple[Scope, ...] = DEFAULT_SCOPES


@dataclass(frozen=True, kw_only=True)
class StartedLogin:
    """`device_code` is the terminal's alone: it asks with it how things stand. `user_code` is shown."""

    device_code: str
    user_code: str
    verification_url: str
    expires_in_s: float
    interval_s: float


@dataclass(frozen=True, kw_only=True)
class LoginQuestion:
    """Terminal -> server. POST /api/v1/logins/poll. With `cancel` nobody can approve it any more."""

    device_code: str
    cancel: bool = False


@dataclass(frozen=True, kw_only=True)
class LoginAnswer:
    """How it stands. Once approved, the terminal's token works, and the rest says for whom and what."""

    state: LoginState
    user: str = ""
    token_id: str = ""
    scopes: tuple[Scope, ...] = ()
    token_expires_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Login:
    """What somebody sees before they approve it: what asks, from where, and for how much."""

    name: str
    address: str
    scopes: tuple[Scope, ...]
    created_at: float
    expires_at: float
    token_lifetime_s: float  # how long the token will work
    state: LoginState = LoginState.PENDING
