"""The printed line, pasted by an ordinary user on the login node of a real Slurm site that can only connect out."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from diamond.core.endpoints import Endpoint
from diamond.core.states import TaskState
from testing.minihpc.fixtures import require
from testing.minihpc.pythons import find, inside
from testing.minihpc.site import Site
from testing.service import Service
from testing.waiting import eventually


@pytest.mark.parametrize("version", ["", "3.10"])
def test_pasted_on_a_login_node(tmp_path: Path, version: str) -> None:
    require("trixie")
    if version and find(version) is None:
        pytest.skip(f"no Python {version} on this machine to show to the site")
    python = f"{inside(version)}/bin/python{version}" if version else "python3"
    with Site("enrol", pythons=[version] if version else []) as site:
        service = Service(tmp_path / "server", tls="1", host="0.0.0.0", multi_user="1", sqlite_synchronous="OFF")
        service.start_server()
        try:
            url = f"https://{site.server_address}:{service.port}"
            done = service.diamond("endpoint", "create", "cluster", "--url", url, "--json")
            assert done.returncode == 0, done.stderr
            made = json.loads(done.stdout)
            assert made["warnings"] == []
            has_curl = site.run(["sh", "-c", "command -v curl"], check=False).returncode == 0
            line = made["line" if has_curl else "line_without_curl"].replace("python3 ", f"{python} ")
            home = site.run(["sh", "-c", "echo $HOME"]).stdout.strip()
            said = site.run(["bash", "-lc", f"cd && {line}"], timeout=90).stdout
            assert "Enrolled as endpoint cluster" in said
            assert "there is no systemd here" in said or "systemd --user does not answer" in said
            pyz = f"{home}/.diamond/agents/cluster/diamond-agent.pyz"
            with service.client() as client:
                facts = eventually(
                    lambda: (found := client.endpoints.get("cluster")).online and found.facts, what="it is online"
                )
                assert (facts.os_user, facts.hostname, facts.scheduler) == ("user1", site.name, "slurm")

                assert facts.python.startswith(version or "3.13")
                status = json.loads(site.run([python, pyz, "status", "--json"]).stdout)
                assert (status["ok"], status["server"], status["running"]["host"]) == (True, url, site.name)
                token = site.path(f"{home}/.diamond/agents/cluster/token")
                assert token.stat().st_mode & 0o777 == 0o600
                other = site.run(["cat", f"{home}/.diamond/agents/cluster/token"], user="user2", check=False)
                assert other.returncode != 0

                before = token.read_text()
                assert "the old one is dead" in service.diamond("endpoint", "rotate", "cluster").stdout
                assert token.read_text() != before
                assert site.run([python, pyz, "start"]).stdout.startswith("The agent runs already")

                # A killed agent comes back, and a stopped one does not.
                pid = status["running"]["pid"]
                site.run(["kill", f"-{signal.SIGKILL.value}", str(pid)])

                def came_back() -> bool:
                    said = site.run([python, pyz, "status", "--json"], check=False).stdout
                    return (json.loads(said)["running"] or {"pid": pid})["pid"] != pid

                eventually(came_back, what="it runs again")
                if not version:
                    _stop_and_allow(site, [python, pyz], lambda: client.endpoints.get("cluster"))
                task = client.tasks.create({"run": "echo from $SLURM_JOB_ID", "resources": {"infra": "cluster"}})
                assert client.tasks.wait(task.id, timeout_s=60).state is TaskState.SUCCEEDED
                assert b"".join(client.tasks.logs(task.id)).startswith(b"from ")
                assert "has stopped" in site.run([python, pyz, "stop"], timeout=60).stdout
                eventually(lambda: not client.endpoints.get("cluster").online, what="it is offline")
        finally:
            service.stop()


def _stop_and_allow(site: Site, agent: list[str], look: Callable[[], Endpoint]) -> None:
    """Root of the centre stops its agents and lets them run again."""
    folder = site.path("/etc/diamond")
    folder.mkdir()
    eventually(lambda: look().online, within_s=60, what="the agent that was killed is connected again")
    (folder / "stop").write_text("maintenance until Friday\n")

    def has_gone() -> bool:
        now = look()
        told = now.usage is not None and any("maintenance until Friday" in warning for warning in now.usage.warnings)
        return told and not now.online

    eventually(has_gone, within_s=60, what="the agent has gone, and has said why")
    refused = site.run([*agent, "start"], check=False)
    assert refused.returncode == 1
    assert "stopped all Diamond agents (/etc/diamond/stop: maintenance" in refused.stderr
    (folder / "stop").unlink()
    eventually(lambda: look().online, within_s=60, what="the agent is back")
