"""Endpoints at which something has run before a test begins, as at any that is in use."""

from __future__ import annotations

from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow


def prove(ctx: Context, endpoint_id: str, *, cpus: int = 1024, gpus: int = 1024) -> None:
    """Let other people's tasks go there without naming it, up to this size before it counts as untried."""
    with ctx.db.write() as session:
        row = session.get_one(EndpointRow, endpoint_id)
        row.proven_at, row.proven_cpus, row.proven_gpus = ctx.clock(), cpus, gpus
