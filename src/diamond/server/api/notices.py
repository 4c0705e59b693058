"""Routes of notices: rules that say what a user is told, and how."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.errors import NotFound, RateLimited
from diamond.core.notices import Channel, NoticeRule, NoticeTest, parse_channel, parse_events, parse_url
from diamond.server import mail, notifier
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, Server, User
from diamond.server.services import notices

router = APIRouter(prefix="/api/v1/notices", tags=["notices"])


@dataclass(frozen=True, kw_only=True)
class NewRule:
    """`channel`: "email" or "webhook"; `target`: an address or an HTTPS URL; `events`: names, or ["all"]."""

    channel: str
    target: str
    events: list[str]


@dataclass(frozen=True, kw_only=True)
class RuleChange:
    """What is left out stays as it is."""

    events: list[str] | None = None
    paused: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RuleList:
    rules: list[NoticeRule]


@router.get(
    "/rules",
    summary="List your rules",
    description="What you are told of, and how; with the reason where one is paused.",
    responses=returns(RuleList, "The rules, oldest first.") | USER_FAILS,
)
def list_rules(user: User, ctx: Ctx) -> Response:
    return Json(RuleList(rules=notices.list_rules(ctx, user)))


@router.post(
    "/rules",
    status_code=201,
    summary="Be told of something",
    description="By e-mail or webhook, of what happens from now on. A webhook's `key`, which its messages are signed "
    "with, is shown this once.",
    responses=returns(NoticeRule, "The rule.", status=201) | USER_FAILS,
    openapi_extra=takes(NewRule),
)
def create_rule(user: User, server: Server, body: Body) -> Response:
    wanted = decode(NewRule, body, strict=True)
    channel, events = parse_channel(wanted.channel), parse_events(wanted.events)
    if channel is Channel.EMAIL:
        target = mail.check_allowed(server.settings, wanted.target)
    else:
        target = parse_url(wanted.target, allow_private=server.settings.webhook_allow_private)
    rule = notices.create(server.ctx, user, channel, target, events)
    return Json(rule, 201, {"Location": f"/api/v1/notices/rules/{rule.id}"})


@router.get(
    "/rules/{rule_id}",
    summary="Look at a rule",
    description="One rule of yours.",
    responses=returns(NoticeRule, "The rule.") | USER_FAILS | fails(NotFound),
)
def get_rule(user: User, ctx: Ctx, rule_id: str) -> Response:
    return Json(notices.get(ctx, user, rule_id))


@router.patch(
    "/rules/{rule_id}",
    summary="Change a rule",
    description="Its events, or whether it is paused. What happened meanwhile is not told later.",
    responses=returns(NoticeRule, "The rule.") | USER_FAILS | fails(NotFound),
    openapi_extra=takes(RuleChange),
)
def change_rule(user: User, ctx: Ctx, rule_id: str, body: Body) -> Response:
    events, paused = notices.parse_change(body)
    return Json(notices.change(ctx, user, rule_id, events=events, paused=paused))


@router.delete(
    "/rules/{rule_id}",
    status_code=204,
    summary="Remove a rule",
    description="With whatever waits to be sent for it.",
    responses=USER_FAILS | fails(NotFound),
)
def remove_rule(user: User, ctx: Ctx, rule_id: str) -> Response:
    notices.remove(ctx, user, rule_id)
    return Response(status_code=204)


@router.post(
    "/rules/{rule_id}/test",
    summary="Try a rule",
    description="Sends a test message now and says what became of it. Takes no body.",
    responses=returns(NoticeTest, "Whether it arrived, and why not.") | USER_FAILS | fails(NotFound, RateLimited),
)
def try_rule(user: User, server: Server, rule_id: str) -> Response:
    rule, key = notices.begin_test(server.ctx, user, rule_id)
    return Json(notifier.try_out(server.ctx, server.settings, rule, key))
