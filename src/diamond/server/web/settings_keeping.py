"""Settings, what is kept and told for somebody: secrets, notifications, and how they stand with their quotas."""

from __future__ import annotations

from typing import Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from diamond.core.errors import Conflict, DiamondError, InvalidInput
from diamond.core.notices import ALL, Channel, NoticeEvent, parse_channel, parse_events, parse_url
from diamond.core.projects import Role
from diamond.core.secrets import MAX_VALUE_BYTES
from diamond.server import mail, notifier
from diamond.server.services import accounts, notices, projects, quotas, secrets, seen
from diamond.server.services.identity import Identity
from diamond.server.web.forms import (
    MAX_FORM_BYTES,
    Fields,
    Form,
    Visitor,
    by_field,
    once_of,
    read_form_of,
    typed,
    unless_done,
)
from diamond.server.web.pages import ctx_of, page_router, settings_of, show, to
from diamond.server.web.settings import me, told

router = page_router()
_NOTICES = {
    "set": "The secret is kept. Tasks use it by its name; nobody sees its value again.",
    "removed": "The secret is forgotten. Jobs that have it already keep it; later ones that name it fail.",
    "rule": "From now on you are told.",
    "changed": "The rule is changed.",
    "paused": "The rule is paused. What happens meanwhile is not told later.",
    "resumed": "The rule goes on.",
    "dropped": "The rule is removed.",
}
EVENTS = {
    NoticeEvent.TASK_STARTED: "a task of mine starts",
    NoticeEvent.TASK_SUCCEEDED: "a task of mine succeeds",
    NoticeEvent.TASK_FAILED: "a task of mine fails",
    NoticeEvent.TASK_CANCELLED: "a task of mine is stopped",
    NoticeEvent.TASK_RETRYING: "a task of mine is tried again",
    NoticeEvent.IMAGE_READY: "an image of mine is ready",
    NoticeEvent.IMAGE_FAILED: "an image of mine cannot be built",
    NoticeEvent.ENDPOINT_OFFLINE: "an endpoint of mine is not heard of",
    NoticeEvent.SHARE_ASKED: "somebody asks to share an endpoint with a project of mine",
    NoticeEvent.SHARE_APPROVED: "an endpoint is shared with a project I am in",
    NoticeEvent.SHARE_DECLINED: "an endpoint I wanted to share is declined",
    NoticeEvent.QUOTA_NEAR: "I have nearly used up a quota",
}


# ---- secrets -----------------------------------------------------------------------------------------------------

# A browser writes a byte as up to three, and the end of a line, one byte to us, as %0D%0A.
MAX_SECRET_FORM_BYTES = 6 * MAX_VALUE_BYTES + MAX_FORM_BYTES


async def _secret_form(request: Request) -> None:
    """Reads a form that holds the largest secret there may be; for nobody but who is signed in."""
    await request.app.state.runtime.authenticator.recheck(request)
    await read_form_of(request, MAX_SECRET_FORM_BYTES)


@router.api_route("/settings/secrets", methods=["GET", "HEAD"])
def secrets_page(request: Request, who: Visitor) -> Response:
    return _secrets(request, who, notice=told(request, _NOTICES))


def _secrets(
    request: Request, who: Identity, *, status: int = 200, form: Form | None = None, **values: Any
) -> Response:
    ctx = ctx_of(request)
    owned = [
        each.name
        for each in projects.list_projects(ctx, me(who))
        if each.role is Role.OWNER and not each.personal
    ]  # fmt: skip
    return show(
        request,
        "settings_secrets.html",
        who=who,
        status=status,
        secrets=secrets.list_secrets(ctx, me(who)),
        owned=owned,
        form=typed(form),
        **values,
    )


@router.post("/settings/secrets", dependencies=[Depends(_secret_form)])
def set_secret(request: Request, who: Visitor, form: Fields) -> Response:
    try:
        secrets.put(
            ctx_of(request),
            me(who),
            form.get("name", "").strip(),
            _as_typed(form.get("value", "")),
            form.get("project") or None,
        )
    except DiamondError as error:
        # The page once more, without the value: what is secret is not sent back.
        kept = {key: text for key, text in form.items() if key != "value"}
        shown = by_field(error, ("name", "value", "project"))
        return _secrets(request, who, status=error.status, form=kept, **shown)
    return to("/settings/secrets?done=set")


def _as_typed(value: str) -> str:
    """Browsers send the line ends of a text area as CR LF, which no key file has."""
    return value.replace("\r\n", "\n")


@router.post("/settings/secrets/{name}/remove")
def remove_secret(request: Request, who: Visitor, name: str, form: Fields) -> Response:
    try:
        secrets.remove(ctx_of(request), me(who), name, form.get("project") or None)
    except DiamondError as error:
        return _secrets(request, who, status=error.status, problem=error)
    return to("/settings/secrets?done=removed")


# ---- notifications -----------------------------------------------------------------------------------------------


