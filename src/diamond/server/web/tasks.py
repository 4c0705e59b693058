"""The Task Manager: a live table of tasks, and what can be done with several of them at once."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_urlsafe
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import DiamondError, InvalidInput, NotFound
from diamond.core.ids import is_id
from diamond.core.states import TaskState
from diamond.core.tasks import Task
from diamond.server import auth
from diamond.server.services import removals, reruns, task_lists, tasks
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.services.task_lists import Wanted
from diamond.server.web import task_words
from diamond.server.web.compare import compare_path
from diamond.server.web.forms import Fields, Form, Visitor
from diamond.server.web.pages import ctx_of, page_router, safe_next, settings_of, show, to

router = page_router()
COLUMNS_COOKIE = "diamond_columns"
_YEAR_S = 366 * 86400
_PICK = "pick_"


class Column(NamedTuple):
    """`sort` is what the table can be sorted by there; "" nothing."""

    key: str
    title: str
    sort: str = ""
    shared: bool = False  # only where there is more than one user
    shown: bool = True  # unless somebody chooses


# Name, state and actions are always there.
COLUMNS = (
    Column("endpoint", "Endpoint", "endpoint"),
    Column("project", "Project", shared=True),
    Column("owner", "Owner", shared=True),
    Column("created", "Created", "created"),
    Column("duration", "Duration", "duration"),
    Column("gpus", "GPUs", "gpus"),
    Column("image", "Image", shown=False),
    Column("log", "Log Path"),
    Column("id", "Id", shown=False),
)


class Deed(NamedTuple):
    """Something to do with tasks. `fits` says of which it makes sense; `told` is for afterwards."""

    verb: str
    told: str
    question: str
    fits: Callable[[Task], bool]
    act: Callable[[Context, str, str], object]
    left_alone: str


DEEDS = {
    "stop": Deed(
        "Stop", "asked to stop", "A program that is stopped is warned first, and then ended. Its log and outputs stay.",
        lambda task: not task.state.is_final, tasks.cancel, "has ended already",
    ),
    "rerun": Deed(
        "Run again", "launched again", "Each becomes a new task with the same description.",
        lambda _task: True, reruns.rerun, "",
    ),
    "delete": Deed(
        "Delete", "deleted", "Their logs, curves and history are removed for good. Files at the endpoint stay there.",
        lambda task: task.state.is_final, removals.remove, "has not ended: stop it first",
    ),
}  # fmt: skip


@router.api_route("/tasks", methods=["GET", "HEAD"])
def table(request: Request, who: Visitor) -> Response:
    assert who.user_id is not None
    ctx, asked = ctx_of(request), request.query_params
    multi_user = settings_of(request).multi_user
    states = tuple(state for state in TaskState if state.value in asked.getlist("state"))
    sort = asked.get("sort", "created")
    wanted = Wanted(
        states=states,
        search=asked.get("q", "")[: task_lists.MAX_SEARCH],
        endpoint=asked.get("endpoint", "")[:200],
        project=asked.get("project", "")[:200],
        everybody=multi_user and asked.get("whose") == "all",
        sort=sort if sort in task_lists.SORTS else "created",
        ascending=asked.get("order") == "asc",
    )
    problem = None
    try:
        page = task_lists.page(ctx, who.user_id, wanted, cursor=asked.get("at", ""))
    except (InvalidInput, NotFound) as error:  # an old link: the table is shown from its beginning, with a word why
        problem = error
        wanted = Wanted()
        page = task_lists.page(ctx, who.user_id, wanted)
    endpoints, projects = task_lists.choices(ctx, who.user_id)
    address, shown = _Address(wanted), _columns(request, multi_user)
    return show(
        request,
        "tasks.html",
        who=who,
        page=page,
        wanted=wanted,
        address=address,
        here_now=address.to(at=asked.get("at", "")),
        states=list(TaskState),
        endpoints=sorted({*endpoints, wanted.endpoint} - {""}),
        projects=sorted({*projects, wanted.project} - {""}),
        chosen=shown,
        is_chosen=COLUMNS_COOKIE in request.cookies,
        has_endpoint="endpoint" in shown,  # it stands before the state, as people know it
        columns=[each for each in COLUMNS if each.key in shown - {"endpoint"}],
        all_columns=[each for each in COLUMNS if multi_user or not each.shared],
        is_filtered=wanted != Wanted(sort=wanted.sort, ascending=wanted.ascending),
        why=task_words.short,
        ran_s=task_words.ran_s,
        now=ctx.clock(),
        notice=notice(asked.get("done", ""), asked.get("n", "")),
        problem=problem,
        once=token_urlsafe(12),
    )


class _Address:
    """Addresses of this table, looked at in another way."""

    def __init__(self, wanted: Wanted) -> None:
        self._now = {
            "q": wanted.search, "endpoint": wanted.endpoint, "project": wanted.project,
            "whose": "all" if wanted.everybody else "", "sort": "" if wanted.sort == "created" else wanted.sort,
            "order": "asc" if wanted.ascending else "",
        }  # fmt: skip
        self._states = [state.value for state in wanted.states]

    def to(self, *, states: list[str] | None = None, **changes: str) -> str:
        fields = {name: value for name, value in {**self._now, **changes}.items() if value}
        chosen = self._states if states is None else states
        query = urlencode([*fields.items(), *(("state", each) for each in chosen)])
        return f"/tasks?{query}" if query else "/tasks"

    def toggled(self, state: str) -> str:
        """With that state added, or taken away."""
        others = [each for each in self._states if each != state]
        return self.to(states=others if state in self._states else [*self._states, state])

    def sorted(self, sort: str, wanted: Wanted) -> str:
        """By that column; by the other end of it, if it is sorted so already."""
        ascending = not wanted.ascending if wanted.sort == sort else sort in ("name", "status", "endpoint")
        return self.to(sort="" if sort == "created" else sort, order="asc" if ascending else "")


def _columns(request: Request, multi_user: bool) -> set[str]:
    """Which were chosen; a cookie that holds something else is no choice."""
    known = {each.key for each in COLUMNS if multi_user or not each.shared}
    cookie = request.cookies.get(COLUMNS_COOKIE)
    if cookie is None:
        return {each.key for each in COLUMNS if each.shown and each.key in known}
    return set(cookie.split(".")) & known


@router.post("/tasks/columns")
def choose_columns(request: Request, who: Visitor, form: Fields) -> Response:
    chosen = [each.key for each in COLUMNS if f"column_{each.key}" in form]
    response = to(_back(form))
    response.set_cookie(
        COLUMNS_COOKIE, ".".join(chosen) or "-", max_age=_YEAR_S, path="/tasks", httponly=True, samesite="lax",
        secure=auth.is_secure(request),
    )  # fmt: skip
    return response


@router.post("/tasks/chosen")
def chosen(request: Request, who: Visitor, form: Fields) -> Response:
    """Do something with those that are ticked: asks first, and then does it."""
    picked = [name.removeprefix(_PICK) for name in form if name.startswith(_PICK)]
    ids = [each for each in picked if is_id(each, "tsk")]
    if form.get("do") == "compare":
        return to(compare_path(ids))
    deed = DEEDS.get(form.get("do", ""))
    if deed is None:
        names = ", ".join((*DEEDS, "compare"))
        raise InvalidInput(f"is none of {names}", hint="go back and press one of the buttons", field="do")
    return sure(request, who, form, form.get("do", ""), ids)


def sure(request: Request, who: Identity, form: Form, do: str, ids: list[str]) -> Response:
    """The page that asks once more; with `sure` in the form, what was asked is done."""
    assert who.user_id is not None
    ctx, deed, back = ctx_of(request), DEEDS[do], _back(form)
    failed: list[DiamondError] = []
    found = _seen(ctx, who.user_id, ids, failed)
    fitting = [task for task in found if deed.fits(task)]
    if form.get("sure") == "yes":
        done = 0
        for task in fitting:
            try:
                if do == "rerun":
                    reruns.rerun(ctx, who.user_id, task.id, once_key(form, task.id))
                else:
                    deed.act(ctx, who.user_id, task.id)
                done += 1
            except DiamondError as error:
                failed.append(error)
        if not failed:
            return to(with_query(back, done=do, n=str(done)))
        found = _seen(ctx, who.user_id, [task.id for task in found], [])
        fitting = [task for task in found if deed.fits(task)]
    return show(
        request,
        "tasks_sure.html",
        who=who,
        status=failed[0].status if failed else 200,
        do=do,
        deed=deed,
        fitting=fitting,
        others=[task for task in found if task not in fitting],
        failed=failed,
        back=back,
        once=form.get("once", "") or token_urlsafe(12),
    )


def _seen(ctx: Context, user_id: str, ids: list[str], failed: list[DiamondError]) -> list[Task]:
    found = []
    for task_id in ids:
        try:
            found.append(tasks.get(ctx, user_id, task_id))
        except NotFound as error:
            failed.append(error)
    return found


def once_key(form: Form, task_id: str) -> str | None:
    """A key that makes a form which is sent twice do its work once."""
    key = form.get("once", "")
    return f"page/{key[:40]}/{task_id}" if key and key.isprintable() else None


def _back(form: Form) -> str:
    """Where the table was: a path of ours below /tasks."""
    asked = safe_next(form.get("back", ""), "/tasks")
    return asked if asked == "/tasks" or asked.startswith(("/tasks?", "/tasks/")) else "/tasks"


def with_query(path: str, **more: str) -> str:
    place, _, query = path.partition("?")
    kept = [(name, value) for name, value in parse_qsl(query) if name not in more]
    return f"{place}?{urlencode([*kept, *more.items()])}"


def notice(done: str, number: str) -> str:
    deed = DEEDS.get(done)
    if deed is None:
        return ""
    count = int(number) if number.isdecimal() and len(number) < 6 else 1
    many = "1 task was" if count == 1 else f"{count} tasks were"
    return f"{many} {deed.told}."
