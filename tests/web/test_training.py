"""How a training stands, on the page of its task: what a program wrote to $DIAMOND_TRAIN_FILE, as people read it."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from typing import Any

import pytest

from diamond.sdk.client import Client
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
EVIL = '<img src=x onerror=alert(1)>"'


def line(step: int, **fields: Any) -> str:
    """As diamond.train writes it."""
    return json.dumps(
        {
            "t": time.time(), "job": "", "step": step, "until": 10_000, "steps": 40, "world": 4, "nodes": 2,
            "device": "NVIDIA H200", "parallel": "ddp", "precision": "bf16", "global_batch": 256, "per_rank": 64,
            "accumulate": 1, "step_s": 0.21, "compute_s": 0.15, "comm_s": 0.03, "data_s": 0.01, "save_s": 0.002,
            "other_s": 0.018, "sync_s": 0.05, "samples_per_s": 1219.0, "noise_scale": 812.0,
            "memory_peak_bytes": 72 * 2**30, "slowest": {"rank": 3, "host": "node2", "ratio": 1.8},
            "saves": {"count": 3, "blocked_s": 0.03, "took_s": 1.2, "interval_s": 72.0}, "lr_scale": 1.0,
            "generation": 0, "restarts": 0, "ends_at": None, **fields,
        }
    )  # fmt: skip


def writing(*lines: str) -> str:
    return "".join(f"echo {shlex.quote(each)} >> $DIAMOND_TRAIN_FILE\n" for each in lines)


@pytest.fixture(scope="module")
def client(service: Service) -> Any:
    with service.client() as made:
        yield made


def measured(client: Client, task_id: str, step: int) -> None:
    def there() -> bool:
        latest = client.tasks.training(task_id).latest
        return latest is not None and latest.step == step

    eventually(there, within_s=60, what=f"{task_id} is at step {step}")


def test_it_appears_and_moves_on_by_itself(visit: Visit, client: Client, tmp_path: Any) -> None:
    go = tmp_path / "go"
    waits = f"until [ -e {go} ]; do sleep 0.1; done\n"
    run = (
        "echo begun\n" + waits + writing(line(1200)) + f"until [ -e {go}2 ]; do sleep 0.1; done\n" + writing(line(5000))
    )
    task = client.tasks.create({"name": "trains", "run": run + "sleep 300", "max_duration": "2h"})
    visitor = visit()
    page = visitor.page
    page.goto(f"/tasks/{task.id}")
    page.get_by_role("region", name="How it stands").get_by_text("Running").wait_for()
    assert page.get_by_role("heading", name="Training").count() == 0, "most tasks train nothing"
    go.touch()
    panel = page.get_by_role("region", name="Training")
    panel.get_by_text("Step 1,200 of 10,000").wait_for()
    assert panel.get_by_role("progressbar", name="Steps done").get_attribute("value") == "1200"
    panel.get_by_text("About 31m of training left at this pace. It should be done within this job.").wait_for()
    parts = panel.get_by_role("list", name="Parts of a step").get_by_role("listitem")
    assert [re.sub(r"\s+", " ", each).strip() for each in parts.all_inner_texts()] == [
        "Compute 150 ms, 71%", "Communication 30.0 ms, 14%", "Data 10.0 ms, 5%", "Checkpoints 2.0 ms, 1%",
        "Other 18.0 ms, 9%",
    ]  # fmt: skip
    for words in (
        "Rank 3 on node2 computes 1.8 times as long as the others.",
        "4 ranks on 2 nodes, NVIDIA H200, ddp, bf16",
        "72.0 GiB",
        "Batches much larger than this gain little. The batch is 256 = 64 × 4 ranks.",
        "3, one every 1m 12s; each takes 1.20 s and holds the training up for 30.0 ms",
    ):
        assert panel.get_by_text(words).is_visible(), words
    assert panel.get_by_text("256 = 64 × 4 ranks", exact=True).is_visible()
    assert panel.get_by_role("table").count() == 0, "one size is no table"
    (tmp_path / "go2").touch()
    panel.get_by_text("Step 5,000 of 10,000").wait_for()
    client.tasks.cancel(task.id)


@pytest.mark.parametrize("how", [{}, {"dark": True}, {"width": 400}, {"width": 400, "dark": True}, {"scripts": False}])
def test_it_can_be_read_by_everybody(visit: Visit, client: Client, how: dict[str, Any]) -> None:
    lines = [
        line(10, world=1, nodes=1, global_batch=64, samples_per_s=330.0, step_s=0.19),
        line(20, world=2, nodes=1, global_batch=128, samples_per_s=640.0, step_s=0.2),
        line(30, device=EVIL, slowest={"rank": 1, "host": EVIL, "ratio": 2.5}),
        "[" * 5000, "{}", json.dumps({"t": 1, "step": -1}), line(40),
    ]  # fmt: skip
    task = client.tasks.create({"name": "sizes", "run": writing(*lines) + "sleep 300", "max_duration": "10m"})
    measured(client, task.id, 40)
    visitor = visit(**how)
    page = visitor.page
    page.goto(f"/tasks/{task.id}")
    panel = page.get_by_role("region", name="Training", exact=True)
    panel.get_by_text("Step 40 of 10,000").wait_for()
    assert panel.get_by_text(re.compile("About 35m of .* That is 25m more than max_duration leaves it")).is_visible()
    rows = panel.get_by_role("table", name="What it did at each size").get_by_role("row")
    assert rows.count() == 5 and rows.filter(has_text=EVIL).count() == 1
    if how.get("scripts", True):
        visitor.check_accessible()
        visitor.check_width()
    client.tasks.cancel(task.id)
