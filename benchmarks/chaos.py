"""A server that is killed over and over while people launch tasks: is any task lost, run twice, or its log wrong?

    .venv/bin/python -m benchmarks.chaos [--quick] [--check]

The server gets SIGKILL at random moments, starts again, and gets it again. Meanwhile several clients launch tasks, each
under its own idempotency key, and repeat a request that got no answer. Every task appends its id to a ledger outside
Diamond; that file, not the database, says what ran.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Bench, options
from diamond.core.errors import Unavailable
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually

KILLS, CLIENTS = 40, 3
# Long enough for a server to take some requests, short enough to hit it while it starts as well.
UP_S = (0.1, 1.5)
LINES = 40
SETTLED = frozenset(state for state in TaskState if state.is_final)


@dataclass
class Found:
    """What became of the tasks; `answers_s` is how long each launch took, repeats included."""

    launched: dict[str, str] = field(default_factory=dict)
    answers_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong_logs: list[str] = field(default_factory=list)


def expected_log(task_id: str) -> bytes:
    return b"".join(f"line {n} of {task_id}\n".encode() for n in range(1, LINES + 1))


def _spec(name: str, ledger: Path) -> dict[str, object]:
    run = (
        'echo "$DIAMOND_TASK_ID" >> "$LEDGER"\n'
        f'for n in $(seq 1 {LINES}); do echo "line $n of $DIAMOND_TASK_ID"; done\n'
    )
    return {"name": name, "run": run, "envs": {"LEDGER": str(ledger)}}


class Launcher(threading.Thread):
    """One client, which launches one task after the other until it is told to stop."""

    def __init__(self, service: Service, number: int, ledger: Path, found: Found, enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self.problem: BaseException | None = None
        self._service, self._number, self._ledger, self._found, self._enough = service, number, ledger, found, enough

    def run(self) -> None:
        try:
            count = 0
            while not self._enough.is_set():
                count += 1
                self._launch(f"chaos-{self._number}-{count}")
        except BaseException as problem:
            self.problem = problem

    def _launch(self, name: str) -> None:
        began = time.monotonic()
        while True:
            try:
                with self._service.client() as client:
                    task = client.tasks.create(_spec(name, self._ledger), idempotency_key=name)
                break
            except Unavailable:
                time.sleep(0.05)
        self._found.launched[name] = task.id
        self._found.answers_s.append(time.monotonic() - began)


def chaos(service: Service, ledger: Path, kills: int, seed: int) -> Found:
    chance, found, enough = random.Random(seed), Found(), threading.Event()
    launchers = [Launcher(service, number, ledger, found, enough) for number in range(CLIENTS)]
    for launcher in launchers:
        launcher.start()
    for _ in range(kills):
        time.sleep(chance.uniform(*UP_S))
        service.kill(service.server)
        service.start_server(wait=chance.random() < 0.5)
    service.wait_healthy()
    enough.set()
    for launcher in launchers:
        launcher.join()
        if launcher.problem is not None:
            raise launcher.problem
    _judge(service, ledger, found)
    return found


def _judge(service: Service, ledger: Path, found: Found) -> None:
    names = list(found.launched.values())
    with service.client() as client:
        for task_id in names:
            eventually(
                lambda task_id=task_id: client.tasks.get(task_id).state in SETTLED,
                within_s=600,
                what=f"task {task_id} ends",
            )
        for task_id in names:
            if client.tasks.get(task_id).state is not TaskState.SUCCEEDED:
                found.lost.append(task_id)
            if b"".join(client.tasks.logs(task_id)) != expected_log(task_id):
                found.wrong_logs.append(task_id)
    ran = Counter(ledger.read_text().split())
    found.lost += [task_id for task_id in names if not ran[task_id]]
    found.doubled = [task_id for task_id, times in ran.items() if times > 1]
    found.doubled += [task_id for task_id in ran if task_id not in names]


def measure(bench: Bench, chosen: argparse.Namespace) -> None:
    kills = 8 if chosen.quick else KILLS
    with tempfile.TemporaryDirectory(prefix="diamond-chaos-") as folder:
        ledger = Path(folder) / "ledger"
        with Service(Path(folder) / "home") as service:
            found = chaos(service, ledger, kills, seed=time.time_ns() % 2**32)
    note = f"{kills} kills, {len(found.launched)} tasks launched meanwhile"
    bench.add("kills of the server", kills, "", "higher", note=note)
    bench.add("tasks launched meanwhile", len(found.launched), "", "higher")
    bench.add("tasks lost", len(found.lost), "", "lower", aim=0, note=note)
    bench.add("tasks run twice, or by nobody's order", len(found.doubled), "", "lower", aim=0, note=note)
    bench.add("logs that differ", len(found.wrong_logs), "", "lower", aim=0, note=note)
    slowest = max(found.answers_s)
    bench.add("slowest launch, with its repeats", slowest, "s", "lower", runs=[round(s, 3) for s in found.answers_s])


def main() -> int:
    chosen = options("Server kills under load: nothing lost, nothing doubled.")
    bench = Bench("chaos")
    measure(bench, chosen)
    return bench.finish(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
