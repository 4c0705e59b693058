"""Quotas with real processes: what waits for a limit goes on by itself, and users take turns on one machine."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from diamond.core.quotas import Limits
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually


def test_a_task_that_waits_for_a_limit_goes_on_by_itself(service: Service, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    spec = {"run": f"until [ -e {flag} ]; do sleep 0.05; done"}
    with service.client() as client:
        (mine,) = [quota for quota in client.quotas.list() if quota.kind == "user"]
        assert service.diamond("quota", "set", "user", mine.name, "--nodes", "1", "--tasks", "3").returncode == 0
        first, second = client.tasks.create(spec), client.tasks.create(spec)
        eventually(lambda: client.tasks.get(first.id).state is TaskState.RUNNING, what="the first runs")
        waits = client.tasks.get(second.id)
        assert waits.state is TaskState.PENDING
        assert "may hold 1 node at once and holds 1; this task asks for 1" in waits.pending_reason

        third = client.tasks.create(spec)
        assert third.warnings
        task_file = tmp_path / "task.yaml"
        task_file.write_text("run: 'true'\n")
        refused = service.diamond("launch", "-d", str(task_file))
        assert refused.returncode == 1
        assert "may have 3 unfinished tasks at once and has 3" in refused.stderr
        planned = service.diamond("launch", "--dry-run", "--json", str(task_file))
        assert json.loads(planned.stdout)["error"]["code"] == "quota_exceeded"
        shown = service.diamond("quota")
        assert "nodes at once" in shown.stdout and "1 of 1" in shown.stdout

        flag.touch()
        for task in (first, second, third):
            assert client.tasks.wait(task.id, timeout_s=30).state is TaskState.SUCCEEDED
        (mine,) = [quota for quota in client.quotas.list() if quota.kind == "user"]
        assert (mine.used.tasks, mine.used.nodes) == (0, 0)
        client.quotas.clear("user", mine.name)
        assert client.quotas.get("user", mine.name).limits == Limits()


def test_use_is_exact_after_the_server_died_while_adding_it_up(tmp_path: Path) -> None:
    with Service(tmp_path / "home") as service, service.client() as client:
        service.kill(service.server)
        service.start_server(fault="server.charging:1")
        task = client.tasks.create({"run": "sleep 1"})
        server = service.server
        assert server is not None
        eventually(lambda: server.poll() is not None, what="the server died while it added up")
        service.start_server()
        done = client.tasks.wait(task.id, timeout_s=30)
        assert done.state is TaskState.SUCCEEDED
        eventually(lambda: _charged(service), what="the job is charged")
        (job,) = done.jobs
        assert job.started_at and job.ended_at
        with closing(sqlite3.connect(service.home.server / "diamond.db")) as database:
            days = database.execute("SELECT node_seconds, gpu_seconds FROM usage").fetchall()
        assert sum(nodes for nodes, _ in days) == pytest.approx(job.ended_at - job.started_at, abs=0.01)
        assert sum(gpus for _, gpus in days) == 0


def _charged(service: Service) -> bool:
    with closing(sqlite3.connect(service.home.server / "diamond.db")) as database:
        return database.execute("SELECT count(*) FROM jobs WHERE charged_at IS NULL").fetchone() == (0,)
