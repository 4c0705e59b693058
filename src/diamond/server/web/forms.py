"""Forms of pages: read within limits, and taken only from a page of ours in the same browser.

A signed-in user's forms hold a value made from their session's cookie (`sessions.csrf_of`); `Authenticator` compares.
Before anybody is signed in there is no such cookie: then the page sets one that means nothing but "this browser", and
the form holds a value made from that. Another site can have a browser send a form, but can read neither.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import re
import secrets
import time
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import Depends
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from diamond.core.accounts import Scope
from diamond.core.errors import DiamondError, Forbidden, InvalidInput, TooLarge
from diamond.server import auth
from diamond.server.services import audit, form_keys, known_browsers, sessions
from diamond.server.services.identity import Identity
from diamond.server.store.acting import Actor, become
from diamond.server.web.pages import LOOKED_AT, ctx_of, show

CSRF_FIELD = "csrf"
MAX_FORM_BYTES = 64 * 1024
_MAX_FIELDS = 50
_SEED_COOKIE = "diamond_form"
_SECURE_SEED_COOKIE = "__Host-diamond_form"
_BROWSER_COOKIE = "diamond_browser"
_SECURE_BROWSER_COOKIE = "__Host-diamond_browser"
_SEED = re.compile(r"[A-Za-z0-9_-]{43}")
Form = dict[str, str]


async def read_form(request: Request) -> Form:
    """The fields of a form that a browser sent. Reads the body once.

    Raises:
        InvalidInput: it is not such a form.
        TooLarge: it is larger than any form of ours.
    """
    return await read_form_of(request, MAX_FORM_BYTES)


async def read_form_of(request: Request, max_bytes: int) -> Form:
    """`read_form` for a page whose largest form is known to it."""
    known = request.scope.get("diamond.form")
    if known is not None:
        form: Form = known
        return form
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise InvalidInput(
            "the request is not a form", hint="send application/x-www-form-urlencoded, or use the API: /openapi.json"
        )
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > max_bytes:
            raise TooLarge(f"the form is larger than {max_bytes} bytes", hint="go back and shorten what you wrote")
    form = parse_form(bytes(raw))
    request.scope["diamond.form"] = form
    return form


def parse_form(raw: bytes, *, max_fields: int = _MAX_FIELDS) -> Form:
    try:
        pairs = parse_qsl(
            raw.decode("ascii"), keep_blank_values=True, max_num_fields=max_fields, encoding="utf-8", errors="strict"
        )
    except ValueError:  # covers UnicodeError
        raise InvalidInput("the form cannot be read", hint="reload the page and send it again") from None
    form = dict(pairs)
    if len(form) != len(pairs):
        raise InvalidInput("the form gives a field twice", hint="reload the page and send it again")
    if any("\x00" in value for value in form.values()):
        raise InvalidInput("the form holds a NUL character", hint="leave it out")
    return form


async def _open_form(request: Request) -> Form:
    """A form of somebody who need not be signed in. Raises Forbidden when no page of ours made it for this browser."""
    form = await read_form(request)
    auth.check_same_origin(request)
    expected = _token(_seed(request))
    if not expected or not hmac.compare_digest(form.get(CSRF_FIELD, "").encode(), expected.encode()):
        raise Forbidden(
            "this form was not made for this browser",
            hint="go back, reload the page and send it again; the browser must accept cookies from this site",
        )
    become(Actor(name="", address=auth.client_address(request)))
    return form


async def _visitor(request: Request) -> Identity:
    """Whoever looks at their own things (GET), or changes them by a form of their session."""
    if request.method not in auth.SAFE_METHODS:
        form = await read_form(request)
        request.scope[auth.OF_FORM] = form.get(CSRF_FIELD, "")
    request.scope[LOOKED_AT] = time.time()
    identity: Identity = await request.app.state.runtime.authenticator.identify(request)
    auth.require_user(identity, Scope.READ if request.method in auth.SAFE_METHODS else Scope.ADMIN)
    become(identity.actor(auth.client_address(request)))
    return identity


async def _administrator(request: Request) -> Identity:
    """A visitor who administers this installation; that somebody else tried is noted, as the API notes it."""
    identity = await _visitor(request)
    try:
        auth.require_administrator(identity)
    except Forbidden as refusal:
        path = getattr(request.scope.get("route"), "path", "unknown")
        why = {"method": request.method, "path": path, "why": refusal.message}
        note = functools.partial(audit.refuse, ctx_of(request), "access.refused", identity.user_id or "", **why)
        await run_in_threadpool(note)
        raise
    return identity


OpenForm = Annotated[Form, Depends(_open_form)]
Visitor = Annotated[Identity, Depends(_visitor)]
Administrator = Annotated[Identity, Depends(_administrator)]
# After `Visitor` among a route's parameters: who is asking comes first.
Fields = Annotated[Form, Depends(read_form)]


def show_open(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A page with forms for somebody who need not be signed in."""
    seed = _seed(request)
    fresh = seed or secrets.token_urlsafe(32)
    response = show(request, template, status=status, csrf=_token(fresh), **values)
    if not seed:
        _set_cookie(request, response, _SECURE_SEED_COOKIE if auth.is_secure(request) else _SEED_COOKIE, fresh)
    return response


