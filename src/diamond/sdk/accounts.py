"""People seen from a client: one's own account and browsers; for administrators, everybody's accounts."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from diamond.core.accounts import BrowserSession, Invitation, Person, SignInMethods, User
from diamond.core.codec import decode
from diamond.sdk.transport import API, Transport


@dataclass(frozen=True, kw_only=True)
class Closing:
    """`stopped`: how many of the user's live tasks were asked to stop."""

    user: User
    stopped: int


@dataclass(frozen=True, kw_only=True)
class ResetCode:
    """A code for a new password. It is shown this once; give it to that user alone."""

    user: str
    code: str
    url: str
    expires_at: float


class Accounts:
    """Reached as `Client.accounts`. Unless it says otherwise, a call that changes something needs the scope `admin`;
    what concerns other people is for administrators (Forbidden for everybody else)."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def sign_in_methods(self) -> SignInMethods:
        """How one signs in at this server; needs no token."""
        return decode(SignInMethods, self._transport.json("GET", f"{API}/sign-in-methods"))

    def me(self) -> User:
        """Whose token this is. Raises Unauthenticated for a bad one."""
        return decode(User, self._transport.json("GET", f"{API}/me"))

    def change(self, *, full_name: str | None = None, email: str | None = None) -> User:
        """Change what you say of yourself; None: as it is."""
        given = {"full_name": full_name, "email": email}
        body = {key: value for key, value in given.items() if value is not None}
        return decode(User, self._transport.json("PATCH", f"{API}/me", body=body, repeatable=True))

    def people(self) -> list[Person]:
        """Everybody with whom you share a project, by name."""
        return [decode(Person, raw) for raw in self._transport.json("GET", f"{API}/people")["people"]]

    def sessions(self) -> list[BrowserSession]:
        """Browsers that are signed in as you, newest first."""
        answer = self._transport.json("GET", f"{API}/me/sessions")
        return [decode(BrowserSession, raw) for raw in answer["sessions"]]

    def end_session(self, session_id: str) -> None:
        """Sign a browser out; what it follows ends too. May be repeated.

        Raises:
            NotFound: you have no such session.
        """
        self._transport.request("DELETE", f"{API}/me/sessions/{quote(session_id, safe='')}", repeatable=True)

    def unlink(self, identity_id: str) -> None:
        """An identity of yours (`me` lists them) no longer signs you in; your browsers are signed out.

        Raises:
            NotFound: none of that id is linked to you.
            Conflict: it is your last way to sign in.
        """
        self._transport.request("DELETE", f"{API}/me/identities/{quote(identity_id, safe='')}")

    def users(self) -> list[User]:
        """Everybody with an account, closed ones too, by name."""
        return [decode(User, raw) for raw in self._transport.json("GET", f"{API}/users")["users"]]

    def user(self, name: str) -> User:
        """One account. Raises NotFound."""
        return decode(User, self._transport.json("GET", _path(name)))

    def disable(self, name: str) -> Closing:
        """Close an account: sessions end, tokens die, live tasks are stopped. What it owns stays. May be repeated.

        Raises:
            NotFound: there is no such user.
            Conflict: it is the last administrator's.
        """
        return decode(Closing, self._transport.json("POST", f"{_path(name)}/disable", repeatable=True))

    def enable(self, name: str) -> User:
        """Open a closed account; sessions and tokens it had stay dead. May be repeated."""
        return decode(User, self._transport.json("POST", f"{_path(name)}/enable", repeatable=True))

    def set_admin(self, name: str, is_admin: bool = True) -> User:
        """Make somebody an administrator, or an ordinary user again. May be repeated.

        Raises:
            NotFound: there is no such user.
            Conflict: nobody would be left.
        """
        body = {"is_admin": is_admin}
        return decode(User, self._transport.json("POST", f"{_path(name)}/admin", body=body, repeatable=True))

    def reset(self, name: str, *, revoke_tokens: bool = False) -> ResetCode:
        """A code with which a user sets a new password, once, within a day; earlier ones are void.

        Args:
            revoke_tokens: when it is used, their tokens die as well as their sessions.
        """
        body = {"revoke_tokens": revoke_tokens}
        return decode(ResetCode, self._transport.json("POST", f"{_path(name)}/reset", body=body))

    def invite(
        self, *, name: str = "", email: str = "", project: str = "", role: str = "", is_admin: bool = False
    ) -> Invitation:
        """A code for a new account, valid for a week, with the address to open. It is shown this once.

        Args:
            name: what they could be called; they choose.
            project: they join it, as `role` (owner, member or viewer). Its owners may invite into it too.
            is_admin: they will be an administrator of the installation.

        Raises:
            Forbidden: you may not invite there.
            NotFound: there is no such project.
            Conflict: the server has one user only.
        """
        body = {"name": name, "email": email, "project": project, "role": role, "is_admin": is_admin}
        return decode(Invitation, self._transport.json("POST", f"{API}/invitations", body=body))

    def invitations(self) -> list[Invitation]:
        """Open ones, newest first: all for an administrator, else yours and those into projects you own."""
        answer = self._transport.json("GET", f"{API}/invitations")
        return [decode(Invitation, raw) for raw in answer["invitations"]]

    def withdraw(self, invitation_id: str) -> None:
        """Make an invitation's code useless. Raises NotFound."""
        self._transport.request("DELETE", f"{API}/invitations/{quote(invitation_id, safe='')}")


def _path(name: str) -> str:
    return f"{API}/users/{quote(name, safe='')}"
