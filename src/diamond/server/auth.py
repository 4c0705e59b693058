"""Who is asking: from a bearer token, or a browser's cookie, to an Identity, looked up now and then per credential.

Must not accept a token from anywhere but the header: URLs end up in histories, proxies' logs and referrers.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from diamond.core.accounts import SCOPE_FIELD, Scope
from diamond.core.errors import Forbidden, RateLimited, Unauthenticated
from diamond.server import forms_token
from diamond.server.services import sessions, tokens
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.services.throttling import network_of

CACHE_S = 30.0
CACHE_UNTOLD_S = 5.0  # while nobody would tell us that a credential died
COOKIE = "diamond_session"
SECURE_COOKIE = "__Host-diamond_session"
CSRF_HEADER = "Diamond-CSRF"
NO_CREDENTIAL = "this needs a token"
OF_FORM = "diamond.csrf"  # in a request's scope: what the form of a page gave
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_MAX_CACHED = 1000
_MAX_TOKEN_CHARS = 512
MAX_FAILURES = 20
_FAILURES_WITHIN_S = 60.0
_MAX_ADDRESSES = 10_000


class Authenticator:
    """Looks credentials up, and remembers the good ones for `CACHE_S` seconds, or until somebody's dies: whichever
    process ended it says so to all (topic "credentials"). While that cannot be heard, for `CACHE_UNTOLD_S`."""

    def __init__(
        self,
        ctx: Context,
        *,
        clock: Callable[[], float] = time.monotonic,
        is_told: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ctx = ctx
        self._is_told = is_told
        self._clock = clock
        self._known: dict[bytes, tuple[float, Identity]] = {}  # since when, and who

    async def identify(self, request: Request) -> Identity:
        """The identity behind a request.

        Raises:
            Unauthenticated: there is none, or its credential is not valid.
            Forbidden: a browser's cookie came with a request that no page of ours made.
        """
        credential = credential_of(request)
        key = hashlib.sha256(repr(credential).encode()).digest()
        now = self._clock()
        found = self._known.get(key)
        if found and self._holds(*found, now):
            return self._checked(request, found[1])
        if len(self._known) >= _MAX_CACHED:
            self._known = {k: v for k, v in self._known.items() if self._holds(*v, now)}
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
        known = self._known  # if somebody's dies while we look, this one is thrown away
        identity = await self._look_up(request, credential)
        known[key] = (now, identity)
        return self._checked(request, identity)

    def _holds(self, since: float, identity: Identity, now: float) -> bool:
        within_s = CACHE_S if self._is_told() else CACHE_UNTOLD_S
        return now - since < within_s and (identity.until is None or self._ctx.clock() < identity.until)

    async def recheck(self, request: Request) -> None:
        """Raises Unauthenticated if the credential has died, whatever is remembered of it."""
        await self._look_up(request, credential_of(request))

    def forget(self) -> None:
        """Somebody's credential died: ask again about all of them, so that it is dead in this process at once."""
        self._known = {}

    async def _look_up(self, request: Request, credential: tuple[str, str]) -> Identity:
        kind, value = credential
        if kind == "cookie":
            return await run_in_threadpool(sessions.authenticate, self._ctx, value)
        return await run_in_threadpool(tokens.authenticate, self._ctx, value, client_address(request))

    @staticmethod
    def _checked(request: Request, identity: Identity) -> Identity:
        """A browser sends cookies with whatever page asks for it: a request that changes something must be ours."""
        if identity.session_id and request.method not in SAFE_METHODS:
            check_same_origin(request)
            given = request.headers.get(CSRF_HEADER, "") or request.scope.get(OF_FORM, "")
            if not hmac.compare_digest(forms_token.bare(given).encode(), identity.csrf.encode()):
                if OF_FORM in request.scope:  # a person sent it
                    raise Forbidden(
                        "this page was opened before you signed in as you are now, so what it sent was not done",
                        hint="go back, reload the page and send it again",
                    )
                raise Forbidden(
                    "this request does not come from a page of this session",
                    hint=f"reload the page and try again; scripts send the token of the page as {CSRF_HEADER}",
                )
        return identity


def credential_of(request: Request) -> tuple[str, str]:
    """("token", …) from the Authorization header, else ("cookie", …)."""
    authorization = request.headers.get("authorization")
    if authorization is None and (cookie := session_cookie(request)):
        return "cookie", cookie
    return "token", bearer_token(authorization)


