"""Limits, for administrators: those of everybody and those of one project. Those of one user are on their own page."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.errors import Conflict, DiamondError, NotFound
from diamond.core.quotas import EVERYBODY, NAMES, Limits
from diamond.server.services import projects, quotas, seen
from diamond.server.services.identity import Identity
from diamond.server.web.forms import Administrator, Fields, Form, by_field, typed
from diamond.server.web.pages import ctx_of, page_router, show, to
from diamond.server.web.settings import me, told

router = page_router()
DEFAULTS = {"every-user": "Every user", "every-project": "Every project"}
PAGE = 50
_NOTICES = {
    "limits": "The limits are set, for all that have none of their own.",
    "quota": "The limits are set. What runs goes on, even if it is more than that.",
    "cleared": "The limits of every project hold for it.",
}


def read_limits(form: Form) -> Limits:
    """What was typed, as the API takes it: nothing is no limit, a number is one. Raises InvalidInput for the rest."""
    given: dict[str, Any] = {}
    for name in NAMES:
        text = form.get(name, "").strip()
        if not text:
            given[name] = None
        elif text.isdecimal() and len(text) < 20:
            given[name] = int(text)
        elif name == "gpu_hours" and text.replace(".", "", 1).isdecimal() and len(text) < 20:
            given[name] = float(text)
        else:
            given[name] = text
    return decode(Limits, given, strict=True)


def shown_limits(limits: Limits) -> Form:
    """As the form takes them again, exactly."""
    return {name: _shown(name, limit) for name, limit in limits.given().items()}


def _shown(name: str, limit: float) -> str:
    """Sizes in the largest unit that needs no fraction."""
    if name != "storage_bytes":
        return f"{limit:g}" if limit < 1e6 else str(int(limit))
    value, units = int(limit), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value and value % 1024 == 0 and len(units) > 1:
        value, units = value // 1024, units[1:]
    return f"{value} {units[0]}" if units[0] != "B" else str(value)


# ---- those of everybody ------------------------------------------------------------------------------------------


@router.api_route("/limits", methods=["GET", "HEAD"])
def limits_page(request: Request, who: Administrator) -> Response:
    return _everybody(request, who, notice=told(request, _NOTICES))


def _everybody(
    request: Request, who: Identity, *, status: int = 200, kind: str = "", form: Form | None = None, **values: Any
) -> Response:
    """What holds for every user and every project without limits of its own; who has such; and all projects."""
    ctx = ctx_of(request)
    shown = {}
    for each in DEFAULTS:
        standing = quotas.get(ctx, each, EVERYBODY)
        fields = typed(form if each == kind else shown_limits(standing.limits))
        shown[each] = {"is_set": standing.own, "form": fields, "seen": quotas.mark_of(standing)}
    errors = values.pop("errors", {})
    own = [each for each in quotas.list_set(ctx) if each.kind not in DEFAULTS]
    words = request.query_params.get("q", "").strip()[:100]
    asked = request.query_params.get("page", "1")
    found = [
        each
        for each in projects.list_all(ctx, me(who))
        if words.lower() in f"{each.name} {each.title}".lower()
    ]  # fmt: skip
    pages = max(1, -(-len(found) // PAGE))
    page = max(1, min(pages, int(asked))) if asked.isdecimal() and len(asked) < 8 else 1
    return show(
        request,
        "limits.html",
        who=who,
        status=status,
        kinds=shown,
        titles=DEFAULTS,
        wrong={each: errors if each == kind else {} for each in DEFAULTS},
        own=own,
        own_projects={each.name for each in own if each.kind == "project"},
        projects=found[(page - 1) * PAGE : page * PAGE],
        total=len(found),
        words=words,
        page=page,
        pages=pages,
        **values,
    )


@router.post("/limits/{kind}")
def set_default(request: Request, who: Administrator, kind: str, form: Fields) -> Response:
    if kind not in DEFAULTS:
        raise NotFound(f"there are no limits of {kind[:40]!r}", hint="see /limits")
    try:
        quotas.set_limits(ctx_of(request), kind, EVERYBODY, read_limits(form), saw=form.get(seen.FIELD))
    except DiamondError as error:
        return _everybody(request, who, status=error.status, kind=kind, form=form, **by_field(error, NAMES))
    return to("/limits?done=limits")


# ---- those of one project ----------------------------------------------------------------------------------------


@router.api_route("/limits/projects/{project}", methods=["GET", "HEAD"])
def project_limits_page(request: Request, who: Administrator, project: str) -> Response:
    return _project(request, who, project, notice=told(request, _NOTICES))


def _project(
    request: Request, who: Identity, project: str, *, status: int = 200, form: Form | None = None, **values: Any
) -> Response:
    quota = quotas.get(ctx_of(request), "project", project)
    return show(
        request,
        "limits_project.html",
        who=who,
        status=status,
        quota=quota,
        seen=quotas.mark_of(quota),
        form=typed(form if form is not None else shown_limits(quota.limits)),
        **values,
    )


@router.post("/limits/projects/{project}")
def set_project_limits(request: Request, who: Administrator, project: str, form: Fields) -> Response:
    try:
        quotas.set_limits(ctx_of(request), "project", project, read_limits(form), saw=form.get(seen.FIELD))
    except DiamondError as error:
        return _project(request, who, project, status=error.status, form=form, **by_field(error, NAMES))
    return to(f"/limits/projects/{project}?done=quota")


@router.post("/limits/projects/{project}/clear")
def clear_project_limits(request: Request, who: Administrator, project: str, form: Fields) -> Response:
    try:
        quotas.clear(ctx_of(request), "project", project, saw=form.get(seen.FIELD))
    except Conflict as error:
        return _project(request, who, project, status=error.status, problem=error)
    return to(f"/limits/projects/{project}?done=cleared")
