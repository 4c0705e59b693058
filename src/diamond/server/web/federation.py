"""Signing in with an identity provider: to it, and back. Also linking identities to an account, and unlinking them.

The browser keeps a key of its own in a cookie while it is on its way. What comes back is worth nothing without it, so
an address somebody was lured to cannot sign them in as somebody else, and one that was stolen signs nobody in.
"""

from __future__ import annotations

import re
import secrets

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from diamond.core.errors import InvalidInput, Unauthenticated
from diamond.server import auth
from diamond.server.hosts import base_url
from diamond.server.provider_link import Attempt, Provider, Refused
from diamond.server.services import federation
from diamond.server.services.federation import Ticket
from diamond.server.store.acting import Actor, become
from diamond.server.web.forms import OpenForm, Visitor, set_session
from diamond.server.web.pages import HOME_PAGE, ctx_of, page_router, safe_next, show, to

router = page_router()
_COOKIE = "diamond_provider"
_SECURE_COOKIE = "__Host-diamond_provider"
# Chance, and behind a dot the invitation that is to be used.
_KEY = re.compile(r"[A-Za-z0-9_-]{43}(\.[A-Za-z0-9_-]{1,100})?")
_MAX_PARAMETER = 4096


@router.get("/sign-in/{name}")
async def begin(request: Request, name: str) -> Response:
    become(Actor(name="", address=auth.client_address(request)))
    ticket = Ticket(next_path=safe_next(request.query_params.get("next", "")))
    return await _begin(request, ctx_of(request).identity.get(name), ticket, by_link=True)


@router.post("/sign-in/{name}")
async def begin_by_form(request: Request, form: OpenForm, name: str) -> Response:
    """The same from a form, which may hold an invitation: no address should."""
    invitation = form.get("code", "").strip()
    if invitation:
        # Known to be wrong now, rather than after signing in elsewhere.
        await run_in_threadpool(_check_invitation, request, invitation)
    ticket = Ticket(next_path=safe_next(form.get("next", "")))
    return await _begin(request, ctx_of(request).identity.get(name), ticket, invitation=invitation)


def _check_invitation(request: Request, code: str) -> None:
    if not _KEY.fullmatch(f"{'x' * 43}.{code}"):
        raise InvalidInput("this is not an invitation code", hint="copy all of it, and nothing else", field="code")
    federation.check_invitation(ctx_of(request), code, address=auth.client_address(request))


@router.post("/settings/identities/{name}/link")
async def link(request: Request, who: Visitor, name: str) -> Response:
    if not who.session_id:
        raise Unauthenticated("only a browser that is signed in can link an identity", hint="sign in at /sign-in")
    ticket = Ticket(next_path="/settings?done=linked", user_id=who.user_id, session_id=who.session_id)
    return await _begin(request, ctx_of(request).identity.get(name), ticket)


@router.post("/settings/identities/{identity_id}/unlink")
def unlink(request: Request, who: Visitor, identity_id: str) -> Response:
    assert who.user_id is not None
    federation.unlink(ctx_of(request), who.user_id, identity_id, keep_session=who.session_id)
    return to("/settings?done=unlinked")


async def _begin(
    request: Request, provider: Provider, ticket: Ticket, *, invitation: str = "", by_link: bool = False
) -> Response:
    """Send the browser to the provider."""
    config = provider.config
    key = secrets.token_urlsafe(32) + (f".{invitation}" if invitation else "")
    attempt = Attempt(state=secrets.token_urlsafe(32), key=key, redirect_uri=_redirect_uri(request, config.name))
    federation.check_rate(ctx_of(request), address=auth.client_address(request))
    try:
        place = await provider.address(attempt, linking=ticket.user_id is not None)
    except Refused as refused:
        return await _refuse(request, config.name, refused)
    await run_in_threadpool(federation.begin, ctx_of(request), config.name, attempt.state, key, ticket)
    # Browsers hold a form to our own pages, wherever its answer leads: a page in between leads on instead.
    response: Response = (
        RedirectResponse(place, 303) if by_link else show(request, "to_provider.html", place=place, title=config.title)
    )
    _keep(request, response, key)
    return response


