"""A training that leaves its size and its batch to Diamond, for real: it is measured, grows to both slots of this
machine with a batch that was chosen for it, and ends after exactly its samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from diamond.agent.machine import num_cpus
from diamond.core.fields import GLOBAL_BATCH
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "testing" / "growing.py"
SAMPLES, FIRST, SAMPLE_S = 14_003, 8, 0.002


@pytest.mark.timeout(300)
def test_one_click_chooses_size_and_batch(tmp_path: Path) -> None:
    if num_cpus() < 2:
        pytest.skip("a pool of two slots needs two cores")
    with Service(tmp_path / "home") as service, service.client() as client:
        client.pools.create({"name": "shared", "endpoint": "local", "nodes": "1", "slots": 2, "walltime": "30m"})
        eventually(lambda: client.pools.get("shared").nodes == 1, within_s=30 * PATIENCE, what="the node is held")
        task_id = client.tasks.create(
            {
                "name": "grows",
                "pool": "shared",
                "run": f"exec {sys.executable} {PROGRAM} ledger {SAMPLES} {FIRST} {SAMPLE_S}",
                "envs": {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "DIAMOND_STANDBYS": "0"},
                "outputs": ["ledger"],
            }
        ).id
        eventually(
            lambda: any(one.batch_chosen for one in client.pools.get("shared").tasks if one.task_id == task_id),
            within_s=90 * PATIENCE,
            what="it has grown",
        )
        shown = client.pools.get("shared")
        done = client.tasks.wait(task_id, timeout_s=120 * PATIENCE)
        assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED), (done.detail, done.jobs)
        client.tasks.download(task_id, tmp_path / "found")
    (task,) = [one for one in shown.tasks if one.task_id == task_id]
    lines = [json.loads(line) for line in (tmp_path / "found" / "ledger").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    assert (first["world"], first["batch"], first["wish"]) == (1, FIRST, None), "nothing is known of it yet"
    assert (last["world"], last["wish"]) == (2, str(task.batch)), f"it is in {GLOBAL_BATCH}"
    assert task.batch is not None and last["batch"] == task.batch and task.first_batch == FIRST
    assert task.batch > 2 * FIRST, "more than two ranks compute at once: they need to exchange less often"
    assert task.noise_scale == pytest.approx(1000 * FIRST, rel=0.2)
    assert f"batch {task.batch:,} (first {FIRST}): gradients are noisy enough for it" in task.batch_reason
    assert f"batch {task.batch:,} (first {FIRST})" in shown.decisions[0].reason
    assert task.parallel == "none" and "one rank" in task.parallel_reason, "as its last job said"
    assert last["samples"] == SAMPLES
    ends = [line["samples"] for line in lines]
    assert ends == sorted(set(ends)), "no sample is counted twice"
