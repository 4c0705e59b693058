"""Endpoints as decisions see them: which there are, what they said of themselves, who is online.

Whoever makes images, replicas or jobs for tasks that wait locks the endpoints first (`endpoints(session, lock=True)`),
so that two such transactions come one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode
from diamond.core.endpoints import ONLINE_WITHIN_S, EndpointFacts, EndpointUsage
from diamond.planner.partitions import Obstacle
from diamond.planner.placement import Candidate
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow

_SNAPSHOT = "endpoints"


def keep(session: Session) -> None:
    """Let every task of this transaction be placed by one look at the endpoints: a batch has many."""
    session.info[_SNAPSHOT] = endpoints(session)


def forget(session: Session) -> None:
    session.info.pop(_SNAPSHOT)


def endpoints(session: Session, *, lock: bool = False) -> list[EndpointRow]:
    if not lock and _SNAPSHOT in session.info:
        return list(session.info[_SNAPSHOT])
    query = sa.select(EndpointRow).where(EndpointRow.removed_at.is_(None)).order_by(EndpointRow.name)
    return list(session.scalars(query.with_for_update() if lock else query).all())


def candidate(
    ctx: Context,
    row: EndpointRow,
    *,
    rank: int = 0,
    note: str = "",
    obstacle: Obstacle | None = None,
    is_undecided: bool = False,
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
    )


def is_online(last_seen_at: float | None, now: float) -> bool:
    return last_seen_at is not None and now - last_seen_at < ONLINE_WITHIN_S


def facts_of(row: EndpointRow) -> EndpointFacts | None:
    """What the row says of its endpoint; decoded once: a cluster's facts are long, and a batch has many tasks."""
    if not row.facts:
        return None
    known: tuple[object, EndpointFacts] | None = row.__dict__.get("_decoded_facts")
    if known is None or known[0] is not row.facts:
        known = (row.facts, decode(EndpointFacts, row.facts))
        row.__dict__["_decoded_facts"] = known
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
