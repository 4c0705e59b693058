"""Brings together what the nodes of a job noted of themselves: each node's file, into the job's util.jsonl.

Only this process writes there, so lines of nodes that share no lock cannot mix. Keeps no state of its own on disk:
after a restart, the newest time of each node in util.jsonl says how far one had come. The files are the job's, which
may have put anything into them: only numbers that mean something are taken over.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diamond.agent.sampler import append
from diamond.agent.tail import read_from
from diamond.core.measuring import EVERY_S, MAX_NODES, node_key, node_of
from diamond.core.rundir import RunDir
from diamond.core.wire import JobOrder

_PERIOD_S = EVERY_S / 2
_PIECE_BYTES = 256 * 1024  # of one node at a look
_MAX_BYTES = 8 * 1024 * 1024  # of one node's file; twice what an honest one comes to
_LONGEST_LINE = 16 * 1024
_MOST_GPUS = 64
_BIGGEST = 2.0**60
_GPU = re.compile(r"sys/gpu(\d{1,2})_(percent|mem_bytes)")


class _Progress:
    def __init__(self) -> None:
        self.looked_at = float("-inf")  # monotonic
        self.is_over = False
        self.offsets: dict[int, int] = {}
        self.newest: dict[int, float] = {}  # time of the last record taken over, by node


class NodeSamples:
    """For one thread."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Progress] = {}

    def gather(self, order: JobOrder, path: Path, *, is_over: bool) -> None:
        """Take over what is new; of a job that is over, all there is, once."""
        spec = order.spec
        if spec.num_nodes < 2 or spec.ranks_per_node < 1 or order.work is not None:
            return
        run_dir = RunDir(path)
        job = self._jobs.get(order.job_id)
        now = time.monotonic()
        if job is not None and (job.is_over or (not is_over and now - job.looked_at < _PERIOD_S)):
            return
        if job is None:
            job = self._jobs[order.job_id] = _Progress()
            _resume(job, run_dir)
        job.looked_at, job.is_over = now, is_over
        found: list[dict[str, float]] = []
        for node in range(min(spec.num_nodes, MAX_NODES)):
            found += _new_records(job, run_dir, node, everything=is_over)
        if found:
            append(run_dir.stream("util"), *sorted(found, key=lambda record: record["t"]))

    def forget(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self._jobs.pop(job_id, None)


def _resume(job: _Progress, run_dir: RunDir) -> None:
    path, offset, rest = run_dir.stream("util"), 0, b""
    while (piece := read_from(path, offset, _PIECE_BYTES)).data:
        offset += len(piece.data)
        *lines, rest = (rest + piece.data).split(b"\n")
        for record in map(_parsed, lines):
            node = next((found for key in record if (found := node_of(key)) is not None), None)
            if node is not None and (t := _number(record.get("t"))) is not None:
                job.newest[node] = max(t, job.newest.get(node, 0.0))
    if rest:
        append(path, {})  # ends the line that a crash left unfinished


def _new_records(job: _Progress, run_dir: RunDir, node: int, *, everything: bool) -> Iterator[dict[str, float]]:
    while (offset := job.offsets.get(node, 0)) < _MAX_BYTES:
        data = read_from(run_dir.node_util(node), offset, _PIECE_BYTES).data
        end = data.rfind(b"\n") + 1
        job.offsets[node] = offset + (end or len(data) * (len(data) > _LONGEST_LINE))
        for raw in map(_parsed, data[:end].splitlines()):
            t = _number(raw.get("t"))
            if t is not None and t > job.newest.get(node, 0.0) and (record := summed(raw, node)):
                job.newest[node] = t
                yield {"t": t, **record}
        if not everything or job.offsets[node] == offset:
            return


def summed(raw: dict[str, Any], node: int) -> dict[str, float]:
    """A node's record in a few numbers: its GPUs as one, busy as they are on average. A thousand nodes have many."""
    record: dict[str, float] = {}
    gpus: dict[str, list[float]] = {"percent": [], "mem_bytes": []}
    for key, value in list(raw.items())[: 2 * _MOST_GPUS + 8]:
        number = _number(value)
        if number is None:
            continue
        if key in ("sys/cpu_percent", "sys/rss_bytes"):
            record[node_key(node, key)] = number
        elif found := _GPU.fullmatch(key):
            gpus[found[2]].append(number)
    if gpus["percent"]:
        record[node_key(node, "sys/gpu_percent")] = round(sum(gpus["percent"]) / len(gpus["percent"]), 1)
    if gpus["mem_bytes"]:
        record[node_key(node, "sys/gpu_mem_bytes")] = sum(gpus["mem_bytes"])
    return record


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(line) if len(line) <= _LONGEST_LINE else None
    except (ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _number(raw: object) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw < _BIGGEST:
        return None  # nor is NaN
    return raw
