"""What a request must say to get anywhere: names of what there is, and bodies a route accepts.

Random names find nothing and random bodies fail at their first field; the suite starts from these as often as not, and
changes them. A route without an entry here fails the suite, so that none is only ever asked nonsense.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI

from diamond.server.api import ROUTERS
from diamond.server.api.documents import document
from testing.people import PASSWORD
from tests.api.installation import BLOB, BLOB_DIGEST, MANIFEST, RECIPE, Installation

# `{name}` means another thing on every path that has it.
_NAME_BY_PREFIX = {
    "/api/v1/endpoints/": "alpha",
    "/api/v1/users/": "bob",
    "/api/v1/quotas/": "alice",
    "/api/v1/secrets/": "API_KEY",
    "/api/v1/images/": "lock.json",
}

_OF_ENDED_TASKS = ("/outputs", "/outputs/content", "/tasks/{task_id}/transfer", "/api/v1/tasks/{task_id}")


@cache
def openapi() -> dict[str, Any]:
    """The server's own document, made without a server: routes are known before there is a database."""
    app = FastAPI()
    for router in ROUTERS:
        app.include_router(router)
    return document(app)


def path_parameters(installation: Installation, path: str) -> dict[str, str]:
    """A value that exists for every parameter of `path`; KeyError names one nobody has thought of."""
    if path == "/api/v1/endpoints/{name}/transfer":
        return {"name": "idle"}  # what runs jobs does not change hands
    if path == "/api/v1/projects/{project}/endpoints/{endpoint}/decline":
        return {"project": "pde", "endpoint": "offered"}  # a member's, which waits
    wanted = [part[1:-1].removesuffix(":path") for part in path.split("/") if part.startswith("{")]
    found = {}
    for parameter in wanted:
        if parameter == "name":
            found[parameter] = next(value for prefix, value in _NAME_BY_PREFIX.items() if path.startswith(prefix))
        elif parameter == "task_id" and path.endswith(_OF_ENDED_TASKS):
            found[parameter] = installation.names["ended_task_id"]
        elif parameter == "digest" and "/bundles/" in path:
            found[parameter] = installation.bundle
        elif parameter == "shell_id":
            found[parameter] = installation.shell()
        else:
            found[parameter] = installation.names[parameter]
    return found


def query(label: str) -> dict[str, Any]:
    """What a route must be asked with beside its path."""
    return {
        "POST /api/v1/shells/{shell_id}/input": {"offset": 0},
        "GET /api/v1/tasks/{task_id}/metrics/curve": {"key": "loss"},
        "GET /api/v1/tasks/{task_id}/outputs/content": {"path": "result.txt"},
        "GET /api/v1/images/find": {"ref": "env"},
        "PUT /api/v1/blobs/{digest}": {"total": len(BLOB), "offset": 0},
        "DELETE /api/v1/images/{image}": {"force": "true"},
        "DELETE /api/v1/endpoints/{name}": {"force": "true"},
        "POST /api/v1/agent/shells/{shell_id}/output": {"runner": "run_00000000", "offset": 0},
        "GET /api/v1/agent/shells/{shell_id}/input": {"runner": "run_00000000"},
        "POST /api/v1/agent/shells/{shell_id}/end": {"runner": "run_00000000"},
    }.get(label, {})


def headers(label: str) -> dict[str, str]:
    """An agent says which of the endpoint's homes it is."""
    return {"Diamond-Agent": "agt_alpha"} if " /api/v1/agent/" in label else {}


