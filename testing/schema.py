"""Empty databases with today's schema, copied from one that was migrated once: migrating takes longer than most tests.

That the migrations lead to this schema, from every release and on both kinds of database, is tested where they are:
tests/contract/store/test_migrations.py.
"""

from __future__ import annotations

import secrets
import sqlite3
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

import sqlalchemy as sa

from diamond.server.store.db import Database

_NEW_EPOCH = "UPDATE meta SET value = {} WHERE key = 'epoch'"  # two databases are never two lives of one


def give(db: Database) -> None:
    """Today's schema for a database that is not there yet: SQLite, and nobody has connected to it."""
    assert db.is_sqlite and db.url.database, f"{db.url}: only a file can be written down"
    write_sqlite(Path(db.url.database))


def write_sqlite(path: Path) -> None:
    assert not path.exists(), f"{path} would be lost"
    path.write_bytes(_sqlite_file())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(_NEW_EPOCH.format("?"), [secrets.token_hex(8)])


@cache
def _sqlite_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "diamond.db"
        db = Database(f"sqlite:///{path}", sqlite_synchronous="OFF")
        db.migrate()
        db.close()
        return path.read_bytes()


def make_postgresql(admin: sa.Engine, name: str, *, template: str) -> None:
    """`admin` is of the maintenance database and commits by itself; `template` is made at the first call."""
    with admin.connect() as connection:
        known = sa.text("SELECT 1 FROM pg_database WHERE datname = :name")
        if connection.execute(known, {"name": template}).first() is None:
            connection.execute(sa.text(f"CREATE DATABASE {template}"))
            db = Database(admin.url.set(database=template).render_as_string(hide_password=False))
            db.migrate()
            db.close()
        connection.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    engine = sa.create_engine(admin.url.set(database=name), poolclass=sa.NullPool)
    with engine.begin() as made:
        made.execute(sa.text(_NEW_EPOCH.format(":epoch")), {"epoch": secrets.token_hex(8)})
