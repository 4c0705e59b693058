"""Help: the documentation of this very version, with contents and search."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from diamond.core.errors import NotFound
from diamond.server.web import manual
from diamond.server.web.forms import Visitor
from diamond.server.web.pages import page_router, show

router = page_router()
_OPERATORS = ("operator-guide", "identity", "settings", "audit", "threat-model")
_MAX_QUERY = 100


@router.api_route("/help", methods=["GET", "HEAD"])
def help_page(request: Request, who: Visitor) -> Response:
    """The contents; with ?q=, where these words stand."""
    words = request.query_params.get("q", "").strip()[:_MAX_QUERY]
    titles = manual.titles()
    groups = (
        ("Working with Diamond", [name for name in titles if name not in (*_OPERATORS, "rest") and "/" not in name]),
        ("Running a server", [name for name in titles if name in _OPERATORS]),
        ("For programs", [name for name in titles if name == "rest"]),
        ("Why it is built as it is", [name for name in titles if "/" in name]),
    )
    return show(
        request,
        "help.html",
        who=who,
        groups=[(title, names) for title, names in groups if names],
        titles=titles,
        words=words,
        hits=manual.search(words),
    )


@router.api_route("/help/{name:path}", methods=["GET", "HEAD"])
def help_on(request: Request, who: Visitor, name: str) -> Response:
    if (picture := manual.pictures().get(name)) is not None:
        return FileResponse(picture, headers={"Cache-Control": "private, max-age=3600"})
    found = manual.page(name)
    if found is None:
        raise NotFound(f"there is no page {name[:60]!r} in the documentation", hint="see what there is: /help")
    return show(request, "help_page.html", who=who, page=found, titles=manual.titles())
