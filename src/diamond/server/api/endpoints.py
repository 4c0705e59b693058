"""Routes of endpoints and their queues."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.endpoints import Endpoint
from diamond.core.errors import Conflict, NotFound
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, User
from diamond.server.api.schemas import CreatedEndpoint, EndpointList, NewEndpoint, Queue
from diamond.server.services import endpoints

router = APIRouter(prefix="/api/v1", tags=["endpoints"])


@router.get(
    "/endpoints",
    summary="List endpoints",
    description="Every endpoint of yours: whether its agent is online, what it has, what is in use.",
    responses=returns(EndpointList, "The endpoints, by name.") | USER_FAILS,
)
def list_endpoints(user: User, ctx: Ctx) -> Response:
    return Json(EndpointList(endpoints=endpoints.list_endpoints(ctx, user)))


@router.post(
    "/endpoints",
    status_code=201,
    summary="Add an endpoint",
    description="Makes an endpoint and the token its agent will use. The token is shown this once.",
    responses=returns(CreatedEndpoint, "The endpoint and its token.", status=201) | USER_FAILS | fails(Conflict),
    openapi_extra=takes(NewEndpoint),
)
def create_endpoint(user: User, ctx: Ctx, body: Body) -> Response:
    wanted = decode(NewEndpoint, body, strict=True)
    endpoint, token = endpoints.create(ctx, user, wanted.name)
    return Json(CreatedEndpoint(endpoint=endpoint, token=token), 201, {"Location": f"/api/v1/endpoints/{wanted.name}"})


@router.get(
    "/endpoints/{name}",
    summary="Look at an endpoint",
    description="One endpoint with its facts and present use.",
    responses=returns(Endpoint, "The endpoint.") | USER_FAILS | fails(NotFound),
)
def get_endpoint(user: User, ctx: Ctx, name: str) -> Response:
    return Json(endpoints.get(ctx, user, name))


@router.get(
    "/queue",
    summary="Look at the queue",
    description="Live jobs of yours, in the order their schedulers will take them.",
    responses=returns(Queue, "The queue.") | USER_FAILS | fails(NotFound),
)
def read_queue(
    user: User,
    ctx: Ctx,
    endpoint: Annotated[str | None, Query(max_length=100, description="Only this endpoint's.")] = None,
) -> Response:
    return Json(Queue(queue=endpoints.queue(ctx, user, endpoint)))
