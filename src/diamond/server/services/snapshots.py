"""Endpoints as decisions see them: which there are, what they said of themselves, who is online.

Whoever makes images, replicas or jobs for tasks that wait locks the endpoints first (`endpoints(session, lock=True)`),
so that two such transactions come one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.endpoints import ONLINE_WITHIN_S, EndpointFacts, EndpointUsage
from diamond.planner.partitions import Obstacle
from diamond.planner.placement import Candidate
from diamond.server.services import access
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, UserRow

_SNAPSHOT = "endpoints"
_USABLE = "usable endpoints"
_MOST_DECODED = 1000
# Facts by endpoint, as they lie in the database and decoded, which takes fifty times as long as to compare them.
_DECODED: dict[str, tuple[dict[str, Any], EndpointFacts]] = {}


def keep(session: Session) -> None:
    """Let every task of this transaction be placed by one look at the endpoints: a batch has many."""
    session.info[_SNAPSHOT] = endpoints(session)
    session.info[_USABLE] = {}


def forget(session: Session) -> None:
    session.info.pop(_SNAPSHOT)
    session.info.pop(_USABLE)


def endpoints(session: Session, *, lock: bool = False, owner_id: str | None = None) -> list[EndpointRow]:
    """All of them, or those of one owner, by name."""
    if owner_id is not None:
        return [row for row in endpoints(session, lock=lock) if row.owner_id == owner_id]
    if not lock and _SNAPSHOT in session.info:
        return list(session.info[_SNAPSHOT])
    query = sa.select(EndpointRow).where(EndpointRow.removed_at.is_(None)).order_by(EndpointRow.name)
    return list(session.scalars(query.with_for_update() if lock else query).all())


_USED = (
    sa.select(EndpointRow)
    .where(EndpointRow.removed_at.is_(None), access.runs_at(sa.bindparam("user"), sa.bindparam("project")))
    .order_by(EndpointRow.name)
)


def for_tasks(session: Session, user_id: str, project_id: str | None) -> list[EndpointRow]:
    """Where tasks of the user in this project may run, by name."""
    if _SNAPSHOT in session.info:
        return usable(session, user_id, project_id, endpoints(session))
    return list(session.scalars(_USED, {"user": user_id, "project": project_id or ""}))


def usable(session: Session, user_id: str, project_id: str | None, rows: list[EndpointRow]) -> list[EndpointRow]:
    """Of these, those where tasks of the user in this project may run."""
    return _kept(session, (user_id, project_id or ""), access.runs_at(user_id, project_id), user_id, rows)


_SEEN = (
    sa.select(EndpointRow)
    .where(EndpointRow.removed_at.is_(None), access.sees_endpoint(sa.bindparam("viewer")))
    .order_by(EndpointRow.name)
)


def seen_by(session: Session, user_id: str) -> list[EndpointRow]:
    return list(session.scalars(_SEEN, {"viewer": user_id}))


def is_seen(session: Session, user_id: str, row: EndpointRow) -> bool:
    query = sa.select(EndpointRow.id).where(EndpointRow.id == row.id, access.sees_endpoint(user_id))
    return row.owner_id == user_id or session.scalars(query).one_or_none() is not None


def for_images(session: Session, user_id: str, *, lock: bool = False) -> list[EndpointRow]:
    """Where the user may have images. `lock`: as `endpoints` does, all of them."""
    return usable_for_images(session, user_id, endpoints(session, lock=lock))


def usable_for_images(session: Session, user_id: str, rows: list[EndpointRow]) -> list[EndpointRow]:
    """Of these, those where the user may have images: their own, and what their projects share."""
    return _kept(session, (user_id, None), access.runs_somewhere(user_id), user_id, rows)


def _kept(
    session: Session,
    key: tuple[str, str | None],
    rule: sa.ColumnElement[bool],
    user_id: str,
    rows: list[EndpointRow],
) -> list[EndpointRow]:
    if all(row.owner_id == user_id for row in rows):
        return rows
    known: dict[tuple[str, str | None], set[str]] = session.info.get(_USABLE, {})
    if key not in known:
        known[key] = set(session.scalars(sa.select(EndpointRow.id).where(EndpointRow.removed_at.is_(None), rule)))
    return [row for row in rows if row.id in known[key]]


_HALF_OPEN = "has neither containers_only = true nor allow_others_on_host = true beside allow_others = true"


def barred(session: Session, user_id: str, rows: list[EndpointRow]) -> dict[str, Obstacle]:
    """Others' endpoints that do not want this user's tasks, as far as their agents have said."""
    others = [row for row in rows if row.owner_id != user_id]
    if not others:
        return {}
    name = session.get_one(UserRow, user_id).name
    found = {}
    for row in others:
        facts = facts_of(row)
        if facts is None:
            continue
        named = facts.allowed_users
        if facts.allows_others if named is None else any(fnmatchcase(name, one) for one in named):
            continue
        owner = session.get_one(UserRow, row.owner_id).name
        text = f"its policy file lets only {owner} run tasks there ({owner} can set allow_others = true in policy.toml)"
        if facts.others_problem:
            text = f"its agent takes tasks of {owner} only, since its policy file {_HALF_OPEN}"
        found[row.id] = Obstacle(field="resources.infra", text=text)
    return found


def candidate(
    ctx: Context,
    row: EndpointRow,
    *,
    rank: int = 0,
    note: str = "",
    obstacle: Obstacle | None = None,
    is_undecided: bool = False,
    doubt: int = 0,
) -> Candidate:
    """`is_undecided`: what matters of it is not known yet, though its agent has spoken."""
    return Candidate(
        name=row.name,
        online=is_online(row.last_seen_at, ctx.clock()),
        facts=None if is_undecided else facts_of(row),
        usage=decode(EndpointUsage, row.usage) if row.usage else None,
        rank=rank,
        note=note,
        obstacle=obstacle,
        doubt=doubt,
    )


def is_online(last_seen_at: float | None, now: float) -> bool:
    return last_seen_at is not None and now - last_seen_at < ONLINE_WITHIN_S


def facts_of(row: EndpointRow) -> EndpointFacts | None:
    """What the row says of its endpoint. Decoded once: a cluster's facts are long, and everybody asks for them."""
    if not row.facts:
        return None
    known = _DECODED.get(row.id)
    if known is None or (known[0] is not row.facts and known[0] != row.facts):
        if len(_DECODED) >= _MOST_DECODED:
            _DECODED.clear()
        known = (row.facts, decode(EndpointFacts, row.facts))
    # Noted again also where it was only equal: the next look in this transaction is at the very same.
    _DECODED[row.id] = (row.facts, known[1])
    return known[1]


def knows_builders(facts: EndpointFacts | None) -> bool:
    """Whether the agent has found out how images can be made there; it does so some seconds after its first start."""
    return facts is not None and bool(facts.builds)


def with_last_known(facts: EndpointFacts, before: dict[str, Any] | None) -> EndpointFacts:
    """What a restarted agent has not found out again yet is as it was."""
    if facts.builds or not before or not before.get("builds"):
        return facts
    old = decode(EndpointFacts, before)
    return replace(
        facts,
        builders=old.builders,
        builds=old.builds,
        image_bytes=old.image_bytes,
        layer_bytes=old.layer_bytes,
        builder_problems=old.builder_problems,
        runtimes=facts.runtimes or old.runtimes,
    )


def gpu_models(rows: Iterable[EndpointRow]) -> list[str]:
    """The models of GPU those endpoints have, for choosing a suggested base."""
    found: dict[str, None] = {}
    for row in rows:
        if (facts := facts_of(row)) is not None:
            groups = [facts.gpus_per_node, *(g.gpus for part in facts.partitions for g in part.groups)]
            found.update({gpu.model: None for gpus in groups for gpu in gpus})
    return list(found)
