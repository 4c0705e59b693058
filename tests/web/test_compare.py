"""Charts, the curves of a task, and Compare: real runs that log real metrics, looked at in a real browser."""

from __future__ import annotations

import csv
import io
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from diamond.core.tasks import Task
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
HOSTILE = "<img src=x onerror=alert(1)> \u05d0\u05d1\u05d2"
# Writes what diamond.train.log writes; a file says when to go on, so that a test sees a curve grow.
_TRAIN = """
import json, math, os, time
lr, steps = float(os.environ["LR"]), int(os.environ.get("STEPS", "200"))
with open(os.environ["DIAMOND_METRICS_FILE"], "a", buffering=1 << 16) as out:
    for step in range(steps):
        loss = math.exp(-lr * step * 200 / steps / 40) + 0.02 * math.sin(step) * lr + 0.05
        record = {"step": step, "t": time.time(), "train/loss": loss, "val/accuracy": 1 - loss / 2}
        if os.environ.get("HOLES") and 50 <= step < 60:
            record["train/loss"] = "NaN"
        if step == steps // 2 and os.environ.get("GATE"):
            out.flush()
            while not os.path.exists(os.environ["GATE"]):
                time.sleep(0.1)
        out.write(json.dumps(record) + "\\n")
time.sleep(float(os.environ.get("REST", "0")))
"""


def train(service: Service, name: str, lr: float = 1.0, **envs: str) -> Task:
    spec = {"name": name, "run": f"python3 - <<'EOF'{_TRAIN}EOF", "envs": {"LR": str(lr), **envs}}
    with service.client() as client:
        return client.tasks.create(spec)


def finished(service: Service, *tasks: Task) -> None:
    with service.client() as client:

        def over() -> bool:
            return all(client.tasks.get(task.id).state.is_final for task in tasks)

        eventually(over, within_s=120, what="the runs end")


class Runs(NamedTuple):
    slow: Task
    fast: Task
    hostile: Task

    @property
    def address(self) -> str:
        return "/compare?" + "&".join(f"task={task.id}" for task in self)


@pytest.fixture(scope="module")
def runs(service: Service) -> Runs:
    made = Runs(
        train(service, "slow", 0.5),
        train(service, "fast", 2.0, HOLES="1", REST="8"),
        train(service, HOSTILE, 1.0, NOTE="=1+1"),
    )
    finished(service, *made)
    return made


def begins(text: str) -> re.Pattern[str]:
    """For names of roles. A stroke ends a pattern there, so a dot stands for it."""
    return re.compile("^" + re.escape(text).replace("/", "."))


def chart(visitor: Visitor, title: str) -> Any:
    """A chart that has its numbers; they come when it can be seen."""
    found = visitor.page.get_by_role("img", name=begins(f"Chart of {title}."))
    found.scroll_into_view_if_needed()
    eventually(lambda: "No numbers" not in words(found), within_s=30, what=f"{title} is drawn")
    return found


def words(image: Any) -> str:
    return str(image.get_attribute("aria-label"))


def test_runs_are_chosen_and_compared(visit: Visit, runs: Runs) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/compare")
    visitor.check_accessible()
    page.get_by_label("Find a run").fill("SLOW")
    page.get_by_role("button", name="Find").click()
    page.wait_for_url("**q=SLOW*")
    assert page.get_by_label("Compare fast").count() == 0
    page.get_by_label("Compare slow").check()
    page.get_by_label("Find a run").fill("fas")
    page.get_by_role("button", name="Find").click()
    assert page.get_by_label("Compare slow").is_checked(), "what was ticked stays, whatever is looked for next"
    page.get_by_label("Compare fast").check()
    page.get_by_role("button", name="Compare", exact=True).click()
    table = page.get_by_role("table", name="What differs")
    assert "0.5" in table.get_by_role("row", name=re.compile("^LR")).inner_text()
    assert table.get_by_role("row", name=begins("train/loss")).count() == 1
    assert table.get_by_role("row", name=re.compile("^run")).count() == 0
    page.get_by_text("The same in all").click()
    same = page.get_by_role("table", name="What is the same")
    assert "metrics" not in same.inner_text() and "math.exp" in same.inner_text()
    image = chart(visitor, "train/loss")
    assert re.search(r"slow: steps 0 to 199, lowest [\d.]+, .*fast: steps 0 to 199", words(image))
    assert "not a number in one place" in words(image)
    visitor.check_accessible()
    page.get_by_role("link", name="Leave out fast").click()
    page.wait_for_url(lambda url: runs.fast.id not in url)
    assert page.get_by_role("heading", name="What differs").count() == 0


