"""GET /: what Diamond is, and the ways in. Shows nothing of anybody's; whoever is signed in goes on to their work."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import DiamondError
from diamond.server import auth
from diamond.server.hosts import base_url
from diamond.server.services import accounts, federation
from diamond.server.web.pages import HOME_PAGE, ctx_of, page_router, settings_of, show, to

router = page_router()


@router.api_route("/", methods=["GET", "HEAD"])
async def landing(request: Request) -> Response:
    if await _is_signed_in(request):
        return to(HOME_PAGE)
    return show(request, "landing.html", home=HOME_PAGE, **await run_in_threadpool(_offered, request))


def _offered(request: Request) -> dict[str, Any]:
    """The ways in, as the sign-in page has them."""
    url = base_url(request)
    if not settings_of(request).multi_user:
        return {"url": url, "setup": False, "providers": [], "local": False}
    ctx = ctx_of(request)
    return {
        "url": url,
        "setup": accounts.setup_needed(ctx),
        "providers": federation.providers(ctx),
        "local": accounts.offers_passwords(ctx),
    }


async def _is_signed_in(request: Request) -> bool:
    if not auth.session_cookie(request):
        return False
    try:
        found = await request.app.state.runtime.authenticator.identify(request)
    except DiamondError:
        return False
    return bool(found.user_id)
