from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.gpus import GpuMonitor
from diamond.agent.main import only_one, run
from diamond.agent.run_dirs import remove_old
from diamond.agent.sampler import Sampler
from diamond.agent.schedulers.base import JobProcesses
from diamond.core.errors import Conflict, InstallationProblem


def test_one_agent_per_home(tmp_path: Path) -> None:
    with only_one(tmp_path):
        with pytest.raises(Conflict) as caught, only_one(tmp_path):
            pass
        assert str(os.getpid()) in caught.value.message
    with only_one(tmp_path):
        pass


def test_a_wrong_policy_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("max_nodes = 'x'")
    with pytest.raises(InstallationProblem, match="max_nodes"):
        run(server_url="http://127.0.0.1:1", token="x", home=tmp_path)


def test_samples_a_job_and_spares_the_young(tmp_path: Path) -> None:
    class Source:
        def processes(self) -> tuple[JobProcesses, ...]:
            mine = {"run_dir": tmp_path, "pid": os.getpid(), "gpus": (0,)}
            return (
                JobProcesses(name="old", started_at=time.time() - 60, **mine),
                JobProcesses(name="young", started_at=time.time(), **{**mine, "run_dir": tmp_path / "none"}),
            )

    class Gpus(GpuMonitor):
        def __init__(self) -> None:
            pass

        def sample(self, index: int) -> tuple[float, int] | None:
            return 75.0, 1024

    sampler = Sampler(Source(), Gpus())
    sampler.sample()
    sum(range(2_000_000))
    sampler.sample()
    first, second = [json.loads(line) for line in (tmp_path / "util.jsonl").read_text().splitlines()]
    assert first["sys/rss_bytes"] > 1_000_000
    assert second["sys/cpu_percent"] >= 0
    assert (second["sys/gpu0_percent"], second["sys/gpu0_mem_bytes"]) == (75.0, 1024)
    assert not (tmp_path / "none").exists()


def test_once_ends_when_all_is_delivered(server: Any, home: Path) -> None:
    from typing import cast

    from diamond.agent.link import Link
    from diamond.agent.main import Agent

    jobs = [server.order("echo x") for _ in range(5)]
    home.mkdir()
    Agent(link=cast(Link, server), home=home).run(once=True)
    assert sorted(server.finals) == sorted(jobs)
    phases = [json.loads(line)["phase"] for line in (home / "journal.jsonl").read_text().splitlines()]
    assert phases.count("delivered") == 5


def test_a_centre_stops_its_agents(server: Any, home: Path, tmp_path: Path) -> None:
    from typing import cast

    from diamond.agent import centre
    from diamond.agent.link import Link
    from diamond.agent.main import Agent

    home.mkdir()
    assert centre.stop_reason(tmp_path) == ""
    (tmp_path / "stop").write_text("moved to \x1b[31mcluster-b\n")
    agent = Agent(link=cast(Link, server), home=home, centre=tmp_path)
    agent.run()
    assert agent.stopped_by_centre
    assert centre.stop_reason(tmp_path) == f"{tmp_path}/stop: moved to [31mcluster-b"
    with pytest.raises(InstallationProblem, match="stopped all Diamond agents"):
        centre.refuse_stopped(tmp_path)
    (tmp_path / "stop").write_bytes(b"")
    assert centre.stop_reason(tmp_path) == f"{tmp_path}/stop exists"
    (tmp_path / "stop").unlink()
    centre.wait_while_stopped(tmp_path)


def test_only_old_run_directories_nobody_needs_are_removed(tmp_path: Path) -> None:
    for name in ("old", "kept", "young"):
        (tmp_path / name / "work").mkdir(parents=True)
    for name in ("old", "kept"):
        os.utime(tmp_path / name, (1000, 1000))
    remove_old(tmp_path, {"kept"}, older_than_s=3600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "young"]
