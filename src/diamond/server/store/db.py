"""The database: SQLite (one process) or PostgreSQL (any number), behind the same two kinds of transaction.

`read()` sees one consistent state. `write()` commits at its end or not at all; events recorded in it get their
sequence numbers last, under a lock held until the commit, so a reader that has seen number n will never meet
a smaller one later. What goes into the audit log is treated likewise.
Locks are always taken in the order quota (an advisory lock), endpoint, task,
job, counter. No subprocess or network call belongs inside either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event, exc
from sqlalchemy.orm import Session

from diamond.core.errors import DiamondError, InstallationProblem, StorageFull, Unavailable
from diamond.server.store import audit_chain
from diamond.server.store.models import EventRow, Meta, table_of

_MIGRATIONS = Path(__file__).parent / "migrations"
_PENDING = "diamond_events"
_RESTED_S = 2.0
# Straight into the table: events are never changed, so nothing needs to know them as objects. All rows of one insert
# have the same columns.
_INSERT = sa.insert(table_of(EventRow))
_NOTHING: dict[str, Any] = {"owner_id": None, "task_id": None, "job_id": None, "endpoint_id": None, "data": {}}


class Database:
    """Thread-safe. Rows read in one transaction must not be used in another."""

    def __init__(self, url: str, *, sqlite_synchronous: str = "FULL", connections: int = 16) -> None:
        self.url = sa.make_url(url)
        if self.url.get_backend_name() == "postgresql" and self.url.drivername == "postgresql":
            self.url = self.url.set(drivername="postgresql+psycopg")
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if not self.is_sqlite and self.url.get_backend_name() != "postgresql":
            raise InstallationProblem(
                f"database {self.url.get_backend_name()!r} is not supported",
                hint="use sqlite:///path or postgresql://user@host/name",
                field="database_url",
            )
        self.engine = self._to_sqlite(sqlite_synchronous) if self.is_sqlite else _to_postgresql(self.url, connections)
        self._writer = self.engine.execution_options(diamond_write=True)
        # SQLite has one writer. Queueing for it here, in order, beats its own sleep-and-retry.
        self._write_lock = threading.Lock() if self.is_sqlite else nullcontext()

    def _to_sqlite(self, synchronous: str) -> sa.Engine:
        engine = sa.create_engine(
            self.url, pool_size=48, max_overflow=24, pool_use_lifo=True, connect_args={"timeout": 30}
        )

        @event.listens_for(engine, "connect")
        def _connect(connection: Any, _record: Any) -> None:
            connection.isolation_level = None  # we say BEGIN ourselves, see below
            for pragma in (
                "journal_mode=WAL",
                f"synchronous={synchronous}",
                "foreign_keys=ON",
                "busy_timeout=30000",
                "cache_size=-4000",
            ):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin(connection: sa.Connection) -> None:
            # A transaction that will write takes the lock at once: upgrading later can fail with "locked".
            write = connection.get_execution_options().get("diamond_write", False)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

        return engine

    @contextmanager
    def read(self) -> Iterator[Session]:
        with _explained(), Session(self.engine, expire_on_commit=False) as session:
            if not self.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        with _explained(), self._write_lock, Session(self._writer, expire_on_commit=False) as session:
            yield session
            self._number_events(session)
            audit_chain.write_pending(session)
            session.commit()

    def _number_events(self, session: Session) -> None:
        pending: list[dict[str, Any]] = session.info.pop(_PENDING, [])
        if not pending:
            return
        session.flush()
        last = audit_chain.bump(session, "events", len(pending))
        numbers = range(last - len(pending) + 1, last + 1)
        rows = [{**fields, "seq": number} for number, fields in zip(numbers, pending, strict=True)]
        session.connection().execute(_INSERT, rows)

    def migrate(self, revision: str = "head") -> None:
        """Bring the schema to `revision`; safe to call at every start and from several processes at once."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        with _explained(), self._writer.begin() as connection:
            if not self.is_sqlite:
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(7421001)"))
            config.attributes["connection"] = connection
            command.upgrade(config, revision)

    def current_revision(self) -> str | None:
        from alembic.runtime.migration import MigrationContext

        with _explained(), self.engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()

    def epoch(self) -> str:
        """Names this life of the database; a restored backup gets a new one."""
        with self.read() as session:
            return session.execute(sa.select(Meta.value).where(Meta.key == "epoch")).scalar_one()

    def close(self) -> None:
        self.engine.dispose()


def _to_postgresql(url: sa.URL, connections: int) -> sa.Engine:
    # A new connection is a new process over there: none is made for a moment's need, and the warm ones go first.
    engine = sa.create_engine(url, pool_size=connections, max_overflow=0, pool_timeout=30, pool_use_lifo=True)
    _ping_after_rest(engine)
    return engine


def _ping_after_rest(engine: sa.Engine) -> None:
    """Ask a connection whether it still lives, unless it was in use a moment ago: asking every time would be a round
    trip more for every request. One that dies within that moment is an Unavailable, which clients try again."""

    @event.listens_for(engine, "checkin")
    def _back(_connection: Any, record: Any) -> None:
        record.info["rested_from"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _ping(connection: Any, record: Any, _proxy: Any) -> None:
        if time.monotonic() - record.info.get("rested_from", time.monotonic()) < _RESTED_S:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise exc.DisconnectionError("the connection was lost while nobody used it") from error


def record_event(session: Session, **fields: Any) -> None:
    """Add an event to this write transaction. See `Database` for when it gets its number."""
    session.info.setdefault(_PENDING, []).append({**_NOTHING, **fields})
    audit_chain.add_event(session, fields)


@contextmanager
def _explained() -> Iterator[None]:
    """Turn the database's own failures into errors that say what to do."""
    try:
        yield
    except exc.OperationalError as error:
        raise _explain(error) from error
    except exc.DBAPIError as error:
        if error.connection_invalidated:
            raise Unavailable("the connection to the database was lost", hint="try again in a moment") from error
        raise
    except exc.TimeoutError as error:
        raise Unavailable("the database is busy", hint="try again in a moment") from error


def _explain(error: exc.OperationalError) -> DiamondError:
    text = str(error.orig).lower()
    if "full" in text or "no space" in text or "disk i/o" in text or "quota" in text:
        return StorageFull(
            "the disk holding the server's database is full; nothing was changed",
            hint="free space in the server's data directory; the same request will then work",
        )
    if "locked" in text or "busy" in text:
        return Unavailable("the database is busy", hint="try again in a moment")
    if "unable to open" in text:
        return InstallationProblem(
            f"the database cannot be opened: {error.orig}", hint="check that its folder exists and is writable"
        )
    return Unavailable(f"the database does not answer: {str(error.orig).strip()[:200]}", hint="is it running?")
