"""Pages of endpoints: which there are and how busy, what each has and allows, how its agent is let in and cut off."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from diamond.core import endpoint_words
from diamond.core.endpoints import Endpoint
from diamond.core.enrolment import ENDPOINT_NAME, enrolment_lines
from diamond.core.errors import Conflict, DiamondError, Forbidden, NotFound
from diamond.core.projects import Role
from diamond.server.hosts import base_url, is_loopback_name
from diamond.server.services import endpoint_shares, endpoints, enrolment, image_copies, overview, projects
from diamond.server.services.identity import Identity
from diamond.server.web import endpoint_facts
from diamond.server.web.forms import Fields, Visitor
from diamond.server.web.pages import ctx_of, page_router, show, to

router = page_router()
_SHOWN = 100  # of a queue: what comes behind is a number
_NOTICES = {
    "rotating": "Its agent was asked to take a new token. The old one dies as soon as the new one was used.",
    "rotate-later": "Its agent is not there. It takes a new token when it comes back; to replace the token before, "
    "make a new line and paste it there.",
    "revoked": "Its agent is cut off: every token and code of it is dead. Jobs that run there go on.",
    "shared": "The endpoint is shared with that project.",
    "asked": "The owners of that project are asked. Its tasks come here once one of them approves.",
    "unshared": "The endpoint is no longer shared with that project.",
}


class Line(NamedTuple):
    """What to paste on the login node, with curl and without. `code` works once, until `expires_at`."""

    with_curl: str
    with_python: str
    expires_at: float
    warnings: list[str]


@router.api_route("/endpoints", methods=["GET", "HEAD"])
def list_page(request: Request, who: Visitor) -> Response:
    assert who.user_id is not None
    found = endpoints.list_endpoints(ctx_of(request), who.user_id)
    removed = request.query_params.get("done") == "removed"
    return show(
        request,
        "endpoints.html",
        who=who,
        cards=[endpoint_facts.card_of(one) for one in found],
        notice="The endpoint is gone. Its finished tasks keep their record." if removed else "",
    )


# ---- a new one -------------------------------------------------------------------------------------------------------


@router.api_route("/endpoints/new", methods=["GET", "HEAD"])
def new_page(request: Request, who: Visitor) -> Response:
    return show(request, "endpoint_new.html", who=who, name="")


@router.post("/endpoints/new")
def new(request: Request, who: Visitor, form: Fields) -> Response:
    assert who.user_id is not None
    given = form.get("name", "").strip()
    name = given.lower() if ENDPOINT_NAME.fullmatch(given.lower()) else given  # what is refused is quoted as typed
    try:
        endpoints.create_with_code(ctx_of(request), who.user_id, name)
    except DiamondError as error:
        if not (isinstance(error, Conflict) and _awaits_agent(request, who, name)):
            shown = {"errors": {"name": error}} if error.field == "name" else {"problem": error}
            return show(request, "endpoint_new.html", who=who, status=error.status, name=form.get("name", ""), **shown)
    # 307: the browser sends the same form there, so that the address under which the line is shown can be reloaded.
    return RedirectResponse(f"{_path(name)}/line", 307)


def _awaits_agent(request: Request, who: Identity, name: str) -> bool:
    """Whether the form was sent twice: it is theirs, and no agent has ever come."""
    assert who.user_id is not None
    try:
        found = endpoints.get(ctx_of(request), who.user_id, name)
    except DiamondError:
        return False
    return found.is_mine and found.last_seen_at is None and found.access in ("code", "none")


@router.api_route("/endpoints/{name}/line", methods=["GET", "HEAD"])
def line_page(request: Request, who: Visitor, name: str) -> Response:
    """Whether the agent has come; a line is made by the form alone."""
    return _line(request, who, name, None)


@router.post("/endpoints/{name}/line")
def make_line(request: Request, who: Visitor, name: str) -> Response:
    assert who.user_id is not None
    trust = request.app.state.runtime.trust
    url = base_url(request)
    code = enrolment.renew_code(ctx_of(request), who.user_id, name)
    made = enrolment.offer(code, url=url, pin=trust.pin, names=trust.names)
    with_curl, with_python = enrolment_lines(made, url)
    return _line(request, who, name, Line(with_curl, with_python, made.expires_at, _warnings(url, made.names)))


def _line(request: Request, who: Identity, name: str, line: Line | None) -> Response:
    assert who.user_id is not None
    found = endpoints.get(ctx_of(request), who.user_id, name)
    if not found.is_mine:
        raise Forbidden(f"endpoint {name} is {found.owner}'s: it can be used, not changed", hint=f"ask {found.owner}")
    return show(
        request,
        "endpoint_line.html",
        who=who,
        card=endpoint_facts.card_of(found),
        line=line,
        is_live=True,  # GET has how its agent stands, and not the line, which stays as it is
    )


def _warnings(url: str, names: tuple[str, ...]) -> list[str]:
    """Why the line may not work where it is pasted."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if is_loopback_name(host):
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return [
            f"{url} means the machine it is used on, so that only this machine reaches it. For a cluster, start the "
            f"server where it can be reached and set DIAMOND_PUBLIC_URL, or keep a tunnel open: "
            f"ssh -R {port}:127.0.0.1:{port} LOGIN-NODE"
        ]
    if parts.scheme == "http":
        return [
            "Over plain HTTP whoever listens in can take the agent's token: start the server with --tls, or put a TLS "
            "proxy in front of it."
        ]
    if names and host not in names:
        return [
            f"The server's certificate does not name {host}, so agents will refuse it: start the server with "
            f"DIAMOND_PUBLIC_URL={url}."
        ]
    return []


