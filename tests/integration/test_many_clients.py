"""Many clients at once: everything arrives once, and the server never stumbles."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from diamond.core.home import ClientConfig
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually

CLIENTS, TASKS = 20, 50


@pytest.mark.timeout(480)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_twenty_clients_launch_fifty_tasks_each(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = str(request.getfixturevalue("postgres_server")) if kind == "postgresql" else None
    with Service(tmp_path / "home", database_url=url) as service:
        config = ClientConfig.load(service.home)
        assert config is not None
        headers = {"Authorization": f"Bearer {config.token}"}
        statuses: list[int] = []
        ids: list[str] = []

        def launch(client_number: int) -> None:
            # Plain HTTP, without the SDK's retries: every answer counts.
            with httpx.Client(base_url=config.url, headers=headers, timeout=60) as http:
                for number in range(TASKS):
                    body = {"spec": {"name": f"c{client_number}", "run": f"exit {number % 2}"}}
                    answer = http.post("/api/v1/tasks", json=body)
                    statuses.append(answer.status_code)
                    ids.append(answer.json()["id"])

        threads = [threading.Thread(target=launch, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [201] * (CLIENTS * TASKS)
        assert len(set(ids)) == CLIENTS * TASKS
        with service.client() as client:
            for state in (TaskState.SUCCEEDED, TaskState.FAILED):
                eventually(
                    lambda s=state: client.tasks.page(states=[s], limit=1)[2] == CLIENTS * TASKS // 2,
                    within_s=300,  # a thousand real processes, beside whatever else runs
                    every_s=0.5,
                    what=f"half of the tasks are {state}",
                )


def test_two_identical_posts_with_one_key_make_one_task(service: Service) -> None:
    config = ClientConfig.load(service.home)
    assert config is not None
    headers = {"Authorization": f"Bearer {config.token}", "Idempotency-Key": "the same"}
    answers: list[tuple[int, str]] = []
    barrier = threading.Barrier(6)

    def post() -> None:
        with httpx.Client(base_url=config.url, headers=headers, timeout=30) as http:
            barrier.wait()
            answer = http.post("/api/v1/tasks", json={"spec": {"run": "true"}})
            answers.append((answer.status_code, answer.json()["id"]))

    threads = [threading.Thread(target=post) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(status for status, _ in answers) == [200] * 5 + [201]
    assert len({task_id for _, task_id in answers}) == 1
    other = httpx.post(f"{config.url}/api/v1/tasks", headers=headers, json={"spec": {"run": "false"}})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")
