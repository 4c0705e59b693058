"""Users, for administrators: who has an account here, inviting people, and what becomes of those who leave."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import DiamondError, NotFound
from diamond.core.projects import Role
from diamond.core.quotas import NAMES
from diamond.server.services import invitations, ownership, projects, quotas, seen, sessions, tokens, users
from diamond.server.services.identity import Identity
from diamond.server.web import inviting
from diamond.server.web.forms import Administrator, Fields, Form, by_field, once_of, typed, unless_done
from diamond.server.web.limits import read_limits, shown_limits
from diamond.server.web.pages import ctx_of, page_router, show, to
from diamond.server.web.settings import me, told

router = page_router()
PAGE = 50
_MAX_PAGE = 1_000_000
_NOTICES = {
    "withdrawn": "The invitation is withdrawn: its link works no more.",
    "disabled": "The account is closed: its sessions ended, its tokens are dead, its live tasks are being stopped.",
    "enabled": "The account is open again. Sessions and tokens it had stay dead.",
    "admin": "They now administer this installation.",
    "ordinary": "They are an ordinary user now.",
    "quota": "The limits are set. What runs goes on, even if it is more than that.",
    "cleared": "The limits of everybody hold for them.",
}


@router.api_route("/users", methods=["GET", "HEAD"])
def users_page(request: Request, who: Administrator) -> Response:
    return _list(request, who, notice=told(request, _NOTICES))


def _list(request: Request, who: Identity, *, status: int = 200, form: Form | None = None, **values: Any) -> Response:
    ctx = ctx_of(request)
    words = request.query_params.get("q", "").strip()[:100]
    asked = request.query_params.get("page", "1")
    page = max(1, min(_MAX_PAGE, int(asked))) if asked.isdecimal() and len(asked) < 8 else 1
    found, total = users.search(ctx, words, offset=(page - 1) * PAGE, limit=PAGE)
    return show(
        request,
        "users.html",
        who=who,
        status=status,
        users=found,
        total=total,
        words=words,
        page=page,
        pages=max(1, -(-total // PAGE)),
        invitations=invitations.list_invitations(ctx, me(who)),
        projects=[each.name for each in projects.list_all(ctx, me(who))],
        roles=[Role.VIEWER, Role.MEMBER, Role.OWNER],
        sends_mail=inviting.sends_mail(request),
        form=typed(form),
        **{"given": None, **values},
    )


# ---- invitations -------------------------------------------------------------------------------------------------


@router.post("/invitations")
def invite(request: Request, who: Administrator, form: Fields) -> Response:
    """Answers with the page itself: the link is shown this once, so there is no address for it."""
    try:
        given = inviting.invite(request, who, form, form.get("project", ""), is_admin=bool(form.get("is_admin")))
    except DiamondError as error:
        again = unless_done(error, form)
        return _list(request, who, status=error.status, form=again, **by_field(error, inviting.FIELDS))
    return _list(request, who, given=given)


@router.post("/invitations/{invitation_id}/withdraw")
def withdraw(request: Request, who: Administrator, invitation_id: str) -> Response:
    invitations.withdraw(ctx_of(request), me(who), invitation_id)
    return to("/users?done=withdrawn")


# ---- one of them -------------------------------------------------------------------------------------------------


@router.api_route("/users/{name}", methods=["GET", "HEAD"])
def user_page(request: Request, who: Administrator, name: str) -> Response:
    return _detail(request, who, name, notice=told(request, _NOTICES))


def _detail(
    request: Request, who: Identity, name: str, *, status: int = 200, form: Form | None = None, **values: Any
) -> Response:
    ctx = ctx_of(request)
    user = users.get(ctx, name)
    quota = quotas.get(ctx, "user", user.name)
    return show(
        request,
        "user.html",
        who=who,
        status=status,
        user=user,
        quota=quota,
        seen=quotas.mark_of(quota),
        form=typed(shown_limits(quota.limits) | (form or {})),  # which may be that of another form on the page
        num_sessions=len(sessions.list_sessions(ctx, user.id)),
        num_tokens=len(tokens.list_tokens(ctx, user.id)),
        **{"link": "", "until": 0.0, "given": None, **values},
    )


@router.post("/users/{name}/disable")
def disable(request: Request, who: Administrator, name: str) -> Response:
    try:
        users.disable(ctx_of(request), name)
    except DiamondError as error:
        return _again(request, who, name, error)
    return to("/users?done=disabled") if name == who.name else _to(name, "disabled")


@router.post("/users/{name}/enable")
def enable(request: Request, who: Administrator, name: str) -> Response:
    try:
        users.enable(ctx_of(request), name)
    except DiamondError as error:
        return _again(request, who, name, error)
    return _to(name, "enabled")


@router.post("/users/{name}/admin")
def set_admin(request: Request, who: Administrator, name: str, form: Fields) -> Response:
    wanted = form.get("is_admin") == "yes"
    try:
        users.set_admin(ctx_of(request), name, wanted)
    except DiamondError as error:
        return _again(request, who, name, error)
    if name == who.name and not wanted:
        return to("/settings")  # nothing here is theirs to see any more
    return _to(name, "admin" if wanted else "ordinary")


@router.post("/users/{name}/reset")
def reset(request: Request, who: Administrator, name: str, form: Fields) -> Response:
    """Answers with the page itself, which shows the link this once."""
    try:
        code, until = users.reset(
            ctx_of(request), me(who), name, revoke_tokens=bool(form.get("revoke_tokens")), once=once_of(form)
        )
    except DiamondError as error:
        return _again(request, who, name, error)
    return _detail(request, who, name, link=inviting.address(request, "reset", code), until=until)


@router.post("/users/{name}/quota")
def set_quota(request: Request, who: Administrator, name: str, form: Fields) -> Response:
    try:
        quotas.set_limits(ctx_of(request), "user", name, read_limits(form), saw=form.get(seen.FIELD))
    except DiamondError as error:
        return _again(request, who, name, error, form, *NAMES)
    return _to(name, "quota")


@router.post("/users/{name}/quota/clear")
def clear_quota(request: Request, who: Administrator, name: str, form: Fields) -> Response:
    try:
        quotas.clear(ctx_of(request), "user", name, saw=form.get(seen.FIELD))
    except DiamondError as error:
        return _again(request, who, name, error)
    return _to(name, "cleared")


@router.post("/users/{name}/hand-over")
def hand_over(request: Request, who: Administrator, name: str, form: Fields) -> Response:
    """All that somebody has goes to somebody else; says how much that was."""
    taker = form.get("to", "").strip()
    try:
        given = ownership.hand_over(ctx_of(request), name, taker)
    except DiamondError as error:
        return _again(request, who, name, error, form, "to")
    return _detail(request, who, name, given=given, taker=taker)


def _again(
    request: Request, who: Identity, name: str, error: DiamondError, form: Form | None = None, *fields: str
) -> Response:
    if isinstance(error, NotFound) and error.field == "name":
        raise error  # there is no page to show it on
    return _detail(request, who, name, status=error.status, form=form, **by_field(error, fields))


def _to(name: str, done: str) -> Response:
    # Only names that the services know come here, and those are letters, digits, dots, dashes and underscores.
    return to(f"/users/{name}?done={done}")
