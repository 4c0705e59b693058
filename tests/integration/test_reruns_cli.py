"""`diamond rerun` and `diamond rm`: by the real command against a real service, which then collects what was left."""

from __future__ import annotations

import json
import os
import pty
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import Conflict, NotFound
from diamond.core.states import TaskState
from testing.service import Service
from testing.waiting import eventually


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with Service(tmp_path / "home") as running:
        yield running


def run(service: Service, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["diamond", *words], env=service.env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def answer(service: Service, *words: str, code: int = 0) -> Any:
    return json.loads(run(service, *words, "--json", code=code).stdout)


def finish(service: Service, task_id: str) -> None:
    with service.client() as client:
        assert client.tasks.wait(task_id, timeout_s=60).state is TaskState.SUCCEEDED
        (place,) = client.endpoints.list()
        assert place.proven_at is not None, "something has run there: what the agent tells of it is plausible"


def typed(service: Service, words: list[str], text: str) -> tuple[int, str]:
    """What a command says, and its exit code, when a person at a terminal types this."""
    main, side = pty.openpty()
    with subprocess.Popen(
        ["diamond", *words], env=service.env, stdin=side, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        os.close(side)
        os.write(main, text.encode())
        said, _ = process.communicate(timeout=120)
    os.close(main)
    return process.returncode, said.decode()


def files(service: Service, folder: str) -> list[Path]:
    return [path for path in (service.home.server / folder).rglob("*") if path.is_file() and path.suffix != ".lock"]


def make_old(service: Service) -> None:
    """As if all that was sent had been sent a month ago."""
    then = time.time() - 30 * 86_400
    for path in files(service, "blobs"):
        os.utime(path, (then, then))
    with sqlite3.connect(service.home.server / "diamond.db") as database:
        database.execute("UPDATE holdings SET created_at = created_at - ?", (30 * 86_400,))
    database.close()


def test_run_again_and_removed_with_all_that_was_theirs(service: Service, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data.txt").write_text("forty-two\n")
    task_file = tmp_path / "task.yaml"
    task_file.write_text(
        "name: tour\nworkdir: work\nrun: cat data.txt; cp data.txt out.txt; date +%N >> out.txt\noutputs: [out.txt]\n"
    )
    assert "forty-two" in run(service, "launch", str(task_file)).stdout
    first = answer(service, "show", "tour")["id"]

    said = run(service, "rerun", "tour", "--name", "again").stdout
    assert said.startswith("launched again (tsk_") and f"as {first} was" in said
    again = answer(service, "show", "again")["id"]
    finish(service, again)
    assert "forty-two" in run(service, "logs", again).stdout

    # One wrong word holds nothing up.
    mixed = answer(service, "rerun", first, "tsk_nothing", "nobody", code=1)
    assert [task["name"] for task in mixed["tasks"]] == ["tour"]
    assert ["tsk_nothing" in mixed["errors"][0]["message"], "nobody" in mixed["errors"][1]["message"]] == [True, True]
    third = mixed["tasks"][0]["id"]
    finish(service, third)

    # Nobody is there to be asked.
    assert "-y removes" in run(service, "rm", first, code=1).stderr
    assert answer(service, "rm", first, code=2)["error"]["field"] == "--yes"
    code, text = typed(service, ["rm", first, again], "n\n")
    assert code == 1 and text.count("?") == 1 and f"tour ({first}), again ({again})" in text
    assert {task["id"] for task in answer(service, "ps", "-a")["tasks"]} == {first, again, third}
    code, text = typed(service, ["rm", first, again, first], "y\n")
    assert code == 0 and text.count("removed ") == 2
    assert [task["id"] for task in answer(service, "ps", "-a")["tasks"]] == [third]

    # The third still needs the files: they stay, whatever their age. The outputs of the others go.
    assert len(files(service, "blobs")) == 5
    make_old(service)
    service.kill(service.server)
    service.start_server()
    eventually(lambda: len(files(service, "blobs")) == 3, what="file, list and output are kept")
    assert "forty-two" in run(service, "logs", third).stdout
    run(service, "outputs", third, "--to", str(tmp_path / "fetched"))
    assert (tmp_path / "fetched" / "out.txt").read_text().startswith("forty-two\n")

    gone = answer(service, "rm", third, "tsk_nothing", "-y", code=1)
    assert gone["removed"] == [{"id": third, "name": "tour"}] and "tsk_nothing" in gone["errors"][0]["message"]
    assert files(service, "streams") == [] and files(service, "series") == []
    make_old(service)
    service.kill(service.server)
    service.start_server()
    eventually(lambda: files(service, "blobs") == [], what="nothing is left")
    assert "forty-two" in run(service, "launch", str(task_file)).stdout, "and it can be sent again"


def test_the_client(service: Service, tmp_path: Path) -> None:
    with service.client() as client:
        sleeper = client.tasks.create({"name": "sleeper", "run": "sleep 600"})
        with pytest.raises(Conflict, match="only what has ended"):
            client.tasks.remove(sleeper.id)
        refused = answer(service, "rm", sleeper.id, "-y", code=1)
        assert refused["removed"] == [] and refused["errors"][0]["code"] == "conflict"
        client.tasks.cancel(sleeper.id)
        client.tasks.wait(sleeper.id, timeout_s=60)
        once = client.tasks.rerun(sleeper.id, name="twin", idempotency_key="one-key")
        assert client.tasks.rerun(sleeper.id, name="twin", idempotency_key="one-key").id == once.id
        assert (once.name, once.owner) == ("twin", sleeper.owner)
        client.tasks.cancel(once.id)
        assert client.tasks.wait(once.id, timeout_s=60).state is TaskState.CANCELLED
        client.tasks.remove(once.id)
        with pytest.raises(NotFound):
            client.tasks.get(once.id)
        with pytest.raises(NotFound):
            client.tasks.rerun(once.id)


def test_curves_say_where_they_have_gaps(service: Service) -> None:
    program = "import math\nfrom diamond import train\nfor step, loss in enumerate((1.0, math.nan, math.inf, 2.0)):\n"
    program += "    train.log(step=step, loss=loss)\n"
    with service.client() as client:
        task = client.tasks.create({"run": "python prog.py", "setup": f"cat > prog.py <<'E'\n{program}E\n"})
        assert client.tasks.wait(task.id, timeout_s=60).state is TaskState.SUCCEEDED
        curve = client.tasks.curve(task.id, "loss")
        assert [point.x for point in curve.points] == [0, 3]
        assert (curve.non_finite, curve.first_non_finite_x, curve.gaps) == (2, 1.0, ((1.0, 2.0),))
