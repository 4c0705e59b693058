"""Routes of secrets: set, list, remove. No route shows a value to a user; agents fetch those of a job they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from diamond.core.accounts import Scope
from diamond.core.errors import InvalidInput, NotFound, TooLarge
from diamond.core.secrets import Secret
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Anyone, Body, Ctx, User
from diamond.server.auth import require_user
from diamond.server.services import secrets
from diamond.server.services.identity import Identity

router = APIRouter(prefix="/api/v1/secrets", tags=["secrets"])
_FIELDS = ("value", "project")


@dataclass(frozen=True, kw_only=True)
class NewSecret:
    """`project`: whose it is; without one it is the user's own."""

    value: str
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class SecretList:
    secrets: list[Secret]


def _check_scope(asker: Identity, project: str | None) -> None:
    """Whoever may launch could use one's own secrets anyway; those of a project are other people's as well."""
    require_user(asker, Scope.LAUNCH if project is None else Scope.ADMIN)


@router.get(
    "",
    summary="List secrets",
    description="Your own, and those of projects you are a member of. Values are never shown again.",
    responses=returns(SecretList, "The secrets.") | USER_FAILS,
)
def list_secrets(user: User, ctx: Ctx) -> Response:
    return Json({"secrets": secrets.list_secrets(ctx, user)})


@router.put(
    "/{name}",
    summary="Set a secret",
    description="Keeps a value, encrypted, under a name that tasks use it by; replaces the one there was. With "
    "`project` it is the project's, which its owners change and its members use: that needs the scope "
    "`admin`, your own `launch`.",
    responses=returns(Secret, "It was replaced.")
    | returns(Secret, "It was made.", status=201)
    | USER_FAILS
    | fails(NotFound, TooLarge),
    openapi_extra=takes(NewSecret),
)
def put_secret(user: User, asker: Anyone, ctx: Ctx, name: str, body: Body) -> Response:
    unknown = sorted(set(body) - set(_FIELDS))
    if unknown:
        raise InvalidInput(f"unknown field {unknown[0][:80]!r}", hint=f"valid fields: {', '.join(_FIELDS)}")
    if "value" not in body:
        raise InvalidInput("is required", hint='the body is {"value": "…"}', field="value")
    project = body.get("project")
    if project is not None and not isinstance(project, str):
        raise InvalidInput("must be the name of a project", field="project")
    _check_scope(asker, project)
    found, is_new = secrets.put(ctx, user, name, body["value"], project)
    return Json(found, 201 if is_new else 200, {"Cache-Control": "no-store"})


@router.delete(
    "/{name}",
    status_code=204,
    summary="Remove a secret",
    description="Jobs that run keep what they were given; those that begin later and name it fail. One of a "
    "project needs the scope `admin`, your own `launch`.",
    responses=USER_FAILS | fails(NotFound),
)
def remove_secret(
    user: User,
    asker: Anyone,
    ctx: Ctx,
    name: str,
    project: Annotated[str | None, Query(max_length=200, description="The project it belongs to.")] = None,
) -> Response:
    _check_scope(asker, project)
    secrets.remove(ctx, user, name, project)
    return Response(status_code=204)
