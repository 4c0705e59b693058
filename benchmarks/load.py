"""Many users at once: 200 people, 2,000 live tasks and 20 agents on one server, on PostgreSQL with four workers and on
SQLite.

    .venv/bin/python -m benchmarks.load [--quick] [--check]

Users and agents are simulated, the server is real: its own processes, over TCP, with real accounts, tokens, projects
and shared endpoints. What is asked is what people's lists, pages and scripts ask, at a steady rate whatever the answers
take (an open loop: a slow answer does not slow the questions down). Meanwhile the agents hold their long polls, take
orders and report, and some users follow the stream of events, each of which must arrive exactly once. Client and server
share this machine's cores; what the client itself takes is given beside the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Bench, median, options, percentile
from benchmarks.load_agents import SimulatedAgent
from benchmarks.load_http import Connection
from benchmarks.load_people import Installed, install
from diamond.server.store.models import EventRow
from testing import postgres
from testing.postgres import free_port

USERS, AGENTS, TASKS, FOLLOWERS = 200, 20, 2_000, 50
RATE = 200.0
_CONNECTIONS = 128
# What people ask for, in parts of a hundred.
MIX = {
    "list tasks": 35, "look at a task": 20, "read a log": 15, "curves": 8, "events": 7, "endpoints": 5, "queue": 3,
    "launch": 5, "stop": 2,
}  # fmt: skip


@dataclass
class Seen:
    """What came of the questions."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: int = 0  # questions that found no free connection in time

    @property
    def all_seconds(self) -> list[float]:
        return [second for found in self.seconds.values() for second in found]


class Crowd:
    """People with tokens who ask."""

    def __init__(self, host: str, port: int, people: Installed) -> None:
        self._idle: asyncio.Queue[Connection] = asyncio.Queue()
        for _ in range(_CONNECTIONS):
            self._idle.put_nowait(Connection(host, port))
        self._people = people
        self._random = random.Random(7)
        self._tasks: list[tuple[int, str]] = []  # whose, and which

    async def ask(self, method: str, path: str, user: int, body: Any = None) -> Any:
        connection = await self._idle.get()
        try:
            return await connection.ask(method, path, self._people.tokens[user], body)
        except Exception:
            connection.close()
            raise
        finally:
            self._idle.put_nowait(connection)

    async def launch_all(self, number: int) -> None:
        """Everybody's tasks, before anything is measured."""
        each = number // USERS
        for user in range(USERS):
            specs = [self._spec(user, item) for item in range(each)]
            answer = await self.ask("POST", "/api/v1/tasks/batch", user, {"specs": specs})
            assert answer.status in (200, 201), answer.body[:500]
            self._tasks += [(user, task["id"]) for task in answer.json()["tasks"]]

    def _spec(self, user: int, number: int) -> dict[str, Any]:
        return {"name": f"task-{number}", "run": "python train.py", "project": self._people.projects[user]}

    async def steadily(self, rate: float, seconds: float) -> Seen:
        """Ask `rate` times a second, come what may."""
        seen, asked, began = Seen(), [], time.perf_counter()
        for number in range(int(rate * seconds)):
            due = began + number / rate
            if (ahead := due - time.perf_counter()) > 0:
                await asyncio.sleep(ahead)
            asked.append(asyncio.create_task(self._one(seen, due)))
        await asyncio.gather(*asked)
        return seen

    async def flat_out(self, clients: int, seconds: float) -> Seen:
        """Ask again as soon as answered, with so many at once."""
        seen, until = Seen(), time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < until:
                await self._one(seen, time.perf_counter())

        await asyncio.gather(*(client() for _ in range(clients)))
        return seen

    async def _one(self, seen: Seen, due: float) -> None:
        what = self._random.choices(list(MIX), list(MIX.values()))[0]
        user, task = self._random.choice(self._tasks)
        method, path, body = {
            "list tasks": ("GET", "/api/v1/tasks?limit=50", None),
            "look at a task": ("GET", f"/api/v1/tasks/{task}", None),
            "read a log": ("GET", f"/api/v1/tasks/{task}/logs", None),
            "curves": ("GET", f"/api/v1/tasks/{task}/metrics", None),
            "events": ("GET", f"/api/v1/events?since={self._random.randrange(1, 2000)}&limit=100", None),
            "endpoints": ("GET", "/api/v1/endpoints", None),
            "queue": ("GET", "/api/v1/queue", None),
            "launch": ("POST", "/api/v1/tasks", {"spec": self._spec(user, 0)}),
            "stop": ("POST", f"/api/v1/tasks/{task}/cancel", None),
        }[what]
        try:
            answer = await self.ask(method, path, user, body)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            seen.wrong.append(f"{what}: {type(error).__name__} {error}")
            return
        # From when it was due: a queue in front of the server is the server's.
        seen.seconds.setdefault(what, []).append(time.perf_counter() - due)
        seen.statuses[answer.status] += 1
        if answer.status >= 400:
            seen.wrong.append(f"{what}: {answer.status} {answer.body[:200]!r}")
        elif what == "launch":
            self._tasks.append((user, answer.json()["id"]))