def session_cookie(request: Request) -> str:
    name = SECURE_COOKIE if is_secure(request) else COOKIE
    return request.cookies.get(name, "")[:_MAX_TOKEN_CHARS]


def is_secure(request: Request) -> bool:
    """Whether the browser speaks HTTPS: to us, or to the proxy that `public_url` names."""
    settings = request.app.state.runtime.settings
    return request.url.scheme == "https" or settings.public_url.startswith("https://")


def check_same_origin(request: Request) -> None:
    """Raises Forbidden when a page from elsewhere had the browser make this request."""
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site not in (None, "same-origin", "none"):
        raise Forbidden("another site's page made this request", hint="open this page from Diamond itself")
    if origin is not None and urlsplit(origin).netloc.lower() not in _own_hosts(request):
        raise Forbidden("another site's page made this request", hint="open this page from Diamond itself")


def _own_hosts(request: Request) -> set[str]:
    public = request.app.state.runtime.settings.public_url
    return {request.headers.get("host", "").lower(), urlsplit(public).netloc.lower()} - {""}


def client_address(request: Request) -> str:
    """Where the request comes from; behind a proxy the operator trusts, as that says."""
    peer = request.client.host if request.client else ""
    trusted = request.app.state.runtime.settings.trusted_networks
    if not trusted or not is_within(peer, trusted):
        return peer
    hops = [hop.strip() for hop in ",".join(request.headers.getlist("x-forwarded-for")).split(",") if hop.strip()]
    for hop in reversed(hops):  # the last one nobody trusted vouches for
        if not is_within(hop, trusted):
            return hop[:60] if _is_address(hop) else peer
    return peer


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_within(text: str, networks: tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]) -> bool:
    return _is_address(text) and any(ipaddress.ip_address(text) in network for network in networks)


class Failures:
    """Wrong enrolment codes by network, so that nobody can try many. Kept in this process, for a minute."""

    def __init__(self) -> None:
        self._at: dict[str, deque[float]] = {}

    def check(self, address: str, now: float) -> None:
        """Raises RateLimited for an address that has failed too often lately."""
        times = self._at.get(network_of(address))
        if times and len(times) >= MAX_FAILURES and now - times[0] < _FAILURES_WITHIN_S:
            raise RateLimited(
                "too many wrong enrolment codes from this address", hint="wait a minute, then check the code"
            )

    def add(self, address: str, now: float) -> None:
        if len(self._at) >= _MAX_ADDRESSES:
            self._at = {key: times for key, times in self._at.items() if now - times[-1] < _FAILURES_WITHIN_S}
        self._at.setdefault(network_of(address), deque(maxlen=MAX_FAILURES)).append(now)


def bearer_token(authorization: str | None) -> str:
    if not authorization:
        raise Unauthenticated(
            NO_CREDENTIAL,
            hint="send the header `Authorization: Bearer <token>`; `diamond login` gets you one",
        )
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > _MAX_TOKEN_CHARS or not token.isascii():
        raise Unauthenticated(
            "the Authorization header is not `Bearer <token>`",
            hint="send the header `Authorization: Bearer <token>`; `diamond login` gets you one",
        )
    return token


def require_user(identity: Identity, scope: Scope) -> str:
    if identity.user_id is None:
        raise Forbidden(
            "this is for users, and the token belongs to an agent", hint="use a token of yours: `diamond login`"
        )
    if scope not in identity.scopes:
        raise Forbidden(
            f"this token may not be used for that: it lacks the scope `{scope}`",
            hint=f"sign in for one that may: diamond login --scopes {_with(identity.scopes, scope)}",
            field=SCOPE_FIELD,
        )
    return identity.user_id


def _with(scopes: frozenset[Scope], missing: Scope) -> str:
    """What to ask for, so that nothing that works now stops working."""
    return str(missing) if missing is Scope.ADMIN else ",".join(one for one in Scope if one in scopes | {missing})


def require_administrator(identity: Identity) -> str:
    user_id = require_user(identity, Scope.ADMIN)
    if not identity.is_admin:
        raise Forbidden("this is for administrators of this installation", hint="ask one of them")
    return user_id


def require_agent(identity: Identity) -> str:
    if identity.endpoint_id is None:
        raise Forbidden(
            "this is for agents, and the token belongs to a user",
            hint="an agent has a token of its own, from its enrolment: `diamond endpoint enroll NAME`",
        )
    return identity.endpoint_id
