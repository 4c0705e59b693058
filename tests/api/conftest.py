"""The installations the suite asks: one on each database, made once and restored before whatever may change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from testing.people import cheap_passwords
from tests.api.installation import Installation, KeptDatabase, KeptFile, installed


@pytest.fixture(scope="module", autouse=True)
def _cheap() -> Iterator[None]:
    """Of a module: `package` would mean the session in a folder that is no package, and so every suite after this."""
    with cheap_passwords():
        yield


@pytest.fixture(scope="session")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    home = tmp_path_factory.mktemp("schema") / "home"
    with installed(home, KeptFile(home / "server" / "diamond.db")) as made:
        yield made


@pytest.fixture(scope="session")
def on_postgresql(tmp_path_factory: pytest.TempPathFactory, postgres_server: str) -> Iterator[Installation]:
    url = sa.make_url(postgres_server).set(drivername="postgresql+psycopg")
    admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as connection:
        connection.execute(sa.text("CREATE DATABASE schema_test"))
    home = tmp_path_factory.mktemp("schema-postgresql") / "home"
    chosen = url.set(database="schema_test").render_as_string(hide_password=False)
    with installed(home, KeptDatabase(admin, "schema_test"), database_url=chosen) as made:
        yield made
    admin.dispose()
