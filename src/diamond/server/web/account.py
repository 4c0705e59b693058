"""Terminals that ask to act for who is signed in. What else is theirs is in `settings`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.accounts import SCOPE_MEANS
from diamond.core.errors import DiamondError
from diamond.server.services import logins
from diamond.server.services.identity import Identity
from diamond.server.web.forms import Fields, Visitor
from diamond.server.web.pages import ctx_of, page_router, show, to

router = page_router()


@router.api_route("/account", methods=["GET", "HEAD"])
def account_page(request: Request, _who: Visitor) -> Response:
    """Where people's settings used to be: links and bookmarks go on working."""
    return to("/settings" + (f"?{request.url.query}" if request.url.query else ""))


@router.api_route("/device", methods=["GET", "HEAD"])
def device_page(request: Request, who: Visitor) -> Response:
    return show(request, "device.html", who=who, login=None, code="", decided="")


@router.post("/device")
def device(request: Request, who: Visitor, form: Fields) -> Response:
    """What asks under a code; nothing is decided yet."""
    code = form.get("code", "").strip()
    try:
        login = logins.find(ctx_of(request), who, code)
    except DiamondError as error:
        return _device_again(request, who, code, error)
    return show(request, "device.html", who=who, login=login, code=code, decided="", scope_means=SCOPE_MEANS)


@router.post("/device/approve")
def approve(request: Request, who: Visitor, form: Fields) -> Response:
    return _decide(request, who, form.get("code", ""), approved=True)


@router.post("/device/refuse")
def refuse(request: Request, who: Visitor, form: Fields) -> Response:
    return _decide(request, who, form.get("code", ""), approved=False)


def _decide(request: Request, who: Identity, code: str, *, approved: bool) -> Response:
    decide = logins.approve if approved else logins.refuse
    try:
        login = decide(ctx_of(request), who, code.strip())
    except DiamondError as error:
        return _device_again(request, who, code, error)
    return show(request, "device.html", who=who, login=login, code="", decided="approved" if approved else "refused")


def _device_again(request: Request, who: Identity, code: str, error: DiamondError) -> Response:
    return show(
        request, "device.html", who=who, status=error.status, login=None, code=code, decided="", errors={"code": error}
    )
