"""Pages of pools: which there are, a new one, and of each who has what, now and over time, and why."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.endpoints import Endpoint
from diamond.core.errors import DiamondError, InvalidInput, NotFound
from diamond.core.pools import Pool
from diamond.core.projects import Role
from diamond.server.services import endpoints, pool_history, pools, projects
from diamond.server.services.identity import Identity
from diamond.server.web import pool_drawing, pool_words
from diamond.server.web.forms import Fields, Form, Visitor, typed
from diamond.server.web.pages import ctx_of, page_router, settings_of, show, to
from diamond.texts import tasktext

router = page_router()
_NOTICES = {
    "made": "The pool is made. Its first nodes are asked for now.",
    "changed": "The pool is changed. Pilots that run keep the walltime they have.",
    "closed": "The pool is closed. Its nodes are let go once its tasks have saved their state.",
}
SPANS = {"1h": 3600.0, "6h": 21_600.0, "1d": 86_400.0, "7d": 604_800.0}
_USUAL_SPAN = "6h"
_MOST_SHOWN = 200  # tasks in a table; of the rest, how many there are
_FIELDS = (
    "endpoint", "name", "project", "least", "most", "gpu_type", "gpus", "slots", "cpus", "memory", "walltime", "idle",
    "partition", "account", "qos",
)  # fmt: skip
_SLURM = ("partition", "account", "qos")
# Fields of a pool that the forms ask for in another way.
_SHOWN_AT = {"nodes": "most", "accelerators": "gpus", **{f"slurm.{name}": name for name in _SLURM}}


@router.api_route("/pools", methods=["GET", "HEAD"])
def list_page(request: Request, who: Visitor) -> Response:
    assert who.user_id is not None
    closed = request.query_params.get("closed") == "1"
    return show(
        request,
        "pools.html",
        who=who,
        pools=pools.list_pools(ctx_of(request), who.user_id, closed=closed),
        closed=closed,
        words=pool_words,
        notice=_NOTICES.get(request.query_params.get("done", ""), ""),
    )


# ---- a new one -------------------------------------------------------------------------------------------------------


@router.api_route("/pools/new", methods=["GET", "HEAD"])
def new_page(request: Request, who: Visitor) -> Response:
    return _new(request, who, None)


@router.post("/pools/new")
def new(request: Request, who: Visitor, form: Fields) -> Response:
    assert who.user_id is not None
    try:
        made = pools.create(ctx_of(request), who.user_id, read_form(form))
    except DiamondError as error:
        return _new(request, who, form, status=error.status, **_beside(error, _FIELDS))
    return to(f"/pools/{made.id}?done=made")


def read_form(form: Form) -> dict[str, Any]:
    """A pool as its form describes it; what is left empty is left out."""
    given = {name: form.get(name, "").strip() for name in _FIELDS}
    raw: dict[str, Any] = {
        name: given[name]
        for name in ("endpoint", "name", "project", "cpus", "memory", "walltime", "idle")
        if given[name]
    }
    if nodes := _nodes(given["least"], given["most"]):
        raw["nodes"] = nodes
    if given["gpus"] not in ("", "0"):
        raw["accelerators"] = f"{given['gpu_type'] or 'gpu'}:{given['gpus']}"
    if given["slots"]:
        raw["slots"] = _number(given["slots"])
    if slurm := {name: given[name] for name in _SLURM if given[name]}:
        raw["slurm"] = slurm
    return raw


def _nodes(least: str, most: str) -> str:
    """One of the two alone is both."""
    return f"{least}..{most}" if least and most else least or most


def _number(text: str) -> int | str:
    """What is no number is left for validation, which says what is wanted."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text


def _beside(error: DiamondError, fields: tuple[str, ...]) -> dict[str, Any]:
    name = _SHOWN_AT.get(error.field or "", error.field)
    return {"errors": {name: error}} if name in fields else {"problem": error}


def _new(request: Request, who: Identity, form: Form | None, **values: Any) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    places = endpoints.list_endpoints(ctx, who.user_id)
    return show(
        request,
        "pool_new.html",
        who=who,
        form=typed(form if form is not None else _usual(request, places)),
        offered=[(one.name, _place_words(one)) for one in places],
        projects=_projects(request, who),
        **values,
    )


def _place_words(one: Endpoint) -> str:
    if one.facts is None:
        return f"{one.name} (not connected yet)"
    kind = one.facts.scheduler + ("" if one.online else ", away")
    return f"{one.name} ({kind}{'' if one.facts.holds_pools else '; does not hold pools'})"


def _usual(request: Request, places: list[Endpoint]) -> Form:
    """What most people want where the pool is to be: the whole of one machine, a few nodes of a cluster."""
    asked = request.query_params.get("endpoint", "")
    able = [one for one in places if one.facts is not None and one.facts.holds_pools]
    chosen = next((one for one in places if one.name == asked), able[0] if len(able) == 1 else None)
    usual = {"endpoint": "", "least": "1", "most": "4", "cpus": "1", "walltime": "4h", "idle": "10m"}
    if chosen is None:
        return usual
    usual |= {"endpoint": chosen.name, "name": f"{chosen.name}-pool"}
    facts = chosen.facts
    if facts is None:
        return usual
    gpus = facts.gpus_per_node or [gpu for part in facts.partitions for group in part.groups for gpu in group.gpus]
    if gpus:
        usual |= {"gpu_type": gpus[0].model, "gpus": str(gpus[0].count)}
    elif facts.cpus_per_node:
        usual |= {"slots": str(facts.cpus_per_node)}
    return usual | ({"most": "1"} if facts.scheduler == "local" else {})