def test_curves_are_read_zoomed_smoothed_and_switched(visit: Visit, runs: Runs) -> None:
    visitor = visit()
    page = visitor.page
    page.goto(runs.address)
    image = chart(visitor, "train/loss")
    image.scroll_into_view_if_needed()
    box = image.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 80)
    readout = page.locator("figure").filter(has=image).locator(".readout")
    assert re.search(r"step \d+\s+slow\s*[\d.]+\s+fast", readout.inner_text()), readout.inner_text()
    assert HOSTILE in readout.inner_text() and page.locator("img").count() == 0

    def labels() -> list[str]:
        return [str(each) for each in image.locator("text.x").all_text_contents()]

    whole = labels()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 + 60, box["y"] + 90, steps=4)
    page.mouse.up()
    figure = page.locator("figure").filter(has=image)
    figure.get_by_role("button", name="Show everything").wait_for()
    assert labels() != whole and int(labels()[0]) > 50
    image.dblclick()
    assert labels() == whole

    image.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    said = figure.get_by_role("status")
    assert said.inner_text().startswith("step 1: slow ")
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert labels() != whole
    page.keyboard.press("0")
    assert labels() == whole
    figure.get_by_role("button", name="Zoom in").click()
    assert labels() != whole
    figure.get_by_role("button", name="Zoom out").click()
    assert labels() == whole

    ticks = image.locator("text.y").all_text_contents()
    figure.get_by_role("button", name="Logarithmic y axis").click()
    assert image.locator("text.y").all_text_contents() != ticks
    assert image.locator("path.raw").count() == 0
    page.get_by_label("Smoothing").fill("0.9")
    assert image.locator("path.raw").count() == 3 and "smooth=0.9" in page.url
    legend = page.get_by_role("list", name="Runs shown")
    legend.get_by_role("button", name="fast").click()
    assert image.locator("g.curve").count() == 2 and "fast" not in words(image)
    page.get_by_label("Along x").select_option("time")
    eventually(lambda: "time 0" in words(image) or " s to " in words(image), within_s=20, what="time along x")
    visitor.check_accessible()
    page.reload()
    assert page.get_by_label("Along x").input_value() == "time", "the address keeps how it is looked at"
    page.get_by_text("Choose among").click()
    page.get_by_label("Find", exact=True).fill("accuracy")
    page.get_by_role("checkbox", name="val/accuracy").uncheck()
    assert page.get_by_role("img", name=begins("Chart of val/accuracy")).count() == 0


