"""The Image Builder with a real browser: six steps, drafts, mistakes, two windows, and builds on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually
from testing.web_images import packages_here, wait_for_builder

Visit = Callable[..., Visitor]
STEPS = ("Select Endpoint", "Base Image", "Dependencies", "Environment Variables", "Build Commands", "Review")
HOST = "The endpoint's own Python"
ENVIRONMENT = """\
name: climate
channels: [conda-forge, nodefaults]
dependencies:
  - python=3.12
  - hdf5
  - pip:
      - tinytool==1.2
variables:
  OMP_NUM_THREADS: 4
"""
MARKUP = "<img src=x onerror=alert(1)>\u202e"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with (
        packages_here(tmp_path_factory.mktemp("wheels")),
        Service(tmp_path_factory.mktemp("builder") / "home") as running,
    ):
        wait_for_builder(running)
        yield running


def begin(visitor: Visitor) -> Any:
    visitor.page.goto("/image-builder")
    visitor.press("New image")
    visitor.page.get_by_role("heading", name="1. Select Endpoint").wait_for()
    return visitor.page


def step(page: Any) -> str:
    """Which one the indicator says this is."""
    return str(page.get_by_role("navigation", name="Steps").locator("[aria-current=step]").inner_text())


def to_dependencies(visitor: Visitor, name: str) -> Any:
    page = begin(visitor)
    page.get_by_role("radio", name="local").check()
    visitor.press("Next")
    visitor.fill(Image_name=name)
    page.get_by_role("radio", name=HOST).check()
    visitor.press("Next")
    page.get_by_role("heading", name="3. Dependencies").wait_for()
    return page


def test_six_steps_to_an_image(visit: Visit) -> None:
    visitor = visit()
    page = begin(visitor)
    assert "Online" in page.content() and "Builds with venv" in page.content()
    indicator = page.get_by_role("navigation", name="Steps")
    assert [name for name in STEPS if name in indicator.inner_text()] == list(STEPS)
    page.get_by_role("radio", name="local").check()
    visitor.press("Next")
    assert "Base Image" in step(page)
    visitor.fill(Image_name="tools")
    page.get_by_role("radio", name=HOST).check()
    visitor.press("Next")
    page.get_by_text("Paste a requirements.txt").click()
    page.get_by_label("Contents of the file").fill("# mine\ntinytool==1.2  # small\n")
    visitor.press("Split into the fields")
    assert page.get_by_label("Python packages").input_value() == "tinytool==1.2"
    visitor.press("Next")
    visitor.fill(Environment_variables='GREETING=hello = "you"\nLINES="a\\nb"')
    visitor.press("Next")
    visitor.fill(Build_commands="echo built-once", Validation_command="python -c 'import tinytool'")
    visitor.press("Next")
    assert "Review" in step(page)
    assert page.get_by_role("region", name="Text of the definition").inner_text().count("tinytool==1.2") == 1
    assert "Not there yet" in page.content()
    visitor.press("Build the image")
    page.wait_for_url("**/log")
    # The page follows the build by itself: nobody reloads it.
    page.get_by_role("link", name="Look at the image").wait_for(timeout=120_000)
    log = page.get_by_role("region", name="Lines of the log")
    log.get_by_text("built-once").first.wait_for()
    for title in ("Base image", "Python packages", "Files and build commands", "Validation"):
        assert title in page.get_by_role("main").inner_text()
    page.get_by_role("link", name="Look at the image").click()
    assert page.get_by_role("heading", name="tools", level=1).is_visible()
    page.goto("/image-builder")
    assert "Submitted" in page.get_by_role("row", name=re.compile("tools")).inner_text()
    # F5 and back keep what is there.
    page.get_by_role("link", name="tools", exact=True).click()
    page.get_by_role("link", name="Environment Variables").click()
    assert (
        page.get_by_role("textbox", name="Environment variables").input_value()
        == 'GREETING=hello = "you"\nLINES="a\\nb"'
    )
    page.reload()
    assert page.get_by_role("textbox", name="Environment variables").input_value().startswith("GREETING=")


def test_without_scripts_and_already_there(visit: Visit, service: Service) -> None:
    """After the test above: the same recipe is not built again."""
    visitor = visit(scripts=False)
    page = begin(visitor)
    page.get_by_role("radio", name="local").check()
    visitor.press("Next")
    page.get_by_role("radio", name=HOST).check()
    visitor.press("Next")
    visitor.fill(Python_packages="tinytool==1.2")
    visitor.press("Next")
    visitor.fill(Environment_variables='GREETING=hello = "you"\nLINES="a\\nb"')
    visitor.press("Next")
    visitor.fill(Build_commands="echo built-once", Validation_command="python -c 'import tinytool'")
    visitor.press("Next")
    assert "It is there already" in page.content()
    visitor.press("Use it")
    assert "Nothing had to be built" in page.get_by_role("status").first.inner_text()
    # Remove the draft: asked once more.
    page.goto("/image-builder")
    before = page.get_by_role("row").count()
    page.get_by_role("row", name=re.compile("Unnamed image")).first.locator("summary").click()
    visitor.press("Yes, remove the draft Unnamed image")
    assert "The draft is removed" in page.content()
    assert page.get_by_role("row").count() == before - 1


def test_mistakes_stand_beside_their_fields(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed.append("422")
    page = begin(visitor)
    page.get_by_label("Time limit").fill("soon")
    visitor.press("Next")
    field = page.get_by_label("Time limit")
    assert field.get_attribute("aria-invalid") == "true" and field.input_value() == "soon"
    assert "is not a length of time" in page.locator("#time_limit-error").inner_text()
    # To another step all the same: what is wrong is kept, and the indicator says where.
    page.get_by_role("navigation", name="Steps").get_by_role("button", name="Base Image").click()
    assert "needs a correction" in page.get_by_role("navigation", name="Steps").inner_text()
    visitor.fill(Image_name=MARKUP)
    page.get_by_role("radio", name="Another one").check()
    visitor.press("Next")
    assert "is not an image name" in page.locator("#name-error").inner_text()
    assert page.get_by_label("Image name").input_value() == MARKUP
    visitor.fill(Image_name="fine")
    page.get_by_label("Address or path of the base").fill("docker://python:3.12-slim")
    visitor.press("Next")
    assert "Dependencies" in step(page)
    visitor.fill(Python_packages="not a package!!")
    visitor.press("Next")
    assert "write one package a line" in page.locator("#pip-error").inner_text().lower()
    assert "[" not in page.locator("#pip-error").inner_text(), "no advice for another place"
    visitor.fill(Python_packages="")
    visitor.fill(Python_packages="numpy\n--index-url https://example.org", System_packages="git; rm -rf /")
    visitor.press("Next")
    assert "is an option of pip" in page.locator("#pip-error").inner_text()
    assert "is not a package name" in page.locator("#system-error").inner_text()
    assert page.get_by_label("System packages").input_value() == "git; rm -rf /"
    visitor.fill(Python_packages="", System_packages="")
    visitor.press("Next")
    visitor.fill(Environment_variables=f"GOOD={MARKUP}\nno equals sign")
    visitor.press("Next")
    assert "Line 2" in page.locator("#envs-error").inner_text()
    assert page.get_by_role("textbox", name="Environment variables").input_value().startswith(f"GOOD={MARKUP}")
    page.get_by_role("navigation", name="Steps")
    visitor.fill(Environment_variables=f"GOOD={MARKUP}")
    visitor.press("Next")
    visitor.press("Next")
    assert page.get_by_role("heading", name="It cannot be built yet").is_visible()
    page.get_by_role("link", name="Correct Select Endpoint time_limit").click()
    page.get_by_label("Time limit").fill("30m")
    page.get_by_label("Time limit").press("Enter")  # what Enter presses goes on
    assert "Base Image" in step(page)
    # Nothing here builds containers: the review says so, and where to change it.
    page.get_by_role("navigation", name="Steps").get_by_role("button", name="Review").click()
    assert "base: host" in page.content()


def test_an_environment_is_pasted(visit: Visit) -> None:
    visitor = visit(scripts=False)
    visitor.allowed.append("422")
    page = to_dependencies(visitor, "pasted")
    page.get_by_text("Paste a requirements.txt").click()
    page.get_by_label("Contents of the file").fill("numpy\n-r other.txt\n")
    page.get_by_label("Constraints").fill("protobuf<6")
    visitor.press("Split into the fields")
    assert "line 2" in page.locator("#paste-error").inner_text()
    assert page.get_by_label("Contents of the file").input_value() == "numpy\n-r other.txt\n"
    assert page.get_by_label("Constraints").input_value() == "protobuf<6"
    page.get_by_label("Python packages").fill("# what we had\nothertool")
    page.get_by_label("Contents of the file").fill(ENVIRONMENT)
    visitor.press("Split into the fields")
    assert page.get_by_label("Python packages").input_value() == "# what we had\nothertool\ntinytool==1.2"
    assert page.get_by_label("Conda packages").input_value() == "python=3.12\nhdf5"
    assert page.get_by_label("Conda channels").input_value() == "conda-forge"
    visitor.press("Next")
    assert page.get_by_role("textbox", name="Environment variables").input_value() == "OMP_NUM_THREADS=4"


@pytest.mark.parametrize("scripts", [True, False])
def test_a_file_is_brought_in(visit: Visit, tmp_path: Path, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.allowed.append("422")
    page = to_dependencies(visitor, "with-files")
    settings = tmp_path / "settings.toml"
    settings.write_text("answer = 42\n")
    page.get_by_label("Python packages").fill("tinytool==1.2")
    page.get_by_label("Path in the image").fill("relative/path")
    page.get_by_label("Add a file").set_input_files(settings)
    visitor.press("Save")
    assert "absolute path" in page.locator("#target-error").inner_text()
    assert page.get_by_label("Python packages").input_value() == "tinytool==1.2"
    page.get_by_label("Path in the image").fill("")
    page.get_by_label("Add a file").set_input_files(settings)
    visitor.press("Save")
    assert "/opt/settings.toml" in page.get_by_role("group", name="Files it brings in").inner_text()
    page.get_by_role("navigation", name="Steps").get_by_role("button", name="Review").click()
    assert "/opt/settings.toml" in page.get_by_role("region", name="Text of the definition").inner_text()
    page.get_by_role("link", name="Dependencies").click()
    page.get_by_label("Leave out /opt/settings.toml").check()
    visitor.press("Save")
    assert page.get_by_label("Leave out /opt/settings.toml").count() == 0


def test_two_windows_the_later_is_told_and_loses_nothing(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed.append("409")
    page = to_dependencies(visitor, "shared")
    other = visitor.new_tab()
    other.goto(page.url)
    page.get_by_label("Python packages").fill("tinytool==1.1")
    visitor.press("Save")
    assert "Saved" in page.get_by_role("status").inner_text()
    other.get_by_label("Python packages").fill("othertool==3.0")
    other.get_by_role("button", name="Next").first.click()
    assert "was changed meanwhile" in other.get_by_role("alert").inner_text()
    assert other.get_by_label("Python packages").input_value() == "othertool==3.0"
    assert other.get_by_role("region", name="In the draft now: pip").inner_text() == "tinytool==1.1"
    other.get_by_label("Python packages").fill("othertool==3.0\ntinytool==1.1")
    other.get_by_role("button", name="Save all the same").click()
    other.get_by_role("heading", name="4. Environment Variables").wait_for()
    page.reload()
    assert page.get_by_label("Python packages").input_value() == "othertool==3.0\ntinytool==1.1"
    # The review of the first window is older than the draft: building is refused until it was looked through.
    page.goto(page.url.replace("dependencies", "review"))
    other.get_by_role("textbox", name="Environment variables").fill("A=1")
    other.get_by_role("button", name="Save", exact=True).click()
    other.get_by_role("status").wait_for()
    visitor.press("Build the image")
    assert "was changed in another window" in page.get_by_role("alert").inner_text()
    assert page.get_by_role("button", name="Build the image").is_visible()


def test_a_build_that_fails_says_why_and_is_corrected(visit: Visit, service: Service) -> None:
    visitor = visit()
    page = to_dependencies(visitor, "broken")
    page.get_by_label("Python packages").fill("nosuchtool==9.9")
    page.get_by_role("navigation", name="Steps").get_by_role("button", name="Review").click()
    visitor.press("Build the image")
    failed = page.get_by_role("region", name=re.compile("The build failed"))
    failed.wait_for(timeout=120_000)
    words = failed.inner_text()
    assert "nosuchtool" in words and "pip" in words and "What helps" in words
    assert page.get_by_role("region", name="The decisive lines of the log").is_visible()
    page.get_by_role("link", name="Overview").click()
    assert page.get_by_role("region", name=re.compile("The build failed")).is_visible()
    visitor.press("Correct the recipe")
    assert "Dependencies" in step(page)
    assert page.get_by_label("Python packages").input_value() == "nosuchtool==9.9"
    page.get_by_label("Python packages").fill("tinytool==1.2")
    page.get_by_role("navigation", name="Steps").get_by_role("button", name="Review").click()
    visitor.press("Build the image")
    page.get_by_role("link", name="Look at the image").wait_for(timeout=120_000)

    def listed() -> bool:
        with service.client() as client:
            return client.images.get("broken").state == "READY"

    eventually(listed, within_s=20, what="the corrected image is ready")


@pytest.mark.parametrize("dark", [False, True])
def test_every_step_is_for_everybody(visit: Visit, dark: bool) -> None:
    visitor = visit(dark=dark)
    page = to_dependencies(visitor, "wide" * 15)
    address = page.url.rsplit("/", 1)[0]
    steps = ("endpoint", "base", "dependencies", "environment", "commands", "review")
    for path in (*(f"{address}/{step}" for step in steps), "/image-builder"):
        page.goto(path)
        visitor.check_looks()


def test_what_is_not_there(visit: Visit) -> None:
    visitor = visit()
    visitor.allowed.append("404")
    for path in ("/image-builder/dra_00000000", "/image-builder/dra_00000000/base", "/image-builder/x%00/base"):
        assert visitor.page.goto(path).status == 404
    page = begin(visitor)
    assert page.goto(page.url.replace("endpoint", "elsewhere")).status == 404
