"""What a notice says: of an event, whether anybody can want to be told of it, and in which words."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.durations import format_duration
from diamond.core.notices import Message, NoticeEvent
from diamond.core.reasons import MEANINGS, Reason
from diamond.core.states import TaskState
from diamond.server.store.models import EndpointRow, EventRow, TaskRow

# What becomes a notice comes from events of these kinds.
_SHARES = {
    "endpoint.share_asked": NoticeEvent.SHARE_ASKED,
    "endpoint.share_approved": NoticeEvent.SHARE_APPROVED,
    "endpoint.share_declined": NoticeEvent.SHARE_DECLINED,
}
KINDS = ("task.state", "image.ready", "image.failed", "endpoint.offline", "quota.near", *_SHARES)
_OF_STATE = {
    TaskState.RUNNING: NoticeEvent.TASK_STARTED,
    TaskState.SUCCEEDED: NoticeEvent.TASK_SUCCEEDED,
    TaskState.FAILED: NoticeEvent.TASK_FAILED,
    TaskState.CANCELLED: NoticeEvent.TASK_CANCELLED,
}
_GOES_ON = {Reason.CONTINUED, Reason.TIME_LIMIT, Reason.IMAGE_MISSING}
_MAX = 1000


def message_of(session: Session, event: EventRow) -> Message | None:
    """What to say of this event; None when nobody is told of such."""
    if event.kind == "task.state":
        return _of_task(session, event)
    if event.kind in ("image.ready", "image.failed"):
        return _of_image(event)
    if event.kind == "endpoint.offline":
        return _of_endpoint(session, event)
    if event.kind in _SHARES:
        return _of_share(event)
    return _of_quota(event) if event.kind == "quota.near" else None


def _of_task(session: Session, event: EventRow) -> Message | None:
    data = event.data
    state = str(data.get("state", ""))
    task = session.get(TaskRow, event.task_id) if event.task_id else None
    if task is None or task.kind != "command":  # image work has notices of its own
        return None
    reason = Reason(data["reason"]) if data.get("reason") in set(Reason) else None
    is_retry = state == TaskState.PENDING and reason is not None
    if is_retry:
        if "next_attempt_at" not in data and reason in _GOES_ON:
            return None
        kind = NoticeEvent.TASK_RETRYING
    elif state in _OF_STATE:
        kind = _OF_STATE[TaskState(state)]
    else:
        return None
    if kind is NoticeEvent.TASK_STARTED and _ran_before(session, event):
        return None
    endpoint = session.get(EndpointRow, event.endpoint_id) if event.endpoint_id else None
    sentence = MEANINGS[reason].sentence if reason else ""
    detail = str(data.get("detail") or "")[:_MAX]
    show, logs = f"diamond show {task.id}", f"diamond logs {task.id}"
    title = {
        NoticeEvent.TASK_STARTED: f"Task {task.name} has started",
        NoticeEvent.TASK_SUCCEEDED: f"Task {task.name} succeeded",
        NoticeEvent.TASK_FAILED: f"Task {task.name} failed",
        NoticeEvent.TASK_CANCELLED: f"Task {task.name} was cancelled",
        NoticeEvent.TASK_RETRYING: f"Task {task.name} is tried again",
    }[kind]
    advice = {
        NoticeEvent.TASK_STARTED: f"Follow it: {logs} -f",
        NoticeEvent.TASK_SUCCEEDED: f"Its results: diamond outputs {task.id}",
        NoticeEvent.TASK_FAILED: f"{sentence}\nIts last words: {logs}\nEverything known of it: {show}".strip(),
        NoticeEvent.TASK_CANCELLED: f"Everything known of it: {show}",
        NoticeEvent.TASK_RETRYING: f"Nothing, if that is fine with you. To stop it: diamond stop {task.id}",
    }[kind]
    code = data.get("exit_code")
    why = [f"{reason}" + (f" (exit code {code})" if code not in (None, 0) else "")] if reason else []
    if kind is NoticeEvent.TASK_SUCCEEDED:
        why = []
    if detail:
        why.append(detail)
    if is_retry and isinstance(data.get("next_attempt_at"), int | float):
        why.append(f"The next attempt follows in {format_duration(max(0.0, data['next_attempt_at'] - event.at))}.")
    if kind is NoticeEvent.TASK_SUCCEEDED and task.started_at:
        why.append(f"It ran for {format_duration(max(0.0, event.at - task.started_at))}.")
    about = {
        "task_id": task.id, "task": task.name, "state": state, "reason": reason.value if reason else None,
        "exit_code": code, "attempt": data.get("attempt"), "endpoint": endpoint.name if endpoint else None,
    }  # fmt: skip
    return _message(kind, event, title, ". ".join(part.rstrip(".") for part in why), advice, about)


def _ran_before(session: Session, event: EventRow) -> bool:
    """Whether it ran in an earlier job: a task that goes on has not started again."""
    earlier = sa.select(EventRow.data).where(EventRow.task_id == event.task_id, EventRow.seq < event.seq)
    states = session.scalars(earlier.where(EventRow.kind == "task.state"))
    return any(data.get("state") == TaskState.RUNNING for data in states)


def _of_image(event: EventRow) -> Message:
    data = event.data
    name, where = str(data.get("name", "")), str(data.get("endpoint", ""))
    about = {"image_id": data.get("image_id"), "image": name, "endpoint": where, "task_id": event.task_id}
    if event.kind == "image.ready":
        title = f"Image {name} is ready at {where}"
        return _message(NoticeEvent.IMAGE_READY, event, title, "", f"Use it in a task: image_id: {name}", about)
    why = str(data.get("message") or "")[:_MAX]
    advice = f"{str(data.get('hint') or '')[:_MAX]}\nIts log: diamond image logs {name}".strip()
    return _message(NoticeEvent.IMAGE_FAILED, event, f"Image {name} could not be made at {where}", why, advice, about)


def _of_endpoint(session: Session, event: EventRow) -> Message:
    name = str(event.data.get("name", ""))
    about = {"endpoint_id": event.endpoint_id, "endpoint": name}
    silent_s = event.data.get("silent_s")
    why = "Its agent stopped."
    if isinstance(silent_s, int | float):
        why = f"Nothing was heard of its agent for {format_duration(float(silent_s))}."
    return _message(
        NoticeEvent.ENDPOINT_OFFLINE,
        event,
        f"Endpoint {name} is offline",
        why,
        "Jobs that run there go on. Start its agent again on that machine: diamond agent start",
        about,
    )


def _of_share(event: EventRow) -> Message:
    data = {key: str(event.data.get(key) or "") for key in ("name", "project", "owner", "by", "why")}
    name, project, owner, by = data["name"], data["project"], data["owner"], data["by"]
    about = {"endpoint_id": event.endpoint_id, "endpoint": name, "project": project, "owner": owner, "by": by}
    reads = f"Whoever owns an endpoint can read what is sent there, secrets included: {owner} owns {name}."
    kind = _SHARES[event.kind]
    if kind is NoticeEvent.SHARE_ASKED:
        title = f"{owner} asks to share endpoint {name} with project {project}"
        why = f"It was approved before: {data['why']}. {reads}" if data["why"] else reads
        advice = f"diamond project approve {project} {name}, or diamond project decline {project} {name}"
    elif kind is NoticeEvent.SHARE_APPROVED:
        title = f"Endpoint {name} of {owner} is shared with project {project}"
        why, advice = f"{by} approved of it. {reads}", f"What the project shares: diamond project show {project}"
    else:
        title = f"Endpoint {name} is not shared with project {project}"
        why, advice = f"{by} declined it.", f"Ask {by} why, before you ask again."
    return _message(kind, event, title, why, advice, about)


def _of_quota(event: EventRow) -> Message:
    data = {key: value for key, value in event.data.items() if isinstance(value, str | int | float | None)}
    what = str(data.get("what") or data.get("limit") or "a quota")
    why = str(data.get("message") or "")[:_MAX]
    return _message(
        NoticeEvent.QUOTA_NEAR, event, f"Little is left of {what}", why, "See what is used: diamond quota", data
    )


def _message(kind: NoticeEvent, event: EventRow, title: str, why: str, advice: str, about: dict[str, Any]) -> Message:
    return Message(event=kind.value, at=event.at, title=title, why=why, advice=advice, about=about)
