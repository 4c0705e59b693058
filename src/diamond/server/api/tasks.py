"""Routes of tasks: create, plan, list, look at, cancel, run again, remove."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from diamond.core.codec import decode, shallow
from diamond.core.errors import (
    Conflict,
    Forbidden,
    IdempotencyMismatch,
    InvalidInput,
    NotFound,
    QuotaExceeded,
    StorageFull,
    TooLarge,
)
from diamond.core.states import parse_task_states
from diamond.core.tasks import Task
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, Server, User
from diamond.server.api.schemas import NewTask, NewTasks, TaskBatch, TaskChange, TaskPage, TaskPlan
from diamond.server.services import ownership, removals, reruns, tasks

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
    | fails(Forbidden, QuotaExceeded)
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
    | fails(Forbidden, QuotaExceeded)
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
    responses=returns(TaskPlan, "The plan.") | USER_FAILS | fails(Forbidden, QuotaExceeded) | fails(TooLarge),
    openapi_extra=takes(NewTask),
)
def plan_task(user: User, ctx: Ctx, body: Body) -> Response:
    return Json(tasks.plan(ctx, user, _spec(body)))


@router.get(
    "/tasks",
    summary="List tasks",
    description="Newest first, one page at a time: your own, or with `project` or `owner` all of theirs that you see.",
    responses=returns(TaskPage, "A page of tasks.") | USER_FAILS | fails(NotFound),
)
async def list_tasks(
    user: User,
    server: Server,
    state: Annotated[str | None, Query(description="States, separated by commas: `RUNNING,QUEUED`.")] = None,
    name: Annotated[str | None, Query(max_length=500, description="Only tasks of exactly this name.")] = None,
    id_prefix: Annotated[str | None, Query(max_length=60, description="Only ids that begin like this.")] = None,
    limit: Annotated[int, Query(ge=1, le=tasks.MAX_PAGE, description="Tasks on a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=60, description="`next_cursor` of the page before.")] = None,
    kind: Annotated[
        str, Query(max_length=20, description="`command`, or what looks after images: `build`, `transfer`; or `all`.")
    ] = "command",
    project: Annotated[str | None, Query(max_length=100, description="Everybody's in this project.")] = None,
    owner: Annotated[str | None, Query(max_length=100, description="Those of this user.")] = None,
) -> Response:
    page, next_cursor, total = await server.looks.look(
        tasks.list_tasks,
        server.ctx,
        user,
        states=parse_task_states(state or "", "state"),
        name=name,
        limit=limit,
        cursor=cursor,
        id_prefix=id_prefix,
        kind=kind,
        project=project,
        owner=owner,
    )
    rows = [{key: value for key, value in shallow(task).items() if key not in _DETAIL} for task in page]
    return Json({"tasks": rows, "next_cursor": next_cursor, "total": total})


@router.get(
    "/tasks/{task_id}",
    summary="Look at a task",
    description="The task with its spec, its jobs (oldest first) and its outputs.",
    responses=returns(Task, "The task.") | USER_FAILS | fails(NotFound),
)
async def get_task(user: User, server: Server, task_id: str) -> Response:
    return Json(await server.looks.look(tasks.get, server.ctx, user, task_id))


@router.patch(
    "/tasks/{task_id}",
    summary="Share a task",
    description="Who sees it, and which project it is in; what is left out stays. Only its owner can; while it is live "
    "it stays in its project.",
    responses=returns(Task, "The task as it now is.") | USER_FAILS | fails(NotFound, Conflict),
    openapi_extra=takes(TaskChange),
)
def change_task(user: User, ctx: Ctx, task_id: str, body: Body) -> Response:
    wanted = decode(TaskChange, body, strict=True)
    return Json(ownership.change_task(ctx, user, task_id, visibility=wanted.visibility, project=wanted.project))


@router.delete(
    "/tasks/{task_id}",
    status_code=204,
    summary="Remove a task",
    description="Forgets a task of yours that has ended: its log, curves and events too. What it used stays counted. "
    "Its files go some days later, unless something else needs them.",
    responses=USER_FAILS | fails(NotFound, Forbidden, Conflict),
)
def remove_task(user: User, ctx: Ctx, task_id: str) -> Response:
    removals.remove(ctx, user, task_id)
    return Response(status_code=204)


@router.post(
    "/tasks/{task_id}/rerun",
    status_code=201,
    summary="Run a task again",
    description="A new task from the same description, of whoever asks. Secrets have the values of now; files are "
    "those that were uploaded then. With `name` it gets another name. An `Idempotency-Key` makes repeating it "
    "harmless. Takes no body.",
    responses=returns(Task, "The new task.", status=201)
    | USER_FAILS
    | fails(NotFound, Forbidden, QuotaExceeded)
    | fails(IdempotencyMismatch),
)
def rerun_task(
    user: User,
    ctx: Ctx,
    task_id: str,
    name: Annotated[str | None, Query(description="Name of the new task; left out: that of the old one.")] = None,
    idempotency_key: Annotated[str | None, Header(description="1 to 200 printable characters.")] = None,
) -> Response:
    task = reruns.rerun(ctx, user, task_id, idempotency_key, name=name)
    return Json(task, 201, {"Location": f"/api/v1/tasks/{task.id}"})


@router.post(
    "/tasks/{task_id}/cancel",
    summary="Stop a task",
    description="Asks for the task to be stopped. Idempotent; a task that has ended stays as it is. Takes no body.",
    responses=returns(Task, "The task as it now stands.") | USER_FAILS | fails(NotFound),
)
def cancel_task(user: User, ctx: Ctx, task_id: str) -> Response:
    return Json(tasks.cancel(ctx, user, task_id))
