"""What is written down of an agent that goes on saying the same, on every database."""

from __future__ import annotations

from dataclasses import replace

import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.wire import Hello, Report
from diamond.server.services import agents
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow

FACTS = EndpointFacts(scheduler="local", nodes=1, cpus_per_node=4, mem_bytes_per_node=8 * 1024**3)


def test_the_same_use_is_written_again_only_now_and_then(ctx: Context, user_id: str) -> None:
    now = [ctx.clock()]
    ctx = replace(ctx, clock=lambda: now[0])
    known = sa.select(EndpointRow.id, EndpointRow.last_seen_at, EndpointRow.usage)

    def say(cpus: int) -> tuple[float | None, object]:
        agents.report(ctx, endpoint, Report(epoch=ctx.epoch, usage=EndpointUsage(cpus_used=cpus)))
        with ctx.db.read() as session:
            _, seen_at, usage = session.execute(known).one()
        return seen_at, usage["cpus_used"]

    with ctx.db.read() as session:
        endpoint = session.execute(known).one()[0]
    agents.hello(ctx, endpoint, Hello(facts=FACTS))
    began = now[0]
    assert say(1) == (began, 1)
    now[0] += 2
    assert say(1) == (began, 1), "nothing new, and it was heard of a moment ago"
    assert say(2) == (began + 2, 2)
    now[0] += 6
    assert say(2) == (began + 8, 2), "still there"