class Follower:
    """Somebody who watches their events; `seqs` are those that came, in order."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._connection = Connection(host, port)
        self._token = token
        self.seqs: list[int] = []
        self.first = asyncio.Event()

    async def run(self, since: int) -> None:
        async for line in self._connection.stream(f"/api/v1/events/stream?since={since}", self._token):
            if line.startswith(b"event: hello"):
                self.first.set()
            elif line.startswith(b"id: "):
                self.seqs.append(int(line[4:]))


@contextlib.contextmanager
def server(home: Path, url: str, workers: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = free_port()
    settings = {
        "HOME": home,
        "PORT": port,
        "DATABASE_URL": url,
        "WORKERS": workers,
        "MULTI_USER": 1,
        "LOG_LEVEL": "WARNING",
    }
    env = {key: value for key, value in os.environ.items() if not key.startswith("DIAMOND_")}
    env |= {f"DIAMOND_{key}": str(value) for key, value in settings.items()}
    with (home.parent / f"{home.name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "diamond.server"], env=env, stdout=log, stderr=log)
    try:
        yield port, process
    finally:
        process.terminate()
        process.wait(timeout=60)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def memory_mib(pid: int) -> float:
    """Of a process and all below it, what only they hold plus their part of what they share."""
    total = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def cpu_s(pid: int) -> float:
    ticks = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def wait_until(what: str, condition: Any, within_s: float = 180) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        await asyncio.sleep(0.2)


async def measure(
    bench: Bench, label: str, port: int, process: subprocess.Popen[bytes], people: Installed, quick: bool
) -> None:
    host = "127.0.0.1"
    probe = Connection(host, port)

    async def healthy() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see its log")
        with contextlib.suppress(OSError):
            return (await probe.ask("GET", "/api/v1/health", "")).status == 200
        return False

    await wait_until("the server answers", healthy)
    agents = [SimulatedAgent(host, port, token, number) for number, token in enumerate(people.agent_tokens)]
    running = [asyncio.create_task(agent.run()) for agent in agents]
    crowd = Crowd(host, port, people)
    await wait_until("all endpoints are online", lambda: _all_online(probe, people))
    total = 400 if quick else TASKS
    began = time.perf_counter()
    await crowd.launch_all(total)

    async def all_run() -> bool:
        for task in running:
            if task.done():
                task.result()
        return sum(len(agent.running) for agent in agents) >= total

    await wait_until("all tasks run", all_run)
    bench.add(f"{label}: launched and running", total / (time.perf_counter() - began), "tasks/s", "higher",
              note="in batches of ten, until the agents have taken them all")  # fmt: skip
    newest = _newest_seq(people)
    followers = [Follower(host, port, people.tokens[user]) for user in range(0, USERS, USERS // FOLLOWERS)]
    following = [asyncio.create_task(follower.run(newest)) for follower in followers]
    await asyncio.gather(*(follower.first.wait() for follower in followers))
    seconds = 10 if quick else 60
    await crowd.steadily(RATE, 5)  # caches warm, as they are in the afternoon
    server_cpu, own_cpu, start = cpu_s(process.pid), time.process_time(), time.perf_counter()
    seen = await crowd.steadily(RATE, seconds)
    took = time.perf_counter() - start
    server_cores, own_cores = (cpu_s(process.pid) - server_cpu) / took, (time.process_time() - own_cpu) / took
    note = f"{len(seen.all_seconds)} requests in {took:.1f} s; server {server_cores:.2f} cores, client {own_cores:.2f}"
    everything = seen.all_seconds
    bench.add(
        f"{label}: p99 at {RATE:g} requests/s", 1000 * percentile(everything, 0.99), "ms", "lower", aim=250.0, note=note
    )
    bench.add(f"{label}: p50 at {RATE:g} requests/s", 1000 * median(everything), "ms", "lower")
    for what, found in sorted(seen.seconds.items()):
        bench.add(
            f"{label}: p99, {what}",
            1000 * percentile(found, 0.99),
            "ms",
            "lower",
            note=f"p50 {1000 * median(found):.1f} ms, {len(found)} times",
        )
    most = await crowd.flat_out(32, 5 if quick else 20)
    bench.add(f"{label}: most requests a second", len(most.all_seconds) / (5 if quick else 20), "1/s", "higher",
              note=f"32 at once, p99 {1000 * percentile(most.all_seconds, 0.99):.0f} ms")  # fmt: skip
    wrong = seen.wrong + most.wrong + [error for agent in agents for error in agent.errors]
    bench.add(f"{label}: errors", len(wrong), "", "lower", aim=0.0, note="; ".join(wrong[:3]))
    bench.add(f"{label}: lost or repeated events", await _lost(people, followers, newest), "", "lower", aim=0.0,
              note=f"{sum(len(one.seqs) for one in followers)} events to {len(followers)} streams")  # fmt: skip
    bench.add(
        f"{label}: memory", memory_mib(process.pid), "MiB", "lower", note="of all server processes together (PSS)"
    )
    for task in [*running, *following]:
        task.cancel()
    await asyncio.gather(*running, *following, return_exceptions=True)
    await _credentials(bench, label, host, port, people)


async def _all_online(probe: Connection, people: Installed) -> bool:
    for user in range(0, USERS, USERS // AGENTS):
        answer = await probe.ask("GET", "/api/v1/endpoints", people.tokens[user])
        if not all(endpoint["online"] for endpoint in answer.json()["endpoints"]):
            return False
    return True


def _newest_seq(people: Installed) -> int:
    with people.db.read() as session:
        return session.execute(sa.select(sa.func.coalesce(sa.func.max(EventRow.seq), 0))).scalar_one()


async def _lost(people: Installed, followers: list[Follower], since: int) -> float:
    """Events that did not come exactly once and in order, after a moment for the last ones."""
    await asyncio.sleep(3)
    newest = _newest_seq(people)
    wrong = 0
    for follower, user in zip(followers, range(0, USERS, USERS // FOLLOWERS), strict=True):
        with people.db.read() as session:
            query = sa.select(EventRow.seq).where(EventRow.owner_id == people.user_ids[user], EventRow.seq > since)
            wanted = list(session.scalars(query.where(EventRow.seq <= newest).order_by(EventRow.seq)))
        came = [seq for seq in follower.seqs if seq <= newest]
        wrong += len(set(wanted) ^ set(came)) + (len(came) - len(set(came))) + (came != sorted(came))
    return wrong


async def _credentials(bench: Bench, label: str, host: str, port: int, people: Installed) -> None:
    """What it costs to sign in with a password, and to have a token checked for the first time and again."""
    connection = Connection(host, port)
    signing = [await asyncio.to_thread(_sign_in, f"http://{host}:{port}", people) for _ in range(5)]
    bench.add(f"{label}: sign in with a password", 1000 * median(signing), "ms", "lower",
              runs=[round(1000 * one, 2) for one in signing], note="argon2id, on purpose not quick")  # fmt: skip
    first, again = [], []
    for user in range(100, 140):
        for times in (first, again):
            began = time.perf_counter()
            answer = await connection.ask("GET", "/api/v1/me", people.tokens[user])
            assert answer.status == 200, answer.body[:300]
            times.append(time.perf_counter() - began)
    bench.add(f"{label}: a token's first check", 1000 * median(first), "ms", "lower", note="GET /api/v1/me, whole")
    bench.add(f"{label}: a token's next check", 1000 * median(again), "ms", "lower", note="remembered for five seconds")


def _sign_in(url: str, people: Installed) -> float:
    """Seconds from sending the form until the browser has its cookie."""
    with httpx.Client(base_url=url) as browser:
        page = browser.get("/sign-in").text
        fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', page))
        form = {**fields, "name": people.names[0], "password": people.password}
        began = time.perf_counter()
        answer = browser.post("/sign-in", data=form, headers={"Origin": url})
        took = time.perf_counter() - began
    assert answer.status_code == 303, answer.text[:500]
    return took


def main() -> int:
    chosen = options(__doc__ or "")
    bench = Bench("load", packages=("fastapi", "uvicorn", "sqlalchemy", "psycopg", "pwdlib"))
    with tempfile.TemporaryDirectory(prefix="diamond-load-") as name:
        folder = Path(name)
        if reason := postgres.why_not():
            bench.absent["PostgreSQL"] = reason
        else:
            with postgres.running_server() as url:
                _one(bench, "PostgreSQL, 4 workers", folder / "postgres", url, 4, chosen.quick)
        database = f"sqlite:///{folder / 'load.db'}"
        _one(bench, "SQLite", folder / "sqlite", database, 1, chosen.quick)
    return bench.finish(chosen)


def _one(bench: Bench, label: str, home: Path, url: str, workers: int, quick: bool) -> None:
    print(f"\n{label}", flush=True)
    home.mkdir()
    people = install(url, num_users=USERS, num_agents=AGENTS)
    with server(home, url, workers) as (port, process):
        asyncio.run(measure(bench, label, port, process, people, quick))
    people.db.close()


if __name__ == "__main__":
    raise SystemExit(main())