def bodies(installation: Installation) -> dict[str, Any]:
    """A body that is accepted, by route. Routes that take bytes are not here: any bytes will do."""
    names, codes = installation.names, installation.codes
    spec = {
        "run": "echo hi", "name": "fuzzed", "project": "pde", "num_nodes": 1, "envs": {"A": "b"}, "setup": "true",
        "secrets": {"TOKEN": {"secret": "API_KEY", "file": True}}, "outputs": ["*.txt"], "priority": 1,
        "curves": ["loss: {loss}"],
        "resources": {"infra": "alpha", "cpus": 1, "memory": "1"}, "max_duration": "1h",
        "retry": {"max_retries": 1, "on": ["NODE_FAIL"], "backoff": "10s"}, "image": {**RECIPE, "envs": {"C": "d"}},
    }  # fmt: skip
    facts = {
        "scheduler": "slurm", "hostname": "alpha", "os_user": "alice", "nodes": 1, "cpus_per_node": 8,
        "mem_bytes_per_node": 2**33, "gpus_per_node": [{"model": "H100", "count": 4}], "runtimes": ["apptainer"],
        "max_walltime_s": 3600, "policy": {"allow_others": "true"}, "accounts": ["pde"], "image_bytes": 1,
        "partitions": [{"name": "batch", "nodes": 1}], "builder_problems": {"venv": "none"}, "builds": "any",
    }  # fmt: skip
    job = {
        "job_id": names["job_id"], "state": "RUNNING", "detail": "on its way", "exit_code": 0, "signal": 0,
        "scheduler_id": "17", "hosts": ["n1"], "run_dir": "/run", "pending_reason": "Resources", "partition": "batch",
        "expected_start_at": 1.0, "queued_at": 1.0, "started_at": 2.0, "ended_at": 3.0, "reason": None,
        "outputs": [{"path": "a.txt", "size_bytes": 1, "sha256": BLOB_DIGEST.removeprefix("sha256:"), "stored": True}],
    }  # fmt: skip
    ended = {**job, "state": "SUCCEEDED", "reason": "COMPLETED"}
    chunk = {"job_id": names["job_id"], "stream": "log", "offset": 60, "data": "aGk="}
    usage = {"at": 1.0, "cpus_used": 1, "gpus_used": {"H100": 1}, "cpu_percent": 5.0, "warnings": ["disk full"]}
    epoch = installation.ctx.epoch
    to_bob = {"to": "bob"}
    person = {"name": "dave", "password": PASSWORD}
    return {
        "POST /api/v1/tasks": {"spec": spec},
        "POST /api/v1/tasks/batch": {"specs": [spec]},
        "POST /api/v1/tasks/plan": {"spec": spec},
        "PATCH /api/v1/tasks/{task_id}": {"visibility": "public"},
        "POST /api/v1/tasks/{task_id}/shells": {"argv": ["bash"]},
        "POST /api/v1/tasks/{task_id}/transfer": to_bob,
        "POST /api/v1/templates": {"name": "again", "spec": {"run": "true"}, "visibility": "public"},
        "PATCH /api/v1/templates/{template}": {"version": 1, "description": "what it is for"},
        "POST /api/v1/endpoints": {"name": "beta"},
        "POST /api/v1/endpoints/{name}/transfer": to_bob,
        "POST /api/v1/pools": {
            "name": "pool",
            "endpoint": "alpha",
            "nodes": "0..1",
            "slots": 4,
            "cpus": "2",
            "memory": "1",
            "walltime": "4h",
            "idle": "10m",
            "project": "pde",
            "slurm": {"time": "1h"},
        },
        "PATCH /api/v1/pools/{ref}": {"nodes": "0..1", "walltime": 3600, "idle": 60},
        "POST /api/v1/projects": {"name": "fluids"},
        "PATCH /api/v1/projects/{project}": {"title": "Partial differential equations"},
        "PUT /api/v1/projects/{project}/members/{user}": {"role": "viewer"},
        "POST /api/v1/projects/{project}/transfer": to_bob,
        "POST /api/v1/users/{name}/hand-over": {"to": "alice"},
        "POST /api/v1/enrolment": {"code": codes["enrolment"], "token_sha256": "0" * 64, "instance": "agt_00000000"},
        "PUT /api/v1/agent/token": {"sha256": "0" * 64},
        "PATCH /api/v1/me": {"full_name": "Alice"},
        "POST /api/v1/me/password": {"old_password": PASSWORD, "new_password": "another horse battery staple"},
        "POST /api/v1/setup": {"code": "wrong", **person},
        "POST /api/v1/invitations/accept": {"code": codes["invitation"], **person},
        "POST /api/v1/reset": {"code": codes["reset"], "password": "another horse battery staple"},
        "POST /api/v1/users/{name}/admin": {"is_admin": True},
        "POST /api/v1/users/{name}/reset": {"revoke_tokens": True},
        "POST /api/v1/invitations": {"email": "erin@example.org"},
        "POST /api/v1/logins": {"name": "terminal", "token_sha256": "1" * 64},
        "POST /api/v1/logins/poll": {"device_code": codes["device"]},
        "POST /api/v1/tokens": {"name": "nightly", "scopes": ["read"], "expires_in_s": 3600.0},
        "POST /api/v1/notices/rules": {"channel": "email", "target": "a@example.org", "events": ["task.failed"]},
        "PATCH /api/v1/notices/rules/{rule_id}": {"paused": True},
        "PUT /api/v1/quotas/{kind}/{name}": {"tasks": 5, "gpu_hours": 10.5},
        "POST /api/v1/image-drafts": {},
        "PUT /api/v1/image-drafts/{draft_id}/{step}": {"version": 1, "contents": {"base": "python:3.13-slim"}},
        "POST /api/v1/image-drafts/{draft_id}/submit": {"version": 1},
        "POST /api/v1/images": {"recipe": {**RECIPE, "name": "other"}, "endpoint": "alpha"},
        "POST /api/v1/images/plan": {"recipe": RECIPE, "endpoint": "alpha"},
        "POST /api/v1/images/import": {"recipe": RECIPE, "facts": {}, "payload": BLOB_DIGEST},
        "POST /api/v1/images/{image}/share": {"visibility": "public"},
        "POST /api/v1/images/{image}/copy": {"endpoint": "alpha"},
        "POST /api/v1/images/{image}/export": {},
        "POST /api/v1/images/{image}/test": {},
        "POST /api/v1/images/{image}/transfer": to_bob,
        "PUT /api/v1/secrets/{name}": {"value": "another"},
        "POST /api/v1/bundles": MANIFEST,
        "POST /api/v1/blobs/missing": {"digests": [BLOB_DIGEST]},
        "POST /api/v1/agent/hello": {"facts": facts},
        "POST /api/v1/agent/reports": {
            "epoch": epoch,
            "jobs": [job, ended],
            "streams": [chunk],
            "usage": usage,
        },
        "POST /api/v1/agent/shells/{shell_id}/end": {"exit_code": 0},
    }
