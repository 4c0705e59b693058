"""A second endpoint with an agent of its own, started by the command a user is told to type."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually


def start_agent(service: Service, token_file: Path, home: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "diamond.cli", "agent", "run", "--server", service.url]
    argv += ["--token-file", str(token_file), "--home", str(home)]
    with home.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(argv, env=service.env, stdout=log, stderr=log, start_new_session=True)


def test_a_stand_alone_agent_its_policy_and_a_second_home(service: Service, tmp_path: Path) -> None:
    token_file, home, other = tmp_path / "token", tmp_path / "agent", tmp_path / "other"
    assert service.diamond("endpoint", "create", "box", "--token-file", str(token_file)).returncode == 0
    assert token_file.stat().st_mode & 0o077 == 0
    home.mkdir()
    (home / "policy.toml").write_text("max_cpus = 1\n")
    agents = [start_agent(service, token_file, home)]
    try:
        with service.client() as client:
            eventually(lambda: client.endpoints.get("box").online, what="box is online")
            ran = client.tasks.create({"run": "echo $PWD", "resources": {"infra": "box"}})
            assert client.tasks.wait(ran.id, timeout_s=30).state is TaskState.SUCCEEDED
            assert str(home) in b"".join(client.tasks.logs(ran.id)).decode()

            refused = client.tasks.create({"run": "true", "resources": {"infra": "box", "cpus": 2}})
            done = client.tasks.wait(refused.id, timeout_s=30)
            assert (done.state, done.reason) == (TaskState.FAILED, Reason.REJECTED)
            assert "max_cpus = 1" in done.detail

            # A copy of the token in another home must not run everything a second time.
            agents.append(start_agent(service, token_file, other))
            log = other.with_suffix(".log")
            eventually(lambda: "another agent already speaks" in log.read_text(), what="the second home is refused")
            once = client.tasks.create({"run": "true", "resources": {"infra": "box"}})
            assert client.tasks.wait(once.id, timeout_s=30).state is TaskState.SUCCEEDED
            assert not list(other.glob("jobs/*"))

            agents[0].send_signal(signal.SIGTERM)
            assert agents[0].wait(timeout=20) == 0
            assert not client.endpoints.get("box").online
            waiting = client.tasks.create({"run": "true", "resources": {"infra": "box"}})
            assert "offline" in client.tasks.get(waiting.id).pending_reason
            client.tasks.cancel(waiting.id)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
            agent.wait(timeout=20)