# ---- one of them -----------------------------------------------------------------------------------------------------


@router.api_route("/endpoints/{name}", methods=["GET", "HEAD"])
def detail_page(request: Request, who: Visitor, name: str) -> Response:
    return _detail(request, who, name, notice=_NOTICES.get(request.query_params.get("done", ""), ""))


def _detail(request: Request, who: Identity, name: str, *, status: int = 200, **values: Any) -> Response:
    ctx = ctx_of(request)
    assert who.user_id is not None
    found = endpoints.get(ctx, who.user_id, name)
    facts = found.facts
    queue = endpoints.queue(ctx, who.user_id, name)
    return show(
        request,
        "endpoint.html",
        who=who,
        status=status,
        card=endpoint_facts.card_of(found),
        about=endpoint_words.about(found),
        partitions=endpoint_facts.partitions(facts) if facts else [],
        file_systems=endpoint_facts.file_systems(facts) if facts else [],
        warnings=list(overview.full_disks(found)) if found.online else [],
        queue=queue[:_SHOWN],
        more_queue=max(0, len(queue) - _SHOWN),
        live_jobs=len(queue),
        images=image_copies.at_endpoint(ctx, who.user_id, name),
        projects=_projects_for(request, who, found),
        **values,
    )


def _projects_for(request: Request, who: Identity, found: Endpoint) -> list[str]:
    """Those the endpoint could be shared with besides."""
    if not found.is_mine:
        return []
    assert who.user_id is not None
    return [
        one.name
        for one in projects.list_projects(ctx_of(request), who.user_id)
        if not one.personal
        and one.role in Role.MEMBER.at_least
        and one.name not in (*found.shared_with, *found.waits_for)
    ]


@router.post("/endpoints/{name}/rotate")
def rotate(request: Request, who: Visitor, name: str) -> Response:
    assert who.user_id is not None
    try:
        _, online = enrolment.rotate(ctx_of(request), who.user_id, name)
    except Conflict as error:
        return _detail(request, who, name, status=error.status, problem=error)
    return to(f"{_path(name)}?done={'rotating' if online else 'rotate-later'}")


@router.post("/endpoints/{name}/revoke")
def revoke(request: Request, who: Visitor, name: str) -> Response:
    assert who.user_id is not None
    enrolment.revoke(ctx_of(request), who.user_id, name)
    request.app.state.runtime.hub.notify("credentials")
    return to(f"{_path(name)}?done=revoked")


@router.post("/endpoints/{name}/remove")
def remove(request: Request, who: Visitor, form: Fields, name: str) -> Response:
    assert who.user_id is not None
    try:
        endpoints.remove(ctx_of(request), who.user_id, name, force=form.get("force") == "yes")
    except Conflict as error:
        told = Conflict(
            error.message, hint="stop its tasks or wait for them; or tick the box to give them up: they go on unwatched"
        )
        return _detail(request, who, name, status=error.status, problem=told)
    request.app.state.runtime.hub.notify("credentials")
    return to("/endpoints?done=removed")


@router.post("/endpoints/{name}/share")
def share(request: Request, who: Visitor, form: Fields, name: str) -> Response:
    assert who.user_id is not None
    project = form.get("project", "")
    try:
        found = endpoint_shares.share(ctx_of(request), who.user_id, project, name)
    except DiamondError as error:
        if error.field != "project":
            raise
        return _detail(request, who, name, status=error.status, errors={"project": error})
    return to(f"{_path(name)}?done={'shared' if name in found.endpoints else 'asked'}")


@router.post("/endpoints/{name}/unshare")
def unshare(request: Request, who: Visitor, form: Fields, name: str) -> Response:
    assert who.user_id is not None
    try:
        endpoint_shares.unshare(ctx_of(request), who.user_id, form.get("project", ""), name)
    except NotFound as error:
        # Pressed twice: it is as was asked for, unless they do not even see it.
        if error.field != "endpoint" or not endpoints.get(ctx_of(request), who.user_id, name).is_mine:
            raise
    return to(f"{_path(name)}?done=unshared")


def _path(name: str) -> str:
    return f"/endpoints/{quote(name, safe='')}"
