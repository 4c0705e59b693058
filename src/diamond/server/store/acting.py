"""Who a request acts for, known to everything that happens in it: the audit log asks here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Actor:
    """Who does something, and from where. Without any, the server acts by itself."""

    user_id: str | None = None
    name: str = "diamond"
    via: str = ""
    address: str = ""


_SERVER = Actor()
_current: ContextVar[Actor] = ContextVar("diamond_actor", default=_SERVER)


def current() -> Actor:
    return _current.get()


def become(actor: Actor) -> None:
    """For the rest of this request."""
    _current.set(actor)


@contextmanager
def acting(actor: Actor) -> Iterator[None]:
    token = _current.set(actor)
    try:
        yield
    finally:
        _current.reset(token)
