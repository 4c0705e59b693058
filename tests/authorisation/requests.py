"""What is asked of every route: the least that it takes, so that nothing but who asks decides the answer.

Path parameters come from `World.names` (or `World.private`). A route that is not named here is asked without a body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from testing.people import PASSWORD
from tests.authorisation.world import BLOB, OUTPUT, RECIPE, RUNNER, World, digest_of

NEW_BLOB = b"bytes that are not at the server yet"
Body = Callable[[World], Any]
_SPEC = {"run": "true", "project": "lab", "resources": {"infra": "cluster"}}
_API = "/api/v1"


@dataclass(frozen=True, kw_only=True)
class Request:
    body: Body | None = None
    form: Callable[[World], dict[str, str]] | None = None
    query: dict[str, str] | None = None
    parameters: dict[str, str] | None = None  # other names for those of the path


def _sends(body: Any, **more: Any) -> Request:
    return Request(body=lambda _world: body, **more)


def _fills(**fields: str) -> Request:
    return Request(form=lambda _world: dict(fields))


def _account(world: World, code: str) -> dict[str, str]:
    return {"code": world.codes[code], "name": "newcomer", "password": PASSWORD}


def _password(world: World, code: str) -> dict[str, str]:
    return {"code": world.codes[code], "password": PASSWORD + "!"}


def _twice(fields: dict[str, str]) -> dict[str, str]:
    return {**fields, "again": fields["password"]}


_GIVE = _sends({"to": "member"})
_BUILD = {"recipe": {**RECIPE, "name": "other", "pip": ["scipy"]}, "endpoint": "cluster"}
_FACTS = {"scheduler": "local", "cpus_per_node": 8, "mem_bytes_per_node": 8 * 1024**3}
_MADE = {
    "image_id": "img_00000001", "recipe_digest": "", "builder": "apptainer", "architecture": "x86_64",
    "digest": digest_of(BLOB), "size_bytes": len(BLOB), "path": "",
}  # fmt: skip
_DONE = {"task_id": "done_id"}
_SHELL = {"runner": RUNNER, "offset": "0", "wait_s": "0"}
_OF_VIEWER = {"name": "user"}
_PLACE = {"name": "endpoint"}
_OFFERED = {"endpoint": "offered"}

REQUESTS: dict[str, Request] = {
    # Tasks
    f"POST {_API}/tasks": _sends({"spec": _SPEC}),
    f"POST {_API}/tasks/batch": _sends({"specs": [_SPEC]}),
    f"POST {_API}/tasks/plan": _sends({"spec": _SPEC}),
    f"GET {_API}/tasks": Request(query={"project": "lab"}),
    f"PATCH {_API}/tasks/{{task_id}}": _sends({"visibility": "public"}),
    f"POST {_API}/tasks/{{task_id}}/transfer": _sends({"to": "member"}, parameters=_DONE),
    f"DELETE {_API}/tasks/{{task_id}}": Request(parameters=_DONE),
    f"POST {_API}/tasks/{{task_id}}/shells": _sends({"argv": ["bash"]}),
    f"GET {_API}/tasks/{{task_id}}/metrics/curve": Request(query={"key": "loss"}),
    f"GET {_API}/tasks/{{task_id}}/outputs/content": Request(query={"path": OUTPUT}, parameters=_DONE),
    f"POST {_API}/shells/{{shell_id}}/input": _sends(b"i\0\0\0\1x", query={"offset": "0", "wait_s": "0"}),
    f"GET {_API}/shells/{{shell_id}}/output": Request(query={"wait_s": "0"}),
    # Endpoints
    f"POST {_API}/endpoints": _sends({"name": "another"}),
    f"GET {_API}/endpoints/{{name}}": Request(parameters=_PLACE),
    f"DELETE {_API}/endpoints/{{name}}": Request(parameters=_PLACE, query={"force": "true"}),
    f"POST {_API}/endpoints/{{name}}/enrolment": Request(parameters=_PLACE),
    f"POST {_API}/endpoints/{{name}}/rotate": Request(parameters=_PLACE, query={"wait_s": "0"}),
    f"POST {_API}/endpoints/{{name}}/revoke": Request(parameters=_PLACE),
    f"POST {_API}/endpoints/{{name}}/transfer": _sends({"to": "member"}, parameters=_PLACE),
    f"GET {_API}/endpoints/{{name}}/images": Request(parameters=_PLACE),
    f"POST {_API}/endpoints/{{name}}/images/prune": Request(parameters=_PLACE),
    f"GET {_API}/queue": Request(query={"endpoint": "cluster"}),
    # Pools
    f"POST {_API}/pools": _sends({"name": "newer", "endpoint": "cluster", "slots": 4, "project": "lab"}),
    f"PATCH {_API}/pools/{{ref}}": _sends({"idle": "1h"}),
    "POST /pools/new": _fills(name="newer", endpoint="cluster", slots="4", most="1", project="lab"),
    "POST /pools/{ref}/change": _fills(idle="1h"),
    "POST /pools/{ref}/close": _fills(),
    # Projects
    f"POST {_API}/projects": _sends({"name": "new"}),
    f"PATCH {_API}/projects/{{project}}": _sends({"title": "Lab"}),
    f"PUT {_API}/projects/{{project}}/members/{{user}}": _sends({"role": "member"}),
    f"POST {_API}/projects/{{project}}/transfer": _GIVE,
    # Images
    f"POST {_API}/images": _sends({**_BUILD, "project": "lab"}),
    f"POST {_API}/images/plan": _sends(_BUILD),
    f"POST {_API}/images/import": _sends(
        {"recipe": _BUILD["recipe"], "facts": _MADE, "payload": digest_of(BLOB), "endpoint": "cluster"}
    ),
    f"GET {_API}/images/find": Request(query={"ref": "owner/env"}),
    f"GET {_API}/images/bases": Request(query={"endpoint": "cluster"}),
    f"POST {_API}/projects/{{project}}/endpoints/{{endpoint}}/approve": Request(parameters=_OFFERED),
    f"POST {_API}/projects/{{project}}/endpoints/{{endpoint}}/decline": Request(parameters=_OFFERED),
    f"POST {_API}/images/{{image}}/share": _sends({"visibility": "public"}),
    f"POST {_API}/images/{{image}}/copy": _sends({"endpoint": "cluster"}),
    f"POST {_API}/images/{{image}}/export": _sends({}),
    f"POST {_API}/images/{{image}}/test": _sends({}),
    f"GET {_API}/images/{{image}}/files/{{name}}": Request(parameters={"name": "=lock.json"}),
    f"POST {_API}/images/{{image}}/transfer": _GIVE,
    f"POST {_API}/image-drafts": _sends({}),
    f"PUT {_API}/image-drafts/{{draft_id}}/{{step}}": _sends(
        {"version": 1, "contents": {"pip": ["scipy"]}}, parameters={"step": "=dependencies"}
    ),
    f"POST {_API}/image-drafts/{{draft_id}}/submit": _sends({"version": 1}),
    # Templates
    f"POST {_API}/templates": _sends({"name": "new", "spec": {"run": "true"}, "project": "lab"}),
    f"PATCH {_API}/templates/{{template}}": _sends({"version": 1, "description": "better"}),
    "POST /compose": _fills(**{"do": "launch", "yaml": "run: 'true'\nproject: lab\nresources: {infra: cluster}\n"}),
    "POST /compose/sync": _fills(side="text", yaml="run: echo"),
    "POST /compose/import": _fills(script="#!/bin/bash\necho\n"),
    "POST /templates/{template_id}": _fills(name="new", version="1", visibility="project", yaml="run: echo"),
    "POST /templates/{template_id}/remove": _fills(),
    # Files
    f"POST {_API}/bundles": _sends({"files": [], "is_file": False}),
    f"GET {_API}/bundles/{{digest}}": Request(parameters={"digest": "bundle"}),
    f"POST {_API}/blobs/missing": _sends({"digests": [digest_of(BLOB)]}),
    f"PUT {_API}/blobs/{{digest}}": _sends(
        NEW_BLOB, query={"total": str(len(NEW_BLOB))}, parameters={"digest": "=" + digest_of(NEW_BLOB)}
    ),
    f"POST {_API}/blobs/pack": _sends(b""),
    # Secrets, notices, quotas
    f"PUT {_API}/secrets/{{name}}": _sends({"value": "other", "project": "lab"}, parameters={"name": "=KEY"}),
    f"DELETE {_API}/secrets/{{name}}": Request(query={"project": "lab"}, parameters={"name": "=KEY"}),
    f"POST {_API}/notices/rules": _sends({"channel": "webhook", "target": "https://example.org/", "events": ["all"]}),
    f"PATCH {_API}/notices/rules/{{rule_id}}": _sends({"paused": True}),
    f"GET {_API}/quotas/{{kind}}/{{name}}": Request(parameters=_OF_VIEWER),
    f"PUT {_API}/quotas/{{kind}}/{{name}}": _sends({"tasks": 5}, parameters=_OF_VIEWER),
    f"DELETE {_API}/quotas/{{kind}}/{{name}}": Request(parameters=_OF_VIEWER),
    # Accounts
    f"PATCH {_API}/me": _sends({"full_name": "Somebody"}),
    f"POST {_API}/me/password": _sends({"old_password": PASSWORD, "new_password": PASSWORD + "!"}),
    f"POST {_API}/setup": Request(body=lambda world: _account(world, "setup")),
    f"POST {_API}/invitations/accept": Request(body=lambda world: _account(world, "invitation")),
    f"POST {_API}/reset": Request(body=lambda world: _password(world, "reset")),
    f"POST {_API}/invitations": _sends({"project": "lab"}),
    f"POST {_API}/logins": _sends({"name": "terminal", "token_sha256": "1" * 64}),
    f"POST {_API}/logins/poll": Request(body=lambda world: {"device_code": world.codes["device"]}),
    f"POST {_API}/tokens": _sends({"name": "new"}),
    f"GET {_API}/users/{{name}}": Request(parameters=_OF_VIEWER),
    f"POST {_API}/users/{{name}}/disable": Request(parameters=_OF_VIEWER),
    f"POST {_API}/users/{{name}}/enable": Request(parameters=_OF_VIEWER),
    f"POST {_API}/users/{{name}}/admin": _sends({"is_admin": True}, parameters=_OF_VIEWER),
    f"POST {_API}/users/{{name}}/reset": _sends({}, parameters=_OF_VIEWER),
    f"POST {_API}/users/{{name}}/hand-over": _sends({"to": "member"}, parameters=_OF_VIEWER),
    # Agents
    f"POST {_API}/enrolment": Request(
        body=lambda world: {"code": world.codes["enrolment"], "token_sha256": "2" * 64, "instance": "agt_00000own"}
    ),
    f"PUT {_API}/agent/token": _sends({"sha256": "3" * 64}),
    f"POST {_API}/agent/hello": _sends({"facts": _FACTS}),
    f"POST {_API}/agent/reports": Request(body=lambda world: {"epoch": world.ctx.epoch}),
    f"POST {_API}/agent/shells/{{shell_id}}/output": _sends(b"o\0\0\0\1x", query=_SHELL),
    f"GET {_API}/agent/shells/{{shell_id}}/input": Request(query=_SHELL),
    f"POST {_API}/agent/shells/{{shell_id}}/end": _sends({"exit_code": 0}, query={"runner": RUNNER}),
    # Pages
    "POST /tasks/columns": _fills(column_endpoint="1"),
    "POST /tasks/chosen": Request(
        form=lambda world: {"do": "stop", "sure": "yes", f"pick_{world.names['task_id']}": "1"}
    ),
    "POST /tasks/{task_id}/rerun": _fills(),
    "POST /tasks/{task_id}/share": _fills(visibility="public"),
    "GET /tasks/{task_id}/log/find": Request(query={"q": "hello"}),
    "GET /static/{name}": Request(parameters={"name": "=none.css"}),
    "POST /sign-in": _fills(name="owner", password=PASSWORD),
    "POST /sign-out": _fills(),
    "POST /setup": Request(form=lambda world: _twice(_account(world, "setup"))),
    "POST /invitation": Request(form=lambda world: _twice(_account(world, "invitation"))),
    "POST /reset": Request(form=lambda world: _twice(_password(world, "reset"))),
    # Settings, users, help
    "GET /help/{name}": Request(parameters={"name": "=user-guide"}),
    "GET /users/{name}": Request(parameters=_OF_VIEWER),
    "POST /settings/profile": _fills(full_name="Somebody", email=""),
    "POST /settings/password": _fills(old_password=PASSWORD, new_password=PASSWORD + "!", again=PASSWORD + "!"),
    "POST /settings/tokens": _fills(**{"name": "new", "scope.read": "on", "days": "30"}),
    "POST /settings/tokens/{token_id}/revoke": _fills(),
    "POST /settings/sessions/{session_id}/end": _fills(),
    "POST /settings/sessions/end-others": _fills(),
    "POST /settings/appearance": _fills(theme="dark"),
    "POST /settings/identities/{name}/link": Request(form=lambda _world: {}, parameters={"name": "=site"}),
    "POST /settings/identities/{identity_id}/unlink": _fills(),
    "POST /settings/projects": _fills(name="new", title=""),
    "POST /settings/projects/{project}/title": _fills(title="Lab"),
    "POST /settings/projects/{project}/members": _fills(user="viewer", role="member"),
    "POST /settings/projects/{project}/members/{user}/remove": _fills(),
    "POST /settings/projects/{project}/invitations": _fills(name="", email="", role="member"),
    "POST /settings/projects/{project}/invitations/{invitation_id}/withdraw": _fills(),
    "POST /settings/projects/{project}/endpoints": _fills(endpoint="cluster"),
    "POST /settings/projects/{project}/endpoints/{endpoint}/unshare": _fills(),
    "POST /settings/projects/{project}/endpoints/{endpoint}/approve": Request(
        form=lambda _world: {"owner": "member"}, parameters=_OFFERED
    ),
    "POST /settings/projects/{project}/endpoints/{endpoint}/decline": Request(
        form=lambda _world: {}, parameters=_OFFERED
    ),
    "POST /settings/projects/{project}/remove": _fills(),
    "POST /settings/secrets": _fills(name="OTHER", value="a value", project="lab"),
    "POST /settings/secrets/{name}/remove": Request(
        form=lambda _world: {"project": "lab"}, parameters={"name": "=KEY"}
    ),
    "POST /settings/notifications": _fills(
        **{"channel": "webhook", "target": "https://example.org/", "event.task.failed": "on"}
    ),
    "POST /settings/notifications/{rule_id}": _fills(**{"event.task.started": "on"}),
    "POST /settings/notifications/{rule_id}/test": _fills(),
    "POST /settings/notifications/{rule_id}/pause": _fills(),
    "POST /settings/notifications/{rule_id}/resume": _fills(),
    "POST /settings/notifications/{rule_id}/remove": _fills(),
    "POST /limits/{kind}": Request(form=lambda _world: {"tasks": "5"}, parameters={"kind": "=every-user"}),
    "POST /limits/projects/{project}": _fills(tasks="5"),
    "POST /limits/projects/{project}/clear": _fills(),
    "POST /invitations": _fills(name="", email="", project="lab", role="member"),
    "POST /invitations/{invitation_id}/withdraw": _fills(),
    "POST /users/{name}/disable": Request(form=lambda _world: {}, parameters=_OF_VIEWER),
    "POST /users/{name}/enable": Request(form=lambda _world: {}, parameters=_OF_VIEWER),
    "POST /users/{name}/admin": Request(form=lambda _world: {"is_admin": "yes"}, parameters=_OF_VIEWER),
    "POST /users/{name}/reset": Request(form=lambda _world: {}, parameters=_OF_VIEWER),
    "POST /users/{name}/quota": Request(form=lambda _world: {"tasks": "5"}, parameters=_OF_VIEWER),
    "POST /users/{name}/quota/clear": Request(form=lambda _world: {}, parameters=_OF_VIEWER),
    "POST /users/{name}/hand-over": Request(form=lambda _world: {"to": "member"}, parameters=_OF_VIEWER),
    "GET /endpoints/{name}": Request(parameters=_PLACE),
    "GET /endpoints/{name}/line": Request(parameters=_PLACE),
    "POST /endpoints/new": _fills(name="another"),
    "POST /endpoints/{name}/line": Request(form=lambda _world: {}, parameters=_PLACE),
    "POST /endpoints/{name}/rotate": Request(form=lambda _world: {}, parameters=_PLACE),
    "POST /endpoints/{name}/revoke": Request(form=lambda _world: {}, parameters=_PLACE),
    "POST /endpoints/{name}/remove": Request(form=lambda _world: {"force": "yes"}, parameters=_PLACE),
    "POST /endpoints/{name}/share": Request(form=lambda _world: {"project": "lab"}, parameters=_PLACE),
    "POST /endpoints/{name}/unshare": Request(form=lambda _world: {"project": "lab"}, parameters=_PLACE),
    "POST /device": Request(form=lambda world: {"code": world.names["user_code"]}),
    "POST /device/approve": Request(form=lambda world: {"code": world.names["user_code"]}),
    "POST /device/refuse": Request(form=lambda world: {"code": world.names["user_code"]}),
    "GET /sign-in/{name}": Request(parameters={"name": "=site"}),
    "POST /sign-in/{name}": Request(form=lambda _world: {}, parameters={"name": "=site"}),
    "GET /sign-in/{name}/callback": Request(parameters={"name": "=site"}),
    # Image Builder and Image Manager
    "POST /image-builder": Request(form=lambda _world: {}),
    "POST /image-builder/{draft_id}/delete": _fills(),
    "POST /image-builder/{draft_id}/submit": _fills(version="1"),
    "GET /image-builder/{draft_id}/{step}": Request(parameters={"step": "=dependencies"}),
    "POST /image-builder/{draft_id}/{step}": Request(
        form=lambda _world: {"version": "1", "pip": "scipy", "go": "stay"}, parameters={"step": "=dependencies"}
    ),
    "POST /images/import": _fills(),  # without a file: who may not, does not come as far as that
    "POST /images/{image}/export": _fills(),
    "POST /images/{image}/test": _fills(command="true"),
    "POST /images/{image}/copy": _fills(target="cluster"),
    "POST /images/{image}/rebuild": _fills(endpoint="cluster"),
    "POST /images/{image}/share": _fills(visibility="public"),
    "POST /images/{image}/transfer": _fills(to="member"),
    "POST /images/{image}/delete": _fills(),
    "GET /images/{image}/files/{name}": Request(parameters={"name": "=lock.json"}),
}
