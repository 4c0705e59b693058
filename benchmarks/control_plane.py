"""How fast the control plane is: submitting, finishing, listing, following, starting. Peers in the same run.

    .venv/bin/python benchmarks/control_plane.py [--quick] [--check]

Ray Jobs and Parsl are compared when installed (pip install 'ray[default]' parsl); a peer that is not, is left out.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import peers
from benchmarks.harness import Bench, machine, median, options, percentile, rss_mib
from diamond.core.states import TaskState
from testing.service import Service

FINALS = [state for state in TaskState if state.is_final]


def finished(service: Service) -> int:
    with service.client() as client:
        return client.tasks.page(states=FINALS, limit=1)[2]


def submit(service: Service, count: int) -> list[float]:
    """Milliseconds of each submission over HTTP, one client, one after the other."""
    times = []
    with service.client() as client:
        for _ in range(count):
            start = time.perf_counter()
            client.tasks.create({"run": "true"})
            times.append((time.perf_counter() - start) * 1e3)
    return times


def wait_finished(service: Service, count: int, within_s: float = 900) -> None:
    deadline = time.perf_counter() + within_s
    while finished(service) < count:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"only {finished(service)} of {count} tasks finished")
        time.sleep(0.05)


def measure_throughput(bench: Bench, service: Service, count: int, quick: bool) -> float:
    """Returns the server's resident memory in MiB after the first `count` tasks."""
    assert service.server is not None
    memory: list[float] = []
    width = int(machine()["cores"])
    repetitions = 1 if quick else 3
    rates, submits, floors = [], [], []
    done = 0
    for _ in range(repetitions):
        began = time.perf_counter()
        submits += submit(service, count)
        done += count
        wait_finished(service, done)
        rates.append(count / (time.perf_counter() - began))
        memory.append(rss_mib(service.server.pid))
        floors.append(peers.popen_rate(count, width))
    parsl = peers.parsl_rates(count, width)
    ray = peers.ray_rates(5 if quick else 40, width)
    submit_peers, rate_peers = {}, {"subprocess.Popen": round(median(floors), 2)}
    if parsl:
        submit_peers["parsl (in-process call)"], rate_peers["parsl"] = round(parsl[0], 3), round(parsl[1], 2)
    if ray:
        submit_peers["ray jobs"], rate_peers["ray jobs"] = round(ray[0], 3), round(ray[1], 2)
    bench.add("submit p50", percentile(submits, 0.5), "ms", "lower", aim=30, peer=submit_peers, runs=_few(submits))
    bench.add("submit p95", percentile(submits, 0.95), "ms", "lower")
    note = f"{count} tasks of `true`, {width} at a time; Ray Jobs measured over fewer tasks"
    bench.add("tasks finished", median(rates), "1/s", "higher", aim=50, peer=rate_peers, runs=rates, note=note)
    return memory[0]


