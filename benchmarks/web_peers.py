"""MLflow's own pages with as many runs, from an environment of their own.

python -m venv DIR; DIR/bin/pip install mlflow; then DIAMOND_BENCH_PEERS=DIR.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.web_pages import Page
from testing.postgres import free_port

_FILL = """
import sys, time
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient
client = MlflowClient("sqlite:///" + sys.argv[1])
experiment = client.create_experiment("bench")
first = ""
for number in range(int(sys.argv[2])):
    run = client.create_run(experiment, run_name=f"task-{number}")
    first = run.info.run_id
    if number % 100 == 0:
        now = int(time.time() * 1000)
        metrics = [Metric("loss", 1 / (step + 1), now, step) for step in range(200)]
        client.log_batch(first, metrics=metrics, params=[Param("lr", "0.1")])
    client.set_terminated(first, "FINISHED")
print(experiment, first)
"""


def folder() -> Path | None:
    given = os.environ.get("DIAMOND_BENCH_PEERS", "")
    return Path(given) if given and (Path(given) / "bin" / "mlflow").exists() else None


@contextlib.contextmanager
def mlflow(peers: Path, home: Path, runs: int) -> Iterator[tuple[int, list[Page]]]:
    """Its process id, and its pages that show what ours do."""
    database = home / "mlflow.db"
    filled = subprocess.run(
        [peers / "bin" / "python", "-c", _FILL, str(database), str(runs)], capture_output=True, text=True, check=True
    )
    experiment, run = filled.stdout.split()[-2:]
    port = free_port()
    argv = [peers / "bin" / "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}", "--port", str(port)]
    argv += ["--workers", "1", "--default-artifact-root", str(home / "artifacts")]
    with (home / "mlflow.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url)
        yield (
            process.pid,
            [
                Page(name="dashboard", url=f"{url}/#/experiments", row="text=bench"),
                Page(name="tasks", url=f"{url}/#/experiments/{experiment}/runs", row="text=/task-\\d+/"),
                Page(name="task", url=f"{url}/#/experiments/{experiment}/runs/{run}", row="text=/task-\\d+/"),
            ],
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(timeout=30)


def _wait(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise TimeoutError("MLflow's server does not answer")
