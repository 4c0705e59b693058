"""The Slurm everybody is measured on, and what it says itself: when jobs came and went, who asked it how often.

Nothing here asks Slurm anything while a figure is taken: submissions and ends are read from slurmctld's own log, and
queries are counted where they are made.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from testing.cluster import BINDS
from testing.minihpc import Partition, Site, many_cpus

PEERS_INSIDE = "/opt/peers"
BENCH_INSIDE = "/opt/bench"
QUERIES = ("squeue", "sinfo", "scontrol", "sacct", "sprio", "sshare", "sacctmgr", "sdiag", "scancel")
PATH = "/usr/local/bin:/usr/bin:/bin"

_SUBMITTED = re.compile(r"^\[(\S+)\] _slurm_rpc_submit_batch_job: JobId=(\d+) ", re.MULTILINE)
_STARTED = re.compile(r"^\[(\S+)\] (?:sched: Allocate|sched/backfill: _start_job: Started) JobId=(\S+) ", re.MULTILINE)
_ENDED = re.compile(r"^\[(\S+)\] _job_complete: JobId=(\S+) done$", re.MULTILINE)
_RPC = re.compile(r"^\s+(\w+)\s+\(\s*\d+\)\s+count:(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Moments:
    """What slurmctld noted since a mark: Unix seconds, in order."""

    submitted: list[float]
    started: list[float]
    ended: list[float]


class BenchSite:
    """A site with room for hundreds of jobs at once and one partition for all of them."""

    def __init__(self, peers: Path | None) -> None:
        nodes = many_cpus(4, 256)
        options = {"Default": "YES", "MaxTime": "1-00:00:00", "DefaultTime": "01:00:00"}
        main = Partition(name="main", nodes=tuple(node.name for node in nodes), options=options)
        binds = {**BINDS, BENCH_INSIDE: Path(__file__).resolve().parent}
        if peers is not None:
            binds[PEERS_INSIDE] = peers
        self.site = Site(name="bench", nodes=nodes, partitions=[main], binds=binds)

    def mark(self) -> int:
        """A place in slurmctld's log."""
        return self._log.stat().st_size

    def since(self, mark: int) -> Moments:
        with self._log.open("rb") as file:
            file.seek(mark)
            text = file.read().decode(errors="replace")
        return Moments(
            submitted=[_unix(when) for when, _ in _SUBMITTED.findall(text)],
            started=[_unix(when) for when, _ in _STARTED.findall(text)],
            ended=[_unix(when) for when, _ in _ENDED.findall(text)],
        )

    def wait_submitted(self, mark: int, count: int, within_s: float = 120) -> Moments:
        deadline = time.monotonic() + within_s
        while len((found := self.since(mark)).submitted) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"slurmctld has {len(found.submitted)} of {count} jobs after {within_s:g} s")
            time.sleep(0.05)
        return found

    def clear(self) -> None:
        """Cancel what is left and wait until nothing of it is."""
        self.site.run(["scancel", "--user=user1"], user="root")
        self.wait_empty()

    def wait_empty(self) -> None:
        deadline = time.monotonic() + 120
        while self.site.run(["squeue", "-h", "-o", "%i"], user="root").stdout.strip():
            if time.monotonic() > deadline:
                raise TimeoutError("the queue does not get empty")
            time.sleep(0.5)

    def reset_rpcs(self) -> None:
        self.site.run(["sdiag", "--reset"], user="root")

    def rpcs(self) -> dict[str, int]:
        """slurmctld's own count of requests by kind, since the last reset."""
        text = self.site.run(["sdiag"], user="root").stdout
        by_kind = text.split("statistics by message type")[-1].split("statistics by user")[0]
        return {kind: int(count) for kind, count in _RPC.findall(by_kind)}

    @property
    def _log(self) -> Path:
        return self.site.path("/var/log/slurm/slurmctld.log")


class Ledger:
    """Counts what one contender asks Slurm: programs of the same names, first on its PATH, that note the call.

    sbatch is not among them: it is what is timed.
    """

    def __init__(self, site: Site, name: str) -> None:
        folder = f"/home/user1/ledger-{name}"
        self._file = f"{folder}/calls"
        self._site = site
        self.path = f"{folder}:{PATH}"
        site.run(["mkdir", "-p", folder])
        site.write(self._file, "")
        for program in QUERIES:
            text = f'#!/bin/bash\necho "$EPOCHREALTIME {program} $*" >> {self._file}\nexec /usr/bin/{program} "$@"\n'
            site.write(f"{folder}/{program}", text, mode=0o755)

    def calls(self, began: float, ended: float) -> Counter[str]:
        """Calls between two moments, by program."""
        found: Counter[str] = Counter()
        for line in self._site.path(self._file).read_text().splitlines():
            when, program, *words = line.split(" ")
            # Names of hosts out of a variable: that one asks nobody.
            if began <= float(when) < ended and words[:2] != ["show", "hostnames"]:
                found[program] += 1
        return found

    def shown(self) -> list[str]:
        """Every call as it was made, for a look by eye."""
        return self._site.path(self._file).read_text().splitlines()


def _unix(when: str) -> float:
    return datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp()
