"""Routes of the audit log: looking at it, exporting it, checking it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from diamond.core.audit import AuditEntry, AuditHead, AuditVerdict, parse_head
from diamond.core.errors import NotFound
from diamond.server.api.answers import Json, attachment
from diamond.server.api.documents import USER_FAILS, fails, returns
from diamond.server.api.runtime import MAX_CURSOR, Administrator, Ctx, User
from diamond.server.services import audit

router = APIRouter(prefix="/api/v1", tags=["audit"])

Action = Annotated[
    str, Query(max_length=81, description="Only this action (`task.created`), or all about this noun (`task`).")
]
Object = Annotated[str, Query(max_length=100, description="Only what was done to the object with this id.")]
# Years 1 to 9999: what a clock can mean, and what every database can compare.
Since = Annotated[float | None, Query(ge=0, le=2.5e11, description="Not before this time, in Unix seconds.")]
Until = Annotated[float | None, Query(ge=0, le=2.5e11, description="Before this time, in Unix seconds.")]
Cursor = Annotated[int | None, Query(ge=0, le=MAX_CURSOR, description="`next_cursor` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most entries wanted.")]


@dataclass(frozen=True, kw_only=True)
class AuditPage:
    """Newest first. Pass `next_cursor` as `cursor` for the next page."""

    entries: list[AuditEntry]
    next_cursor: int | None


@router.get(
    "/audit",
    summary="Read the audit log",
    description="Who did what, to what, from where; newest first. For administrators.",
    responses=returns(AuditPage, "Entries, newest first.") | USER_FAILS,
)
def read_audit(
    _admin: Administrator,
    ctx: Ctx,
    user: Annotated[str, Query(max_length=100, description="Only of this user, by name or id.")] = "",
    action: Action = "",
    object: Object = "",
    since: Since = None,
    until: Until = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    found, following = audit.entries(
        ctx, user=user, action=action, obj=object, since=since, until=until, cursor=cursor, limit=limit
    )
    return Json(AuditPage(entries=found, next_cursor=following))


@router.get(
    "/me/audit",
    summary="Read what was done in your name",
    description="Entries of the audit log about what you did, or somebody with a token or session of yours.",
    responses=returns(AuditPage, "Entries, newest first.") | USER_FAILS,
)
def read_own_audit(
    user: User,
    ctx: Ctx,
    action: Action = "",
    object: Object = "",
    since: Since = None,
    until: Until = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    found, following = audit.entries(
        ctx, user_id=user, action=action, obj=object, since=since, until=until, cursor=cursor, limit=limit
    )
    return Json(AuditPage(entries=found, next_cursor=following))


@router.get(
    "/audit/head",
    summary="Where the audit log ends",
    description="Number and hash of the last entry. Kept elsewhere, it shows later whether anything was changed.",
    responses=returns(AuditHead, "The last entry's number and hash.") | USER_FAILS,
)
def read_audit_head(_admin: Administrator, ctx: Ctx) -> Response:
    return Json(audit.head(ctx))


@router.get(
    "/audit/verify",
    summary="Check the audit log",
    description="Recomputes the hash of every entry.",
    responses=returns(AuditVerdict, "Whether all is as it was written, and what is not.") | USER_FAILS,
)
def verify_audit(
    _admin: Administrator,
    ctx: Ctx,
    head: Annotated[str, Query(max_length=100, description="`SEQ:HASH`, as the log once ended.")] = "",
) -> Response:
    return Json(audit.verify(ctx, parse_head(head) if head else None))


@router.get(
    "/audit/export",
    summary="Export the audit log",
    description="Lines of JSON: one about the export, one for each entry, one with the last entry's number and hash. "
    "`diamond audit verify --file` checks them without a server.",
    responses=returns("application/jsonl", "The log.") | USER_FAILS | fails(NotFound),
)
def export_audit(
    _admin: Administrator,
    ctx: Ctx,
    after: Annotated[int, Query(ge=0, le=MAX_CURSOR, description="From the entry after this one on.")] = 0,
) -> Response:
    return _Export(audit.export(ctx, after))


class _Export(StreamingResponse):
    """As slow as its reader's line: it counts as waiting, not as slow."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        headers = {"Content-Disposition": attachment("diamond-audit.jsonl")}
        super().__init__(lines, media_type="application/jsonl", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["diamond.waits"] = True
        await super().__call__(scope, receive, send)
