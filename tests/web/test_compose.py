"""The Job Composer, by people with a browser: the form, the text beside it, files, the dry run and the launch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from diamond.core.states import TaskState
from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

pytestmark = pytest.mark.usefixtures("service")
Visit = Callable[..., Visitor]
REFUSED = ("status of 422", "status of 413", "status of 409")  # what the browser says of a page that shows errors
SHOTS = Path(os.environ["DIAMOND_SHOTS"]) if os.environ.get("DIAMOND_SHOTS") else None


def shoot(visitor: Visitor, name: str) -> None:
    if SHOTS is not None:
        visitor.shoot(SHOTS / f"{name}.png")


def value(visitor: Visitor, label: str) -> str:
    found: str = visitor.page.get_by_label(label, exact=True).input_value()
    return found


def text_of(visitor: Visitor) -> str:
    return value(visitor, "YAML")


def launched(visitor: Visitor, service: Service) -> Any:
    """The task whose page the browser has been led to, once it has ended."""
    visitor.page.wait_for_url(re.compile(r"/tasks/tsk_\w+$"))
    task_id = visitor.page.url.rsplit("/", 1)[1]
    with service.client() as client:
        eventually(lambda: client.tasks.get(task_id).state.is_final, within_s=60)
        return client.tasks.get(task_id)


def test_a_command_is_composed_tried_and_launched(visit: Visit, service: Service) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Task_name="hello <b>you</b>", Command="echo composed $GREETING\n", Variables="GREETING=hej")
    page.get_by_label("Endpoint").select_option("local")
    visitor.fill(Walltime="10m")
    page.get_by_text("Form and YAML are in step.").wait_for()
    assert "GREETING: hej" in text_of(visitor)
    assert "infra: local" in text_of(visitor)
    visitor.press("Dry run")
    plan = page.get_by_role("region", name="Dry run")
    plan.wait_for()
    assert "local" in plan.inner_text()
    assert "at most 0.17 node-hours" in plan.inner_text().lower()
    plan.get_by_text("The script, and what it runs").click()
    assert "echo composed" in page.get_by_role("region", name="The file run.sh").inner_text()
    visitor.check_accessible()
    visitor.check_width()
    shoot(visitor, "compose-plan")
    visitor.press("Launch")
    task = launched(visitor, service)
    assert (task.state, task.name) == (TaskState.SUCCEEDED, "hello <b>you</b>")
    assert task.spec.slurm.time == "00:10:00"


def test_both_sides_follow_each_other(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/compose")
    visitor.fill(YAML="name: from-text\nresources: {cpus: 2, accelerators: H100:4}\nnum_nodes: 2\n"
                 "slurm: {constraint: fast}\nrun: echo hi\n")  # fmt: skip
    page.get_by_text("Form and YAML are in step.").wait_for()
    assert value(visitor, "Task name") == "from-text"
    assert (value(visitor, "GPUs per node"), value(visitor, "Number of nodes")) == ("4", "2")
    assert value(visitor, "Task type") == "distributed"
    visitor.fill(Task_name="renamed")
    expect(page.get_by_label("YAML", exact=True)).to_have_value(re.compile("renamed"))
    assert "constraint: fast" in text_of(visitor), "what the form does not know stays"
    visitor.fill(YAML="name: x\nnum_nodes: many\nrun: echo\n")
    page.get_by_text("Must be a whole number").first.wait_for()
    visitor.fill(YAML="name: x\n  broken: [\n")
    alert = page.locator("#yaml-error")
    alert.get_by_text(re.compile("line 2")).wait_for()
    assert value(visitor, "Task name") == "x", "a text that cannot be read changes nothing in the form"


WRONG = {
    "Number_of_nodes": "two", "GPUs_per_node": "-1", "CPUs_per_node": "lots", "Memory_per_node": "32 bananas",
    "Walltime": "tomorrow", "Retries": "many", "Variables": "noequals", "Task_name": "n" * 300,
}  # fmt: skip


@pytest.mark.parametrize("scripts", [True, False])
def test_every_mistake_is_shown_at_once_and_can_be_seen(visit: Visit, scripts: bool) -> None:
    visitor = visit(scripts=scripts, width=400 if scripts else 1280)
    visitor.allowed += REFUSED
    page = visitor.page
    page.goto("/compose")
    visitor.press("Launch")
    page.get_by_text("One field needs a correction: Command.").wait_for()
    if scripts:
        expect(page.get_by_label("Command", exact=True)).to_be_focused()
        expect(page.locator("#run-error")).to_be_in_viewport()
    visitor.fill(**WRONG)
    if scripts:
        page.get_by_text("The YAML waits until Variables are right.").wait_for()
        assert page.get_by_text("are in step").count() == 0
    visitor.press("Launch")
    page.get_by_text(f"{len(WRONG) + 1} fields need a correction: Task name, Number of nodes,").wait_for()
    for label in (*WRONG, "Command"):
        field = page.get_by_label(label.replace("_", " "), exact=True)
        assert field.get_attribute("aria-invalid") == "true", label
        about = field.get_attribute("aria-describedby")
        assert page.locator(f"#{about.split()[0]}").inner_text(), label
    assert value(visitor, "Task name") == "n" * 300, "nothing is cut off in silence"
    visitor.check_width()
    if not scripts:
        return
    visitor.check_accessible()
    visitor.fill(**dict.fromkeys(WRONG, "") | {"Command": "true", "Number_of_nodes": "20"})
    page.get_by_text("Form and YAML are in step.").wait_for()
    assert page.get_by_text("need a correction").count() == 0, "it went with the last mistake"
    visitor.press("Dry run")
    page.get_by_text("One field needs a correction: Number of nodes.").wait_for()
    expect(page.get_by_label("Number of nodes")).to_be_focused()
    box, bar = (page.locator(each).bounding_box() for each in ("#num_nodes-error", ".go"))
    assert box["y"] > 0 and box["y"] + box["height"] < bar["y"], "nothing covers what is wrong"


def test_without_scripts_everything_works(visit: Visit, service: Service, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("forty-two\n")
    visitor = visit(scripts=False)
    visitor.allowed += REFUSED
    page = visitor.page
    page.goto("/compose")
    page.get_by_label("Endpoint").select_option("local")
    visitor.press("Update choices")
    assert page.get_by_label("Endpoint").input_value() == "local"
    visitor.fill(Task_name="plain", Command="cat input/data.txt")
    page.get_by_label("Files to upload").set_input_files(tmp_path / "data.txt")
    visitor.fill(Into_the_folder="input")
    visitor.press("Upload, or take out")
    page.get_by_role("cell", name="input/data.txt", exact=True).wait_for()
    assert "workdir: bundle:sha256:" in text_of(visitor)
    visitor.fill(Number_of_nodes="lots")
    visitor.press("Dry run")
    page.get_by_text("Must be a whole number").wait_for()
    assert value(visitor, "Number of nodes") == "lots"
    assert page.get_by_label("Number of nodes").get_attribute("aria-invalid") == "true"
    visitor.fill(Number_of_nodes="1")
    visitor.press("Form → YAML")
    assert "name: plain" in text_of(visitor)
    visitor.fill(YAML=text_of(visitor).replace("plain", "edited"))
    visitor.press("YAML → form")
    assert value(visitor, "Task name") == "edited"
    shoot(visitor, "compose-noscript")
    visitor.press("Launch")
    task = launched(visitor, service)
    assert task.state is TaskState.SUCCEEDED, task.detail
    page.goto(f"/compose?from={task.id}")
    assert value(visitor, "Command") == "cat input/data.txt"
    page.get_by_label("Take out input/data.txt").check()
    visitor.press("Upload, or take out")
    assert "workdir" not in text_of(visitor)


def test_both_sides_changed_are_not_guessed_about(visit: Visit) -> None:
    visitor = visit(scripts=False)
    visitor.allowed += REFUSED
    visitor.page.goto("/compose")
    visitor.fill(Command="echo one", Task_name="of-the-form", YAML="run: echo two\nname: of-the-text\n")
    visitor.press("Dry run")
    visitor.page.get_by_text("were both changed").wait_for()
    assert value(visitor, "Task name") == "of-the-form"
    assert "of-the-text" in text_of(visitor)
    visitor.press("YAML → form")
    assert value(visitor, "Command") == "echo two"


def test_what_was_typed_survives(visit: Visit) -> None:
    """F5, going away and coming back, and a second tab that has its own."""
    visitor = visit()
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Task_name="kept", Command="echo kept")
    page.get_by_text("Form and YAML are in step.").wait_for()
    page.reload()
    page.get_by_text("What you had typed here is back.").wait_for()
    assert value(visitor, "Task name") == "kept"
    page.goto("/templates")
    page.go_back()
    expect(page.get_by_label("Task name", exact=True)).to_have_value("kept")
    other = visitor.new_tab()
    other.goto("/compose")
    assert other.get_by_label("Task name", exact=True).input_value() == ""
    page.goto("/compose")
    page.get_by_role("link", name="Start afresh instead").click()
    expect(page.get_by_label("Task name", exact=True)).to_have_value("")


def test_tab_indents_and_escape_leaves(visit: Visit) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/compose")
    command = page.get_by_label("Command", exact=True)
    command.fill("if true\n")
    command.press("End")
    command.press("Tab")
    command.press_sequentially("x")
    assert command.input_value() == "if true\n    x"
    command.press("Shift+Tab")
    assert command.input_value() == "if true\nx"
    command.press("Escape")
    command.press("Tab")
    assert page.evaluate("document.activeElement.id") == "setup"


def test_too_much_is_refused_with_the_number(visit: Visit, tmp_path: Path) -> None:
    large = tmp_path / "large.bin"
    large.write_bytes(b"x" * (33 * 1024 * 1024))
    visitor = visit(scripts=False)
    visitor.allowed += REFUSED
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Task_name="not lost", Command="true")
    page.get_by_label("Files to upload").set_input_files(large)
    visitor.press("Upload, or take out")
    page.get_by_text(str(33 * 1024 * 1024)).wait_for()
    assert value(visitor, "Task name") == "not lost"
    scripted = visit()
    scripted.page.goto("/compose")
    scripted.page.get_by_label("Files to upload").set_input_files(large)
    scripted.page.get_by_text(str(33 * 1024 * 1024)).wait_for()


SBATCH = """#!/bin/bash
#SBATCH --job-name=old-one
#SBATCH --nodes=1
#SBATCH --time=00:20:00
#SBATCH --mail-type=END
#SBATCH --output=out-%j.txt
echo from slurm
"""


@pytest.mark.parametrize("scripts", [True, False])
def test_a_batch_script_is_imported(visit: Visit, tmp_path: Path, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed += REFUSED
    page = visitor.page
    page.goto("/compose")
    page.get_by_role("link", name="Import an sbatch script").click()
    visitor.press("Import")
    page.locator("#script-error").get_by_text(re.compile(r"\w")).wait_for()
    visitor.check_accessible() if scripts else None
    visitor.fill(The_script=SBATCH)
    visitor.press("Import")
    page.get_by_role("heading", name="To check, from the script").wait_for()
    assert value(visitor, "Task name") == "old-one"
    assert value(visitor, "Walltime") == "00:20:00"
    assert "echo from slurm" in value(visitor, "Command")
    shoot(visitor, f"compose-imported-{scripts}")
    file = tmp_path / "night-run.sbatch"
    file.write_text(SBATCH.replace("#SBATCH --job-name=old-one\n", ""))
    page.goto("/compose/import")
    page.get_by_label("The script").fill("")
    page.get_by_label("Or a file").set_input_files(file)
    visitor.press("Import")
    page.get_by_role("heading", name="To check, from the script").wait_for()
    assert value(visitor, "Task name") == "night-run"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280, 1600])
def test_it_fits_and_everybody_can_use_it(visit: Visit, dark: bool, width: int) -> None:
    visitor = visit(dark=dark, width=width)
    for number, path in enumerate(("/compose", "/templates", "/templates/fine-tune", "/compose/import")):
        visitor.page.goto(path)
        visitor.check_width()
        visitor.check_accessible()
        shoot(visitor, f"page{number}-{width}-{'dark' if dark else 'light'}")


def test_what_no_browser_sends_is_refused(visit: Visit) -> None:
    """Names that lead elsewhere, more files than allowed, no token of the page, and nobody signed in."""
    visitor = visit()
    visitor.page.goto("/compose")
    csrf = str(visitor.page.locator("#composer input[name=csrf]").get_attribute("value"))

    def send(csrf: str, *names: str, **fields: str) -> Any:
        mark = "a-boundary-of-ours"
        parts = [f'--{mark}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{text}\r\n'
                 for key, text in {"csrf": csrf, "do": "files", "name": "kept", **fields}.items()]  # fmt: skip
        parts += [f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n'
                  f"Content-Type: text/plain\r\n\r\nx\r\n" for name in names]  # fmt: skip
        headers = {"Content-Type": f"multipart/form-data; boundary={mark}"}
        return visitor.page.request.post("/compose", data="".join(parts) + f"--{mark}--\r\n", headers=headers)

    good = send(csrf, "a.txt", "b.txt")
    assert good.status == 200
    assert "2 files uploaded." in good.text()
    for name in ("../up.txt", "/etc/passwd", "~/x"):
        refused = send(csrf, name)
        assert refused.status == 422, name
        assert 'value="kept"' in refused.text(), "what was typed is still there"
    assert send(csrf, "a.txt", folder="../..").status == 422
    many = send(csrf, *(f"{number}.txt" for number in range(201)))
    assert many.status == 413
    assert "201 files" in many.text() or "more than 200 files" in many.text()
    assert send("wrong", "a.txt").status == 403
    assert send(csrf, "a.txt", workdir="bundle:sha256:" + "0" * 64).status == 422
    visitor.context.clear_cookies()
    assert send(csrf, "a.txt").status == 401


def test_a_page_of_a_stopped_server_loses_nothing(visit: Visit, service: Service) -> None:
    visitor = visit()
    visitor.allowed += ["ERR_CONNECTION", "ERR_INCOMPLETE", "ERR_EMPTY", "status of 503"]
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Command="echo before")
    page.get_by_text("Form and YAML are in step.").wait_for()
    service.kill(service.server)
    visitor.fill(Task_name="typed meanwhile")
    page.get_by_text("The server does not answer.").wait_for()
    service.start_server()
    visitor.fill(Command="echo after")
    page.get_by_text("Form and YAML are in step.").wait_for()
    expect(page.get_by_label("YAML", exact=True)).to_have_value(re.compile("typed meanwhile"))
