"""Routes of agents: introduce themselves, ask what should be, report what is. See `diamond.core.wire`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.errors import Conflict, InstallationProblem, NotFound, ProtocolError, StorageFull, TooLarge
from diamond.core.secrets import JobSecrets
from diamond.core.wire import INSTANCE_HEADER, DesiredState, Hello, Report, ReportAck, Welcome
from diamond.server.api.answers import Json
from diamond.server.api.documents import AGENT_FAILS, fails, returns, takes
from diamond.server.api.runtime import MAX_CURSOR, Agent, Body, Ctx, Server
from diamond.server.api.shells import take_over
from diamond.server.runtime import MAX_WAIT_S
from diamond.server.services import agents, enrolment, secrets

router = APIRouter(prefix="/api/v1/agent", tags=["agent"])
Instance = Annotated[
    str, Header(alias=INSTANCE_HEADER, max_length=100, description="Names the agent's home; an endpoint has one.")
]


@router.post(
    "/hello",
    summary="Introduce an agent",
    description="Once per start, and whenever the endpoint's facts change.",
    responses=returns(Welcome, "Who you are, and the server's epoch.") | AGENT_FAILS | fails(ProtocolError, Conflict),
    openapi_extra=takes(Hello),
)
def hello(agent: Agent, ctx: Ctx, body: Body, instance: Instance = "") -> Response:
    ctx.ingestion.hello(agent)
    return Json(agents.hello(ctx, agent, decode(Hello, body), instance))


@router.get(
    "/desired",
    summary="Ask what should be",
    description="Orders that changed after `since`; all live ones for 0 or another epoch. `wait_s` waits for one.",
    responses=returns(DesiredState, "What should be.") | AGENT_FAILS | fails(Conflict),
)
async def desired(
    request: Request,
    agent: Agent,
    server: Server,
    epoch: Annotated[str, Query(max_length=100, description="As the last answer gave it.")] = "",
    since: Annotated[int, Query(ge=0, le=MAX_CURSOR, description="`revision` of the last answer.")] = 0,
    wait_s: Annotated[float, Query(ge=0, description=f"Seconds to wait for an order, at most {MAX_WAIT_S:.0f}.")] = 0,
    runner: Annotated[str, Query(max_length=100, description="Names the agent process, if it can run shells.")] = "",
    shells: Annotated[str, Query(max_length=8000, description="Ids of shells already known, by commas.")] = "",
    rotates: Annotated[bool, Query(description="Whether the agent can take a new token when asked to.")] = False,
    instance: Instance = "",
) -> Response:
    looks = itertools.count()
    known = frozenset(shells.split(","))

    async def look() -> tuple[DesiredState, bool]:
        first = next(looks) == 0
        state = await run_in_threadpool(agents.desired, server.ctx, agent, epoch, since, instance, is_call=first)
        # An endpoint nothing was ever ordered from has revision 0: answering its since=0 at once would spin.
        news = state.epoch != epoch or (state.full and state.revision > since)
        if runner:
            if first:
                await take_over(server, agent, runner)
            state = dataclasses.replace(state, shells=server.shells.orders(agent, known))
        if rotates and await run_in_threadpool(enrolment.wants_new_token, server.ctx, agent):
            state = dataclasses.replace(state, rotate=True)
        return state, bool(state.orders or state.shells or state.rotate) or news

    state = await server.long_poll(request, (f"endpoint:{agent}",), wait_s, look)
    return Json(state)


@router.get(
    "/jobs/{job_id}/secrets",
    summary="Fetch a job's secrets",
    description="The values of the secrets that a live job of this endpoint names, when it is about to begin. Recorded "
    "in the audit log.",
    responses=returns(JobSecrets, "The values; never to be kept but for the job.")
    | AGENT_FAILS
    | fails(NotFound, Conflict, InstallationProblem),
)
def job_secrets(agent: Agent, ctx: Ctx, job_id: str, instance: Instance = "") -> Response:
    return Json(secrets.deliver(ctx, agent, job_id, instance), headers={"Cache-Control": "no-store"})


@router.post(
    "/goodbye",
    summary="Take leave",
    description="The agent stops on purpose; its jobs go on and are found again at its next start. Takes no body.",
    status_code=204,
    responses=AGENT_FAILS | fails(Conflict),
)
def goodbye(agent: Agent, ctx: Ctx, instance: Instance = "") -> Response:
    agents.goodbye(ctx, agent, instance)
    return Response(status_code=204)


@router.post(
    "/reports",
    summary="Report what is",
    description="States, log and metric bytes with their offsets, and the endpoint's use. Safe to repeat.",
    responses=returns(ReportAck, "What the server now holds.")
    | AGENT_FAILS
    | fails(ProtocolError, TooLarge, StorageFull, Conflict),
    openapi_extra=takes(Report),
)
def report(agent: Agent, server: Server, body: Body, instance: Instance = "") -> Response:
    message = decode(Report, body)
    answer = agents.report(server.ctx, agent, message, instance)
    server.metrics.stream_bytes.inc(sum(len(chunk.data) * 3 // 4 for chunk in message.streams))
    return Json(answer)
