"""Diamond on a real Slurm against raw sbatch, submitit, PSI/J and Parsl: one run, one Slurm, one machine.

    .venv/bin/python -m benchmarks.slurm [--quick] [--check]

Needs what `testing/minihpc` needs (Linux, root, namespaces); Slurm 24.11 runs inside. The peers are installed on the
first run, for the site's Python, into a folder outside the repository (`$DIAMOND_BENCH_PEERS`); a peer that cannot
be had or fails is left out, and the result says what it said. Nothing else should use the machine meanwhile. The
whole takes about a quarter of an hour, --quick about two minutes: only to see that everything works.

How the figures are taken: contenders take turns, with a random pause before each launch, since Slurm starts jobs in
rounds and whoever always came right after one would always wait longest. Times are those the jobs write themselves
and those of slurmctld's log; nobody asks Slurm anything for the sake of measuring. Queries are counted by programs
of the same names that come first on each contender's PATH.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import slurm_peers
from benchmarks.harness import Bench, median, options, percentile
from benchmarks.slurm_diamond import EVERY_S, Diamond, Live
from benchmarks.slurm_peers import KINDS, Peer, PeerFailed
from benchmarks.slurm_site import QUERIES, BenchSite
from testing.minihpc import available

RAW = "raw sbatch"
BLOCKS, BLOCK_UP = "Parsl (a block for the task)", "Parsl (block already up)"
# Contenders that start a Python of their own in every job: so many are what this memory holds.
MOST_LIVE = {RAW: 500, "PSI/J": 500, "submitit": 100}


class Run:
    """One run of the benchmark: its contenders, what it measures, and what failed."""

    def __init__(self, bench: Bench, site: BenchSite, diamond: Diamond, peers: dict[str, Peer], quick: bool) -> None:
        self.bench = bench
        self.site = site
        self.diamond = diamond
        self.peers = peers
        self.quick = quick
        self.failures: dict[str, str] = {}

    def ask(self, name: str, what: str, **request: Any) -> dict[str, Any] | None:
        """What a peer answers; None when it is not there or cannot, which is noted and ends its part."""
        if name not in self.peers or name in self.failures:
            return None
        try:
            return self.peers[name].do(what, **request)
        except PeerFailed as error:
            print(f"  {name} failed: {error}", flush=True)
            self.failures[name] = str(error)
            return None

    # Launch to first output

    def launches(self) -> None:
        repetitions = {"diamond": 30, RAW: 30, BLOCKS: 5, BLOCK_UP: 8, "submitit": 8, "PSI/J": 15}
        if self.quick:
            repetitions = {"diamond": 5, RAW: 5, BLOCKS: 1, BLOCK_UP: 2, "submitit": 2, "PSI/J": 2}
        chance = random.Random(3)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("diamond", *self.peers)}
        for turn in range(max(repetitions.values())):
            for name in runs:
                if turn >= repetitions[name] or name in self.failures:
                    continue
                time.sleep(chance.uniform(0.0, 0.8 if self.quick else 1.5))
                answer = self.diamond.launch() if name == "diamond" else self._peer_launch(name)
                runs[name] += [answer] if answer else []
        self._close_blocks()
        self._first_output("first output seen", "seen", runs)
        self._first_output("first output written", "written", runs)
        self._own_share(runs)

    def _peer_launch(self, name: str) -> dict[str, Any] | None:
        mark = self.site.mark()
        answer = self.ask(name, "launch", within_s=180)
        if answer and not name.startswith("Parsl"):
            moments = self.site.since(mark)
            answer |= {"submitted": moments.submitted[0], "started": moments.started[0]}
        return answer

    def _first_output(self, what: str, until: str, runs: dict[str, list[dict[str, float]]]) -> None:
        spans = {name: [_span(run, until) for run in found] for name, found in runs.items() if found}
        where = {"seen": "as the user sees it", "written": "at the cluster"}[until]
        for share, aims in ((0.5, True), (0.95, False)):
            values = {name: percentile(found, share) for name, found in spans.items()}
            own, raw = values.pop("diamond"), values.get(RAW)
            self.bench.add(
                f"launch to {what} p{share * 100:.0f}", own, "s", "lower",
                peer=_rounded(values), runs=spans["diamond"] if aims else [],
                peer_runs={name: found for name, found in spans.items() if name != "diamond"} if aims else {},
                note=f"{where}; {', '.join(f'{name}: {len(found)}' for name, found in spans.items())} launches",
            )  # fmt: skip
            if aims and raw:
                self.bench.add(
                    f"launch to {what} p50, times raw sbatch", own / raw, "x", "lower", aim=1.3,
                    peer={name: round(value / raw, 3) for name, value in values.items() if name != RAW},
                )  # fmt: skip

    def _own_share(self, runs: dict[str, list[dict[str, float]]]) -> None:
        """What a contender itself adds to Slurm's own rounds, which only chance gives to one and not to the other."""
        runs = {name: found for name, found in runs.items() if found and "started" in found[0]}
        waits = [run["started"] - run["submitted"] for found in runs.values() for run in found]
        added = {
            name: [run["seen"] - run["began"] - (run["started"] - run["submitted"]) for run in found]
            for name, found in runs.items()
        }
        note = "all but the time from slurmctld having the job to Slurm starting it"
        self._spans("launch: own share, p50", added, note)
        if RAW in added:
            wait = sum(waits) / len(waits)
            even = {name: wait + median(found) for name, found in added.items()}
            ratios = {name: value / even[RAW] for name, value in even.items() if name != RAW}
            note = f"own share plus the mean wait of all {len(waits)} launches in Slurm, {wait:.3f} s: no luck in it"
            own = ratios.pop("diamond")
            name = "launch to first output seen at equal waits, times raw sbatch"
            self.bench.add(name, own, "x", "lower", aim=1.3, peer=_rounded(ratios), note=note)
        parts = {
            "call until the task exists": ("began", "created"),
            "task exists until slurmctld has the job": ("created", "submitted"),
            "slurmctld has the job until Slurm starts it": ("submitted", "started"),
            "Slurm starts it until its first line": ("started", "written"),
            "first line until the client has it": ("written", "seen"),
        }
        for what, (since, until) in parts.items():
            spans = [run[until] - run[since] for run in runs["diamond"]]
            raw = [run[until] - run[since] for run in runs.get(RAW, []) if since in run and until in run]
            peer = {RAW: round(median(raw), 4)} if raw else {}
            self.bench.add(f"launch: {what}, p50", median(spans), "s", "lower", peer=peer, runs=_few(spans))

    # Many at once

    def submissions(self) -> None:
        count, repetitions = (30, 1) if self.quick else (200, 2)
        rates: dict[str, list[float]] = {}
        backlog, one_by_one = [], []
        for _ in range(repetitions):
            for name in (RAW, "diamond", "submitit", "PSI/J"):
                if name == "submitit" and len(rates.get(name, [])) == 2:
                    continue  # its own throttle decides; two are enough
                if name == "diamond":
                    answer: dict[str, Any] | None = self.diamond.held(count, in_one_call=True)
                else:
                    answer = self._peer_held(name, count)
                if answer:
                    rates.setdefault(name, []).append(count / (answer["submitted"] - answer["began"]))
                self.site.clear()
            timed = self.diamond.held(count, in_one_call=False)
            one_by_one.append(count / (timed["submitted"] - timed["began"]))
            self.site.clear()
            timed = self.diamond.backlog(count)
            backlog.append((count - 1) / (timed["submitted"] - timed["began"]))
            self.site.clear()
        values = {name: median(found) for name, found in rates.items()}
        own, raw = values.pop("diamond"), values.get(RAW)
        note = f"{count} jobs, none of which may start yet; until slurmctld has the last"
        aim = round(0.8 * raw, 1) if raw else None
        runs = {name: _few(found) for name, found in rates.items() if name != "diamond"}
        self.bench.add(
            "submits a second", own, "1/s", "higher", aim=aim, peer=_rounded(values), runs=_few(rates["diamond"]),
            peer_runs=runs, note=f"{note}; one create_many, from the call on; peers: a call a job; aim: 80 % of raw",
        )  # fmt: skip
        self.bench.add(
            "submits a second, a call for each task", median(one_by_one), "1/s", "higher", runs=_few(one_by_one),
            note=f"{note}; one create after the other, each a round trip and a transaction of its own",
        )  # fmt: skip
        self.bench.add(
            "submits a second, tasks waiting at the server", median(backlog), "1/s", "higher",
            aim=aim, peer=_rounded(values), runs=_few(backlog),
            note="the agent's own speed, from its first job to its last; aim: 80 % of raw sbatch",
        )  # fmt: skip

    def _peer_held(self, name: str, count: int) -> dict[str, Any] | None:
        mark = self.site.mark()
        answer = self.ask(name, "held", count=count)
        if answer:
            answer["submitted"] = self.site.wait_submitted(mark, count).submitted[-1]
        return answer

    def bursts(self) -> None:
        count, repetitions = (30, 1) if self.quick else (200, 1)
        spans: dict[str, list[float]] = {}
        at_cluster: dict[str, list[float]] = {}
        for _ in range(repetitions):
            for name in ("diamond", *self.peers):
                if name == BLOCKS and self.quick:
                    continue  # half a minute of starting Python
                mark = self.site.mark()
                answer = self.diamond.burst(count) if name == "diamond" else self.ask(name, "burst", count=count)
                if answer:
                    spans.setdefault(name, []).append(answer["known"] - answer["began"])
                    ended = self.site.since(mark).ended
                    if len(ended) >= count:
                        at_cluster.setdefault(name, []).append(ended[-1] - answer["began"])
                self._close_blocks()
                self.site.wait_empty()
            if answer := self.ask("submitit", "array", count=count):
                spans.setdefault("submitit (one job array)", []).append(answer["known"] - answer["began"])
        note = f"{count} tasks of `true`, from the first launch call until the contender knows that all are over"
        note += "; raw sbatch and PSI/J look at the queue every 1.5 s; Parsl: 20 blocks at most, or one that was up"
        self._spans(f"{count} short tasks, end to end", spans, note)
        self._spans(f"{count} short tasks, until Slurm has ended the last", at_cluster, "the same, without the notice")

    def _spans(self, what: str, spans: dict[str, list[float]], note: str) -> None:
        values = {name: median(found) for name, found in spans.items()}
        own = values.pop("diamond")
        runs = {name: _few(found) for name, found in spans.items()}
        peer = _rounded(values)
        self.bench.add(what, own, "s", "lower", peer=peer, runs=runs.pop("diamond"), peer_runs=runs, note=note)

    def _close_blocks(self) -> None:
        """Parsl's own jobs must not stand in anybody's way."""
        self.ask(BLOCK_UP, "close")

    # Many live

    def live(self) -> None:
        count, changes, gap_s, followers = (40, 8, 1.5, 8) if self.quick else (500, 30, 1.5, 32)
        found = self.diamond.live(count, changes, gap_s, followers, num_killed=3 if self.quick else 10)
        peers = self._peers_live(count, changes, gap_s)
        self.site.clear()
        at = f"at {count} live tasks"
        lags = [*found.start_lags, *found.end_lags]
        peer = {name: round(percentile(lags, 0.95), 3) for name, (lags, _) in peers.items() if lags}
        note = "from a time the job itself wrote at its start or end until the API shows the state; peers: ends only, "
        note += "submitit at up to 100 jobs (it sees its result files, on the cluster)"
        self.bench.add(
            f"status lag p95 {at}", percentile(lags, 0.95), "s", "lower", aim=2.0, peer=peer, runs=_few(lags), note=note
        )
        self.bench.add(f"status lag p50 {at}", percentile(lags, 0.5), "s", "lower")
        self.bench.add(f"lag of a start p95 {at}", percentile(found.start_lags, 0.95), "s", "lower")
        self.bench.add(f"lag of an end p95 {at}", percentile(found.end_lags, 0.95), "s", "lower", peer=peer)
        self.bench.add(
            f"end seen after scancel by hand, worst of {len(found.killed_lags)}", max(found.killed_lags), "s", "lower",
            runs=_few(found.killed_lags), note="from scancel's return; only Slurm knows of these ends",
        )  # fmt: skip
        note = f"{followers} tasks followed over the API, a line every {EVERY_S:g} s from each of the {count}"
        lag = percentile(found.log_lags, 0.95)
        self.bench.add(f"log lag p95 {at}", lag, "s", "lower", aim=1.0, runs=_few(found.log_lags), note=note)
        self.bench.add(f"log lag p50 {at}", percentile(found.log_lags, 0.5), "s", "lower")
        self._usage(found, at, {name: rate for name, (_, rate) in peers.items()})

    def _usage(self, found: Live, at: str, peers: dict[str, float]) -> None:
        queries = {name: count for name, count in found.queries.items() if name != "scancel"}
        rpcs = {kind: count for kind, count in found.rpcs.items() if "INFO" in kind or "STATE" in kind}
        note = f"counted on its PATH over {found.window_s:.0f} s: {queries}; slurmctld's count of its requests: {rpcs}"
        rate = sum(queries.values()) * 60 / found.window_s
        self.bench.add(f"queries a minute {at}", rate, "1/min", "lower", aim=40, peer=peers, note=note)
        self.bench.add(f"agent RSS {at}", found.agent_mib, "MiB", "lower")
        self.bench.add(f"agent CPU {at}", found.agent_cpu * 100, "% of a core", "lower")
        self.bench.add(f"server RSS {at}", found.server_mib, "MiB", "lower", aim=200)
        self.bench.add(f"server CPU {at}", found.server_cpu * 100, "% of a core", "lower")

    def _peers_live(self, count: int, changes: int, gap_s: float) -> dict[str, tuple[list[float], float]]:
        """(lags of ends, queries a minute) of each peer that has jobs of its own."""
        found = {}
        changes, rest_s = (4, 4) if self.quick else (20, 5)
        for name, most in MOST_LIVE.items():
            self.site.clear()
            num = min(count, most)
            # Time for the jobs to come up first; Python in each takes its time on a small machine.
            begin = time.time() + (6 if self.quick else 60 if name == "submitit" else 30)
            ends = [begin + number * gap_s for number in range(changes)]
            until = ends[-1] + rest_s
            if answer := self.ask(name, "live", count=num, ends=ends, lasts_until=until):
                calls = self.peers[name].ledger.calls(begin, until)
                rate = sum(calls[program] for program in QUERIES if program != "scancel") * 60 / (until - begin)
                found[name] = (list(answer["lags"]), round(rate, 2))
        return found