def _seed(request: Request) -> str:
    found = request.cookies.get(_SECURE_SEED_COOKIE if auth.is_secure(request) else _SEED_COOKIE, "")
    return found if _SEED.fullmatch(found) else ""


def _token(seed: str) -> str:
    return hmac.new(seed.encode(), b"diamond form", hashlib.sha256).hexdigest() if seed else ""


def set_session(request: Request, response: Response, cookie: str) -> None:
    """Sign this browser in."""
    _set_cookie(request, response, _session_cookie(request), cookie, max_age=int(sessions.LIFETIME_S))


def drop_session(request: Request, response: Response) -> None:
    _set_cookie(request, response, _session_cookie(request), "", max_age=0)


def known_browser(request: Request) -> str:
    """What tells this browser from others; a new value, to be given with `remember_browser`, where it has none."""
    given = request.cookies.get(_browser_cookie(request), "")
    return given if known_browsers.is_value(given) else known_browsers.new_value()


def remember_browser(request: Request, response: Response, value: str) -> None:
    """Somebody signed in here with a password: strangers who guess at it shall not keep them out."""
    max_age = int(known_browsers.LIFETIME_S)
    _set_cookie(request, response, _browser_cookie(request), value, max_age=max_age)


def _browser_cookie(request: Request) -> str:
    return _SECURE_BROWSER_COOKIE if auth.is_secure(request) else _BROWSER_COOKIE


def _session_cookie(request: Request) -> str:
    return auth.SECURE_COOKIE if auth.is_secure(request) else auth.COOKIE


def _set_cookie(request: Request, response: Response, name: str, value: str, *, max_age: int | None = None) -> None:
    """Scripts cannot read it; it comes along when somebody follows a link to us, and with no other site's form."""
    response.set_cookie(
        name, value, max_age=max_age, path="/", httponly=True, samesite="lax", secure=auth.is_secure(request)
    )


def once_of(form: Form) -> str:
    """What tells this form from every other, for `form_keys`: its page's key, and what was filled in there. "": none.

    Somebody who goes back to the page and writes something else wants something else.
    """
    page = form.get(form_keys.FIELD, "")
    if not page or len(page) > 60 or not (page.isascii() and page.isalnum()):
        return ""
    rest = sorted((name, text) for name, text in form.items() if name != CSRF_FIELD)
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def unless_done(error: DiamondError, form: Form) -> Form | None:
    """What was typed, to be sent again; not where it was done already, and the page offers to do something new."""
    return None if error.field == form_keys.FIELD else form


class _Typed(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


def typed(form: Form | None) -> Form:
    """For a template: what was typed, and "" for what was not."""
    return _Typed(form or {})


def twice(form: Form, field: str = "password") -> str:
    """A new password, which the form asks for two times."""
    if form.get(field, "") != form.get("again", ""):
        raise InvalidInput("the two passwords differ", hint="write the same one in both fields", field="again")
    return form.get(field, "")


def by_field(error: DiamondError, fields: tuple[str, ...]) -> dict[str, Any]:
    """What a page needs to show an error: beside the field it is about, or at the top."""
    if error.field in fields:
        return {"errors": {error.field: error}}
    return {"problem": error}
