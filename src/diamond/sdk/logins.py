"""Signing in from a program without a browser: it shows a code, somebody approves it, its token begins to work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import quote

from diamond.core.accounts import Scope
from diamond.core.codec import decode
from diamond.core.enrolment import token_hash
from diamond.core.errors import Forbidden, NotFound, Unavailable
from diamond.core.logins import (
    DEFAULT_SCOPES,
    DEVICE_PATH,
    Login,
    LoginAnswer,
    LoginState,
    StartedLogin,
    new_user_token,
)
from diamond.sdk.transport import API, Transport

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0


@dataclass(frozen=True, kw_only=True)
class PendingLogin:
    """A login under way. `token` works once somebody has approved it; nobody but this program has it."""

    started: StartedLogin
    token: str

    @property
    def user_code(self) -> str:
        return self.started.user_code


class Logins:
    """Reached as `Client.logins`. `begin` and `wait` need no token; the others are for whoever approves."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def begin(self, name: str, *, scopes: Iterable[Scope | str] = DEFAULT_SCOPES) -> PendingLogin:
        """Ask for a token under this name. Show `user_code` and `url_of` to somebody who can sign in, then `wait`.

        Raises:
            RateLimited: too many wait already.
        """
        token = new_user_token()
        body = {"name": name, "token_sha256": token_hash(token), "scopes": [str(scope) for scope in scopes]}
        # Twice begun is harmless: what nobody approves is forgotten.
        answer = self._transport.json("POST", f"{API}/logins", body=body, repeatable=True)
        return PendingLogin(started=decode(StartedLogin, answer), token=token)

    def url_of(self, login: PendingLogin) -> str:
        """Where its code is entered: as the server says, if that is an address on the web at all."""
        said = login.started.verification_url
        return (
            said
            if said.startswith(("http://", "https://")) and said.isprintable()
            else self._transport.url + DEVICE_PATH
        )

    def poll(self, login: PendingLogin, *, cancel: bool = False) -> LoginAnswer:
        """How it stands. With `cancel` it is over. May be repeated."""
        body = {"device_code": login.started.device_code, "cancel": cancel}
        return decode(LoginAnswer, self._transport.json("POST", f"{API}/logins/poll", body=body, repeatable=True))

    def wait(self, login: PendingLogin, *, tell: Callable[[str], None] | None = None) -> LoginAnswer:
        """Wait until somebody has approved it. Restarts of the server are waited out.

        Args:
            tell: called with what is amiss while the server does not answer, and with nothing when it does again.

        Raises:
            Forbidden: it was refused, or nobody approved it in time.
        """
        ends_at = time.monotonic() + login.started.expires_in_s
        pause_s = min(max(login.started.interval_s, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)
        while time.monotonic() < ends_at:
            time.sleep(pause_s)
            try:
                answer = self.poll(login)
            except Unavailable as error:
                if tell:
                    tell(error.message)
                continue
            except NotFound:
                break
            if tell:
                tell("")
            if answer.state is LoginState.APPROVED:
                return answer
            if answer.state is LoginState.REFUSED:
                raise Forbidden("the login was refused", hint="if that was a mistake: diamond login")
            if answer.state is LoginState.EXPIRED:
                break
        raise Forbidden("nobody approved the login in time", hint="start again: diamond login")

    def find(self, user_code: str) -> Login:
        """What asks under this code. Raises NotFound."""
        return decode(Login, self._transport.json("GET", _path(user_code)))

    def approve(self, user_code: str) -> Login:
        """Let it act for you. May be repeated.

        Raises:
            NotFound: nothing waits under this code.
            Conflict: it was decided otherwise.
        """
        return decode(Login, self._transport.json("POST", f"{_path(user_code)}/approve", repeatable=True))

    def refuse(self, user_code: str) -> Login:
        """Tell it no. May be repeated."""
        return decode(Login, self._transport.json("POST", f"{_path(user_code)}/refuse", repeatable=True))


def _path(user_code: str) -> str:
    return f"{API}/logins/{quote(user_code, safe='')}"
