"""What is said with identity providers of any kind, and what comes of it: somebody a provider vouches for.

Owns the network: every answer has a limit of time and size, no redirect is followed, nothing but HTTPS is spoken
beyond this machine. Must not know accounts. `oidc` and `github` are the two kinds.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
from authlib.oauth2.auth import ClientAuth  # type: ignore[import-untyped]
from authlib.oauth2.rfc6749.parameters import (  # type: ignore[import-untyped]
    prepare_grant_uri,
    prepare_token_request,
)
from authlib.oauth2.rfc7636 import create_s256_code_challenge  # type: ignore[import-untyped]

from diamond.server.identity_file import ProviderConfig
from diamond.server.identity_values import is_loopback

log = logging.getLogger("diamond.server.providers")
MAX_ANSWER_BYTES = 256 * 1024
MAX_TEXT = 300


class Refused(Exception):
    """Nobody is signed in, and a page says why.

    Attributes:
        why: for the audit log: a word or two, nothing secret.
    """

    status = 403

    def __init__(
        self, why: str, message: str, *, hint: str = "Sign in again; if it stays, ask an administrator."
    ) -> None:
        super().__init__(message)
        self.why, self.message, self.hint = why, message, hint


class ProviderTrouble(Refused):
    """The provider does not answer as it should; nothing is known of whoever wanted to sign in."""

    status = 502


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody a provider vouches for. Only `issuer` and `subject` say who it is.

    Attributes:
        email: empty unless the provider says it has verified it.
        domains: that the provider vouches for.
        suggestions: for a user name, best first.
    """

    issuer: str
    subject: str
    label: str = ""
    full_name: str = ""
    email: str = ""
    domains: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    suggestions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One sign-in under way. `key` is known to one browser alone, which keeps it in a cookie; what must not be
    guessed or stolen on the way is made from it, so that nothing of it has to be stored here.
    """

    state: str
    key: str
    redirect_uri: str

    @property
    def verifier(self) -> str:
        return self._made("verifier")

    @property
    def nonce(self) -> str:
        return self._made("nonce")

    def _made(self, purpose: str) -> str:
        made = hmac.new(self.key.encode(), f"diamond {purpose}:{self.state}".encode(), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


class Provider(Protocol):
    """What signing in needs of a provider, of whichever kind."""

    config: ProviderConfig

    async def address(self, attempt: Attempt, *, linking: bool = False) -> str:
        """Where to send the browser."""
        ...

    async def check_issuer(self, given: str | None) -> None:
        """Raises Refused when the answer came from another provider (RFC 9207)."""
        ...

    async def person(self, attempt: Attempt, code: str) -> Person:
        """Who came back with this code.

        Raises:
            Refused: something about it is not right.
            ProviderTrouble: the provider does not answer.
        """
        ...


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def ask(
    config: ProviderConfig, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: str | None = None
) -> tuple[int, Any]:
    """Status and JSON of one answer. What is not JSON is None."""
    host = urlsplit(url).hostname
    sent = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "diamond", **(headers or {})}
    if body is not None:
        sent["Content-Type"] = "application/x-www-form-urlencoded"
    try:
        async with (
            asyncio.timeout(config.timeout_s),
            httpx.AsyncClient(
                verify=_tls(), timeout=config.timeout_s, follow_redirects=False, trust_env=not is_loopback(url)
            ) as client,
            client.stream(method, url, headers=sent, content=body) as answer,
        ):
            # An encoding nobody asked for could unpack to any size: raw bytes are counted, and left packed.
            data = b""
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise trouble(config, f"an answer of {host} is larger than {MAX_ANSWER_BYTES} bytes")
    except TimeoutError:
        raise trouble(config, f"{host} did not answer within {config.timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise trouble(config, f"{host} cannot be reached: {type(error).__name__}") from None
    if 300 <= answer.status_code < 400:
        raise trouble(config, f"{host} answers with a redirect, which is not followed")
    try:
        return answer.status_code, json.loads(data)
    except (ValueError, RecursionError):
        return answer.status_code, None


async def get(config: ProviderConfig, url: str, token: str = "", **headers: str) -> Any:
    if token:
        headers["Authorization"] = f"Bearer {token}"
    status, found = await ask(config, "GET", url, headers=headers)
    if status != 200 or found is None:
        raise trouble(config, f"{urlsplit(url).hostname} answered {status} where it should have said something")
    return found


def trouble(config: ProviderConfig, what: str) -> ProviderTrouble:
    log.warning("provider %s: %s", config.name, what)
    return ProviderTrouble(
        "provider",
        f"{config.title} cannot sign anybody in at the moment",  # names of hosts are for the operator
        hint="Try again in a moment; if it stays, tell an administrator.",
    )


async def exchange(config: ProviderConfig, url: str, method: str, attempt: Attempt, code: str) -> dict[str, Any]:
    """The tokens for a code, which works once, for this client, with the verifier that only we know."""
    body = prepare_token_request(
        "authorization_code", code=code, redirect_uri=attempt.redirect_uri, code_verifier=attempt.verifier
    )
    auth = ClientAuth(config.client_id, config.client_secret, method)
    url, headers, body = auth.prepare("POST", url, {}, body)
    status, tokens = await ask(config, "POST", url, headers=headers, body=body)
    if status >= 500 or not isinstance(tokens, dict):
        raise trouble(config, f"its token endpoint answered {status}")
    if status != 200 or "error" in tokens:
        error = plain(tokens.get("error")) or f"HTTP {status}"
        log.warning("provider %s refused a code: %s", config.name, error)
        raise Refused("code", f"{config.title} did not accept the code it had given: {error}")
    if not isinstance(tokens.get("access_token"), str) or not tokens["access_token"]:
        raise Refused("token", f"{config.title} gave no access token")
    if str(tokens.get("token_type", "")).lower() != "bearer":
        raise Refused("token", f"{config.title} gave a token of another kind than Bearer")
    return tokens


def authorize_address(config: ProviderConfig, place: str, attempt: Attempt, **extra: str) -> str:
    """Where to send the browser, with a challenge that only we can meet (PKCE)."""
    url: str = prepare_grant_uri(
        place,
        client_id=config.client_id,
        response_type="code",
        redirect_uri=attempt.redirect_uri,
        scope=list(config.scopes),
        state=attempt.state,
        code_challenge=create_s256_code_challenge(attempt.verifier),
        code_challenge_method="S256",
        **extra,
    )
    return url


def plain(value: object) -> str:
    """Text as it may be shown and kept: one line, not long, nothing that is no letter."""
    if not isinstance(value, str):
        return ""
    return "".join(letter for letter in value[:MAX_TEXT] if letter.isprintable()).strip()


def email_of(value: object) -> str:
    text = plain(value).lower()
    name, at, domain = text.rpartition("@")
    return text if at and name and domain and "@" not in name and not any(letter.isspace() for letter in text) else ""
