"""What a walltime costs a training: Diamond's chain of jobs against submitit's requeue, on one Slurm in one run.

    .venv/bin/python -m benchmarks.train_walltime [--quick] [--check]

Needs what `testing/minihpc` needs (Linux, root, namespaces) and PyTorch here; submitit comes from the folder of peers
that `benchmarks/slurm.py` uses. Every contender trains the same model for as many steps of 0.2 s, in jobs of one
minute (Slurm's shortest) with a warning asked for 6 s before their end, all at the same time on nodes of their own:
they mostly sleep. submitit is used as its documentation says, by a callable whose `checkpoint` is called at the warning
and which saves every 10 s beside; once with saving at the warning, and once, as many scripts do, without.

All times are those the training processes write themselves, and Slurm's own of when a job started. The whole takes
about twenty minutes, most of them the two minutes that Slurm lets a requeued job wait; --quick about six.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import slurm_peers
from benchmarks.harness import Bench, median, options
from benchmarks.slurm_site import BENCH_INSIDE, PEERS_INSIDE
from benchmarks.train_walltime_inside import LIMIT_MIN, SAVE_EVERY_S, WARNING_S
from testing import torch_at_site
from testing.cluster import BINDS, Cluster
from testing.minihpc import Site, available

STEP_S = 0.2
AT_SIGNAL, PERIODIC = "submitit, saves at the warning", f"submitit, saves every {SAVE_EVERY_S:g} s alone"
PROGRAM = f"{BENCH_INSIDE}/train_walltime_inside.py"
LONGEST_S = 900  # of one repetition


@dataclass
class Boundary:
    """Where one job ended and the next went on.

    Attributes:
        twice: steps that were computed again.
        gap_s: from the end of the last step that counted to the end of the one after it.
        queue_s: of that, from the end of the process to Slurm starting the next job.
        used_s: from the start of the job before to its last step that counted.
    """

    twice: int
    gap_s: float
    queue_s: float
    used_s: float

    @property
    def own_s(self) -> float:
        return self.gap_s - self.queue_s


@dataclass
class Contender:
    walls: list[float] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)


class Run:
    def __init__(self, site: Site, cluster: Cluster, names: list[str], until: int) -> None:
        self.site, self.cluster, self.until = site, cluster, until
        self.found = {name: Contender() for name in names}
        self.late: dict[str, str] = {}
        self.env = {
            "PYTHONPATH": f"{torch_at_site.PYTHONPATH}:{PEERS_INSIDE}:{BENCH_INSIDE}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def repetition(self, number: int) -> None:
        began = {}
        for place, name in enumerate(self.found):
            ledger = self._ledger(name, number)
            began[name] = time.time()
            words = [PROGRAM, "diamond" if name == "diamond" else "submitit", ledger, str(self.until), str(STEP_S)]
            if name == "diamond":
                self._create(" ".join([torch_at_site.PYTHON, *words]))
            else:
                argv = [torch_at_site.PYTHON, *words, str(int(name == AT_SIGNAL))]
                self.site.run(argv, env=self.env, timeout=120)
            if place + 1 < len(self.found):
                time.sleep(7.0)  # so that not all load torch at once
        waiting, deadline = set(self.found), time.time() + LONGEST_S
        while waiting:
            time.sleep(1.0)
            waiting -= {name for name in waiting if self._steps(name, number)[-1:] == [self.until]}
            if time.time() > deadline:
                break
        for name in waiting:
            last = (self._steps(name, number) or [0])[-1]
            self.late[name] = f"once not at step {self.until} after {LONGEST_S} s, but at {last}"
        for name, one in self.found.items():
            lines = self._lines(name, number)
            one.walls.append((time.time() if name in waiting else lines[-1]["at"]) - began[name])
            lives = list(dict.fromkeys(line["life"] for line in lines))
            one.jobs.append(len(lives))
            new = [_boundary(lines, before, after) for before, after in pairwise(lives)]
            one.boundaries += new
            print(f"  {name}: {one.walls[-1]:.0f} s, {len(lives)} jobs, {new}", flush=True)

    def _create(self, run: str) -> None:
        slurm = {"partition": "debug", "time": f"{LIMIT_MIN}m"}
        spec = {"run": f"exec {run}", "envs": self.env, "resources": {"infra": "cluster"}, "slurm": slurm}
        with self.cluster.service.client() as client:
            client.tasks.create({**spec, "max_duration": "60m"})

    def _ledger(self, name: str, number: int) -> str:
        return f"/home/user1/{name.replace(' ', '-').replace(',', '')}-{number}"

    def _lines(self, name: str, number: int) -> list[dict[str, Any]]:
        path = self.site.path(self._ledger(name, number))
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def _steps(self, name: str, number: int) -> list[int]:
        return [line["step"] for line in self._lines(name, number) if "step" in line]


def _boundary(lines: list[dict[str, Any]], before: str, after: str) -> Boundary:
    old = [line for line in lines if line["life"] == before]
    new = [line for line in lines if line["life"] == after and "step" in line]
    first = new[0]["step"]
    done = [line for line in old if "step" in line]
    # A job that was warned before its first step counted has none: then nothing of it was useful.
    kept = [line for line in done if line["step"] < first]
    last_at = kept[-1]["at"] if kept else old[0]["started"]
    return Boundary(
        twice=len(done) - len(kept), gap_s=new[0]["at"] - last_at, queue_s=new[0]["started"] - old[-1]["at"],
        used_s=last_at - old[0]["started"],
    )  # fmt: skip


def report(bench: Bench, found: dict[str, Contender]) -> None:
    own, peers = found["diamond"], {name: one for name, one in found.items() if name != "diamond"}

    def add(what: str, unit: str, better: str, pick: Any, value: Any = median, **rest: Any) -> None:
        bench.add(
            what, value(pick(own)), unit, better, runs=[round(each, 3) for each in pick(own)],
            peer={name: round(value(pick(one)), 3) for name, one in peers.items()},
            peer_runs={name: [round(each, 3) for each in pick(one)] for name, one in peers.items()}, **rest,
        )  # fmt: skip

    def over(part: str) -> Any:
        return lambda one: [float(getattr(boundary, part)) for boundary in one.boundaries]

    add("steps computed twice at a boundary, worst", "steps", "lower", over("twice"), max, aim=1)
    add("steps computed twice at a boundary, p50", "steps", "lower", over("twice"))
    add(
        "lost at a boundary without the queue, p50", "s", "lower", over("own_s"),
        note="from the last step that counted to the next one, less the time from the end of the process to Slurm "
        "starting the next job: saving, work done twice, starting Python and PyTorch, loading, one step",
    )  # fmt: skip
    add("lost at a boundary with the queue, p50", "s", "lower", over("gap_s"))
    add(
        "in the queue at a boundary, p50", "s", "lower", over("queue_s"),
        note="an idle cluster: Diamond's next job was submitted before; Slurm starts a requeued job only after 2 min",
    )  # fmt: skip
    add(
        f"used of a job of {60 * LIMIT_MIN} s, p50", "s", "higher", over("used_s"),
        note=f"until the last step that counted; Slurm warns up to half a minute earlier than the {WARNING_S} s asked",
    )  # fmt: skip
    add("jobs for the training", "", "lower", lambda one: [float(each) for each in one.jobs])
    add("wall time of the training", "s", "lower", lambda one: one.walls)


def main() -> int:
    chosen = options(__doc__)
    if reason := available() or torch_at_site.why_not():
        print(f"cannot run here: {reason}")
        return 2
    until, repetitions = (150, 1) if chosen.quick else (300, 2)
    bench = Bench("train_walltime", packages=("torch",))
    names, peers = ["diamond"], {}
    try:
        peers = {PEERS_INSIDE: slurm_peers.install("3.13")}
        names += [AT_SIGNAL, PERIODIC]
    except RuntimeError as error:
        bench.absent["submitit"] = str(error)
    binds = {**BINDS, **torch_at_site.binds(), **peers, BENCH_INSIDE: Path(__file__).resolve().parent}
    with (
        tempfile.TemporaryDirectory() as folder,
        Site("bench", binds=binds, pythons=[torch_at_site.VERSION]) as site,
        Cluster(site, Path(folder) / "home") as cluster,
    ):
        run = Run(site, cluster, names, until)
        bench.versions["slurm"] = site.facts.slurm
        if peers:
            argv = [torch_at_site.PYTHON, "-c", "import submitit; print(submitit.__version__)"]
            bench.versions["submitit"] = site.run(argv, env=run.env).stdout.strip()
        try:
            for number in range(repetitions):
                run.repetition(number)
        except KeyboardInterrupt:
            print("interrupted: the figures are of the repetitions that were done")
        bench.absent |= run.late
        report(bench, run.found)
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
