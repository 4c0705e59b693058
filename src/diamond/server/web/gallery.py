"""Templates: the gallery, each of them, and changing one's own without overwriting what somebody else did meanwhile."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import Conflict, DiamondError, InvalidInput, NotFound
from diamond.core.templates import Template
from diamond.server.services import projects, templates
from diamond.server.services.identity import Identity
from diamond.server.web import composing
from diamond.server.web.compose import LARGE
from diamond.server.web.forms import Fields, Form, Visitor
from diamond.server.web.pages import ctx_of, page_router, settings_of, show, to

router = page_router()
_ON_A_PAGE = 24
_NOTICES = {
    "saved": "The template is saved.",
    "changed": "Your changes are saved.",
    "removed": "The template is removed.",
}
_FIELDS = ("name", "description", "visibility", "project", "yaml")


@router.api_route("/templates", methods=["GET", "HEAD"])
def gallery_page(request: Request, who: Visitor) -> Response:
    assert who.user_id is not None
    asked = request.query_params
    search = asked.get("search", "").strip()[:100]
    page, following, total = templates.list_templates(
        ctx_of(request), who.user_id, limit=_ON_A_PAGE, cursor=asked.get("after") or None, search=search
    )
    ours = [each for each in templates.built_in() if search.lower() in f"{each.name} {each.description}".lower()]
    return show(
        request,
        "gallery.html",
        who=who,
        built_in=[] if asked.get("after") else ours,
        saved=page,
        following=following,
        total=total,
        search=search,
        notice=_NOTICES.get(asked.get("done", ""), ""),
    )


@router.api_route("/templates/{template_id}", methods=["GET", "HEAD"])
def template_page(request: Request, who: Visitor, template_id: str) -> Response:
    assert who.user_id is not None
    found = templates.get(ctx_of(request), who.user_id, template_id)
    return _show(request, who, found, notice=_NOTICES.get(request.query_params.get("done", ""), ""))


@router.post("/templates/{template_id}", dependencies=LARGE)
def change(request: Request, who: Visitor, template_id: str, form: Fields) -> Response:
    """Save changes. When somebody else saved theirs first, both are shown, and nothing is written."""
    if "as_new" in form:
        return _save_anew(request, who, template_id, form)
    try:
        return _change(request, who, template_id, form)
    except NotFound:
        gone = NotFound(
            "this template was removed meanwhile, or is no longer shared with you",
            hint="nothing you typed is lost: it is below, and can be saved as a new template",
        )
        return _show_gone(request, who, template_id, form, status=gone.status, problem=gone)


def _change(request: Request, who: Identity, template_id: str, form: Form) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    try:
        version = form.get("version", "")
        if not version.isdecimal() or len(version) > 9:
            raise InvalidInput("the form does not say what it began with", hint="reload the page")
        templates.change(ctx, who.user_id, template_id, version=int(version), **_typed(form))
    except Conflict as error:
        found = templates.get(ctx, who.user_id, template_id)
        if error.field != "version":
            return _show(request, who, found, typed=form, status=error.status, errors={error.field: error})
        return _show(request, who, found, typed=form, theirs=found, status=error.status, problem=error)
    except InvalidInput as error:
        found = templates.get(ctx, who.user_id, template_id)
        return _show(request, who, found, typed=form, status=error.status, errors=_beside(error))
    return to(f"/templates/{template_id}?done=changed")


def _save_anew(request: Request, who: Identity, template_id: str, form: Form) -> Response:
    """What was meant for a template that is gone, as one of its own."""
    assert who.user_id is not None
    try:
        values = _typed(form)
        made = templates.create(ctx_of(request), who.user_id, values.pop("name"), values.pop("raw_spec"), **values)
    except (InvalidInput, Conflict) as error:
        return _show_gone(request, who, template_id, form, status=error.status, errors=_beside(error))
    return to(f"/templates/{made.id}?done=saved")


def _typed(form: Form) -> dict[str, Any]:
    return {
        "name": form.get("name", ""),
        "description": form.get("description", ""),
        "raw_spec": composing.read(form.get("yaml", "")),
        "visibility": form.get("visibility", "private"),
        "project": form.get("project", "").strip() or None,
    }


def _beside(error: DiamondError) -> dict[str, DiamondError]:
    name = error.field if error.field in ("name", "description", "visibility", "project") else "yaml"
    return {name: _named(error, name)}


def _named(error: DiamondError, name: str) -> DiamondError:
    """With the field of the spec in its words, where it stands beside the whole text."""
    if name != "yaml" or not error.field:
        return error
    return InvalidInput(f"{error.field}: {error.message}", hint=error.hint, field=error.field)


@router.post("/templates/{template_id}/remove")
def remove(request: Request, who: Visitor, template_id: str) -> Response:
    assert who.user_id is not None
    templates.remove(ctx_of(request), who.user_id, template_id)
    return to("/templates?done=removed")


def _show(
    request: Request,
    who: Identity,
    found: Template,
    *,
    typed: Form | None = None,
    theirs: Template | None = None,
    **values: Any,
) -> Response:
    """`typed`: what somebody wrote and could not be saved; it stays, over what is there."""
    form = {
        "name": found.name,
        "description": found.description,
        "visibility": found.visibility.value,
        "project": found.project,
        "yaml": found.text,
        "version": str(found.version),
    }
    if typed is not None:
        form |= {name: typed[name] for name in _FIELDS if name in typed}
        if theirs is None:
            form["version"] = typed.get("version", "")
    return show(
        request,
        "template.html",
        who=who,
        chosen=found,
        form=form,
        theirs=theirs,
        projects=_projects(request, who),
        **values,
    )


def _show_gone(request: Request, who: Identity, template_id: str, typed: Form, **values: Any) -> Response:
    form = {"visibility": "private"} | {name: typed.get(name, "") for name in _FIELDS}
    return show(
        request, "template_gone.html", who=who, gone=template_id, form=form, projects=_projects(request, who), **values
    )


def _projects(request: Request, who: Identity) -> list[str]:
    assert who.user_id is not None
    mine = [one.name for one in projects.list_projects(ctx_of(request), who.user_id)]
    return mine if settings_of(request).multi_user else []
