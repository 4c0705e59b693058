"""What a program measures of its training, from its file to API, CLI and page: real processes, and jobs that end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import httpx
import pytest

from diamond.core.home import ClientConfig
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually

# Ten steps a job; each is written as one of 2 s, so that more jobs are expected than there will be.
PROGRAM = """
import json, os, time
place = int(open("place").read()) if os.path.exists("place") else 0
print("ends in", round(float(os.environ["DIAMOND_ENDS_AT"]) - time.time()), flush=True)
with open(os.environ["DIAMOND_TRAIN_FILE"], "a", buffering=1) as out:
    for step in range(place + 1, place + 11):
        time.sleep(0.1)
        print(json.dumps({
            "t": time.time(), "job": os.environ["DIAMOND_JOB_ID"], "step": step, "until": 1000, "steps": 1,
            "world": 2 if place else 1, "nodes": 1, "device": "cpu", "global_batch": 64, "per_rank": 32,
            "step_s": 2.0, "compute_s": 1.5, "comm_s": 0.25, "data_s": 0.25, "save_s": 0, "other_s": 0,
            "samples_per_s": 32.0, "memory_peak_bytes": 2**30, "noise_scale": None, "slowest": None,
            "ends_at": float(os.environ["DIAMOND_ENDS_AT"]),
        }), file=out)
open("place", "w").write(str(place + 10))
if place:
    time.sleep(300)
raise SystemExit(85)
"""

ROOT = Path(__file__).parents[2]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    made = Service(tmp_path / "home")
    folder = made.home.agent("local")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "policy.toml").write_text('max_walltime = "1m"\n')
    return made


def test_a_training_in_several_jobs_is_seen_everywhere(service: Service, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(PROGRAM)
    spec = {"name": "trains", "run": "python3 train.py", "workdir": str(tmp_path / "code"), "max_duration": "2h"}
    with service, service.client() as client:
        task = client.tasks.create(spec)

        def at_step_20() -> bool:
            latest = client.tasks.training(task.id).latest
            return latest is not None and latest.step == 20

        eventually(at_step_20, within_s=60, what="the second job has trained")
        found = client.tasks.training(task.id)
        # 980 steps of 2 s, in jobs of a minute, less what the second still has and what starting takes.
        assert found.remaining_s == 1960.0 and found.walltime_s == 60 and found.chained
        assert found.jobs_expected is not None and 32 <= found.jobs_expected <= 40
        assert [(row.world, row.windows) for row in found.by_size] == [(2, 10), (1, 10)]
        assert found.latest is not None and found.latest.ends_at is not None
        log = b"".join(client.tasks.logs(task.id)).decode()
        assert 55 <= int(re.findall(r"ends in (\d+)", log)[-1]) <= 60

        config = ClientConfig.load(service.home)
        assert config is not None
        asked = {"Authorization": f"Bearer {config.token}"}
        raw = httpx.get(f"{service.url}/api/v1/tasks/{task.id}/training", headers=asked).json()
        assert raw["latest"]["step"] == 20 and raw["by_size"][0]["samples_per_s"] == 32.0

        shown = service.diamond("show", task.id).stdout
        assert f"About {found.jobs_expected} more jobs of 1m expected." in shown
        for words in (
            "step 20 of 1,000",
            "About 33m of training left",
            "compute 75%",
            "1.0 GiB at most",
            "1 node, 2 ranks",
        ):
            assert words in shown, words
        told = json.loads(service.diamond("show", task.id, "--json").stdout)
        assert told["training"]["latest"]["step"] == 20 and told["training"]["jobs_expected"] == found.jobs_expected

        client.tasks.cancel(task.id)
        done = client.tasks.wait(task.id, timeout_s=60)
        assert done.state is TaskState.CANCELLED
        assert client.tasks.training(task.id).jobs_expected is None

        plain = client.tasks.create({"run": "true"})
        client.tasks.wait(plain.id, timeout_s=60)
        assert client.tasks.training(plain.id).latest is None
        assert json.loads(service.diamond("show", plain.id, "--json").stdout)["training"] is None
        assert "Training" not in service.diamond("show", plain.id).stdout


def test_a_training_that_none_follows_ran_out_of_time(service: Service) -> None:
    """It ends by itself before anybody warns it, with a code that alone would mean that a signal ended it."""
    run = f"PYTHONPATH={ROOT}/src:{ROOT} {sys.executable} {ROOT}/tests/train/regrouped.py . 100000"
    with service, service.client() as client:
        trains = [client.tasks.create({"run": run, "ranks_per_node": ranks, "max_duration": "25s"}) for ranks in (1, 2)]
        shot = client.tasks.create({"run": "kill -USR1 $$", "max_duration": "25s"})
        *done, dead = (client.tasks.wait(task.id, timeout_s=120) for task in (*trains, shot))
        logs = [b"".join(client.tasks.logs(task.id)).decode() for task in trains]
    for log, one in zip(logs, done, strict=True):
        assert "ending in time to be continued" in log
        assert (one.state, one.reason) == (TaskState.FAILED, Reason.TIME_LIMIT), one.detail
        assert one.exit_code in (138, 143), "where it is slow, the end of the time comes as SIGTERM"
        assert "the limit was 25s" in one.detail and len(one.jobs) == 1
    assert (dead.state, dead.reason, dead.exit_code) == (TaskState.FAILED, Reason.SIGNALLED, 138), dead.detail
