"""Changing the keys that things are sealed with, while servers run.

A new key comes first in the file, so that every process seals with it from then on and can open what the others seal;
then all that the old keys sealed is sealed anew, row by row. Old keys that nothing needs go at the next change, or with
`prune`: a request that began before the change may still write with the one before, so that waits until the file has
been as it is for `SETTLE_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import InstrumentedAttribute, Session

from diamond.core.errors import DiamondError, InstallationProblem
from diamond.server.services import audit, sealing, secrets
from diamond.server.services.context import Context
from diamond.server.store.identity_models import NoticeRuleRow, SecretRow

SETTLE_S = 60.0  # longer than any request that seals something lasts, in whichever process
_AT_ONCE = 100


@dataclass(frozen=True)
class _Place:
    """A column of sealed texts, and what each is sealed about."""

    model: type[Any]
    column: InstrumentedAttribute[str]
    about: Callable[[Any], tuple[str, ...]]


def about_notice(row: NoticeRuleRow) -> tuple[str, ...]:
    """What the key of a webhook is sealed about: as `services.notices` says."""
    return "webhook key", row.id


_PLACES = (
    _Place(SecretRow, SecretRow.sealed, secrets.about),
    _Place(NoticeRuleRow, NoticeRuleRow.sealed_key, about_notice),
)


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """What came of a change of keys.

    Attributes:
        key: id of the key that seals now.
        resealed: how many texts were sealed anew with it.
        unopened: what could not be opened with any key, by its id; it stays as it is.
        dropped: ids of old keys that are gone, since nothing needs them.
        kept: ids of old keys that still open.
    """

    key: str
    resealed: int = 0
    unopened: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    kept: tuple[str, ...] = field(default=())


def rotate(ctx: Context) -> Rotation:
    """Make a new key and seal everything with it. Keys from the environment are the operator's: the first is used.

    Raises:
        InstallationProblem: the keys cannot be read or written.
    """
    before = ctx.keys.all(make=True)
    keys, dropped = before, tuple[str, ...]()
    if not ctx.keys.is_given:
        keys = (sealing.new_key(), *before)
        ctx.keys.replace(keys)
    resealed, unopened = _reseal(ctx, keys)
    if not ctx.keys.is_given:
        dropped = _drop(ctx, keys, keep={keys[0].id, before[0].id})
    kept = tuple(key.id for key in keys[1:] if key.id not in dropped)
    with ctx.db.write() as session:
        audit.record(session, ctx.clock(), "keys.rotated", keys[0].id, resealed=resealed, unopened=len(unopened))
    return Rotation(key=keys[0].id, resealed=resealed, unopened=tuple(unopened), dropped=dropped, kept=kept)


def prune(ctx: Context, *, pause: Callable[[float], None] = time.sleep) -> Rotation:
    """Drop old keys that nothing is sealed with any more, once nobody can be sealing with them.

    Args:
        pause: waits so many seconds, when the keys were changed just now.

    Raises:
        InstallationProblem: there is no key file to change.
    """
    keys = ctx.keys.all()
    if not keys or ctx.keys.is_given:
        raise InstallationProblem(
            "there is no key file here",
            hint="it is made when the first secret is set; keys in DIAMOND_SECRET_KEY are yours to take out",
            field="secret_key_file",
        )
    waited_for = -1.0
    while len(keys) > 1 and (changed_at := ctx.keys.changed_at()) != waited_for:
        # Another change meanwhile begins the wait anew. A clock that stands before the file's time waits once.
        pause(min(max(changed_at + SETTLE_S - time.time(), 0.0), SETTLE_S))
        waited_for, keys = changed_at, ctx.keys.all()
    resealed, unopened = _reseal(ctx, keys)
    dropped = _drop(ctx, keys, keep={keys[0].id})
    kept = tuple(key.id for key in keys[1:] if key.id not in dropped)
    with ctx.db.write() as session:
        audit.record(session, ctx.clock(), "keys.pruned", keys[0].id, dropped=dropped)
    return Rotation(key=keys[0].id, resealed=resealed, unopened=tuple(unopened), dropped=dropped, kept=kept)


def keys_in_use(session: Session) -> set[str]:
    """Ids of the keys that something in the database needs."""
    found = set()
    for place in _PLACES:
        found |= {sealing.key_id_of(text) for text in session.scalars(sa.select(place.column)) if text}
    return found


def _drop(ctx: Context, keys: tuple[sealing.Key, ...], keep: set[str]) -> tuple[str, ...]:
    with ctx.db.read() as session:
        needed = keys_in_use(session) | keep
    gone = tuple(key.id for key in keys if key.id not in needed)
    if gone:
        ctx.keys.replace(tuple(key for key in keys if key.id in needed))
    return gone


def _reseal(ctx: Context, keys: tuple[sealing.Key, ...]) -> tuple[int, list[str]]:
    done, unopened = 0, list[str]()
    for place in _PLACES:
        old = sa.and_(place.column != "", place.column.not_like(f"%:{keys[0].id}:%"))
        last = ""
        while True:
            with ctx.db.write() as session:
                query = sa.select(place.model).where(old, place.model.id > last).order_by(place.model.id)
                rows = session.scalars(query.limit(_AT_ONCE).with_for_update()).all()
                for row in rows:
                    last = row.id
                    try:
                        value = sealing.unseal_with(keys, getattr(row, place.column.key), place.about(row))
                    except DiamondError:
                        unopened.append(row.id)
                        continue
                    setattr(row, place.column.key, sealing.seal_with(keys[0], value, place.about(row)))
                    done += 1
            if len(rows) < _AT_ONCE:
                break
    return done, unopened
