"""Logs and metrics of real tasks: the cap the user sees, live streams, curves, utilisation."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from diamond.core.home import ClientConfig
from diamond.core.states import TaskState
from diamond.sdk.follow import LogChunk
from testing.service import Service

MIB = 1024 * 1024


def test_a_log_past_its_cap_keeps_both_ends_and_says_so(tmp_path: Path) -> None:
    with (
        Service(tmp_path / "home", log_cap_bytes=str(MIB), log_segment_bytes=str(128 * 1024)) as service,
        service.client() as client,
    ):
        task = client.tasks.create({"run": "seq -f 'line %07.0f of this log' 1 200000"})
        assert client.tasks.wait(task.id, timeout_s=60).state is TaskState.SUCCEEDED
        text = b"".join(client.tasks.logs(task.id)).decode()
        assert text.startswith("line 0000001 of")
        assert text.endswith("line 0200000 of this log\n")
        assert len(text) < 1.3 * MIB
        marker = re.search(r"\[diamond: .* dropped here: this log passed the 1 MiB cap.*run directory.*\]", text)
        assert marker
        shown = service.diamond("logs", task.id)
        assert marker[0] in shown.stdout
        # The whole file is where the marker says it is.
        run_dir = Path(client.tasks.get(task.id).jobs[0].run_dir)
        assert (run_dir / "log").stat().st_size == len("line 0000001 of this log\n") * 200_000


def test_a_follower_sees_lines_while_they_are_printed(service: Service) -> None:
    with service.client() as client:
        task = client.tasks.create({"run": "echo first; sleep 1.5; echo second"})
        arrivals: dict[str, str] = {}
        for item in client.tasks.follow(task.id):
            if isinstance(item, LogChunk):
                for word in item.data.decode().split():
                    arrivals[word] = client.tasks.get(task.id).state
        assert arrivals["first"] == TaskState.RUNNING
        assert "second" in arrivals


def test_server_sent_events_carry_the_log_to_its_end(service: Service) -> None:
    config = ClientConfig.load(service.home)
    assert config is not None
    headers = {"Authorization": f"Bearer {config.token}"}
    with service.client() as client:
        task = client.tasks.create({"run": "for n in 1 2 3; do echo ünï $n; sleep 0.2; done; exit 4"})
    text, end = "", {}
    with httpx.stream("GET", f"{config.url}/api/v1/tasks/{task.id}/logs/stream", headers=headers, timeout=30) as answer:
        event = ""
        for line in answer.iter_lines():
            if line.startswith("event:"):
                event = line.partition(":")[2].strip()
            elif line.startswith("data:"):
                data = json.loads(line.partition(":")[2])
                text += data.get("text", "") if event == "log" else ""
                end = data if event == "end" else end
    assert text == "ünï 1\nünï 2\nünï 3\n"
    assert end == {"state": "FAILED"}


def test_metrics_and_utilisation_become_curves(service: Service) -> None:
    program = (
        "import time\nfrom diamond import train\n"
        "for step in range(60):\n"
        "    train.log(step=step, loss=1 / (step + 1)); sum(range(2_000_000)); time.sleep(0.08)\n"
    )
    with service.client() as client:
        task = client.tasks.create({"run": "python prog.py", "setup": f"cat > prog.py <<'E'\n{program}E\n"})
        assert client.tasks.wait(task.id, timeout_s=60).state is TaskState.SUCCEEDED
        keys = {series.key: series for series in client.tasks.metrics(task.id)}
        assert keys["loss"].count == 60
        curve = client.tasks.curve(task.id, "loss")
        assert [round(point.last, 6) for point in curve.points[:3]] == [1.0, 0.5, 0.333333]
        assert client.tasks.curve(task.id, "sys/rss_bytes").points[0].last > 1e6
        assert "loss" in service.diamond("metrics", task.id).stdout


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "home", streams_per_user="150") as running:
        yield running


def test_many_streams_do_not_keep_others_waiting(roomy: Service) -> None:
    """Waiting holds no thread: with 150 open streams an ordinary request is still answered at once. One more is not
    had, and whoever asks for it is told how many there are."""
    service = roomy
    config = ClientConfig.load(service.home)
    assert config is not None
    headers = {"Authorization": f"Bearer {config.token}"}
    with service.client() as client:
        task = client.tasks.create({"name": "waited for", "run": "sleep 600"})
    url = f"{config.url}/api/v1/tasks/{task.id}/logs/stream"
    ready = threading.Semaphore(0)
    ended: list[str] = []

    def watch() -> None:
        with httpx.stream("GET", url, headers=headers, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("event: hello"):
                    ready.release()
                if line.startswith("event: end"):
                    ended.append(line)

    watchers = [threading.Thread(target=watch) for _ in range(150)]
    for watcher in watchers:
        watcher.start()
    for _ in watchers:
        assert ready.acquire(timeout=60)
    refused = httpx.get(url, headers=headers, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    assert "150 live streams" in refused.json()["error"]["message"]
    assert "DIAMOND_STREAMS_PER_USER" in refused.json()["error"]["hint"]
    with service.client() as client:
        assert client.tasks.page(limit=1)[2] >= 1
        client.tasks.cancel(task.id)
        assert client.tasks.wait(task.id, timeout_s=30).state is TaskState.CANCELLED
    for watcher in watchers:
        watcher.join(timeout=60)
    assert len(ended) == 150
