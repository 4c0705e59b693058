"""Fixtures every suite shares: a database of each kind, and a server context over it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings

from diamond.server.services import bootstrap
from diamond.server.services.context import Context
from testing import postgres, schema
from testing.context import Clock, make_context
from testing.minihpc.fixtures import old_site, site  # noqa: F401 - fixtures for every suite

_numbers = itertools.count(1)

# How long an example takes on a machine that clusters and browsers share says nothing of what is tested.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from testing.dealing import ByFile

    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        from testing.dealing import longest_first

        items.sort(key=lambda item: longest_first(item.nodeid))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    if reason := postgres.why_not():
        pytest.skip(reason)
    with postgres.running_server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind, for a `ctx` with the schema in it; the contract of the store holds on both."""
    if request.param == "sqlite":
        if _wants_schema(request):
            schema.write_sqlite(tmp_path / "diamond.db")
        yield f"sqlite:///{tmp_path}/diamond.db"
        return
    admin_url = sa.make_url(request.getfixturevalue("postgres_server")).set(drivername="postgresql+psycopg")
    admin = sa.create_engine(admin_url, isolation_level="AUTOCOMMIT")
    name = f"test_{next(_numbers)}"
    if _wants_schema(request):
        schema.make_postgresql(admin, name, template="prepared")
    else:
        with admin.connect() as connection:
            connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield admin_url.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


def _wants_schema(request: pytest.FixtureRequest) -> bool:
    return "ctx" in request.fixturenames


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ctx(request: pytest.FixtureRequest, database_url: str, tmp_path: Path, clock: Clock) -> Iterator[Context]:
    """A server's insides over each kind of database, with a clock that tests move."""
    context = make_context(database_url, tmp_path, clock, has_schema=_wants_schema(request))
    yield context
    context.db.close()


@pytest.fixture
def user_id(ctx: Context) -> str:
    from diamond.server.services import tokens

    made = bootstrap.prepare(ctx, embedded="local")
    identity = tokens.authenticate(ctx, made.user_token)
    assert identity.user_id is not None
    return identity.user_id


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Server and agent configure logging for a process of their own; here they share one with every other test."""
    loggers = [logging.getLogger(name) for name in (None, "diamond", "diamond.server", "diamond.agent")]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
