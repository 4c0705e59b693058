"""The same thousand trivial tasks, done by others, on the same machine in the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

# Parsl starts programs that pip installed beside this interpreter.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
# Its workers import the function they are given by the name of this module.
os.environ["PYTHONPATH"] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def popen_rate(count: int, width: int) -> float:
    """The floor: nothing but starting processes, `width` at a time. Tasks a second."""
    began = time.perf_counter()
    running: list[subprocess.Popen[bytes]] = []
    for _ in range(count):
        if len(running) == width:
            running.pop(0).wait()
        running.append(subprocess.Popen(["bash", "-c", "true"]))
    for process in running:
        process.wait()
    return count / (time.perf_counter() - began)


def parsl_rates(count: int, width: int) -> tuple[float, float] | None:
    """Parsl's HighThroughputExecutor on this machine: (submit p50 in ms, tasks a second); None when not installed."""
    try:
        import parsl
        from parsl.config import Config
        from parsl.executors import HighThroughputExecutor
        from parsl.providers import LocalProvider
    except ImportError:
        return None
    folder = tempfile.mkdtemp(prefix="bench-parsl-")
    executor = HighThroughputExecutor(
        label="local",
        address="127.0.0.1",
        max_workers_per_node=width,
        provider=LocalProvider(init_blocks=1, max_blocks=1),
    )
    parsl.load(Config(executors=[executor], run_dir=folder, usage_tracking=0))

    @parsl.bash_app
    def task() -> str:
        return "true"

    try:
        task().result(timeout=60)  # the workers are up
        submits = []
        began = time.perf_counter()
        futures = []
        for _ in range(count):
            start = time.perf_counter()
            futures.append(task())
            submits.append((time.perf_counter() - start) * 1e3)
        for future in futures:
            future.result(timeout=120)
        rate = count / (time.perf_counter() - began)
    finally:
        parsl.dfk().cleanup()
        parsl.clear()
    return sorted(submits)[len(submits) // 2], rate


def ray_rates(count: int, width: int) -> tuple[float, float] | None:
    """Ray Jobs on a local Ray: (submit p50 in ms over HTTP, tasks a second); None when not installed."""
    try:
        import ray
        from ray.job_submission import JobStatus, JobSubmissionClient
    except ImportError:
        return None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    info = ray.init(num_cpus=width, include_dashboard=True, dashboard_host="127.0.0.1", log_to_driver=False)
    client = JobSubmissionClient(f"http://{info.dashboard_url}")
    final = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}
    submits = []
    began = time.perf_counter()
    ids = []
    for _ in range(count):
        start = time.perf_counter()
        ids.append(client.submit_job(entrypoint="true"))
        submits.append((time.perf_counter() - start) * 1e3)
    deadline = time.perf_counter() + 300
    left = set(ids)
    while left and time.perf_counter() < deadline:
        left = {
            job.submission_id for job in client.list_jobs() if job.submission_id in left and job.status not in final
        }
        time.sleep(0.1)
    rate = (count - len(left)) / (time.perf_counter() - began)
    ray.shutdown()
    return sorted(submits)[len(submits) // 2], rate
