"""The OpenAPI document: made from core's dataclasses, on first request, without slowing any route.

Routes name their types with `returns`, `takes` and `fails`; FastAPI itself validates and serialises nothing here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

import diamond
from diamond.core import errors
from diamond.server.api.schemas import ErrorAnswer

_types: dict[str, type] = {"ErrorAnswer": ErrorAnswer}
_REF = "#/components/schemas/{model}"
_TAGS = [
    {"name": "tasks", "description": "What you asked for, and how it stands."},
    {"name": "logs", "description": "Output of a task's jobs, by byte offset or as a live stream."},
    {"name": "shells", "description": "Programs started by hand in a running task, with a terminal."},
    {"name": "metrics", "description": "Numbers a task logged, as downsampled curves."},
    {"name": "outputs", "description": "Files a task left behind."},
    {"name": "events", "description": "What happened, in order, by cursor or as a live stream."},
    {"name": "endpoints", "description": "Clusters and machines that agents speak for."},
    {"name": "pools", "description": "Nodes that are held, inside of which tasks get the share they can use."},
    {"name": "enrolment", "description": "How an agent comes to speak for an endpoint, and changes its token."},
    {"name": "accounts", "description": "Your own account, and how people come in."},
    {"name": "users", "description": "Other people's accounts, for administrators; and invitations."},
    {"name": "logins", "description": "How a terminal comes to act for somebody: `diamond login`."},
    {"name": "tokens", "description": "What programs of yours show to be let in."},
    {"name": "templates", "description": "Tasks to begin with: ours, and those that users saved and share."},
    {"name": "secrets", "description": "Values that tasks use by name, kept encrypted."},
    {"name": "audit", "description": "Who did what, from where: a log that shows when it was changed."},
    {"name": "notices", "description": "Being told of what happened, by e-mail or webhook."},
    {"name": "quotas", "description": "How much users and projects may have, and how much they have."},
    {"name": "projects", "description": "Who works together, what they share, and how things change hands."},
    {"name": "images", "description": "Software environments: built from recipes, shared, copied, and run in."},
    {"name": "image-drafts", "description": "Recipes in the making, step by step."},
    {"name": "bundles", "description": "Folders as lists of content-addressed files."},
    {"name": "blobs", "description": "Upload and download of file contents, resumable."},
    {"name": "agent", "description": "What an endpoint's agent asks and reports. Needs an agent token."},
    {"name": "server", "description": "The server itself."},
]


def schema(kind: type) -> dict[str, Any]:
    """A reference to `kind` in the document."""
    known = _types.setdefault(kind.__name__, kind)
    assert known is kind, f"two types named {kind.__name__}"
    return {"$ref": _REF.format(model=kind.__name__)}


def returns(kind: type | str, description: str, *, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """A `responses` entry: JSON of a dataclass, or another media type by its name."""
    if isinstance(kind, str):
        plain = {"type": "string", "format": "binary"} if kind == "application/octet-stream" else {"type": "string"}
        return {status: {"description": description, "content": {kind: {"schema": plain}}}}
    return {status: {"description": description, "content": {"application/json": {"schema": schema(kind)}}}}


def fails(*kinds: type[errors.DiamondError]) -> dict[int | str, dict[str, Any]]:
    """`responses` entries of the errors a route answers with, by status."""
    by_status: dict[int | str, list[str]] = {}
    for kind in kinds:
        by_status.setdefault(kind.status, []).append(kind.code)
    return {
        status: {
            "description": " or ".join(f"`{code}`" for code in codes),
            "content": {"application/json": {"schema": schema(ErrorAnswer)}},
        }
        for status, codes in by_status.items()
    }


def takes(kind: type | str, description: str = "") -> dict[str, Any]:
    """An `openapi_extra` with the request body."""
    if isinstance(kind, str):
        content: dict[str, Any] = {kind: {"schema": {"type": "string", "format": "binary"}}}
    else:
        content = {"application/json": {"schema": schema(kind)}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


OPEN: dict[str, Any] = {"security": []}  # openapi_extra of a route that needs no token
USER_FAILS = fails(errors.Unauthenticated, errors.Forbidden, errors.InvalidInput, errors.Unavailable)
AGENT_FAILS = USER_FAILS | fails(errors.RateLimited)


@cache
def _definitions() -> dict[str, Any]:
    adapters: list[tuple[type, JsonSchemaMode, TypeAdapter[Any]]] = [
        (kind, "serialization", TypeAdapter(kind)) for kind in _types.values()
    ]
    _, made = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    found: dict[str, Any] = made["$defs"]
    return found


def _add_what_any_may_answer(path: str, route: dict[str, Any]) -> None:
    """What answers before and after the routes themselves: names with slashes, limits on bodies, ranges of files."""
    responses = route["responses"]
    if "{" in path:
        responses.setdefault("404", fails(errors.NotFound)[errors.NotFound.status])
    if "requestBody" in route:
        for status, answer in fails(errors.TooLarge, errors.TooSlow).items():
            responses.setdefault(str(status), answer)
    if "206" in responses:
        outside = {**fails(errors.InvalidInput)[errors.InvalidInput.status], "description": "The range lies outside."}
        responses.setdefault("416", outside)


def document(app: FastAPI) -> dict[str, Any]:
    """The whole document; FastAPI keeps it once made."""
    if not app.openapi_schema:
        made = get_openapi(
            title="Diamond",
            version=diamond.__version__,
            summary="Train any model, with any dataset, on any machine.",
            description="Times are Unix seconds (UTC). Every error has the body `ErrorAnswer`. Give the token as "
            "`Authorization: Bearer <token>`; never in a URL.",
            routes=app.routes,
            tags=_TAGS,
        )
        components = made.setdefault("components", {})
        # Ours replace FastAPI's own validation error, which we never answer with.
        components["schemas"] = dict(sorted(_definitions().items()))
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"token": []}]
        for path, methods in made["paths"].items():
            for route in methods.values():
                _add_what_any_may_answer(path, route)
        app.openapi_schema = made
    return app.openapi_schema