@router.get("/sign-in/{name}/callback")
async def come_back(request: Request, name: str) -> Response:
    become(Actor(name="", address=auth.client_address(request)))
    provider = ctx_of(request).identity.get(name)
    try:
        response = await _come_back(request, provider)
    except Refused as refused:
        response = await _refuse(request, name, refused)
    _keep(request, response, "")
    return response


async def _come_back(request: Request, provider: Provider) -> Response:
    ctx, config, address = ctx_of(request), provider.config, auth.client_address(request)
    given = _parameters(request)
    key = request.cookies.get(_cookie_name(request), "")
    key = key if _KEY.fullmatch(key) else ""
    state = given.get("state", "")
    ticket = await run_in_threadpool(federation.take, ctx, config.name, state, key, address=address)
    await provider.check_issuer(given.get("iss"))
    if "error" in given:
        raise _declined(config.title, given["error"])
    if not given.get("code"):
        raise Refused("code", f"{config.title} sent you back without saying who you are.")
    attempt = Attempt(state=state, key=key, redirect_uri=_redirect_uri(request, config.name))
    person = await provider.person(attempt, given["code"])
    if ticket.user_id is not None:
        await _check_same_session(request, ticket)
        await run_in_threadpool(federation.link, ctx, ticket.user_id, config, person)
        return to(ticket.next_path)
    cookie = await run_in_threadpool(
        federation.come_in,
        ctx,
        config,
        person,
        address=address,
        browser=request.headers.get("user-agent", ""),
        replaces=auth.session_cookie(request),
        invitation=key.partition(".")[2],
    )
    response = to(ticket.next_path)
    set_session(request, response, cookie)
    return response


async def _check_same_session(request: Request, ticket: Ticket) -> None:
    """Whoever began to link an identity must still be the one who is signed in."""
    try:
        who = await request.app.state.runtime.authenticator.identify(request)
    except Unauthenticated:
        who = None
    if who is None or who.session_id != ticket.session_id or who.user_id != ticket.user_id:
        raise Refused(
            "session", "You are no longer signed in as you were; nothing was linked.", hint="Sign in and begin again."
        )
    become(who.actor(auth.client_address(request)))


def _parameters(request: Request) -> dict[str, str]:
    """Of the address the provider sent the browser to; none, where one that is there twice could mean either."""
    pairs = request.query_params.multi_items()
    given = dict(pairs)
    known = ("state", "code", "iss", "error")
    if any(len([name for name, _ in pairs if name == key]) > 1 for key in known) or any(
        len(given.get(key, "")) > _MAX_PARAMETER or "\x00" in given.get(key, "") for key in known
    ):
        return {}
    return given


def _declined(title: str, error: str) -> Refused:
    if error == "access_denied":
        return Refused("declined", f"You did not let {title} say who you are.", hint="Sign in again, or another way.")
    shown = error[:60] if re.fullmatch(r"[a-z0-9_.-]+", error) else "an error it does not name"
    return Refused("error", f"{title} did not sign you in: {shown}.")


async def _refuse(request: Request, provider: str, refused: Refused) -> Response:
    """A page that says why, and a line in the audit log."""
    address = auth.client_address(request)
    await run_in_threadpool(federation.refuse, ctx_of(request), provider, refused, address=address)
    again = HOME_PAGE if auth.session_cookie(request) else "/sign-in"
    return show(request, "problem.html", status=refused.status, problem=refused, again=again)


def _redirect_uri(request: Request, name: str) -> str:
    return f"{base_url(request)}/sign-in/{name}/callback"


def _cookie_name(request: Request) -> str:
    return _SECURE_COOKIE if auth.is_secure(request) else _COOKIE


def _keep(request: Request, response: Response, key: str) -> None:
    """Until the browser is back; `lax`, so that it comes along when the provider sends the browser here."""
    response.set_cookie(
        _cookie_name(request), key, max_age=int(federation.VALID_S) if key else 0, path="/", httponly=True,
        samesite="lax", secure=auth.is_secure(request),
    )  # fmt: skip
