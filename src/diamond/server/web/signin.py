"""Pages to get in by: sign-in, the first administrator, invitations, new passwords, and out again.

No secret is ever part of an address that reaches a server: codes are typed, or arrive behind the ``#`` of a link, which
browsers keep to themselves, and are moved into the form by static/code.js. Everything works without that script.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import DiamondError, Forbidden, Unauthenticated
from diamond.server import auth, peers
from diamond.server.hosts import host_name, is_loopback_name
from diamond.server.services import accounts, federation, loopback, sessions
from diamond.server.web.forms import (
    Form,
    OpenForm,
    Visitor,
    drop_session,
    known_browser,
    remember_browser,
    set_session,
    show_open,
    twice,
)
from diamond.server.web.pages import HOME_PAGE, ctx_of, page_router, safe_next, settings_of, show, to

router = page_router()
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
# What a page says after a form of another did something: by name, so that no address can put words into our mouth.
_NOTICES = {
    "signed-out": "You are signed out.",
    "reset": "Your new password is set. Sign in with it.",
    "accepted": "Your account is made. Sign in.",
}


@router.api_route("/sign-in", methods=["GET", "HEAD"])
async def sign_in_page(request: Request) -> Response:
    next_path = safe_next(request.query_params.get("next", ""))
    if settings_of(request).multi_user:
        return await run_in_threadpool(
            _sign_in_form, request, next_path, notice=_NOTICES.get(request.query_params.get("done", ""), "")
        )
    if request.query_params.get("done") == "signed-out":
        # Or the browser would be signed in again at once.
        return show(request, "signed_out.html", next_path=next_path)
    if "tried" in request.query_params:
        if auth.session_cookie(request):
            return to(next_path)
        raise Forbidden("this browser keeps no cookies", hint="allow them for this site, then open /sign-in again")
    reason = await run_in_threadpool(why_not_by_itself, request)
    if reason:
        return show_open(request, "not_here.html", status=403, reason=reason, next_path=next_path)
    return await run_in_threadpool(_sign_in_by_itself, request, next_path)


def why_not_by_itself(request: Request) -> str:
    """Why this browser is not signed in without being asked anything; empty: it may be."""
    if not is_loopback_name(host_name(request.headers.get("host", ""))):
        return "it was reached by another name than localhost"
    if any(name in request.headers for name in _FORWARDED):
        return "a proxy passed the request on, so that nobody can tell where it comes from"
    if not peers.is_own(_address(request.scope.get("client")), _address(request.scope.get("server"))):
        return "the browser does not run on the same machine under the same account as the server"
    # A picture or a frame on a page elsewhere asks for pages too; nobody looks at what it gets.
    if request.headers.get("sec-fetch-dest", "document") != "document":
        return "no person asked for this page"
    return ""


def _address(pair: Any) -> tuple[str, int] | None:
    return (pair[0], pair[1]) if pair and len(pair) >= 2 and pair[1] else None


def _sign_in_by_itself(request: Request, next_path: str) -> Response:
    value = loopback.begin(ctx_of(request), **_from(request))
    # By way of here, or a browser that keeps no cookie would go round in circles.
    return _signed_in(request, value, f"/sign-in?tried&next={quote(next_path, safe='/')}")


def _sign_in_form(request: Request, next_path: str, *, status: int = 200, **values: Any) -> Response:
    ctx = ctx_of(request)
    # Also where passwords are for nobody else: an administrator without an identity comes in with one.
    offered = {**_offered(request), "local": accounts.offers_passwords(ctx)}
    values = {"name": "", "next_path": next_path, **offered, **values}
    setup = accounts.setup_needed(ctx)
    return show_open(request, "sign_in.html", status=status, setup=setup, **values)


def _offered(request: Request) -> dict[str, Any]:
    """The ways in for everybody: by the providers the operator named, and by a password."""
    ctx = ctx_of(request)
    return {"providers": federation.providers(ctx), "local": ctx.identity.local_accounts}


@router.post("/sign-in")
def sign_in(request: Request, form: OpenForm) -> Response:
    next_path = safe_next(form.get("next", ""))
    name, device = form.get("name", "").strip(), ""
    try:
        if settings_of(request).multi_user:
            _check_passwords(accounts.offers_passwords(ctx_of(request)))
            device = known_browser(request)
            value = accounts.sign_in(ctx_of(request), name, form.get("password", ""), device=device, **_from(request))
        else:
            value = loopback.begin_by_token(ctx_of(request), form.get("token", "").strip(), **_from(request))
    except DiamondError as error:
        if settings_of(request).multi_user:
            return _sign_in_form(request, next_path, status=error.status, problem=error, name=name)
        reason = why_not_by_itself(request)
        values = {"reason": reason, "next_path": next_path, "errors": {"token": error}}
        return show_open(request, "not_here.html", status=error.status, **values)
    return _signed_in(request, value, next_path, device)


@router.post("/sign-out")
def sign_out(request: Request, who: Visitor) -> Response:
    if who.session_id and who.user_id:
        sessions.end(ctx_of(request), who.user_id, who.session_id)
    response = to("/sign-in?done=signed-out")
    drop_session(request, response)
    response.headers["Clear-Site-Data"] = '"cache"'  # nobody after them finds their pages by going back
    return response


@router.api_route("/setup", methods=["GET", "HEAD"])
def setup_page(request: Request) -> Response:
    if not settings_of(request).multi_user or not accounts.setup_needed(ctx_of(request)):
        return to("/sign-in")
    return show_open(request, "setup.html", form={})


@router.post("/setup")
def setup(request: Request, form: OpenForm) -> Response:
    fields = ("code", "name", "full_name", "password", "again")
    try:
        password = twice(form)
        accounts.setup(
            ctx_of(request), form.get("code", "").strip(), name=form.get("name", "").strip(), password=password,
            full_name=form.get("full_name", "").strip(), address=auth.client_address(request),
        )  # fmt: skip
    except DiamondError as error:
        return _again(request, "setup.html", form, fields, error)
    return _first_sign_in(request, form.get("name", "").strip(), password)


@router.api_route("/invitation", methods=["GET", "HEAD"])
def invitation_page(request: Request) -> Response:
    if not settings_of(request).multi_user:
        return to("/sign-in")
    return show_open(request, "invitation.html", form={}, **_offered(request))


@router.post("/invitation")
def invitation(request: Request, form: OpenForm) -> Response:
    fields = ("code", "name", "full_name", "password", "again")
    try:
        _check_passwords(ctx_of(request).identity.local_accounts)
        password = twice(form)
        user = accounts.accept_invitation(
            ctx_of(request), form.get("code", "").strip(), name=form.get("name", "").strip(), password=password,
            full_name=form.get("full_name", "").strip(), address=auth.client_address(request),
        )  # fmt: skip
    except DiamondError as error:
        return _again(request, "invitation.html", form, fields, error, **_offered(request))
    return _first_sign_in(request, user.name, password)


@router.api_route("/reset", methods=["GET", "HEAD"])
def reset_page(request: Request) -> Response:
    if not settings_of(request).multi_user:
        return to("/sign-in")
    return show_open(request, "reset.html", form={})


@router.post("/reset")
def reset(request: Request, form: OpenForm) -> Response:
    try:
        password = twice(form)
        code = form.get("code", "").strip()
        accounts.use_reset(ctx_of(request), code, password, address=auth.client_address(request))
    except DiamondError as error:
        return _again(request, "reset.html", form, ("code", "password", "again"), error)
    return to("/sign-in?done=reset")


def _check_passwords(are_offered: bool) -> None:
    if not are_offered:
        raise Forbidden("nobody signs in with a password here", hint="use one of the ways the page offers")


def _again(
    request: Request, template: str, form: Form, fields: tuple[str, ...], error: DiamondError, **values: Any
) -> Response:
    """The page once more, with what was written but the passwords, and the error beside its field."""
    field = error.field or ("code" if isinstance(error, Unauthenticated) else "")
    shown = {"errors": {field: error}} if field in fields else {"problem": error}
    return show_open(request, template, status=error.status, form=form, **shown, **values)


def _first_sign_in(request: Request, name: str, password: str) -> Response:
    """Whoever has just chosen a password need not write it again."""
    try:
        device = known_browser(request)
        value = accounts.sign_in(ctx_of(request), name, password, device=device, **_from(request))
    except DiamondError:
        return to("/sign-in?done=accepted")
    return _signed_in(request, value, HOME_PAGE, device)


def _signed_in(request: Request, value: str, next_path: str, device: str = "") -> Response:
    response = to(next_path)
    set_session(request, response, value)
    if device:
        remember_browser(request, response, device)
    return response


def _from(request: Request) -> dict[str, str]:
    """Where a sign-in comes from, and the session it takes the place of: nobody can plant one that lives on."""
    return {
        "address": auth.client_address(request),
        "browser": request.headers.get("user-agent", ""),
        "replaces": auth.session_cookie(request),
    }
