"""What bounding costs: taking in the metrics of a job with and without thinning, and placing tasks under hostile facts.

Metrics go through the stores as an agent's reports do, without HTTP. "Whole" is the same text in the same run under a
cap that it does not reach, which is what a job within its cap costs. Kept bytes are what lies on disk afterwards.

Placing is measured with fifty endpoints that list all an agent may, each model of GPU under a name of its own, beside
placing with one ordinary endpoint. What an agent says is measured from JSON to facts within bounds.

    .venv/bin/python benchmarks/stream_caps.py [--quick] [--check]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Bench, median, options

from diamond.core import bounds
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts, EndpointUsage, Gpu, NodeGroup, Partition
from diamond.core.tasks import TaskSpec
from diamond.planner import placement
from diamond.planner.placement import Candidate, place
from diamond.server.store import series
from diamond.server.store.series import SeriesStore
from diamond.server.store.streams import StreamStore

MIB = 1024 * 1024
JOB = "job_01kbx3v9qz8m2c4d6"
SENT_BYTES = 64 * 1024


def ordinary(size: int) -> bytes:
    """Ten numbers a step."""
    rng = random.Random(1)
    names = ["loss", "lr", "grad_norm", "acc", *(f"loss/part{n}" for n in range(6))]
    return _lines(size, lambda step: {"step": step, "t": 1e9 + step, **{name: rng.random() for name in names}})


def narrow(size: int) -> bytes:
    """The most points for its bytes: one short key, no time."""
    return _lines(size, lambda step: {"a": step})


def inventive(size: int) -> bytes:
    """A new key on every line."""
    return _lines(size, lambda step: {f"key{step}": step})


def _lines(size: int, record: Callable[[int], dict[str, float]]) -> bytes:
    pieces, held = [], 0
    while held < size:
        pieces.append(json.dumps(record(len(pieces))).encode() + b"\n")
        held += len(pieces[-1])
    return b"".join(pieces)


def taken_in(text: bytes, cap_bytes: int) -> tuple[float, int]:
    """MB/s, and the bytes that are kept."""
    with tempfile.TemporaryDirectory() as folder:
        streams = StreamStore(Path(folder) / "streams")
        curves = SeriesStore(Path(folder) / "series", streams, cap_bytes=cap_bytes)
        began = time.perf_counter()
        for begin in range(0, len(text), SENT_BYTES):
            size = streams.append(JOB, "metrics", begin, text[begin : begin + SENT_BYTES])
            curves.gather(JOB, "metrics", begin, size)
        curves.ingest(JOB, "metrics")
        took = time.perf_counter() - began
        return len(text) / MIB / took, streams.held_bytes(JOB) + curves.held_bytes(JOB)


def measure_streams(bench: Bench, size: int, cap_bytes: int, repeats: int) -> None:
    series.warm_up()
    for name, text in (("ordinary", ordinary(size)), ("narrow", narrow(size)), ("a new key a line", inventive(size))):
        whole, thinned, kept = [], [], 0
        for _ in range(repeats):
            whole.append(taken_in(text, 100 * size)[0])
            speed, kept = taken_in(text, cap_bytes)
            thinned.append(speed)
        cap = f"{cap_bytes // MIB} MiB cap"
        bench.add(
            f"metrics, {name}, {size // MIB} MiB, {cap}", median(thinned), "MB/s", "higher", runs=thinned,
            peer={"whole": round(median(whole), 3)}, peer_runs={"whole": whole},
        )  # fmt: skip
        bench.add(
            f"kept of {size // MIB} MiB, {name}, {cap}", kept / MIB, "MiB", "lower", aim=1.1 * cap_bytes / MIB,
            runs=[kept / MIB],
        )  # fmt: skip


def hostile() -> EndpointFacts:
    groups = tuple(
        NodeGroup(count=10**9, cpus=10**9, gpus=(Gpu(model=f"NVIDIA {n}-H200", count=10**9),), features=("f",))
        for n in range(100)
    )
    partitions = tuple(Partition(name=f"p{n}", max_walltime_s=10**18, groups=groups) for n in range(300))
    return EndpointFacts(scheduler="slurm", nodes=10**18, cpus_per_node=10**18, partitions=partitions)


def ordinary_facts() -> EndpointFacts:
    group = NodeGroup(count=100, cpus=64, gpus=(Gpu(model="NVIDIA H100 80GB HBM3", count=8),), mem_bytes=2**40)
    partitions = tuple(Partition(name=f"p{n}", groups=(group,) * 3) for n in range(8))
    return EndpointFacts(scheduler="slurm", nodes=100, cpus_per_node=64, partitions=partitions)


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    runs = []
    for _ in range(repeats):
        placement._FOUND.clear()  # every time as if nobody had asked for this before
        began = time.perf_counter()
        work()
        runs.append(time.perf_counter() - began)
    return runs


def measure_planning(bench: Bench, repeats: int) -> None:
    facts, usage = bounds.fitted(hostile())[0], EndpointUsage()
    good = Candidate(name="good", online=True, facts=ordinary_facts(), usage=usage)
    spec = decode(TaskSpec, {"run": "true", "resources": {"accelerators": "H100:8"}}, strict=True)
    ordinary_runs = seconds(lambda: place(spec, [good]), repeats)
    for count in (1, 50):
        bad = [Candidate(name=f"bad{n}", online=True, facts=facts, usage=usage) for n in range(count)]
        runs = seconds(lambda bad=bad: place(spec, [good, *bad]), repeats)
        bench.add(
            f"placing a task beside {count} hostile endpoints", median(runs), "s", "lower", aim=1.0, runs=runs,
            peer={"one ordinary endpoint": round(median(ordinary_runs), 6)},
            peer_runs={"one ordinary endpoint": ordinary_runs},
        )  # fmt: skip
    raw = encode(hostile())
    runs = seconds(lambda: bounds.fitted(decode(EndpointFacts, raw)), max(2, repeats // 2))
    bench.add("taking in 30,000 groups of nodes that an agent claims", median(runs), "s", "lower", aim=10.0, runs=runs)


def main() -> int:
    chosen = options(__doc__)
    bench = Bench("stream_caps", packages=("numpy",))
    size, repeats = (32 * MIB, 2) if chosen.quick else (96 * MIB, 3)
    measure_streams(bench, size, 16 * MIB, repeats)
    measure_planning(bench, 3 if chosen.quick else 10)
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
