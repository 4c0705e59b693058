"""Hostile requests over real HTTP: a 4xx that names the field, nothing written. Odd but legal text arrives exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from diamond.core.home import ClientConfig
from diamond.core.states import TaskState
from testing.service import Service

DIGEST = "sha256:" + "0" * 64
TEN_MB = "x" * (10 * 1024 * 1024)


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    config = ClientConfig.load(service.home)
    assert config is not None
    headers = {"Authorization": f"Bearer {config.token}"}
    with httpx.Client(base_url=f"{config.url}/api/v1", headers=headers, timeout=60) as client:
        yield client


def count(http: httpx.Client) -> int:
    return int(http.get("/tasks", params={"limit": 1}).json()["total"])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"run": "true", "name": "a\nb"}, "name"),
        ({"run": "true", "name": "a\x00b"}, "name"),
        ({"run": "true", "envs": {"A": "\x00"}}, "envs.A"),
        ({"run": "true", "envs": {"A": "x" * 200_000}}, "envs.A"),
        ({"run": "true", "file_mounts": {"/etc/x": "bundle:" + DIGEST}}, "file_mounts"),
        ({"run": "true", "file_mounts": {"../x": "bundle:" + DIGEST}}, "file_mounts"),
        ({"run": "true", "file_mounts": {"x": "/etc/passwd"}}, "file_mounts.x"),
        ({"run": "true", "workdir": "bundle:sha256:../../etc"}, "workdir"),
        ({"run": "true", "workdir": "bundle:" + DIGEST}, "workdir"),
        ({"run": "true", "outputs": ["../../etc/passwd"]}, "outputs"),
        ({"run": "true", "num_nodes": "many"}, "num_nodes"),
        ({"run": "true", "num_nodes": 2}, "num_nodes"),
        ({"run": "true", "nodes": 2}, "nodes"),
        ({"run": {"a": 1}}, "run"),
        ({"run": "x" * 2_000_000}, "run"),
    ],
)
def test_a_bad_spec_names_its_field_and_writes_nothing(http: httpx.Client, spec: dict[str, Any], field: str) -> None:
    before = count(http)
    for route in ("/tasks", "/tasks/plan"):
        if route == "/tasks/plan" and field in ("workdir", "file_mounts.x"):
            continue  # a dry run needs no upload
        answer = http.post(route, json={"spec": spec})
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert error["field"] == field
        assert error["message"]
    assert count(http) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b'{"spec": NaN}',
        b'{"spec": {"run": "a"}, "spec": {"run": "b"}}',
        b'{"spec": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"spec": {"run": "true", "num_nodes": 1' + b"0" * 100_000 + b"}}",
        b'{"spec": {"run": "\\ud800"}}',
        b'{"spec": {"run": "\xff\xfe"}}',
        json.dumps({"spec": {"run": TEN_MB}}).encode(),
        json.dumps({"spec": {"run": "true", "name": TEN_MB}}).encode(),
        json.dumps({"spec": {"run": "true"}, "surprise": 1}).encode(),
    ],
    ids=range(13),
)
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes) -> None:
    before = count(http)
    answer = http.post("/tasks", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]
    assert count(http) == before


@pytest.mark.parametrize(
    "files",
    [
        [{"path": "../evil", "digest": DIGEST, "size_bytes": 1}],
        [{"path": "/etc/cron.d/x", "digest": DIGEST, "size_bytes": 1}],
        [{"path": "a/../../x", "digest": DIGEST, "size_bytes": 1}],
        [{"path": "l", "link_to": "/etc"}],
        [{"path": "l", "link_to": "../.."}],
        [{"path": "d", "link_to": "e"}, {"path": "d/x", "digest": DIGEST, "size_bytes": 1}],
        [{"path": "x", "digest": "sha256:../../x", "size_bytes": 1}],
        [{"path": "x", "digest": DIGEST, "size_bytes": -1}],
        [{"path": "x", "digest": DIGEST, "size_bytes": 1, "uid": 0}],
        "files",
    ],
    ids=range(10),
)
def test_bundles_that_lead_outside(http: httpx.Client, files: Any) -> None:
    answer = http.post("/bundles", json={"files": files})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/tasks/../../etc/passwd"),
        ("GET", "/tasks/tsk_%00"),
        ("GET", "/tasks/" + "x" * 5000),
        ("GET", "/tasks?limit=0"),
        ("GET", "/tasks?limit=999999999999999999999"),
        ("GET", "/tasks?cursor=%27%3B--"),
        ("GET", "/tasks?state=BORED"),
        ("GET", "/blobs/sha256:%2e%2e%2f%2e%2e"),
        ("GET", "/blobs/" + DIGEST),
        ("PUT", "/blobs/" + DIGEST + "?offset=-1&total=5"),
        ("PUT", "/blobs/" + DIGEST + "?offset=0&total=5"),
        ("GET", "/endpoints/%2e%2e"),
        ("GET", "/events?since=x"),
        ("DELETE", "/tasks"),
        ("GET", "/nowhere"),
        ("POST", "/agent/reports"),
    ],
)
def test_odd_addresses(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path, content=b"hello" if method == "PUT" else None)
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]


def test_no_token_wrong_token_and_an_agents_token(http: httpx.Client, service: Service) -> None:
    agent_token = (service.home.agent("local") / "token").read_text().strip()
    for header in (None, "Bearer wrong", "Bearer \xff", "Basic abc", "Bearer", f"Bearer {agent_token}"):
        headers = {"Authorization": header.encode("latin-1")} if header else {}
        answer = httpx.get(f"{http.base_url}tasks", headers=headers)
        assert answer.status_code in (401, 403), header
        assert agent_token not in answer.text


def test_odd_but_legal_text_arrives_exact(service: Service) -> None:
    """Quotes, newlines, substitutions and unicode go through name, environment, script and log unharmed."""
    value = 'it\'s "here"\n$(touch /tmp/diamond-pwned) `id` \\ ünï ☃ \t end\n'
    name = "$(reboot); 'quoted' \"double\" ☃ ../../x"
    program = (
        'python3 -c \'import os,sys; sys.stdout.buffer.write(os.environb[b"V"] + os.environb[b"DIAMOND_TASK_NAME"])\''
    )
    with service.client() as client:
        task = client.tasks.create({"name": name, "run": program, "envs": {"V": value}})
        done = client.tasks.wait(task.id, timeout_s=30)
        assert done.state is TaskState.SUCCEEDED
        assert done.name == name
        assert b"".join(client.tasks.logs(task.id)) == (value + name).encode()


def test_binary_logs_arrive_exact(service: Service) -> None:
    with service.client() as client:
        task = client.tasks.create({"run": "head -c 300000 /dev/urandom | tee copy", "outputs": ["copy"]})
        assert client.tasks.wait(task.id, timeout_s=30).state is TaskState.SUCCEEDED
        config = ClientConfig.load(service.home)
        assert config is not None
        copy = httpx.get(
            f"{config.url}/api/v1/tasks/{task.id}/outputs/content",
            params={"path": "copy"},
            headers={"Authorization": f"Bearer {config.token}"},
        )
        assert b"".join(client.tasks.logs(task.id)) == copy.content
        assert len(copy.content) == 300_000
