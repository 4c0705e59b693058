"""A server that dies just when it judges a finished build: at its next start the image is there, and tasks go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from diamond.core.faults import IMAGE_FAULT_POINTS
from diamond.core.images import ReplicaState
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing.service import Service
from testing.waiting import eventually


def can_build(client: Client) -> bool:
    facts = client.endpoints.list()[0].facts
    return facts is not None and "venv" in facts.builders


@pytest.mark.parametrize("point", IMAGE_FAULT_POINTS)
def test_killed_on_the_way_of_an_image(tmp_path: Path, point: str) -> None:
    with Service(tmp_path / "home") as service:
        with service.client() as client:
            eventually(lambda: can_build(client), within_s=60, what="the agent knows what it can build with")
        service.kill(service.server)
        service.start_server(fault=f"{point}:1")
        with service.client() as client:
            spec = {"run": "python -c 'import sys; print(sys.prefix)'", "image": {"name": "env", "base": "host"}}
            task = client.tasks.create(spec)
            assert task.state is TaskState.PENDING
        server = service.server
        assert server is not None
        assert server.wait(timeout=120) == -signal.SIGKILL
        service.start_server()
        with service.client() as client:
            done = client.tasks.wait(task.id, timeout_s=120)
            assert (done.state, done.image) == (TaskState.SUCCEEDED, "env"), done.detail
            image = client.images.get("env")
            assert image.state is ReplicaState.READY and len(image.replicas) == 1
            facts = image.replicas[0].facts
            assert facts is not None
            assert b"".join(client.tasks.logs(task.id)).decode().strip() == facts.path