def _span(run: dict[str, float], until: str) -> float:
    return round(run[until] - run["began"], 4)


def _few(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


@contextlib.contextmanager
def contenders(site: BenchSite, logs: Path, absent: dict[str, str]) -> Iterator[dict[str, Peer]]:
    """Every peer that comes up; why another did not is put into `absent`."""
    with contextlib.ExitStack() as stack:
        peers = {}
        for name in KINDS:
            try:
                peers[name] = stack.enter_context(Peer(site, name, logs))
            except PeerFailed as error:
                absent[name] = str(error)
        yield peers


def main() -> int:
    chosen = options(__doc__ or "")
    if reason := available():
        print(f"cannot be measured here: {reason}")
        return 2
    bench = Bench("slurm", packages=("diamond-hpc",))
    packages: Path | None = None
    try:
        packages = slurm_peers.install("3.13")
    except RuntimeError as error:
        bench.absent["submitit, PSI/J, Parsl"] = str(error)
    site = BenchSite(packages)
    with (
        tempfile.TemporaryDirectory(prefix="bench-slurm-") as folder,
        site.site,
        Diamond(site, Path(folder) / "home") as diamond,
        contenders(site, Path(folder), bench.absent) as peers,
    ):
        run = Run(bench, site, diamond, peers, chosen.quick)
        run.launches()
        run.bursts()
        run.submissions()
        run.live()
        bench.versions = {"slurm": site.site.facts.slurm}
        bench.versions |= {slurm_peers.package(name): peer.version for name, peer in peers.items() if peer.version}
        bench.absent |= run.failures
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
