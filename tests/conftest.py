"""Fixtures every suite shares: a database of each kind, and a server context over it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from diamond.core.home import Home
from diamond.server.services import bootstrap
from diamond.server.services.context import Context
from diamond.server.store.blobs import BlobStore
from diamond.server.store.db import Database
from diamond.server.store.series import SeriesStore
from diamond.server.store.streams import StreamStore
from testing import postgres

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    if reason := postgres.why_not():
        pytest.skip(reason)
    with postgres.running_server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind; the contract of the store holds on both."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/diamond.db"
        return
    admin_url = sa.make_url(request.getfixturevalue("postgres_server")).set(drivername="postgresql+psycopg")
    admin = sa.create_engine(admin_url, isolation_level="AUTOCOMMIT")
    name = f"test_{next(_numbers)}"
    with admin.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield admin_url.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


class Recorder:
    """A hub that remembers which topics were woken."""

    def __init__(self) -> None:
        self.topics: list[str] = []

    def notify(self, *topics: str) -> None:
        self.topics.extend(topics)


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_context(url: str, folder: Path, clock: Clock | None = None) -> Context:
    db = Database(url)
    db.migrate()
    home = Home(folder / "home")
    home.make()
    streams = StreamStore(home.server / "streams")
    return Context(
        home=home,
        db=db,
        streams=streams,
        series=SeriesStore(home.server / "series", streams),
        blobs=BlobStore(home.server / "blobs"),
        hub=Recorder(),
        epoch=db.epoch(),
        **({"clock": clock} if clock else {}),
    )


@pytest.fixture
def ctx(database_url: str, tmp_path: Path, clock: Clock) -> Iterator[Context]:
    """A server's insides over each kind of database, with a clock that tests move."""
    context = make_context(database_url, tmp_path, clock)
    yield context
    context.db.close()


@pytest.fixture
def user_id(ctx: Context) -> str:
    from diamond.server.services import tokens

    made = bootstrap.prepare(ctx, embedded="local")
    identity = tokens.authenticate(ctx, made.user_token)
    assert identity.user_id is not None
    return identity.user_id
