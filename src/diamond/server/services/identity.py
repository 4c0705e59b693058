"""Who is asking, as a credential proved it."""

from __future__ import annotations

from dataclasses import dataclass

from diamond.core.accounts import ALL_SCOPES, Scope
from diamond.server.store.acting import Actor


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A user, or the agent of an endpoint; exactly one of the two ids is set.

    Attributes:
        name: of the user.
        scopes: what the credential may be used for, with all they imply.
        via: id of the token or session.
        session_id: set when a browser's cookie was the credential.
        csrf: what a form of that session must hold.
        until: when the credential expires, if it does.
    """

    user_id: str | None = None
    endpoint_id: str | None = None
    name: str = ""
    is_admin: bool = False
    scopes: frozenset[Scope] = ALL_SCOPES
    via: str = ""
    session_id: str = ""
    csrf: str = ""
    until: float | None = None

    def actor(self, address: str) -> Actor:
        name = self.name or (f"agent of {self.endpoint_id}" if self.endpoint_id else "")
        return Actor(user_id=self.user_id, name=name, via=self.via, address=address)
