"""Passwords of local accounts: what may be one, and its argon2id hash. Never call `hashed` or `matches` inside a
database transaction: each takes a noticeable part of a second, on purpose."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from pwdlib import PasswordHash

from diamond.core.accounts import MAX_PASSWORD, MIN_PASSWORD
from diamond.core.errors import InvalidInput, Unavailable

# Each hash in the making holds 64 MiB: a flood of sign-ins must not take the machine's memory.
_AT_ONCE = 4
_PATIENCE_S = 10.0
_slots = threading.BoundedSemaphore(_AT_ONCE)
_waiting = threading.BoundedSemaphore(4 * _AT_ONCE)
_FEW_DIFFERENT = 5  # characters; fewer are a pattern
_TRIVIAL = (
    "password", "passwort", "passphrase", "letmein", "welcome", "changeme", "qwertyuiop", "qwertzuiop", "administrator",
    "iloveyou", "123456789012", "1234567890", "987654321", "abcdefghijkl", "diamond", "secret", "trustno1",
)  # fmt: skip


@cache
def _hasher() -> PasswordHash:
    return PasswordHash.recommended()


@cache
def _nobodys() -> str:
    """A hash no password has: checked where there is none, so that nobody can tell by the time it takes."""
    return _hasher().hash(secrets.token_urlsafe(32))


@contextmanager
def _slot() -> Iterator[None]:
    # Whoever waits holds one of the threads that answer everybody else: few may.
    if not _waiting.acquire(blocking=False):
        raise _busy()
    try:
        if not _slots.acquire(timeout=_PATIENCE_S):
            raise _busy()
    finally:
        _waiting.release()
    try:
        yield
    finally:
        _slots.release()


def _busy() -> Unavailable:
    return Unavailable("too many people sign in at this moment", hint="try again in a few seconds")


def check(password: str, name: str, *, field: str = "password") -> None:
    """Raises InvalidInput, saying why this cannot be the password of the user `name`."""
    if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
        raise InvalidInput(
            f"must be {MIN_PASSWORD} to {MAX_PASSWORD} characters long, and this is {len(password)}",
            hint="four unrelated words are easy to remember and hard to guess",
            field=field,
        )
    plain = "".join(char for char in password.lower() if char.isalnum())
    own = "".join(char for char in name.lower() if char.isalnum())
    if _is_made_of(plain, own):
        raise InvalidInput("must not be made of your user name", hint="choose something unrelated to you", field=field)
    if len(set(password.lower())) < _FEW_DIFFERENT or any(_is_made_of(plain, word) for word in _TRIVIAL):
        raise InvalidInput(
            "is among the first that somebody would guess", hint="choose four unrelated words", field=field
        )


def _is_made_of(plain: str, word: str) -> bool:
    """Whether it is that word, once or more, perhaps with digits around it."""
    return bool(word) and any(text and not text.replace(word, "") for text in (plain, plain.strip("0123456789")))


def hashed(password: str) -> str:
    with _slot():
        return _hasher().hash(password)


def matches(password: str, known: str | None) -> tuple[bool, str | None]:
    """Whether it is the password with this hash (None: of nobody, which takes as long); and a better hash, if due."""
    with _slot():
        nobodys = _nobodys()
        right, better = _hasher().verify_and_update(password[:MAX_PASSWORD], known or nobodys)
    if known is None or len(password) > MAX_PASSWORD:
        return False, None
    return right, better
