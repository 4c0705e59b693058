"""The audit log, for administrators: who did what, to what, from where; whether it is whole; and a copy to keep."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.audit import AuditEntry, parse_head
from diamond.core.errors import DiamondError, InvalidInput
from diamond.server.services import audit
from diamond.server.web.audit_words import NOUNS, sentence_of, who_did
from diamond.server.web.forms import Administrator, by_field, typed
from diamond.server.web.pages import ctx_of, page_router, show

router = page_router()
PAGE = 50
_FILTERS = ("user", "action", "object", "since", "until")
_MAX_FILTER = 100
_MAX_SEQ = 2**62


@router.api_route("/audit", methods=["GET", "HEAD"])
def audit_page(request: Request, who: Administrator) -> Response:
    ctx = ctx_of(request)
    asked = {name: request.query_params.get(name, "").strip()[:_MAX_FILTER] for name in _FILTERS}
    before = request.query_params.get("before", "")
    cursor = min(int(before), _MAX_SEQ) if before.isdecimal() and len(before) < 20 else None
    found: list[AuditEntry] = []
    following, told, status = None, {}, 200
    try:
        if not all(text.isprintable() for text in asked.values()):
            raise InvalidInput("cannot be read", hint="write it anew", field="user")
        found, following = audit.entries(
            ctx, user=asked["user"], action=asked["action"], obj=asked["object"], since=_moment(asked, "since"),
            until=_moment(asked, "until"), cursor=cursor, limit=PAGE,
        )  # fmt: skip
    except DiamondError as error:
        told, status = by_field(error, _FILTERS), error.status
    given = {name: text for name, text in asked.items() if text}
    older = urlencode({**given, "before": following}) if following is not None else ""
    return show(
        request,
        "audit.html",
        who=who,
        status=status,
        entries=[_shown(entry) for entry in found],
        asked=typed(asked),
        is_filtered=bool(given),
        newest=urlencode(given) if cursor is not None else "",
        is_first=cursor is None,
        older=older,
        nouns=NOUNS,
        **told,
    )


def _shown(entry: AuditEntry) -> dict[str, Any]:
    details = json.dumps(entry.data, indent=2, ensure_ascii=False) if entry.data else ""
    return {"entry": entry, "who": who_did(entry), "what": sentence_of(entry), "details": details}


def _moment(asked: dict[str, str], name: str) -> float | None:
    """A day, or a minute of one, in UTC: what a date field sends, or somebody types. `until` a day is to its end."""
    text = asked[name]
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(
            f"{text[:40]!r} is not a day", hint="write 2026-01-31, or 2026-01-31 14:30 (UTC)", field=name
        ) from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    try:
        return at.timestamp() + (86_400.0 if name == "until" and len(text) == len("2026-01-31") else 0.0)
    except (OverflowError, OSError):
        raise InvalidInput(
            f"{text[:40]!r} is beyond all clocks", hint="write a day of this century", field=name
        ) from None


@router.api_route("/audit/verify", methods=["GET", "HEAD"])
def verify_page(request: Request, who: Administrator) -> Response:
    """Recomputes the whole chain, and says in words whether the log is as it was written."""
    ctx = ctx_of(request)
    text = request.query_params.get("head", "").strip()[:_MAX_FILTER]
    head = audit.head(ctx)
    if "head" not in request.query_params:
        return show(request, "audit_verify.html", who=who, verdict=None, text="", now_head=head, took_s=0.0)
    began = time.monotonic()
    try:
        verdict = audit.verify(ctx, parse_head(text) if text else None)
    except InvalidInput as error:
        values: dict[str, Any] = {"verdict": None, "text": text, "now_head": head, "took_s": 0.0}
        return show(request, "audit_verify.html", who=who, status=error.status, **values, **by_field(error, ("head",)))
    took_s = time.monotonic() - began
    return show(request, "audit_verify.html", who=who, verdict=verdict, text=text, now_head=head, took_s=took_s)
