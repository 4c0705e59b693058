"""A pool for real: this machine as its node, trainings with PyTorch that are resized, and everybody is killed on the
way. What Slurm does with pilots is in test_pool_steward.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.machine import num_cpus
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "testing" / "elastic.py"
SAMPLE_S = 0.004
STEPS = {"long": 220, "late": 90}


def uninterrupted(folder: Path, steps: int) -> dict[str, Any]:
    """How the same training ends here, in one go and without Diamond."""
    folder.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DIAMOND_", "SLURM_"))}
    env = {**kept, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "DIAMOND_TRAIN_QUIET": "1"}
    argv = [sys.executable, str(PROGRAM), "ledger", str(steps), "0"]
    subprocess.run(argv, cwd=folder, env=env, capture_output=True, timeout=120, check=True)
    last: dict[str, Any] = json.loads((folder / "ledger").read_text().splitlines()[-1])
    return last


@pytest.mark.timeout(400)
def test_trainings_share_a_machine_and_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    if num_cpus() < 2:
        pytest.skip("a pool of two slots needs two cores")
    service = Service(tmp_path / "home")

    def launch(name: str) -> str:
        with service.client() as client:
            return client.tasks.create(
                {
                    "name": name,
                    "pool": "shared",
                    "run": f"exec {sys.executable} {PROGRAM} ledger {STEPS[name]} {SAMPLE_S}",
                    "envs": {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "DIAMOND_STANDBYS": "0"},
                    "resources": {"slots": "1..2"},
                    "outputs": ["ledger"],
                }
            ).id

    with service:
        with service.client() as client:
            client.pools.create({"name": "shared", "endpoint": "local", "nodes": "1", "slots": 2, "walltime": "30m"})
            eventually(lambda: client.pools.get("shared").nodes == 1, within_s=30, what="the node is held")
            ids = {"long": launch("long")}
            eventually(
                lambda: client.tasks.training(ids["long"]).latest, within_s=60 * PATIENCE, what="the first is measured"
            )
            ids["late"] = launch("late")
            eventually(
                lambda: client.tasks.get(ids["late"]).state is TaskState.RUNNING,
                within_s=90 * PATIENCE,
                what="the first has made room for the second",
            )
        service.kill(service.agent)
        service.kill(service.server)
        service.start_server()
        service.start_agent()
        with service.client() as client:
            done = {name: client.tasks.wait(task_id, timeout_s=150 * PATIENCE) for name, task_id in ids.items()}
            for name, task in done.items():
                assert (task.state, task.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), (task.detail, task.jobs)
                client.tasks.download(task.id, tmp_path / name)
            shown = client.pools.get("shared")
            client.pools.close("shared")
            eventually(lambda: not client.pools.get("shared").pilots, within_s=60 * PATIENCE, what="the node is let go")
    assert [job.reason for job in done["long"].jobs[:-1]] == [Reason.CONTINUED] * (len(done["long"].jobs) - 1)
    assert len(done["long"].jobs) >= 2, "it was resized"
    sizes = [one.slots for one in reversed(shown.decisions) if one.task_id == ids["long"]]
    assert sizes[:2] == [2, 1], "it had the machine for itself, then half of it"
    assert all(one.reason for one in shown.decisions)
    for name, steps in STEPS.items():
        lines = [json.loads(line) for line in (tmp_path / name / "ledger").read_text().splitlines()]
        right = uninterrupted(tmp_path / f"{name}-alone", steps)
        assert lines[-1]["norm"] == pytest.approx(right["norm"], abs=1e-4)
        assert lines[-1]["sum"] == pytest.approx(right["sum"], abs=1e-4)
        assert sorted({line["step"] for line in lines if "step" in line}) == list(range(1, steps + 1))
