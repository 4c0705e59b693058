"""The page of one task: how it stands, what it runs, what it left, and what can be done with it."""

from __future__ import annotations

from secrets import token_urlsafe
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core import training_words
from diamond.core.errors import DiamondError, InvalidInput
from diamond.core.projects import Visibility
from diamond.server.services import events, ownership, pool_history, reruns, task_details, task_lists, tasks
from diamond.server.services.identity import Identity
from diamond.server.web import curves, pool_words, task_words, training
from diamond.server.web.forms import Fields, Visitor, by_field
from diamond.server.web.pages import PART_HEADER, ctx_of, page_router, show, to
from diamond.server.web.task_log import log_end
from diamond.server.web.tasks import notice, once_key, sure
from diamond.texts import tasktext

router = page_router()
_MOST_EVENTS = 500
_SEEN_BY = {
    Visibility.PRIVATE: "only you",
    Visibility.PROJECT: "everybody in its project",
    Visibility.PUBLIC: "everybody with an account here",
}


@router.api_route("/tasks/{task_id}", methods=["GET", "HEAD"])
def task_page(request: Request, who: Visitor, task_id: str) -> Response:
    asked = request.query_params
    said = "Who sees it is changed." if asked.get("done") == "share" else notice(asked.get("done", ""), "1")
    return _page(request, who, task_id, notice=said)


def _page(request: Request, who: Identity, task_id: str, *, status: int = 200, **values: Any) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    task = tasks.get(ctx, who.user_id, task_id)
    now = ctx.clock()
    runs = [task_words.run_of(job, now, task_lists.log_path(job.run_dir)) for job in task.jobs]
    if PART_HEADER not in request.headers:  # what never changes is not made again for an open page
        values |= log_end(request, ctx, who.user_id, task_id)
        values["text"] = tasktext.write(tasktext.fields_of(task.spec)) if task.spec and task.kind == "command" else ""
        values["program"] = task_details.program(ctx, who.user_id, task)
        values["once"] = token_urlsafe(12)
    return show(
        request,
        "task.html",
        who=who,
        status=status,
        task=task,
        why=task_words.why(task),
        lacks_endpoint=task_words.lacks_endpoint(task),
        ran_s=task_words.ran_s(task, now),
        runs=runs,
        steps=task_words.steps(events.since(ctx, who.user_id, 0, task_id=task_id, limit=_MOST_EVENTS)),
        span=task_words.span,
        is_mine=task.owner == who.name,
        may_stop=task_details.may_stop(ctx, who.user_id, task),
        projects=task_lists.choices(ctx, who.user_id)[1],
        visibilities=list(Visibility),
        seen_by=_SEEN_BY,
        is_whole=PART_HEADER not in request.headers,
        curve_values=curves.last_values(ctx, task),
        curve_notes=curves.notes(ctx, task),
        trained=training.panel(ctx, who.user_id, task_id),
        words=training_words,
        in_pool=pool_history.of_task(ctx, who.user_id, task_id),
        pool_words=pool_words,
        now=now,
        **values,
    )


@router.api_route("/tasks/{task_id}/stop", methods=["GET", "HEAD"])
def ask_stop(request: Request, who: Visitor, task_id: str) -> Response:
    return _ask(request, who, "stop", task_id)


@router.api_route("/tasks/{task_id}/delete", methods=["GET", "HEAD"])
def ask_delete(request: Request, who: Visitor, task_id: str) -> Response:
    return _ask(request, who, "delete", task_id)


def _ask(request: Request, who: Identity, do: str, task_id: str) -> Response:
    assert who.user_id is not None
    tasks.get(ctx_of(request), who.user_id, task_id)  # one that is not there is a page of its own
    return sure(request, who, {"back": "/tasks" if do == "delete" else f"/tasks/{task_id}"}, do, [task_id])


@router.post("/tasks/{task_id}/rerun")
def rerun(request: Request, who: Visitor, task_id: str, form: Fields) -> Response:
    assert who.user_id is not None
    try:
        made = reruns.rerun(ctx_of(request), who.user_id, task_id, once_key(form, task_id))
    except DiamondError as error:
        if error.status == 404:
            raise
        return _page(request, who, task_id, status=error.status, problem=error)
    return to(f"/tasks/{made.id}?done=rerun")


@router.post("/tasks/{task_id}/share")
def share(request: Request, who: Visitor, task_id: str, form: Fields) -> Response:
    assert who.user_id is not None
    try:
        ownership.change_task(
            ctx_of(request),
            who.user_id,
            task_id,
            visibility=form.get("visibility"),
            project=form.get("project") or None,
        )
    except InvalidInput as error:
        return _page(request, who, task_id, status=error.status, **by_field(error, ("visibility", "project")))
    except DiamondError as error:
        if error.status in (403, 404):
            raise
        return _page(request, who, task_id, status=error.status, problem=error)
    return to(f"/tasks/{task_id}?done=share")
