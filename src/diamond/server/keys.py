"""Changing the keys of secrets from outside a server: over the same home and database, while it runs or not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from diamond.core.errors import NotFound
from diamond.server.hub import Hub
from diamond.server.main import make_context, open_database
from diamond.server.services import resealing
from diamond.server.services.resealing import Rotation
from diamond.server.settings import Settings


def rotate(settings: Settings, *, prune: bool = False, pause: Callable[[float], None] = time.sleep) -> Rotation:
    """A new key for everything that is sealed; with `prune`, drop old ones that nothing needs instead, after a `pause`
    of so many seconds where the keys were changed just now.

    Raises:
        NotFound: there is no server's data in this home.
        InstallationProblem: the keys cannot be read or written.
    """
    database = open_database(settings)
    try:
        if database.is_sqlite and not Path(database.url.database or "").exists():
            raise NotFound(f"there is no database at {database.url.database}", hint="is DIAMOND_HOME right?")
        ctx = make_context(settings, database, Hub())
        return resealing.prune(ctx, pause=pause) if prune else resealing.rotate(ctx)
    finally:
        database.close()
