"""Events in words: who or what it was about, with the page of it, and what happened."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote

from diamond.core.events import Event
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from diamond.server.services.overview import Concern, Happening


class Line(NamedTuple):
    """`name` leads to `path` unless that is empty; `words` follow it. `look` is a state of static/app.css."""

    name: str
    path: str
    words: str
    look: str
    at: float | None
    detail: str = ""


_GOES_ON = {Reason.CONTINUED, Reason.TIME_LIMIT, Reason.PREEMPTED, Reason.NODE_FAIL}
_PLAIN = {
    "task.created": ("was launched", "waiting"),
    "task.cancel_requested": ("is being stopped", "ended"),
    "task.shared": ("can be seen by others now", "ended"),
    "shell.opened": ("was entered with a shell", "ended"),
    "image.removed": ("was removed", "ended"),
    "image.shared": ("can be used by others now", "ended"),
    "endpoint.created": ("was registered", "waiting"),
    "endpoint.enrolled": ("has an agent now", "good"),
    "endpoint.online": ("is online", "good"),
    "endpoint.offline": ("went offline", "bad"),
    "endpoint.policy_changed": ("obeys other rules now", "ended"),
    "endpoint.rotated": ("has a new token", "ended"),
    "endpoint.revoked": ("was cut off", "bad"),
    "endpoint.removed": ("was removed", "ended"),
}
# These lead to the project, where its owners decide: an endpoint that is not approved has no page for them.
_SHARES = {
    "endpoint.share_asked": ("of {owner} waits to be approved in project {project}", "waiting"),
    "endpoint.share_approved": ("of {owner} is shared with project {project}", "good"),
    "endpoint.share_declined": ("was declined by project {project}", "ended"),
}


def path_of(about: str, key: str) -> str:
    """The page of a task, an image, an endpoint or a project."""
    if about == "quota":
        return "/settings"
    places = {"task": "/tasks/", "image": "/images/", "endpoint": "/endpoints/", "project": "/settings/projects/"}
    return places[about] + quote(key, safe="") if key else ""


def line_of(each: Happening) -> Line:
    event, data = each.event, each.event.data
    about = event.kind.partition(".")[0]
    if about == "quota":
        return Line(
            "Little is left of a quota", path_of("quota", ""), "", "bad", event.at, str(data.get("message", ""))
        )
    if about == "image":
        name, path = str(data.get("name", "")), path_of("image", str(data.get("image_id") or ""))
        path = "" if event.kind == "image.removed" else path
        words, look, detail = _of_image(event)
    elif event.kind in _SHARES:
        name, path = str(data.get("name", "")), "/settings/projects/" + quote(str(data.get("project", "")), safe="")
        words, look = _SHARES[event.kind]
        words, detail = words.format_map({"project": data.get("project", ""), "owner": data.get("owner", "")}), ""
    elif about == "endpoint":
        name = str(data.get("name", "")) or each.endpoint
        # A removed endpoint is kept under another name, and has no page.
        path = path_of("endpoint", name) if each.endpoint == name else ""
        words, look, detail = *_PLAIN.get(event.kind, ("changed", "ended")), ""
    else:
        name, path = each.task or event.task_id or "", path_of("task", event.task_id or "")
        words, look, detail = _of_task(each)
    return Line(name, path, words, look, event.at, detail)


def _of_image(event: Event) -> tuple[str, str, str]:
    where = str(event.data.get("endpoint", ""))
    at = f" at {where}" if where else ""
    if event.kind == "image.building":
        return f"is being made{at}", "running", ""
    if event.kind == "image.ready":
        return f"is ready{at}", "good", ""
    if event.kind == "image.failed":
        return f"could not be made{at}", "bad", str(event.data.get("message") or "")
    return *_PLAIN.get(event.kind, ("changed", "ended")), ""


def _of_task(each: Happening) -> tuple[str, str, str]:
    event, data = each.event, each.event.data
    if event.kind == "task.moved":
        return f"moved to {data.get('endpoint', 'another endpoint')}", "waiting", ""
    if event.kind != "task.state":
        return *_PLAIN.get(event.kind, ("changed", "ended")), ""
    state, detail = str(data.get("state", "")), str(data.get("detail") or "")
    reason = data.get("reason")
    if state == TaskState.RUNNING:
        return f"started at {each.endpoint}" if each.endpoint else "started", "running", ""
    if state == TaskState.SUCCEEDED:
        return "succeeded", "good", ""
    if state == TaskState.CANCELLED:
        return "was stopped", "ended", ""
    if state == TaskState.FAILED:
        code = data.get("exit_code")
        return f"failed (exit code {code})" if code else "failed", "bad", detail
    return ("goes on in another job" if reason in _GOES_ON else "is tried again"), "waiting", detail


def line_of_concern(each: Concern) -> Line:
    look = "waiting" if each.about == "project" or each.title == "has been waiting" else "bad"
    return Line(each.name, path_of(each.about, each.key), each.title, look, each.at, each.detail)
