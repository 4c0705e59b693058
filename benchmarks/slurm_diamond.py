"""Diamond's side: the client on this machine, the server beside it, the agent as user1 inside the site.

Answers in the same words as `slurm/inside.py`, so that the figures treat all contenders alike.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import rss_mib
from benchmarks.slurm_site import BenchSite, Ledger
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from diamond.sdk.follow import LogChunk
from testing.cluster import Cluster
from testing.minihpc.inside import SiteProcess

FINALS = [state for state in TaskState if state.is_final]
STAMP = "echo $EPOCHREALTIME"
EVERY_S = 5.0  # between two lines of a live task
# Waits in the shell itself: five hundred sleeps every few seconds would be the load that is measured.
LIVE = """
exec 9<> <(:)
echo "start $EPOCHREALTIME"
read -rt "$PHASE" -u 9 || true
until [ -e "$STOP" ]; do echo "line $EPOCHREALTIME"; read -rt "$EVERY" -u 9 || true; done
echo "end $EPOCHREALTIME"
"""


@dataclass
class Live:
    """What was seen while many tasks were live. Lags in seconds, usage at the end of the window."""

    num_live: int
    window_s: float
    start_lags: list[float] = field(default_factory=list)
    end_lags: list[float] = field(default_factory=list)
    killed_lags: list[float] = field(default_factory=list)
    log_lags: list[float] = field(default_factory=list)
    queries: dict[str, int] = field(default_factory=dict)
    rpcs: dict[str, int] = field(default_factory=dict)
    agent_mib: float = 0.0
    server_mib: float = 0.0
    agent_cpu: float = 0.0  # of one core
    server_cpu: float = 0.0


class Diamond:
    """The whole of it, started. Use as a context manager."""

    name = "diamond"

    def __init__(self, site: BenchSite, folder: Path) -> None:
        self._site = site
        self.ledger = Ledger(site.site, "diamond")
        self.cluster = Cluster(site.site, folder, env={"PATH": self.ledger.path})

    def __enter__(self) -> Diamond:
        self.cluster.__enter__()
        self._client = self.cluster.service.client()
        return self

    def __exit__(self, *error: Any) -> None:
        self._client.close()
        self.cluster.__exit__(*error)

    def launch(self) -> dict[str, float]:
        """As a person sees it: from the call to the first line of the log, over the API."""
        mark = self._site.mark()
        began = time.time()
        task = self._create(STAMP)
        created = time.time()
        written, seen = self._first_line(task)
        moments = self._site.since(mark)
        self._client.tasks.wait(task, timeout_s=60)
        times = {"began": began, "created": created, "written": written, "seen": seen}
        return times | {"submitted": moments.submitted[0], "started": moments.started[0]}

    def held(self, count: int, *, in_one_call: bool) -> dict[str, float]:
        """Launch tasks that Slurm must only take; they are cancelled before they could start."""
        mark = self._site.mark()
        began = time.time()
        if in_one_call:
            tasks = [task.id for task in self._client.tasks.create_many([_spec("true", "now+1hour")] * count)]
        else:
            tasks = [self._create("true", begin="now+1hour") for _ in range(count)]
        created = time.time()
        submitted = self._site.wait_submitted(mark, count).submitted[-1]
        self._cancel(tasks)
        return {"began": began, "created": created, "submitted": submitted}

    def backlog(self, count: int) -> dict[str, float]:
        """The same with the tasks waiting at the server before the agent comes: its own speed, from the first on."""
        self.cluster.stop_agent()
        tasks = [self._create("true", begin="now+1hour") for _ in range(count)]
        mark = self._site.mark()
        self.cluster.start_agent()
        moments = self._site.wait_submitted(mark, count).submitted
        self.cluster.wait_online()
        self._cancel(tasks)
        return {"began": moments[0], "submitted": moments[-1]}

    def burst(self, count: int) -> dict[str, float]:
        before = self._finished()
        began = time.time()
        self._client.tasks.create_many([_spec("true")] * count)
        created = time.time()
        self._wait_finished(before + count)
        return {"began": began, "created": created, "known": time.time()}

    def live(self, count: int, changes: int, gap_s: float, num_followers: int, num_killed: int = 10) -> Live:
        """Keep `count` tasks live while one ends and another begins every `gap_s` seconds, `changes` times.

        `num_followers` of them are followed meanwhile; afterwards `num_killed` are cancelled behind Diamond's back.
        """
        folder = f"/home/user1/stop-{time.time_ns()}"
        self._site.site.run(["mkdir", folder])
        chance = random.Random(7)
        tasks = [self._create_live(f"{folder}/{number}", chance) for number in range(count)]
        self._until(lambda: self._count([TaskState.RUNNING]) >= count, 300, f"{count} tasks run")
        found = Live(num_live=count, window_s=changes * gap_s)
        followed = tasks[changes : changes + num_followers]
        with _Watch(self.cluster.service.client) as watch:
            watch.follow(followed)
            time.sleep(3.0)
            self._site.reset_rpcs()
            cpu = self._cpu()
            began = time.time()
            fresh = []
            for number in range(changes):
                self._site.site.write(f"{folder}/{number}", "")
                fresh.append(self._create_live(f"{folder}/{count + number}", chance))
                time.sleep(max(0.0, began + (number + 1) * gap_s - time.time()))
            ended = time.time()
            found.window_s = ended - began
            used = [after - before for after, before in zip(self._cpu(), cpu, strict=True)]
            found.agent_cpu, found.server_cpu = (seconds / found.window_s for seconds in used)
            found.queries = dict(self.ledger.calls(began, ended))
            found.rpcs = self._site.rpcs()
            found.agent_mib, found.server_mib = (rss_mib(pid) for pid in self._pids())
            time.sleep(EVERY_S + 5.0)  # until the last of them has seen its sign, and the API shows it
            found.log_lags = watch.lags(began, ended)
            found.killed_lags = self._kill_by_hand(watch, tasks[-num_killed:])
        for task in fresh:
            self._add_lag(found.start_lags, task, "start", watch.seen(task, TaskState.RUNNING))
        for task in tasks[:changes]:
            self._add_lag(found.end_lags, task, "end", watch.final(task))
        for number in range(count + changes):
            self._site.site.write(f"{folder}/{number}", "")
        self._wait_idle()
        return found

    # Tasks

    def _create(self, run: str, begin: str = "", envs: dict[str, str] | None = None) -> str:
        return self._client.tasks.create(_spec(run, begin, envs)).id

    def _create_live(self, stop: str, chance: random.Random) -> str:
        phase = f"{chance.uniform(0.01, EVERY_S):.3f}"
        return self._create(LIVE, envs={"STOP": stop, "EVERY": f"{EVERY_S:g}", "PHASE": phase})

    def _first_line(self, task: str) -> tuple[float, float]:
        text = b""
        for item in self._client.tasks.follow(task, metrics=False):
            if isinstance(item, LogChunk):
                seen = time.time()
                text += item.data
                for line in text.split(b"\n")[:-1]:
                    if line.replace(b".", b"", 1).isdigit():
                        return float(line), seen
        raise RuntimeError(f"task {task} ended without a word")

    def _cancel(self, tasks: list[str]) -> None:
        before = self._finished()
        for task in tasks:
            self._client.tasks.cancel(task)
        self._wait_finished(before + len(tasks))

    def _kill_by_hand(self, watch: _Watch, tasks: list[str]) -> list[float]:
        """Somebody cancels jobs on the cluster: only Slurm knows. Seconds until the API shows their end."""
        lags = []
        for task in tasks:
            job = self._client.tasks.get(task).jobs[-1]
            self._site.site.run(["scancel", str(job.scheduler_id)], user="root")
            when = time.time()
            self._until(lambda task=task: watch.final(task) is not None, 60, f"{task} ends")  # type: ignore[misc]
            lags.append((watch.final(task) or 0.0) - when)
        return lags

    def _add_lag(self, lags: list[float], task: str, word: str, seen: float | None) -> None:
        text = b"".join(self._client.tasks.logs(task)).decode()
        told = [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{word} ")]
        if told and seen is not None:
            lags.append(round(seen - told[0], 4))
        else:  # left out of a percentile it would flatter it
            raise RuntimeError(f"task {task} never was seen to {word}: {text[-300:]!r}")

    def _count(self, states: list[TaskState]) -> int:
        return self._client.tasks.page(states=states, limit=1)[2]

    def _finished(self) -> int:
        return self._count(FINALS)

    def _wait_finished(self, count: int) -> None:
        self._until(lambda: self._finished() >= count, 600, f"{count} tasks are over")

    def _wait_idle(self) -> None:
        live = [state for state in TaskState if not state.is_final]
        self._until(lambda: self._count(live) == 0, 300, "no task is live")

    @staticmethod
    def _until(holds: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {within_s:g} s: {what}")
            time.sleep(0.05)

    # Processes

    def _pids(self) -> tuple[int, int]:
        agent, server = self.cluster.agent, self.cluster.service.server
        assert isinstance(agent, SiteProcess)
        assert agent.inner_pid is not None
        assert server is not None
        return agent.inner_pid, server.pid

    def _cpu(self) -> tuple[float, ...]:
        """Seconds of processor time of agent and server so far, without the programs they start."""
        ticks = os.sysconf("SC_CLK_TCK")
        used = []
        for pid in self._pids():
            words = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
            used.append((int(words[11]) + int(words[12])) / ticks)
        return tuple(used)


def _spec(run: str, begin: str = "", envs: dict[str, str] | None = None) -> dict[str, Any]:
    spec: dict[str, Any] = {"run": run, "resources": {"infra": "cluster"}, "envs": envs or {}}
    if begin:
        spec["slurm"] = {"extra": [f"--begin={begin}"]}
    return spec


class _Watch:
    """One listener to everybody's events and a follower for each of some tasks, each with its own connection."""

    def __init__(self, client: Callable[[], Client]) -> None:
        self._make = client
        self._lock = threading.Lock()
        self._states: dict[tuple[str, str], float] = {}
        self._lines: list[tuple[float, float]] = []  # (written, seen)
        self._stop = threading.Event()

    def __enter__(self) -> _Watch:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # The threads end with the next thing they hear; what they hear from now on is dropped.
        self._stop.set()

    def follow(self, tasks: list[str]) -> None:
        for task in tasks:
            threading.Thread(target=self._follow, args=(task,), daemon=True).start()

    def seen(self, task: str, state: TaskState) -> float | None:
        """When the API first said so."""
        with self._lock:
            return self._states.get((task, state.value))

    def final(self, task: str) -> float | None:
        return next((when for state in FINALS if (when := self.seen(task, state)) is not None), None)

    def lags(self, began: float, ended: float) -> list[float]:
        with self._lock:
            return [round(seen - written, 4) for written, seen in self._lines if began <= written < ended]

    def _listen(self) -> None:
        with self._make() as client:
            for event in client.events(follow=True):
                if self._stop.is_set():
                    return
                if event.kind == "task.state" and event.task_id:
                    with self._lock:
                        self._states.setdefault((event.task_id, str(event.data.get("state"))), time.time())

    def _follow(self, task: str) -> None:
        tail = b""
        with self._make() as client:
            for item in client.tasks.follow(task, from_start=False, metrics=False):
                if self._stop.is_set():
                    return
                if isinstance(item, LogChunk):
                    now = time.time()
                    *lines, tail = (tail + item.data).split(b"\n")
                    told = [float(line.split()[1]) for line in lines if line.startswith(b"line ")]
                    with self._lock:
                        self._lines += [(written, now) for written in told]
