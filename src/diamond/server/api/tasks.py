"""Routes of tasks: create, plan, list, look at, cancel."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from diamond.core.codec import encode
from diamond.core.errors import IdempotencyMismatch, InvalidInput, NotFound, StorageFull, TooLarge
from diamond.core.states import parse_task_states
from diamond.core.tasks import Task
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, User
from diamond.server.api.schemas import NewTask, NewTasks, TaskBatch, TaskPage, TaskPlan
from diamond.server.services import tasks

router = APIRouter(prefix="/api/v1", tags=["tasks"])
_DETAIL = ("spec", "jobs", "outputs")


def _spec(body: dict[str, Any]) -> object:
    unknown = set(body) - {"spec"}
    if unknown:
        raise InvalidInput(
            f"unknown field {min(unknown)[:80]!r}", hint='the body is {"spec": {…}}; the task\'s fields go inside spec'
        )
    if "spec" not in body:
        raise InvalidInput("is required", hint='the body is {"spec": {"run": "…"}}', field="spec")
    return body["spec"]


@router.post(
    "/tasks",
    status_code=201,
    summary="Launch a task",
    description="Validates the spec, stores the task and places it. With an `Idempotency-Key`, repeating the request "
    "is harmless: the same key and spec answer 200 with the task made the first time.",
    responses=returns(Task, "The task was made.", status=201)
    | returns(Task, "A request with this key had made it.")
    | USER_FAILS
    | fails(IdempotencyMismatch, TooLarge, StorageFull),
    openapi_extra=takes(NewTask),
)
def create_task(
    user: User,
    ctx: Ctx,
    body: Body,
    idempotency_key: Annotated[str | None, Header(description="1 to 200 printable characters.")] = None,
) -> Response:
    task, made = tasks.create(ctx, user, _spec(body), idempotency_key)
    return Json(task, 201 if made else 200, {"Location": f"/api/v1/tasks/{task.id}"})


@router.post(
    "/tasks/batch",
    status_code=201,
    summary="Launch several tasks",
    description="All or none, in one step; the answer lists the tasks in the order of `specs`. An `Idempotency-Key` "
    "names the whole batch.",
    responses=returns(TaskBatch, "The tasks were made.", status=201)
    | returns(TaskBatch, "A request with this key had made them.")
    | USER_FAILS
    | fails(IdempotencyMismatch, TooLarge, StorageFull),
    openapi_extra=takes(NewTasks),
)
def create_tasks(
    user: User,
    ctx: Ctx,
    body: Body,
    idempotency_key: Annotated[str | None, Header(description="1 to 200 printable characters.")] = None,
) -> Response:
    specs = body.get("specs")
    if set(body) != {"specs"} or not isinstance(specs, list):
        raise InvalidInput(
            "must be a list of task specs", hint='the body is {"specs": [{"run": "…"}, …]}', field="specs"
        )
    made, is_new = tasks.create_many(ctx, user, specs, idempotency_key)
    return Json({"tasks": made}, 201 if is_new else 200)


@router.post(
    "/tasks/plan",
    summary="Show what a task would become",
    description="A dry run: where the task would go and why, and exactly what would run there. Changes nothing; "
    "files need not be uploaded.",
    responses=returns(TaskPlan, "The plan.") | USER_FAILS | fails(TooLarge),
    openapi_extra=takes(NewTask),
)
def plan_task(user: User, ctx: Ctx, body: Body) -> Response:
    return Json(tasks.plan(ctx, user, _spec(body)))


@router.get(
    "/tasks",
    summary="List tasks",
    description="Newest first, one page at a time.",
    responses=returns(TaskPage, "A page of tasks.") | USER_FAILS,
)
def list_tasks(
    user: User,
    ctx: Ctx,
    state: Annotated[str | None, Query(description="States, separated by commas: `RUNNING,QUEUED`.")] = None,
    name: Annotated[str | None, Query(max_length=500, description="Only tasks of exactly this name.")] = None,
    id_prefix: Annotated[str | None, Query(max_length=60, description="Only ids that begin like this.")] = None,
    limit: Annotated[int, Query(ge=1, le=tasks.MAX_PAGE, description="Tasks on a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=60, description="`next_cursor` of the page before.")] = None,
    kind: Annotated[
        str, Query(max_length=20, description="`command`, or what looks after images: `build`, `transfer`; or `all`.")
    ] = "command",
) -> Response:
    page, next_cursor, total = tasks.list_tasks(
        ctx,
        user,
        states=parse_task_states(state or "", "state"),
        name=name,
        limit=limit,
        cursor=cursor,
        id_prefix=id_prefix,
        kind=kind,
    )
    rows = [{key: value for key, value in encode(task).items() if key not in _DETAIL} for task in page]
    return Json({"tasks": rows, "next_cursor": next_cursor, "total": total})


@router.get(
    "/tasks/{task_id}",
    summary="Look at a task",
    description="The task with its spec, its jobs (oldest first) and its outputs.",
    responses=returns(Task, "The task.") | USER_FAILS | fails(NotFound),
)
def get_task(user: User, ctx: Ctx, task_id: str) -> Response:
    return Json(tasks.get(ctx, user, task_id))


@router.post(
    "/tasks/{task_id}/cancel",
    summary="Stop a task",
    description="Asks for the task to be stopped. Idempotent; a task that has ended stays as it is. Takes no body.",
    responses=returns(Task, "The task as it now stands.") | USER_FAILS | fails(NotFound),
)
def cancel_task(user: User, ctx: Ctx, task_id: str) -> Response:
    return Json(tasks.cancel(ctx, user, task_id))
