"""Routes an agent needs before it has a token: the one-file agent itself, the authority to trust, and the exchange of
a code; and those by which it changes its token later."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

from fastapi import APIRouter, Header, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diamond.core import onefile
from diamond.core.codec import decode
from diamond.core.enrolment import AGENT_FILE, AGENT_PATH, CA_PATH, AgentSelf, Enrolled, Enrolment, NewAgent, NewToken
from diamond.core.errors import Conflict, InvalidInput, NotFound, RateLimited, Unauthenticated
from diamond.server.api.answers import Json, attachment
from diamond.server.api.bodies import json_object
from diamond.server.api.documents import AGENT_FAILS, OPEN, USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Agent, Body, Ctx, Server
from diamond.server.auth import bearer_token, client_address
from diamond.server.runtime import Runtime
from diamond.server.services import audit, enrolment
from diamond.server.store.acting import Actor, become

router = APIRouter(tags=["enrolment"])


def enrolment_answer(server: Runtime, code: enrolment.Code) -> Enrolment:
    """A code with all that the line to paste needs."""
    return enrolment.offer(code, url=server.settings.public_url, pin=server.trust.pin, names=server.trust.names)


@router.post(
    "/api/v1/enrolment",
    summary="Exchange a code for the right to speak for an endpoint",
    description="The agent names the SHA-256 of a token it has made and keeps. Safe to repeat. Needs no token.",
    responses=returns(Enrolled, "Which endpoint it is.") | USER_FAILS | fails(Conflict, RateLimited),
    openapi_extra=takes(NewAgent) | OPEN,
)
async def enrol(request: Request, server: Server) -> Response:
    address = client_address(request)
    server.failures.check(address, time.monotonic())
    message = decode(NewAgent, await json_object(request))
    become(Actor(name="an enrolment code", address=address))
    try:
        answer = await run_in_threadpool(enrolment.exchange, server.ctx, message)
    except Unauthenticated:
        server.failures.add(address, time.monotonic())
        await run_in_threadpool(audit.refuse, server.ctx, "enrolment.refused")
        raise
    server.hub.notify("credentials")
    return Json(answer)


@router.head(AGENT_PATH, include_in_schema=False)
@router.get(
    AGENT_PATH,
    summary="The agent as one file",
    description="A zip that any Python from 3.10 on runs, with nothing installed. Needs no token: it holds no secret.",
    responses=returns("application/octet-stream", "The file; `ETag` is its SHA-256.") | fails(InvalidInput),
    openapi_extra=OPEN,
)
def agent_file(if_none_match: Annotated[str, Header(max_length=200, include_in_schema=False)] = "") -> Response:
    data, tag = onefile.build(), f'"{onefile.digest()}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache", "Content-Disposition": attachment(AGENT_FILE)}
    if tag in if_none_match:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type="application/octet-stream")


@router.get(
    CA_PATH,
    summary="The authority to trust",
    description="The certificate of the server's private authority, in PEM. To be compared with the pin in the "
    "enrolment line before it is believed. Needs no token.",
    responses=returns("text/plain", "The certificate.") | fails(NotFound),
    openapi_extra=OPEN,
)
def authority(server: Server) -> Response:
    if not server.trust.ca_pem:
        raise NotFound(
            "this server has no authority of its own",
            hint="its certificate, if it has one, is signed by an authority that systems know: leave --pin out",
        )
    return Response(server.trust.ca_pem, media_type="text/plain")


@router.get(
    "/api/v1/agent/me",
    summary="Who this agent is",
    description="And whether its version is the server's.",
    responses=returns(AgentSelf, "What the server knows of it.") | AGENT_FAILS | fails(NotFound),
)
def me(agent: Agent, ctx: Ctx) -> Response:
    return Json(dataclasses.replace(enrolment.me(ctx, agent), agent_sha256=onefile.digest()))


@router.put(
    "/api/v1/agent/token",
    summary="Name the next token",
    description="The SHA-256 of a token that the agent made and will use from now on. Both work until the new one is "
    "confirmed. Safe to repeat.",
    status_code=204,
    responses=AGENT_FAILS | fails(Conflict),
    openapi_extra=takes(NewToken),
)
def next_token(agent: Agent, ctx: Ctx, body: Body) -> Response:
    enrolment.accept_token(ctx, agent, decode(NewToken, body).sha256)
    return Response(status_code=204)


@router.post(
    "/api/v1/agent/token/confirm",
    summary="Confirm a token by using it",
    description="Every other token of the endpoint dies now. Safe to repeat. Takes no body.",
    status_code=204,
    responses=AGENT_FAILS,
)
def confirm_token(request: Request, agent: Agent, server: Server) -> Response:
    enrolment.confirm_token(server.ctx, agent, bearer_token(request.headers.get("authorization")))
    server.hub.notify("credentials")
    return Response(status_code=204)