def _few(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def measure_lists(bench: Bench, service: Service, total: int) -> None:
    lists, pages, details = [], [], []
    with service.client() as client:
        newest, _, _ = client.tasks.page(limit=50)
        for _ in range(50):
            start = time.perf_counter()
            client.tasks.page(limit=50)
            lists.append((time.perf_counter() - start) * 1e3)
            start = time.perf_counter()
            client.tasks.page(limit=50, states=[TaskState.FAILED])
            pages.append((time.perf_counter() - start) * 1e3)
            start = time.perf_counter()
            client.tasks.get(newest[0].id)
            details.append((time.perf_counter() - start) * 1e3)
    name = f"with {total} tasks"
    bench.add(f"list p50 {name}", percentile(lists, 0.5), "ms", "lower", aim=50, runs=_few(lists))
    bench.add(f"list p95 {name}", percentile(lists, 0.95), "ms", "lower")
    bench.add(f"list of failed p50 {name}", percentile(pages, 0.5), "ms", "lower", aim=50, runs=_few(pages))
    bench.add(f"detail p50 {name}", percentile(details, 0.5), "ms", "lower", aim=50, runs=_few(details))


def measure_log_lag(bench: Bench, service: Service, seconds: float) -> None:
    """Seconds from the moment a program prints a line to the moment a follower has it."""
    lags: list[float] = []
    program = f"for n in $(seq 1 {int(seconds * 20)}); do echo $EPOCHREALTIME; sleep 0.05; done"
    with service.client() as client:
        task = client.tasks.create({"run": program})
        tail = b""
        for item in client.tasks.follow(task.id):
            data = getattr(item, "data", None)
            if not isinstance(data, bytes):
                continue
            now = time.time()
            *lines, tail = (tail + data).split(b"\n")
            lags += [now - float(line) for line in lines if line]
    bench.add("log lag p50", percentile(lags, 0.5), "s", "lower", runs=[round(lag, 4) for lag in lags])
    bench.add("log lag p95", percentile(lags, 0.95), "s", "lower", aim=1.0)


def measure_curve(bench: Bench, service: Service) -> None:
    """A million points of one task, written by the program itself, plotted over HTTP."""
    program = (
        "python3 - <<'E' >> \"$DIAMOND_METRICS_FILE\"\n"
        'for n in range(1_000_000): print(f\'{{"step":{n},"t":{1e9 + n},"loss":{1 / (n + 1)}}}\')\nE\n'
    )
    with service.client() as client:
        task = client.tasks.create({"run": program})
        began = time.perf_counter()
        client.tasks.wait(task.id, timeout_s=300)
        arrive = time.perf_counter() - began
        times = []
        for _ in range(20):
            start = time.perf_counter()
            curve = client.tasks.curve(task.id, "loss")
            times.append((time.perf_counter() - start) * 1e3)
        assert curve.count == 1_000_000, curve.count
    bench.add("curve of 1,000,000 points p50", percentile(times, 0.5), "ms", "lower", aim=200, runs=_few(times))
    bench.add("1,000,000 points from file to server", arrive, "s", "lower")


def measure_cli(bench: Bench, service: Service, repetitions: int) -> None:
    commands = {"version": ["version"], "ps": ["ps"], "show": ["show"], "queue": ["queue"], "gpus": ["gpus"]}
    python = [_timed([sys.executable, "-c", "pass"]) for _ in range(repetitions)]
    for name, argv in commands.items():
        runs = []
        for _ in range(repetitions):
            start = time.perf_counter()
            done = service.diamond(*argv)
            runs.append((time.perf_counter() - start) * 1e3)
            assert done.returncode == 0, done.stderr
        peer = {"python -c pass": round(median(python), 2)}
        bench.add(f"diamond {name}", median(runs), "ms", "lower", aim=500, peer=peer, runs=_few(runs))


def _timed(argv: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True)
    return (time.perf_counter() - start) * 1e3


def submit_many(service: Service, count: int) -> None:
    shares = [count // 4 + (number < count % 4) for number in range(4)]
    threads = [threading.Thread(target=submit, args=(service, share)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    chosen = options(__doc__ or "")
    count = 100 if chosen.quick else 1000
    grow = 400 if chosen.quick else 10_000
    bench = Bench("control_plane", packages=("diamond-hpc", "fastapi", "sqlalchemy", "ray", "parsl"))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Service(Path(folder) / "home") as service:
        assert service.server is not None
        assert service.agent is not None
        memory = {0: rss_mib(service.server.pid)}
        memory[count] = measure_throughput(bench, service, count, chosen.quick)
        measure_cli(bench, service, 3 if chosen.quick else 10)
        measure_log_lag(bench, service, 3 if chosen.quick else 15)
        measure_curve(bench, service)
        done = finished(service)
        submit_many(service, grow - done)
        wait_finished(service, grow)
        memory[grow] = rss_mib(service.server.pid)
        measure_lists(bench, service, grow)
        for tasks, mib in memory.items():
            bench.add(f"server RSS at {tasks} tasks", mib, "MiB", "lower", aim=200)
        bench.add(f"agent RSS at {grow} tasks", rss_mib(service.agent.pid), "MiB", "lower")
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
