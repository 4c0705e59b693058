"""Routes of templates: list, look at, save, change, remove. Those that come with Diamond are only looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from diamond.core.codec import decode, shallow
from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound, TooLarge
from diamond.core.tasks import TaskSpec
from diamond.core.templates import Template
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, User
from diamond.server.services import templates

router = APIRouter(prefix="/api/v1/templates", tags=["templates"])
_DETAIL = ("spec", "text")


@dataclass(frozen=True, kw_only=True)
class NewTemplate:
    """`visibility`: "private", "project" (the members of `project`) or "public" (everybody with an account here)."""

    name: str
    spec: TaskSpec
    description: str = ""
    visibility: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class TemplateChange:
    """`version`: the one that was changed. What is left out stays."""

    version: int
    name: str | None = None
    spec: TaskSpec | None = None
    description: str | None = None
    visibility: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class TemplatePage:
    """Without `spec` and `text`. `builtin` ones come with Diamond, on the first page alone."""

    builtin: list[Template]
    templates: list[Template]
    next_cursor: str | None
    total: int


@dataclass(frozen=True, kw_only=True)
class _Saved:
    name: str
    spec: dict[str, Any]
    description: str = ""
    visibility: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Changed:
    version: int
    name: str | None = None
    spec: dict[str, Any] | None = None
    description: str | None = None
    visibility: str | None = None
    project: str | None = None


@router.get(
    "",
    summary="List templates",
    description="Tasks to begin with: those that come with Diamond, then those that users saved and you see, newest "
    "first.",
    responses=returns(TemplatePage, "A page of templates.") | USER_FAILS,
)
def list_templates(
    user: User,
    ctx: Ctx,
    search: Annotated[str, Query(max_length=100, description="Only those with this in name or description.")] = "",
    limit: Annotated[int, Query(ge=1, le=templates.MAX_PAGE, description="Saved ones on a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=60, description="`next_cursor` of the page before.")] = None,
) -> Response:
    page, next_cursor, total = templates.list_templates(ctx, user, limit=limit, cursor=cursor, search=search)
    wanted = search.lower()
    ours = [each for each in templates.built_in() if wanted in f"{each.name} {each.description}".lower()]
    rows, builtin = ([_short(each) for each in some] for some in (page, [] if cursor else ours))
    return Json({"builtin": builtin, "templates": rows, "next_cursor": next_cursor, "total": total})


def _short(template: Template) -> dict[str, Any]:
    return {key: value for key, value in shallow(template).items() if key not in _DETAIL}


@router.post(
    "",
    status_code=201,
    summary="Save a template",
    description="Keeps a task's spec under a name. Files it names must be uploaded (`POST /bundles`).",
    responses=returns(Template, "The template.", status=201)
    | USER_FAILS
    | fails(Conflict, Forbidden, NotFound, TooLarge),
    openapi_extra=takes(NewTemplate),
)
def save_template(user: User, ctx: Ctx, body: Body) -> Response:
    wanted = decode(_Saved, body, strict=True)
    made = _of_spec(
        lambda: templates.create(
            ctx,
            user,
            wanted.name,
            wanted.spec,
            description=wanted.description,
            visibility=wanted.visibility,
            project=wanted.project,
        )
    )
    return Json(made, 201, {"Location": f"/api/v1/templates/{made.id}"})


@router.get(
    "/{template}",
    summary="Look at a template",
    description="By its id; your own also by name. With its spec, and the text of a task file that says the same.",
    responses=returns(Template, "The template.") | USER_FAILS | fails(NotFound),
)
def get_template(user: User, ctx: Ctx, template: str) -> Response:
    return Json(templates.get(ctx, user, template))


@router.patch(
    "/{template}",
    summary="Change a template",
    description="By its owner, or an owner of its project. 409 when it was changed since `version`.",
    responses=returns(Template, "As it now is.") | USER_FAILS | fails(NotFound, Conflict, TooLarge),
    openapi_extra=takes(TemplateChange),
)
def change_template(user: User, ctx: Ctx, template: str, body: Body) -> Response:
    wanted = decode(_Changed, body, strict=True)
    return Json(
        _of_spec(
            lambda: templates.change(
                ctx,
                user,
                template,
                version=wanted.version,
                name=wanted.name,
                description=wanted.description,
                raw_spec=wanted.spec,
                visibility=wanted.visibility,
                project=wanted.project,
            )
        )
    )


@router.delete(
    "/{template}",
    status_code=204,
    summary="Remove a template",
    description="Tasks that were begun with it stay.",
    responses=USER_FAILS | fails(NotFound),
)
def remove_template(user: User, ctx: Ctx, template: str) -> Response:
    templates.remove(ctx, user, template)
    return Response(status_code=204)


_OWN = ("name", "description", "visibility", "project", "version", "template")


def _of_spec(act: Any) -> Template:
    """Errors about fields of the task say that they are inside `spec`."""
    try:
        made: Template = act()
    except (InvalidInput, TooLarge) as error:
        if not error.field or error.field in _OWN:
            raise
        raise type(error)(error.message, hint=error.hint, field=f"spec.{error.field}") from error
    return made
