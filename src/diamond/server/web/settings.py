"""Settings of who is signed in: profile and password, tokens, browsers, and how pages look. Tabs, one address each.

Projects are in `settings_projects`, what is kept and told for them in `settings_keeping`.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.accounts import SCOPE_MEANS, Scope
from diamond.core.errors import DiamondError, InvalidInput
from diamond.server import auth
from diamond.server.hosts import base_url
from diamond.server.services import accounts, federation, seen, sessions, tokens
from diamond.server.services.identity import Identity
from diamond.server.web.forms import Fields, Form, Visitor, by_field, drop_session, once_of, twice, typed, unless_done
from diamond.server.web.pages import THEME_COOKIE, THEMES, ctx_of, page_router, show, to

router = page_router()
DAY_S = 86_400.0
THEME_S = 366 * 86_400
# What a page says after a form did something: by name, so that no address can put words into our mouth.
_NOTICES = {
    "profile": "Saved.",
    "password": "Your password is changed. Your other browsers are signed out.",
    "unlinked": "That identity no longer signs you in.",
    "linked": "You can now sign in with that identity.",
    "session": "That browser is signed out.",
    "sessions": "Every other browser is signed out.",
    "token": "The token is revoked.",
    "theme": "That is how pages look in this browser from now on.",
}
LIFETIMES = {"1": "a day", "30": "30 days", "90": "90 days", "365": "a year", "": "for ever"}
_PASSWORD_FIELDS = ("old_password", "new_password", "again")
_PROFILE_FIELDS = ("full_name", "email")
_TOKEN_FIELDS = ("name", "scopes", "expires_in_s")


def told(request: Request, notices: dict[str, str] = _NOTICES) -> str:
    return notices.get(request.query_params.get("done", ""), "")


def me(who: Identity) -> str:
    assert who.user_id is not None
    return who.user_id


# ---- profile -----------------------------------------------------------------------------------------------------


@router.api_route("/settings", methods=["GET", "HEAD"])
def profile_page(request: Request, who: Visitor) -> Response:
    return _profile(request, who, notice=told(request))


def _profile(
    request: Request, who: Identity, *, status: int = 200, form: Form | None = None, **values: Any
) -> Response:
    ctx = ctx_of(request)
    user = accounts.me(ctx, me(who))
    return show(
        request,
        "settings_profile.html",
        who=who,
        status=status,
        user=user,
        form=typed(form or {"full_name": user.full_name, "email": user.email}),
        seen=accounts.mark_of(user),
        providers=federation.providers(ctx),
        url=base_url(request),
        **values,
    )


@router.post("/settings/profile")
def change_profile(request: Request, who: Visitor, form: Fields) -> Response:
    try:
        accounts.change(
            ctx_of(request),
            me(who),
            full_name=form.get("full_name", ""),
            email=form.get("email", "").strip(),
            saw=form.get(seen.FIELD),
        )
    except DiamondError as error:
        return _profile(request, who, status=error.status, form=form, **by_field(error, _PROFILE_FIELDS))
    return to("/settings?done=profile")


@router.post("/settings/password")
def change_password(request: Request, who: Visitor, form: Fields) -> Response:
    try:
        old, new = form.get("old_password", ""), twice(form, "new_password")
        accounts.change_password(ctx_of(request), me(who), old, new, keep_session=who.session_id)
    except DiamondError as error:
        return _profile(request, who, status=error.status, **by_field(error, _PASSWORD_FIELDS))
    return to("/settings?done=password")


# ---- tokens ------------------------------------------------------------------------------------------------------


@router.api_route("/settings/tokens", methods=["GET", "HEAD"])
def tokens_page(request: Request, who: Visitor) -> Response:
    return _tokens(request, who, notice=told(request))


def _tokens(request: Request, who: Identity, *, status: int = 200, form: Form | None = None, **values: Any) -> Response:
    ctx = ctx_of(request)
    return show(
        request,
        "settings_tokens.html",
        who=who,
        status=status,
        tokens=tokens.list_tokens(ctx, me(who), current=who.via),
        scopes=SCOPE_MEANS,
        lifetimes=LIFETIMES,
        form=typed(form if form is not None else {"scope.read": "on", "scope.launch": "on", "days": "90"}),
        now=ctx.clock(),
        **{"made": None, **values},
    )


@router.post("/settings/tokens")
def create_token(request: Request, who: Visitor, form: Fields) -> Response:
    """Answers with the page itself: what it shows is shown this once, so there is no address for it."""
    try:
        made = tokens.create(
            ctx_of(request),
            me(who),
            form.get("name", ""),
            _scopes(form),
            _lifetime(form),
            held=who.scopes,
            once=once_of(form),
        )
    except DiamondError as error:
        return _tokens(
            request, who, status=error.status, form=unless_done(error, form), **by_field(error, _TOKEN_FIELDS)
        )
    return _tokens(request, who, made=made)


def _scopes(form: Form) -> tuple[Scope, ...]:
    """One box each: a form of ours gives no field twice."""
    chosen = tuple(scope for scope in Scope if form.get(f"scope.{scope}"))
    if not chosen:
        raise InvalidInput("choose at least one", hint="read is the least a token can do", field="scopes")
    return chosen


def _lifetime(form: Form) -> float | None:
    days = form.get("days", "")
    if days not in LIFETIMES:
        raise InvalidInput(
            f"{days[:20]!r} is none of the times to choose from", hint="choose one of the list", field="expires_in_s"
        )
    return int(days) * DAY_S if days else None


@router.post("/settings/tokens/{token_id}/revoke")
def revoke_token(request: Request, who: Visitor, token_id: str) -> Response:
    tokens.revoke(ctx_of(request), me(who), token_id)
    return to("/settings/tokens?done=token")


# ---- browsers ----------------------------------------------------------------------------------------------------


@router.api_route("/settings/sessions", methods=["GET", "HEAD"])
def sessions_page(request: Request, who: Visitor) -> Response:
    found = sessions.list_sessions(ctx_of(request), me(who), current=who.session_id)
    return show(request, "settings_sessions.html", who=who, sessions=found, notice=told(request))


@router.post("/settings/sessions/{session_id}/end")
def end_session(request: Request, who: Visitor, session_id: str) -> Response:
    sessions.end(ctx_of(request), me(who), session_id)
    if session_id != who.session_id:
        return to("/settings/sessions?done=session")
    response = to("/sign-in?done=signed-out")
    drop_session(request, response)
    return response


@router.post("/settings/sessions/end-others")
def end_other_sessions(request: Request, who: Visitor) -> Response:
    ctx = ctx_of(request)
    for each in sessions.list_sessions(ctx, me(who), current=who.session_id):
        if not each.current:
            sessions.end(ctx, me(who), each.id)
    return to("/settings/sessions?done=sessions")


# ---- how pages look ----------------------------------------------------------------------------------------------


@router.api_route("/settings/appearance", methods=["GET", "HEAD"])
def appearance_page(request: Request, who: Visitor) -> Response:
    return show(request, "settings_appearance.html", who=who, notice=told(request))


@router.post("/settings/appearance")
def set_appearance(request: Request, who: Visitor, form: Fields) -> Response:
    """Kept by the browser: somebody may want it dark on one machine and light on another."""
    chosen = form.get("theme", "")
    if chosen not in ("", *THEMES):
        error = InvalidInput("is none of the themes to choose from", hint="choose one of the three", field="theme")
        return show(request, "settings_appearance.html", who=who, status=error.status, problem=error)
    response = to("/settings/appearance?done=theme")
    # Not for scripts, and of no use to anybody else; it must outlive the session.
    response.set_cookie(
        THEME_COOKIE,
        chosen,
        max_age=THEME_S if chosen else 0,
        path="/",
        httponly=True,
        samesite="lax",
        secure=auth.is_secure(request),
    )
    return response