def test_a_curve_moves_while_its_task_runs(visit: Visit, service: Service, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    task = train(service, "moving", 1.0, GATE=str(gate), REST="5")
    visitor = visit()
    visitor.page.goto(f"/tasks/{task.id}/curves")
    image = chart(visitor, "train/loss")
    assert "steps 0 to 99," in words(image)
    asked = len([each for each in visitor.asked if "curve?" in each])
    gate.touch()
    eventually(lambda: "steps 0 to 199," in words(image), within_s=30, what="the curve grows without a reload")
    more = [each for each in visitor.asked if "curve?" in each][asked:]
    assert any("x_min=99" in each for each in more), "only what is new is asked for"
    memory = chart(visitor, "Memory")
    memory.scroll_into_view_if_needed()
    assert "MiB" in words(memory)
    finished(service, task)


def test_a_server_that_restarts_is_waited_for(visit: Visit, service: Service, tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    task = train(service, "patient", 1.0, GATE=str(gate), REST="4")
    visitor = visit()
    visitor.allowed = ["ERR_", "Failed to load resource"]
    visitor.page.goto(f"/tasks/{task.id}/curves")
    image = chart(visitor, "train/loss")
    service.kill(service.server)
    gate.touch()
    time.sleep(2)
    assert "steps 0 to 99," in words(image), "what was known stays"
    service.start_server()
    eventually(lambda: "steps 0 to 199," in words(image), within_s=60, what="the rest comes by itself")
    finished(service, task)


# Each attempt logs from where it says; the first ends as it is told to.
_TWICE = """
from=$(( DIAMOND_ATTEMPT == 1 ? 0 : FROM ))
for step in $(seq $from $((from + 10))); do
  echo "{\\"step\\": $step, \\"t\\": $(date +%s.%N), \\"loss\\": $DIAMOND_ATTEMPT}" >> $DIAMOND_METRICS_FILE
done
[ $DIAMOND_ATTEMPT != 1 ] || $ENDING
"""


def twice(service: Service, ending: str, reason: str, start: int) -> Task:
    spec = {
        "name": f"twice, {ending}", "run": _TWICE, "envs": {"ENDING": ending, "FROM": str(start)},
        "slurm": {"time": "3s"}, "retry": {"max_retries": 1, "on": [reason], "backoff": 1},
    }  # fmt: skip
    with service.client() as client:
        task = client.tasks.create(spec)
    finished(service, task)
    return task


def test_jobs_that_go_on_are_one_curve_and_retries_are_not(visit: Visit, service: Service) -> None:
    visitor = visit()
    resumed = twice(service, "sleep 60", "TIME_LIMIT", start=8)
    visitor.page.goto(f"/tasks/{resumed.id}/curves")
    assert "steps 0 to 18, lowest 1, highest 2, last 2" in words(chart(visitor, "loss"))
    assert not visitor.page.get_by_label("Attempt").is_visible()
    retried = twice(service, "exit 3", "EXIT_NONZERO", start=100)
    visitor.page.goto(f"/tasks/{retried.id}/curves")
    image = chart(visitor, "loss")
    assert "steps 100 to 110, lowest 2" in words(image)
    visitor.page.get_by_label("Attempt").select_option("1")
    eventually(lambda: "steps 0 to 10, lowest 1" in words(image), within_s=20, what="the first attempt is shown")


def test_what_gpus_did_is_one_chart_with_a_key(visit: Visit, service: Service) -> None:
    # As the agent writes it for a job that has GPUs, which the machine of a test may lack.
    line = '{"t": %d, "sys/gpu0_percent": 90, "sys/gpu1_percent": 35, "sys/gpu0_mem_bytes": 1073741824}'
    lines = "\n".join(line % (1_800_000_000 + 2 * number) for number in range(5))
    with service.client() as client:
        task = client.tasks.create({"name": "gpus", "run": f"cat >> $DIAMOND_RUN_DIR/util.jsonl <<'EOF'\n{lines}\nEOF"})
    finished(service, task)
    visitor = visit()
    visitor.page.goto(f"/tasks/{task.id}/curves")
    image = chart(visitor, "GPU")
    assert "GPU 0: time" in words(image) and "lowest 35 %" in words(image)
    assert "last 1 GiB" in words(chart(visitor, "GPU memory"))
    keys = visitor.page.get_by_role("list", name="Curves of GPU", exact=True)
    keys.get_by_role("button", name="GPU 0").click()
    assert "GPU 0" not in words(image) and "GPU 1" in words(image)


def test_what_several_nodes_did_is_a_line_for_each(visit: Visit, service: Service) -> None:
    # As the agent writes it for a job on two nodes of a cluster.
    line = (
        '{"t": %d, "sys/node%d/cpu_percent": %d, "sys/node%d/gpu_percent": 50, "sys/node%d/gpu_mem_bytes": 1073741824}'
    )
    lines = "\n".join(
        line % (1_800_000_000 + number, node, 100 * (node + 1), node, node) for number in range(5) for node in (0, 1)
    )
    with service.client() as client:
        task = client.tasks.create(
            {"name": "nodes", "run": f"cat >> $DIAMOND_RUN_DIR/util.jsonl <<'EOF'\n{lines}\nEOF"}
        )
    finished(service, task)
    visitor = visit()
    visitor.page.goto(f"/tasks/{task.id}/curves")
    image = chart(visitor, "CPU (100 % is one core)")
    assert "Node 0: time" in words(image) and "Node 1: time" in words(image) and "last 200 %" in words(image)
    assert "Node 1: time" in words(chart(visitor, "GPU"))
    assert "last 1 GiB" in words(chart(visitor, "GPU memory"))
    plain = visit(scripts=False)
    plain.page.goto(f"/tasks/{task.id}/curves")
    assert plain.page.get_by_text("CPU (100 % is one core), node 1").is_visible()


def test_a_task_without_metrics_says_how_to_log_them(visit: Visit, service: Service) -> None:
    with service.client() as client:
        task = client.tasks.create({"name": "silent", "run": "true"})
    finished(service, task)
    visitor = visit()
    visitor.page.goto(f"/tasks/{task.id}/curves")
    visitor.page.get_by_text("No metrics yet").wait_for()
    assert "diamond.train.log" in visitor.page.get_by_text("No metrics yet").inner_text()
    visitor.check_accessible()
    plain = visit(scripts=False)
    plain.page.goto(f"/tasks/{task.id}/curves")
    assert plain.page.get_by_text("Nothing has been measured yet").is_visible()


def test_zooming_into_a_long_curve_brings_finer_points(visit: Visit, service: Service) -> None:
    task = train(service, "long", 1.0, STEPS="60000")
    finished(service, task)
    visitor = visit()
    visitor.page.goto(f"/tasks/{task.id}/curves")
    image = chart(visitor, "train/loss")
    assert "steps 149 to 59999," in words(image), "each point stands for 150"
    assert image.locator("path.band").count() == 1
    figure = visitor.page.locator("figure").filter(has=image)
    for _ in range(6):
        figure.get_by_role("button", name="Zoom in").click()
    eventually(lambda: image.locator("path.band").count() == 0, within_s=20, what="every sample is drawn")
    assert any("x_min=" in each and "max_points=2000" in each for each in visitor.asked)
    figure.get_by_role("button", name="Show everything").click()
    assert image.locator("path.band").count() == 1


def test_those_ticked_in_the_task_manager_are_compared(visit: Visit, runs: Runs) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/tasks")
    for task in (runs.slow, runs.fast):
        page.get_by_label(f"Choose {task.name}, {task.id}").check()
    page.get_by_role("form", name="With the ticked tasks").get_by_role("button", name="Compare").click()
    page.wait_for_url("**/compare?task=*")
    chosen = page.get_by_role("list", name="Runs compared")
    assert {"slow", "fast"} == {each.inner_text() for each in chosen.locator("bdi").all()}
    page.goto(f"/tasks/{runs.slow.id}")
    assert "steps 0 to 199" in words(chart(visitor, "train/loss")), "the page of a task has its curves"
    page.get_by_role("link", name="Compare", exact=True).last.click()
    page.wait_for_url(f"**/compare?task={runs.slow.id}")


def test_without_scripts_there_are_tables(visit: Visit, runs: Runs) -> None:
    visitor = visit(scripts=False)
    page = visitor.page
    page.goto(f"/tasks/{runs.slow.id}/curves")
    table = page.get_by_role("table", name="Newest values")
    assert "0.12" in table.get_by_role("row", name=begins("train/loss")).inner_text()
    page.goto("/compare")
    page.get_by_label("Compare slow").check()
    page.get_by_label("Compare fast").check()
    page.get_by_role("button", name="Compare", exact=True).click()
    assert page.get_by_role("table", name="What differs").get_by_role("row", name=re.compile("^LR")).count() == 1


def test_the_table_is_exported_for_programs_and_spreadsheets(visit: Visit, runs: Runs) -> None:
    visitor = visit()
    visitor.page.goto(runs.address)
    with visitor.page.expect_download() as started:
        visitor.page.get_by_role("link", name="Export as CSV").click()
    assert started.value.suggested_filename == "compare.csv"
    text = started.value.path().read_text()
    slow, fast, hostile = csv.DictReader(io.StringIO(text))
    assert (slow["name"], hostile["name"]) == ("slow", HOSTILE)
    assert float(slow["metric train/loss"]) > float(fast["metric train/loss"]) > 0
    assert hostile["envs.NOTE"] == "'=1+1" and slow["envs.NOTE"] == "" and fast["envs.LR"] == "2.0"


def test_what_is_not_there_is_said(visit: Visit, runs: Runs) -> None:
    visitor = visit()
    visitor.allowed = ["404"]
    page = visitor.page
    assert page.goto(f"/compare?task=tsk_none&task={runs.slow.id}&task=<b>x</b>").status == 200
    assert "There is no task tsk_none, <b>x</b>" in page.get_by_role("alert").inner_text()
    assert page.get_by_role("link", name="slow").count() >= 1
    assert page.goto("/compare?task=tsk_none").status == 404
    assert page.goto("/tasks/tsk_none/curves").status == 404
    page.goto("/compare?" + "&".join(f"task=tsk_{number}" for number in range(13)))
    assert "12 can be compared at once" in page.get_by_role("alert").inner_text()
    page.goto("/compare?q=nothing-is-called-this")
    assert page.get_by_text("No run has").count() == 1
    answer = page.request.get("/compare.csv?task=tsk_none")
    assert answer.status == 404


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_every_width_in_light_and_dark(visit: Visit, runs: Runs, dark: bool, width: int) -> None:
    visitor = visit(dark=dark, width=width)
    for address in ("/compare", runs.address, f"/tasks/{runs.fast.id}/curves"):
        visitor.page.goto(address)
        if address != "/compare":
            chart(visitor, "train/loss")
        visitor.check_width()
        visitor.check_accessible()


def test_ticks_are_round_numbers(visit: Visit, runs: Runs) -> None:
    visitor = visit()
    page = visitor.page
    page.goto(runs.address)
    address = page.locator("link[rel=modulepreload][href*=scale]").get_attribute("href")

    def told(expression: str) -> Any:
        return page.evaluate(f"async (url) => {{ const s = await import(url); return {expression}; }}", address)

    assert told("s.linearTicks(0, 1, 5)") == [0, 0.2, 0.4, pytest.approx(0.6), 0.8, 1]
    assert told("s.linearTicks(-3, 7, 4)") == [0, 5]
    assert told("s.logTicks(0.001, 1000, 6)") == [0.001, 0.01, 0.1, 1, 10, 100, 1000]
    assert told("s.logTicks(2.1, 3.9, 5)")[0] > 2
    assert told("s.spanTicks(0, 3600, 4)") == [0, 900, 1800, 2700, 3600]
    assert told("s.byteTicks(0, 3 * 1024 ** 3, 3)") == [0, 1024**3, 2 * 1024**3, 3 * 1024**3]
    assert told("s.linearTicks(5, 5, 4)") == [5]
    assert told("s.linearTicks(-1e308, 1e308, 4)") == [-1e308], "an overflow is no endless loop"
    shown = told("[0, 0.03125, 1234.5678, 123456, 1.5e-7, -2e12].map((each) => s.shownNumber(each))")
    assert shown == ["0", "0.03125", "1235", "123\u202f456", "1.5e-7", "-2e12"]
    assert told("[0.5, 45, 61, 7200, 90061].map(s.shownSpan)") == ["0.5 s", "45 s", "1 min 1 s", "2 h", "1 d 1 h"]
    assert told("[512, 1536, 3 * 1024 ** 3].map((each) => s.shownBytes(each))") == ["512 B", "1.5 KiB", "3 GiB"]
    assert told("s.smoothed([1, 1, 1, NaN, 1], 0.9).filter(Number.isFinite)") == pytest.approx([1, 1, 1, 1])
    assert told("[0, 2.4, 2.6, 99].map((x) => s.nearest([1, 2, 3], x))") == [0, 1, 2, 2]
