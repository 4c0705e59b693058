"""kill -9 at every step between journal, submit, report and commit: nothing lost, nothing run twice, logs exact.

Each fault point ends the process that passes it with SIGKILL, for real; a supervisor starts it again as a
service manager would. The tasks write to a ledger outside Diamond, which is the judge of what really ran.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diamond.core.errors import Unavailable
from diamond.core.faults import FAULT_POINTS
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually

TASKS_PER_POINT, MOST_TASKS = 11, 90  # with those of the second test more than 200
LINES = 40


class Supervisor(threading.Thread):
    """Starts a dead server or agent again, without its fault, and remembers how each one died."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        self.service = service
        self.deaths: Counter[tuple[str, int]] = Counter()
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(0.05):
            for name, start in (("server", self.service.start_server), ("agent", self.service.start_agent)):
                process = getattr(self.service, name)
                if process.poll() is not None:
                    self.deaths[name, process.returncode] += 1
                    start()

    def stop(self) -> None:
        self._done.set()
        self.join()


@contextmanager
def supervised(service: Service) -> Iterator[Supervisor]:
    supervisor = Supervisor(service)
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()


def expected_log(task_id: str) -> bytes:
    return b"".join(f"line {n} of {task_id}\n".encode() for n in range(1, LINES + 1))


def expected_state(number: int) -> TaskState:
    return TaskState.FAILED if number % 5 == 0 else TaskState.SUCCEEDED


def launch(service: Service, number: int, ledger: Path) -> str:
    """Keep asking with one key until the answer comes, as a careful client does."""
    run = (
        'echo "$DIAMOND_TASK_ID" >> "$LEDGER"\n'
        f'for n in $(seq 1 {LINES}); do echo "line $n of $DIAMOND_TASK_ID"; done\n'
        f"exit {3 if number % 5 == 0 else 0}\n"
    )
    spec = {"name": f"crash {number}", "run": run, "envs": {"LEDGER": str(ledger)}}
    while True:
        try:
            with service.client() as client:
                return client.tasks.create(spec, idempotency_key=f"crash-{number}").id
        except Unavailable:
            time.sleep(0.1)


def arm(service: Service, point: str, nth: int) -> str:
    """Restart the process that passes `point` with the fault armed."""
    name = "server" if point.startswith("server.") else "agent"
    service.kill(getattr(service, name))
    if name == "server":  # which may pass the point before anybody has asked whether it is up
        service.start_server(fault=f"{point}:{nth}", wait=False)
    else:
        service.start_agent(fault=f"{point}:{nth}")
    return name


@pytest.mark.timeout(600)
def test_killed_at_every_fault_point(tmp_path: Path) -> None:
    chance = random.Random(7421)
    ledger = tmp_path / "ledger"
    ids: dict[int, str] = {}
    with Service(tmp_path / "home") as service:
        for point in FAULT_POINTS:
            name = arm(service, point, nth=chance.randint(1, 4))
            with supervised(service) as supervisor:
                died = (name, -signal.SIGKILL)
                for round_number in range(MOST_TASKS):
                    if round_number >= TASKS_PER_POINT and supervisor.deaths[died]:
                        break
                    number = len(ids)
                    ids[number] = launch(service, number, ledger)
                    # Orders and reports go in batches; without a pause few batches pass the armed point.
                    time.sleep(0.03)
                eventually(lambda s=supervisor, d=died: s.deaths[d], what=f"{point} kills the {name}")
                if chance.random() < 0.5:  # now and then the other one goes too
                    service.kill(service.agent if name == "server" else service.server)
                wait_all_final(service, len(ids))
        check(service, ids, ledger)


@pytest.mark.timeout(300)
def test_both_killed_again_and_again(tmp_path: Path) -> None:
    """No chosen place: both processes die at random moments while tasks stream in."""
    chance = random.Random(99)
    ledger = tmp_path / "ledger"
    ids: dict[int, str] = {}
    with Service(tmp_path / "home") as service, supervised(service) as supervisor:
        for number in range(45):
            ids[number] = launch(service, number, ledger)
            if number % 8 == 3:
                service.kill(service.agent)
            if number % 12 == 7:
                service.kill(service.server)
                if chance.random() < 0.5:
                    service.kill(service.agent)
        wait_all_final(service, len(ids))
        assert supervisor.deaths["server", -signal.SIGKILL] >= 3
        assert supervisor.deaths["agent", -signal.SIGKILL] >= 3
        check(service, ids, ledger)


def wait_all_final(service: Service, count: int) -> None:
    finals = [state for state in TaskState if state.is_final]

    def all_final() -> bool:
        try:
            with service.client() as client:
                return client.tasks.page(states=finals, limit=1)[2] == count
        except Unavailable:
            return False

    eventually(all_final, within_s=90, every_s=0.2, what=f"{count} tasks are final\n{service.log_tail('agent.log')}")


def check(service: Service, ids: dict[int, str], ledger: Path) -> None:
    ran = Counter(ledger.read_text().split())
    assert ran == Counter(ids.values()), "a task ran twice, or not at all"
    with service.client() as client:
        assert client.tasks.page(limit=1)[2] == len(ids)
        for number, task_id in ids.items():
            task = client.tasks.get(task_id)
            assert task.state is expected_state(number), (number, task)
            assert task.attempt == len(task.jobs) == 1
            assert b"".join(client.tasks.logs(task_id)) == expected_log(task_id)
