"""Single values of identity.toml: each function takes what the file says and answers what is meant.

All raise ValueError for what cannot be meant, in words that fit behind the name of the field.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from diamond.core.addresses import is_public

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_RESERVED_NAMES = ("password", "loopback")  # what sessions say of other ways to sign in
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def flag(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ValueError("must be true or false")
    return raw


def text(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip() or len(raw) > 1000 or not raw.isprintable():
        raise ValueError("must be text in one line")
    return raw.strip()


def seconds(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0.1 <= raw <= 60:
        raise ValueError("must be a number of seconds, 0.1 to 60")
    return float(raw)


def provider_name(raw: object) -> str:
    if not isinstance(raw, str) or not _NAME.fullmatch(raw) or raw in _RESERVED_NAMES:
        raise ValueError(
            "must be 1 to 31 small letters, digits or dashes: it is part of the address people come back to"
        )
    return raw


def kind(raw: object) -> str:
    if raw not in ("oidc", "github"):
        raise ValueError('must be "oidc" or "github"')
    return str(raw)


def prompt(raw: object) -> str:
    if raw not in ("", "login", "select_account", "consent"):
        raise ValueError('must be "login", "select_account", "consent" or empty')
    return str(raw)


def words(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, str) and item.strip() for item in raw):
        raise ValueError('must be a list of texts, such as ["one", "two"]')
    return tuple(item.strip() for item in raw)


def domains(raw: object) -> tuple[str, ...]:
    found = tuple(item.lower() for item in words(raw))
    for domain in found:
        if not re.fullmatch(r"(\*\.)?[a-z0-9-]+(\.[a-z0-9-]+)+", domain):
            raise ValueError(
                f"{domain[:60]!r} is not a domain such as example.org, or *.example.org for those below it"
            )
    return found


def emails(raw: object) -> tuple[str, ...]:
    found = tuple(item.lower() for item in words(raw))
    for email in found:
        if not re.fullmatch(r"[^@\s]+@[^@\s]+", email):
            raise ValueError(f"{email[:60]!r} is not an address such as alice@example.org")
    return found


def is_loopback(url: str) -> bool:
    return (urlsplit(url).hostname or "") in _LOOPBACK


def is_inside(url: str) -> bool:
    """Whether the address names this machine or its network, as far as one sees without resolving it."""
    return is_loopback(url) or not is_public(urlsplit(url).hostname or "")


def check_address(url: object) -> str:
    """An address that may be asked: https, or a plain one on this machine.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if not isinstance(url, str) or len(url) > 2000 or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("is not an address")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError("is not an address") from None
    if not parts.hostname or parts.username is not None or parts.fragment:
        raise ValueError("is not an address such as https://login.example.org")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(url)):
        raise ValueError("must begin with https://, as what it answers is believed")
    return url


def exact_address(raw: object) -> str:
    """As it stands: issuers are compared letter by letter, a slash at the end included."""
    url = check_address(raw)
    if urlsplit(url).query:
        raise ValueError("must have no ?")
    return url


def address(raw: object) -> str:
    return exact_address(raw).rstrip("/")
