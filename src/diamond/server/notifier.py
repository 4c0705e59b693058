"""Sending notices: a few at a time, each with its time limit, in the background of the server.

What is due and what became of it is in `services.outbox`; how a mail or a webhook is sent in `mail` and `webhooks`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool

import diamond
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, InvalidInput, Unavailable
from diamond.core.faults import fault_point
from diamond.core.notices import (
    DELIVERY_HEADER,
    EVENT_HEADER,
    SIGNATURE_HEADER,
    Channel,
    Message,
    NoticeRule,
    NoticeTest,
    sign,
)
from diamond.server import mail, webhooks
from diamond.server.services import audit, outbox
from diamond.server.services.context import Context
from diamond.server.services.outbox import Parcel
from diamond.server.settings import Settings

if TYPE_CHECKING:
    from diamond.server.runtime import Runtime

log = logging.getLogger("diamond.server")
AT_ONCE = 8
_SETTLE_S = 0.5  # a burst of events is looked at together
_LOOK_EVERY_S = 30.0
_AFTER_FAILURE_S = 5.0
_DAY_S = 86_400.0
_UNDELIVERED = (
    "the webhook did not arrive: its receiver must be reachable from everywhere by https, with a certificate that is "
    "trusted, and answer 2xx within ten seconds. The server's log says more to its operator"
)


async def keep_notifying(runtime: Runtime) -> None:
    """Make and send notices, now and whenever something happens."""
    hub, ctx = runtime.hub, runtime.ctx
    swept_at: float | None = None
    busy: dict[str, str] = {}  # users something is being sent for
    with hub.subscribe("events", "notices") as subscription:
        while not hub.closing:
            try:
                if swept_at is None or time.monotonic() - swept_at > _DAY_S:
                    await run_in_threadpool(outbox.sweep, ctx)
                    swept_at = time.monotonic()
                await run_in_threadpool(outbox.tell_silence, ctx)
                while await run_in_threadpool(outbox.match, ctx) and not hub.closing:
                    pass
                while not hub.closing and len(busy) < AT_ONCE:
                    parcels = await run_in_threadpool(outbox.claim, ctx, AT_ONCE - len(busy), frozenset(busy))
                    for parcel in parcels:
                        _begin(runtime, parcel, busy)
                    if not parcels:
                        break
                due = await run_in_threadpool(outbox.next_due, ctx)
                pause_s = _LOOK_EVERY_S if due is None else min(max(due - ctx.clock(), 1.0), _LOOK_EVERY_S)
            except Exception:
                # Whatever it was, people must be told again once it is mended.
                log.exception("notices failed; trying again in %.0f s", _AFTER_FAILURE_S)
                pause_s = _AFTER_FAILURE_S
            if await subscription.wait(pause_s) and not hub.closing:
                await asyncio.sleep(_SETTLE_S)


def _begin(runtime: Runtime, parcel: Parcel, busy: dict[str, str]) -> None:
    """Send it in a thread that keeps nobody waiting: neither other users, nor a server that stops meanwhile."""
    busy[parcel.user_id] = parcel.id

    def work() -> None:
        try:
            deliver(runtime.ctx, runtime.settings, parcel)
        except DiamondError as error:  # it will be tried again, since nothing says that it arrived
            log.warning("what became of notice %s could not be written down: %s", parcel.id, error.message)
        finally:
            busy.pop(parcel.user_id, None)
            runtime.hub.notify("notices")

    threading.Thread(target=work, name="diamond-notice", daemon=True).start()


def deliver(ctx: Context, settings: Settings, parcel: Parcel) -> None:
    """Send one notice and write down what became of it."""
    error, hopeless = "", False
    try:
        _send(ctx, settings, parcel, outbox.key_of(ctx, parcel))
        fault_point("server.notice_sent")
    except InvalidInput as problem:  # it may not be sent there, now or later
        error, hopeless = problem.message, True
    except DiamondError as problem:
        error = problem.message
    except Exception as problem:
        log.exception("notice %s could not be sent", parcel.id)
        error = f"it could not be sent: {type(problem).__name__}"
    outbox.settle(ctx, parcel, error, hopeless=hopeless)


def try_out(ctx: Context, settings: Settings, rule: NoticeRule, key: str) -> NoticeTest:
    """Send a message that says it is a test, now; what became of it."""
    now = ctx.clock()
    message = Message(
        event="test", at=now, title="This is a test of a notice", why="You asked for it.",
        advice="Nothing: it arrived.", about={"rule_id": rule.id},
    )  # fmt: skip
    parcel = Parcel(
        id=f"msg_test{int(now * 1000)}", rule_id=rule.id, user_id="", channel=rule.channel.value, target=rule.target,
        key="", subject=message.title, body=encode(message), created_at=now,
    )  # fmt: skip
    try:
        _send(ctx, settings, parcel, key)
    except DiamondError as problem:
        return NoticeTest(delivered=False, error=problem.message)
    return NoticeTest(delivered=True)


def _send(ctx: Context, settings: Settings, parcel: Parcel, key: str) -> None:
    if parcel.channel == Channel.EMAIL:
        to = mail.check_allowed(settings, parcel.target)
        text = mail_text(settings, parcel)
        sender = settings.mail_from
        mail.send(
            settings,
            mail.compose(sender, to, f"[Diamond] {parcel.subject}", text, message_id=parcel.id, at=ctx.clock()),
        )
        return
    body = webhook_body(settings, parcel)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"diamond/{diamond.__version__}",
        EVENT_HEADER: str(parcel.body.get("event", "")),
        DELIVERY_HEADER: parcel.id,
        SIGNATURE_HEADER: sign(key, int(ctx.clock()), body),
    }
    try:
        webhooks.post(
            parcel.target, body, headers, allow_private=settings.webhook_allow_private,
            refused=settings.webhook_refused_networks,
        )  # fmt: skip
    except webhooks.Undelivered as error:
        # The same words whatever it was: else a rule would be a way to look around in the server's network.
        log.info("the webhook of rule %s did not arrive at %s: %s", parcel.rule_id, parcel.target, error)
        raise Unavailable(_UNDELIVERED, field="target") from error


def webhook_body(settings: Settings, parcel: Parcel) -> bytes:
    """The JSON of a webhook: the message, its id, and where to read more."""
    about = parcel.body.get("about")
    task_id = about.get("task_id") if isinstance(about, dict) else None
    url = f"{settings.public_url.rstrip('/')}/api/v1/tasks/{task_id}" if settings.public_url and task_id else None
    return json.dumps({"id": parcel.id, **parcel.body, "url": url}, allow_nan=False).encode()


def mail_text(settings: Settings, parcel: Parcel) -> str:
    """What happened, why, what to do, and where it came from."""
    message = decode(Message, parcel.body)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(message.at))
    names = {"task_id": "Task", "endpoint": "Endpoint", "image_id": "Image", "attempt": "Attempt"}
    about = [f"{shown}: {message.about[name]}" for name, shown in names.items() if message.about.get(name)]
    parts = [
        f"{message.title}.",
        "\n".join([f"When: {when}", *about]),
        f"Why: {message.why}" if message.why else "",
        f"What to do: {message.advice}" if message.advice else "",
        f"Diamond: {settings.public_url.rstrip('/')}/" if settings.public_url else "",
        f"You get this because of a rule of yours. To end it: diamond notify rm {parcel.rule_id}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


async def keep_audit_head(runtime: Runtime) -> None:
    """Write where the audit log ends to the server's log, every day, where the operator wants that."""
    if not runtime.settings.audit_head_log:
        return
    with runtime.hub.subscribe() as subscription:
        while not runtime.hub.closing:
            try:
                log.info("the audit log ends at %s", await run_in_threadpool(audit.head, runtime.ctx))
            except DiamondError as error:
                log.warning("the end of the audit log could not be read: %s", error.message)
            await subscription.wait(_DAY_S)
