"""A script that knows nothing of Diamond has curves, whole and with no point twice, whatever is killed meanwhile."""

from __future__ import annotations

import sys
import textwrap
import time
from pathlib import Path

import pytest

from diamond.core.faults import CURVE_FAULT_POINTS
from diamond.core.rundir import RunDir
from diamond.core.states import TaskState
from diamond.server.web import task_words
from testing.service import Service
from testing.waiting import eventually

EPOCHS = 140
# Without a server, an import of Diamond or a file: what people have before they hear of it.
SCRIPT = textwrap.dedent(
    f"""
    import sys, time
    print("loading 1/3 files, version 2.1.0")
    for epoch in range(1, {EPOCHS} + 1):
        for batch in (30, 60):
            sys.stderr.write(f"\\r{{batch}}/60 [====>] - ETA: 0s")
            sys.stderr.flush()
            time.sleep(0.05)
        sys.stderr.write("\\n")
        head = f"\\x1b[1mEpoch {{epoch}}/{EPOCHS}\\x1b[0m  "
        print(head, f"train loss: {{1 / epoch}}  val_loss: {{2 / epoch}} acc {{epoch}}%", flush=True)
    """
)


def launch(service: Service, script: str, **more: object) -> str:
    run = f"cat > plain.py <<'END'\n{script}\nEND\n{sys.executable} plain.py\n"
    with service.client() as client:
        return client.tasks.create({"run": run, **more}).id


def state(service: Service, task_id: str) -> TaskState:
    with service.client() as client:
        return client.tasks.get(task_id).state


def ended(service: Service, task_id: str) -> None:
    eventually(lambda: state(service, task_id).is_final, within_s=60, what=f"it ends\n{service.log_tail('agent.log')}")
    assert state(service, task_id) is TaskState.SUCCEEDED


def curve(service: Service, task_id: str, key: str) -> list[tuple[float, float]]:
    with service.client() as client:
        found = client.tasks.curve(task_id, key)
    assert found.exact
    return [(point.x, point.last) for point in found.points]


def keys(service: Service, task_id: str) -> set[str]:
    with service.client() as client:
        return {series.key for series in client.tasks.metrics(task_id) if not series.key.startswith("sys/")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "spec", [{}, {"curves": ["Epoch {epoch}/* train loss: {train_loss} val_loss: {val_loss} acc {acc}%"]}]
)
def test_the_agent_is_killed_again_and_again(tmp_path: Path, spec: dict[str, object]) -> None:
    with Service(tmp_path / "home") as service:
        task_id = launch(service, SCRIPT, **spec)
        eventually(lambda: "train_loss" in keys(service, task_id), within_s=30, what="the first points come live")
        assert not state(service, task_id).is_final
        for fault in (*CURVE_FAULT_POINTS, ""):
            agent = service.agent
            assert agent is not None
            if agent.poll() is None:
                time.sleep(0.3)
                service.kill(agent)
            service.start_agent(fault=fault)
            if fault and not state(service, task_id).is_final:
                eventually(lambda: service.agent.poll() is not None, within_s=30, what=f"{fault} kills the agent")
        ended(service, task_id)
        assert curve(service, task_id, "train_loss") == [(n, 1 / n) for n in range(1, EPOCHS + 1)]
        assert curve(service, task_id, "val_loss") == [(n, 2 / n) for n in range(1, EPOCHS + 1)]
        assert curve(service, task_id, "acc") == [(n, n) for n in range(1, EPOCHS + 1)]
        assert keys(service, task_id) == {"train_loss", "val_loss", "acc"}


def test_two_writers_append_whole_lines(service: Service) -> None:
    script = textwrap.dedent(
        """
        import json, os
        with open(os.environ["DIAMOND_METRICS_FILE"], "ab", buffering=0) as file:
            for n in range(3000):
                file.write(json.dumps({"step": n, "own": n}).encode() + b"\\n")
                print(f"step {n} seen={n}", flush=True)
                if n % 1000 == 999:
                    import time
                    time.sleep(1.1)
        """
    )
    task_id = launch(service, script, curves=["step {step} seen={seen}"])
    ended(service, task_id)
    with service.client() as client:
        found = {series.key: series.count for series in client.tasks.metrics(task_id)}
        job = client.tasks.get(task_id).jobs[-1].id
    assert (found["own"], found["seen"]) == (3000, 3000)
    lines = RunDir(service.home.agent("local") / "jobs" / job).stream("metrics").read_text().splitlines()
    assert len(lines) == 6000


def test_no_curves_where_none_are_wanted(service: Service) -> None:
    prints = "print('step 1 loss: 0.5')"
    logs = prints + "\nfrom diamond import train\ntrain.log(step=7, loss=0.25)"
    off, own = launch(service, prints, curves=False), launch(service, logs)
    for task_id in (off, own):
        ended(service, task_id)
    assert keys(service, off) == set()
    assert curve(service, own, "loss") == [(7, 0.25)]


def test_a_pattern_that_matched_nothing_is_named(service: Service) -> None:
    """In the terminal, on the page and among what happened; the task succeeds all the same."""
    task_id = launch(service, "print('Loss: 0.5')", curves=["loss: {loss}", "Loss: {Loss}"])
    ended(service, task_id)
    words = "urve pattern 'loss: {loss}' matched no line of the output"
    assert f"note: c{words}" in service.diamond("show", task_id).stdout
    with service.client() as client:
        task = client.tasks.get(task_id)
        happened = task_words.steps([event for event in client.events(0) if event.task_id == task_id])
    assert f"c{words}" in task.detail and "Loss: {Loss}" not in task.detail
    assert f"C{words}" in task_words.why(task), "what the page of the task says"
    assert f"C{words}" in happened[-1].words


def test_ranks_print_their_numbers(service: Service) -> None:
    script = "import os\nfor n in range(3): print(f\"iter {n} loss={os.environ['RANK']}.{n}\", flush=True)"
    task_id = launch(service, script, ranks_per_node=2)
    ended(service, task_id)
    assert curve(service, task_id, "loss") == [(0, 0.0), (1, 0.1), (2, 0.2)]


def test_the_example(service: Service) -> None:
    folder = Path(__file__).parents[2] / "examples" / "plain_script"
    done = service.diamond("launch", str(folder / "task.yaml"))
    assert done.returncode == 0, done.stderr
    with service.client() as client:
        task = next(task for task in client.tasks.list() if task.name == "plain-script")
    assert keys(service, task.id) == {"loss", "val_loss", "lr", "line/slope", "line/offset"}
    line = curve(service, task.id, "line/slope")
    assert [step for step, _ in line] == list(range(1, 31))
    assert abs(line[-1][1] - 3) < 0.2
    without = launch(service, (folder / "train.py").read_text())
    ended(service, without)
    assert curve(service, without, "val_loss") == curve(service, task.id, "val_loss")
    assert keys(service, without) == {"loss", "val_loss", "lr"}