def _projects(request: Request, who: Identity) -> list[str]:
    """In which this person may make a pool; none where there is one user alone."""
    assert who.user_id is not None
    if not settings_of(request).multi_user:
        return []
    mine = projects.list_projects(ctx_of(request), who.user_id)
    return [one.name for one in mine if one.role in Role.MEMBER.at_least and not one.personal]


# ---- one of them -----------------------------------------------------------------------------------------------------


@router.api_route("/pools/{ref}", methods=["GET", "HEAD"])
def detail_page(request: Request, who: Visitor, ref: str) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    asked = request.query_params.get("span", "")
    span = asked if asked in SPANS else _USUAL_SPAN
    pool = pools.get(ctx, who.user_id, ref)
    history = pool_history.read(ctx, who.user_id, pool.id, SPANS[span])
    live, ended = pool_words.lines(pool, history)
    stack = pool_drawing.stack(history)
    return show(
        request,
        "pool.html",
        who=who,
        pool=pool,
        history=history,
        nodes=pool_drawing.nodes(pool.pilots, history),
        stack=stack,
        bands=pool_drawing.bands(history)[:_MOST_SHOWN],
        ticks=pool_drawing.ticks(history),
        levels=pool_drawing.levels(stack.most),
        live=live[:_MOST_SHOWN],
        more=max(0, len(live) - _MOST_SHOWN),
        ended=ended,
        look_of=pool_drawing.look_of,
        fairness=pool_words.fairness([*live, *ended]),
        words=pool_words,
        span=span,
        spans=list(SPANS),
        example=_example(pool),
        notice=_NOTICES.get(request.query_params.get("done", ""), ""),
    )


def _example(pool: Pool) -> str:
    """What a task file says to be launched into it."""
    most = pool.spec.slots_per_node * pool.spec.most_nodes
    return tasktext.write({"pool": pool.name, "resources": {"slots": f"1..{most}" if most > 1 else "1"}})


@router.api_route("/pools/{ref}/change", methods=["GET", "HEAD"])
def change_page(request: Request, who: Visitor, ref: str) -> Response:
    assert who.user_id is not None
    return _change(request, who, pools.get(ctx_of(request), who.user_id, ref), None)


@router.post("/pools/{ref}/change")
def change(request: Request, who: Visitor, ref: str, form: Fields) -> Response:
    """Only what is different from what the pool has."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    pool = pools.get(ctx, who.user_id, ref)
    wanted = {name: form[name].strip() for name in _changeable(pool) if name in form}
    nodes = _nodes(wanted.pop("least", ""), wanted.pop("most", ""))
    changes = {name: text for name, text in wanted.items() if text != _changeable(pool)[name]}
    try:
        if missing := next((name for name, text in changes.items() if not text), ""):
            raise InvalidInput(f"{missing} is left empty", hint="give it a length of time, as 4h", field=missing)
        if nodes and nodes != f"{pool.spec.least_nodes}..{pool.spec.most_nodes}":
            changes["nodes"] = nodes
        pools.change(ctx, who.user_id, pool.id, changes)
    except (InvalidInput, NotFound) as error:
        return _change(request, who, pool, form, status=error.status, **_beside(error, tuple(_changeable(pool))))
    return to(f"/pools/{pool.id}?done=changed")


def _changeable(pool: Pool) -> Form:
    return {
        "least": str(pool.spec.least_nodes),
        "most": str(pool.spec.most_nodes),
        "walltime": _shown(pool.spec.walltime),
        "idle": _shown(pool.spec.idle),
    }


def _shown(seconds: int) -> str:
    """As the form takes it again, exactly, in the largest unit that needs no fraction."""
    size, unit = next(one for one in ((3600, "h"), (60, "m"), (1, "s")) if seconds % one[0] == 0)
    return f"{seconds // size}{unit}"


def _change(request: Request, who: Identity, pool: Pool, form: Form | None, **values: Any) -> Response:
    return show(
        request,
        "pool_change.html",
        who=who,
        pool=pool,
        form=typed(form if form is not None else _changeable(pool)),
        **values,
    )


@router.api_route("/pools/{ref}/close", methods=["GET", "HEAD"])
def ask_close(request: Request, who: Visitor, ref: str) -> Response:
    assert who.user_id is not None
    return show(request, "pool_close.html", who=who, pool=pools.get(ctx_of(request), who.user_id, ref))


@router.post("/pools/{ref}/close")
def close(request: Request, who: Visitor, ref: str) -> Response:
    assert who.user_id is not None
    closed = pools.close(ctx_of(request), who.user_id, ref)
    return to(f"/pools/{closed.id}?done=closed")
