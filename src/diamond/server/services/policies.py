"""What agents say of the rules they obey: kept within bounds, and noted when it changes.

The server neither checks nor interprets rules: the agent obeys them whatever is believed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.endpoints import EndpointFacts
from diamond.core.rundir import clean
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow, EventRow

CHANGED = "endpoint.policy_changed"
MAX_RULES = 100
MAX_CHARS = 1000  # of a rule's value, or of a sentence
_MAX_NAME = 64
_MAX_FILES = 4
_MAX_NAMED = 20  # rules that an entry names
MOST_AN_HOUR = 30  # entries of one endpoint: whoever edits a file often is believed, and not written down each time
_HOUR_S = 3600.0


def bounded(facts: EndpointFacts, now: float) -> EndpointFacts:
    """Facts with no more about rules than people can read."""
    rules = {clean(name, _MAX_NAME): clean(text, MAX_CHARS) for name, text in list(facts.policy.items())[:MAX_RULES]}
    return replace(
        facts,
        policy=rules,
        policy_files=tuple(clean(file, MAX_CHARS) for file in facts.policy_files[:_MAX_FILES]),
        policy_changed_at=facts.policy_changed_at if 0 <= facts.policy_changed_at <= now else 0.0,
        others_problem=clean(facts.others_problem, MAX_CHARS),
    )


def note_change(session: Session, row: EndpointRow, facts: EndpointFacts, now: float) -> None:
    """An event, and an entry of the audit log, if other rules hold at an endpoint than its agent said before.

    Call with `facts` as `bounded` gives them, while `row` still has the old ones.
    """
    if row.facts is None:
        return
    before: Mapping[str, str] = row.facts.get("policy") or {}
    changed = [name for name in sorted({*before, *facts.policy}) if before.get(name) != facts.policy.get(name)]
    if not changed or _is_often(session, row.id, now):
        return
    data: dict[str, Any] = {"name": row.name, "rules": ", ".join(_words(changed, facts.policy))[:MAX_CHARS]}
    if facts.policy_files:
        data["files"] = ", ".join(facts.policy_files)[:MAX_CHARS]
    record_event(session, at=now, kind=CHANGED, owner_id=row.owner_id, endpoint_id=row.id, data=data)


def _words(changed: list[str], rules: Mapping[str, str]) -> Iterable[str]:
    for name in changed[:_MAX_NAMED]:
        yield f"{name} = {rules[name][:100]}" if name in rules else f"no {name}"
    if len(changed) > _MAX_NAMED:
        yield f"and {len(changed) - _MAX_NAMED} more"


def _is_often(session: Session, endpoint_id: str, now: float) -> bool:
    noted = (EventRow.endpoint_id == endpoint_id, EventRow.kind == CHANGED, EventRow.at > now - _HOUR_S)
    return session.execute(sa.select(sa.func.count()).select_from(EventRow).where(*noted)).scalar_one() >= MOST_AN_HOUR