@router.api_route("/settings/notifications", methods=["GET", "HEAD"])
def notifications_page(request: Request, who: Visitor) -> Response:
    return _rules(request, who, notice=told(request, _NOTICES))


def _rules(request: Request, who: Identity, *, status: int = 200, form: Form | None = None, **values: Any) -> Response:
    ctx, settings = ctx_of(request), settings_of(request)
    if form is None:
        mails = bool(settings.smtp_host and settings.mail_from)
        address = accounts.me(ctx, me(who)).email if mails else ""
        form = {"channel": Channel.EMAIL if mails else Channel.WEBHOOK, "target": address}
        form |= {f"event.{NoticeEvent.TASK_FAILED}": "on"}
    return show(
        request,
        "settings_notifications.html",
        who=who,
        status=status,
        rules=notices.list_rules(ctx, me(who)),
        events=EVENTS,
        all_events=ALL,
        sends_mail=bool(settings.smtp_host and settings.mail_from),
        form=typed(form),
        **{"made": None, "changing": None, **values},
    )


@router.post("/settings/notifications")
def create_rule(request: Request, who: Visitor, form: Fields) -> Response:
    settings = settings_of(request)
    try:
        channel, events = parse_channel(form.get("channel", "")), _events(form)
        if channel is Channel.EMAIL:
            target = mail.check_allowed(settings, form.get("target", ""))
        else:
            target = parse_url(form.get("target", ""), allow_private=settings.webhook_allow_private)
        made = notices.create(ctx_of(request), me(who), channel, target, events, once=once_of(form))
    except DiamondError as error:
        shown = by_field(error, ("channel", "target", "events"))
        return _rules(request, who, status=error.status, form=unless_done(error, form), **shown)
    if made.key:  # shown this once, so there is no address for it
        return _rules(request, who, made=made)
    return to("/settings/notifications?done=rule")


def _events(form: Form) -> tuple[str, ...]:
    if form.get(f"event.{ALL}"):
        return (ALL,)
    chosen = [event.value for event in NoticeEvent if form.get(f"event.{event}")]
    if not chosen:
        raise InvalidInput("choose at least one", hint="tick what you want to be told of", field="events")
    return parse_events(chosen)


@router.api_route("/settings/notifications/{rule_id}", methods=["GET", "HEAD"])
def rule_page(request: Request, who: Visitor, rule_id: str) -> Response:
    return _rule(request, who, rule_id)


def _rule(
    request: Request, who: Identity, rule_id: str, *, status: int = 200, form: Form | None = None, **values: Any
) -> Response:
    rule = notices.get(ctx_of(request), me(who), rule_id)
    if form is None:
        form = {f"event.{event}": "on" for event in rule.events}
    return show(
        request,
        "settings_notification.html",
        who=who,
        status=status,
        rule=rule,
        seen=notices.mark_of(rule),
        events=EVENTS,
        all_events=ALL,
        form=typed(form),
        **{"outcome": None, **values},
    )


@router.post("/settings/notifications/{rule_id}")
def change_rule(request: Request, who: Visitor, rule_id: str, form: Fields) -> Response:
    try:
        notices.change(ctx_of(request), me(who), rule_id, events=_events(form), saw=form.get(seen.FIELD))
    except (InvalidInput, Conflict) as error:
        return _rule(request, who, rule_id, status=error.status, form=form, **by_field(error, ("events",)))
    return to("/settings/notifications?done=changed")


@router.post("/settings/notifications/{rule_id}/test")
def try_rule(request: Request, who: Visitor, rule_id: str) -> Response:
    """Sends a message now, and says what became of it."""
    ctx = ctx_of(request)
    try:
        rule, key = notices.begin_test(ctx, me(who), rule_id)
    except DiamondError as error:
        return _rules(request, who, status=error.status, problem=error)
    outcome = notifier.try_out(ctx, settings_of(request), rule, key)
    return _rule(request, who, rule_id, outcome=outcome)


@router.post("/settings/notifications/{rule_id}/pause")
def pause_rule(request: Request, who: Visitor, rule_id: str) -> Response:
    notices.change(ctx_of(request), me(who), rule_id, paused=True)
    return to("/settings/notifications?done=paused")


@router.post("/settings/notifications/{rule_id}/resume")
def resume_rule(request: Request, who: Visitor, rule_id: str) -> Response:
    notices.change(ctx_of(request), me(who), rule_id, paused=False)
    return to("/settings/notifications?done=resumed")


@router.post("/settings/notifications/{rule_id}/remove")
def remove_rule(request: Request, who: Visitor, rule_id: str) -> Response:
    notices.remove(ctx_of(request), me(who), rule_id)
    return to("/settings/notifications?done=dropped")


# ---- quotas ------------------------------------------------------------------------------------------------------


@router.api_route("/settings/quotas", methods=["GET", "HEAD"])
def quotas_page(request: Request, who: Visitor) -> Response:
    found = quotas.list_quotas(ctx_of(request), me(who))
    return show(request, "settings_quotas.html", who=who, quotas=found)
