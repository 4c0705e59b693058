"""Routes of endpoints and their queues."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint
from diamond.core.enrolment import Enrolment
from diamond.core.errors import Conflict, NotFound
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.enrolment import enrolment_answer
from diamond.server.api.runtime import Body, Ctx, Enroller, Holder, Server, User
from diamond.server.api.schemas import (
    CreatedEndpoint,
    EndpointList,
    NewEndpoint,
    Queue,
    Removal,
    Revocation,
    Rotation,
)
from diamond.server.runtime import MAX_WAIT_S
from diamond.server.services import endpoints, enrolment

router = APIRouter(prefix="/api/v1", tags=["endpoints"])


@router.get(
    "/endpoints",
    summary="List endpoints",
    description="Every endpoint of yours: whether its agent is online, what it has, what is in use.",
    responses=returns(EndpointList, "The endpoints, by name.") | USER_FAILS,
)
async def list_endpoints(user: User, server: Server) -> Response:
    return Json(EndpointList(endpoints=await server.looks.look(endpoints.list_endpoints, server.ctx, user)))


@router.post(
    "/endpoints",
    status_code=201,
    summary="Add an endpoint",
    description="Makes an endpoint and the token its agent will use, or a code to enrol with. It is shown this once.",
    responses=returns(CreatedEndpoint, "The endpoint and its token.", status=201) | USER_FAILS | fails(Conflict),
    openapi_extra=takes(NewEndpoint),
)
def create_endpoint(user: Enroller, server: Server, body: Body) -> Response:
    wanted = decode(NewEndpoint, body, strict=True)
    if wanted.token:
        endpoint, token = endpoints.create(server.ctx, user, wanted.name)
        made = CreatedEndpoint(endpoint=endpoint, token=token)
    else:
        endpoint, code = endpoints.create_with_code(server.ctx, user, wanted.name)
        made = CreatedEndpoint(endpoint=endpoint, token="", enrolment=enrolment_answer(server, code))
    return Json(made, 201, {"Location": f"/api/v1/endpoints/{wanted.name}"})


@router.get(
    "/endpoints/{name}",
    summary="Look at an endpoint",
    description="One endpoint with its facts and present use.",
    responses=returns(Endpoint, "The endpoint.") | USER_FAILS | fails(NotFound),
)
def get_endpoint(user: User, ctx: Ctx, name: str) -> Response:
    return Json(endpoints.get(ctx, user, name))


@router.delete(
    "/endpoints/{name}",
    summary="Remove an endpoint",
    description="Its agent may no longer speak, and its name is free again. Finished tasks keep their record.",
    responses=returns(Removal, "It is gone.") | USER_FAILS | fails(NotFound, Conflict),
)
def remove_endpoint(
    holder: Holder,
    server: Server,
    name: str,
    force: Annotated[bool, Query(description="Even with live jobs, which are given up.")] = False,
) -> Response:
    assert holder.user_id is not None
    given_up = endpoints.remove(server.ctx, holder.user_id, name, force=force)
    server.hub.notify("credentials")
    return Json(Removal(given_up=given_up))


@router.post(
    "/endpoints/{name}/enrolment",
    summary="Get a code for an endpoint's agent",
    description="Works once, for an hour; earlier codes are void. The present agent goes on until it is used. "
    "Takes no body.",
    responses=returns(Enrolment, "The code, and how an agent can be sure of this server.")
    | USER_FAILS
    | fails(NotFound),
)
def enrol_endpoint(user: Enroller, server: Server, name: str) -> Response:
    return Json(enrolment_answer(server, enrolment.renew_code(server.ctx, user, name)))


@router.post(
    "/endpoints/{name}/rotate",
    summary="Give an endpoint's agent a new token",
    description="The agent makes it and hands it over; the old one dies once the new one was used. Takes no body.",
    responses=returns(Rotation, "How far it got.") | USER_FAILS | fails(NotFound, Conflict),
)
async def rotate_endpoint(
    request: Request,
    user: Enroller,
    server: Server,
    name: str,
    wait_s: Annotated[float, Query(ge=0, description=f"Seconds to wait for it, at most {MAX_WAIT_S:.0f}.")] = 20,
) -> Response:
    ctx = server.ctx
    endpoint_id, online = await run_in_threadpool(enrolment.rotate, ctx, user, name)
    if not online:
        code = await run_in_threadpool(enrolment.renew_code, ctx, user, name)
        return Json(Rotation(rotated=False, online=False, enrolment=enrolment_answer(server, code)))

    async def look() -> tuple[bool, bool]:
        done = not await run_in_threadpool(enrolment.wants_rotation, ctx, endpoint_id)
        return done, done

    rotated = await server.long_poll(request, (f"rotation:{endpoint_id}",), wait_s, look)
    server.hub.notify("credentials")
    return Json(Rotation(rotated=rotated, online=True))


@router.post(
    "/endpoints/{name}/revoke",
    summary="Revoke an endpoint's tokens",
    description="All of them and every code, at once. Its jobs go on where they run. Takes no body.",
    responses=returns(Revocation, "How many tokens died.") | USER_FAILS | fails(NotFound),
)
def revoke_endpoint(user: Enroller, server: Server, name: str) -> Response:
    revoked = enrolment.revoke(server.ctx, user, name)
    server.hub.notify("credentials")
    return Json(Revocation(revoked=revoked))


@router.get(
    "/queue",
    summary="Look at the queue",
    description="Live jobs of yours, in the order their schedulers will take them.",
    responses=returns(Queue, "The queue.") | USER_FAILS | fails(NotFound),
)
async def read_queue(
    user: User,
    server: Server,
    endpoint: Annotated[str | None, Query(max_length=100, description="Only this endpoint's.")] = None,
) -> Response:
    return Json(Queue(queue=await server.looks.look(endpoints.queue, server.ctx, user, endpoint)))
