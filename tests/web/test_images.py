"""The Image Manager with a real browser: looking, searching, testing, copying, sharing, exporting, deleting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.images import Image
from testing import believable, people
from testing.browser import WIDTHS, Visitor
from testing.service import Service
from testing.web_images import another_agent, packages_here, wait_for_builder

Visit = Callable[..., Visitor]
MARKUP = "<script>alert(1)</script> &amp; \u05e2\u05d1\u05e8\u05d9\u05ea"
RECIPE = {
    "name": "tools",
    "base": "host",
    "pip": ["tinytool==1.2", "othertool==3.0"],
    "build": "printf 'built \\033[31mred\\033[0m <b>once</b>\\n'",
    "test": "python -c 'import tinytool'",
    "labels": {"note": MARKUP},
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with packages_here(tmp_path_factory.mktemp("wheels")):
        yield


@pytest.fixture(scope="module")
def service(wheels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("images") / "home") as running:
        wait_for_builder(running)
        yield running


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Three hundred images, a tenth of which are gone."""
    with Service(tmp_path_factory.mktemp("many") / "home") as running:
        believable.fill_images(running)
        yield running


@pytest.fixture(scope="module")
def image(service: Service) -> Image:
    return build(service, RECIPE)


def build(service: Service, recipe: dict[str, Any], endpoint: str = "local") -> Image:
    with service.client() as client:
        made = client.images.build(recipe, endpoint=endpoint)
        return client.images.wait(made.image.id, endpoint=endpoint, timeout_s=180)


def test_nothing_there_says_what_to_do(visit: Visit) -> None:
    """Before the first image is built."""
    visitor = visit()
    visitor.page.goto("/images")
    assert "There is no image yet" in visitor.page.get_by_role("main").inner_text()
    visitor.check_accessible()
    visitor.page.get_by_role("main").get_by_role("link", name="Build an image").first.click()
    visitor.page.wait_for_url("**/image-builder")


def test_an_image_is_looked_at(visit: Visit, image: Image) -> None:
    visitor = visit()
    page = visitor.page
    page.goto("/images")
    row = page.get_by_role("row", name=re.compile("tools"))
    assert "Ready" in row.inner_text() and "local" in row.inner_text() and "MiB" in row.inner_text()
    row.get_by_role("link", name="tools").click()
    main = page.get_by_role("main")
    facts = image.replicas[0].facts
    assert facts is not None
    assert facts.digest in main.inner_text() and facts.path in main.inner_text()
    assert MARKUP in main.inner_text()  # shown, not executed
    page.get_by_role("navigation", name="Of this image").get_by_role("link", name="Packages").click()
    table = page.get_by_role("table", name="Packages of the image")
    assert "tinytool" in table.inner_text() and "othertool" in table.inner_text()
    page.get_by_label("Package", exact=True).fill("TINY")
    visitor.press("Search")
    assert "tinytool" in table.inner_text() and "othertool" not in table.inner_text()
    page.get_by_label("Package", exact=True).fill(MARKUP)
    visitor.press("Search")
    assert "No package is called like that" in page.content()
    page.get_by_role("link", name="Recipe").click()
    recipe = page.get_by_role("region", name="Text of the recipe").inner_text()
    assert "base: host" in recipe and "- tinytool==1.2" in recipe and "labels:" in recipe
    page.get_by_role("link", name="Build", exact=True).click()
    log = page.get_by_role("region", name="Lines of the log")
    log.get_by_text("<b>once</b>").wait_for()  # shown, not executed; and in the colours of the program that wrote it
    assert "f1" in (log.get_by_text("red", exact=True).get_attribute("class") or "")
    assert "Python packages" in main.inner_text()
    page.get_by_label("Search the log").fill("ONCE")
    page.get_by_role("button", name="Next match").click()
    page.get_by_role("status").get_by_text("1 of ").wait_for()
    assert log.locator("mark").first.inner_text().lower() == "once"
    with page.expect_download() as download:
        page.get_by_role("link", name="Download", exact=True).click()
    assert b"\x1b[31mred" in Path(download.value.path()).read_bytes()
    visitor.check_accessible()
    plain = visit(scripts=False)
    plain.page.goto(page.url)
    assert "built red <b>once</b>" in plain.page.get_by_role("region", name="The end of the log").inner_text()
    page.get_by_role("link", name="Overview").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Bill of materials").click()
    sbom = json.loads(Path(download.value.path()).read_text())
    assert sbom["bomFormat"] == "CycloneDX" and download.value.suggested_filename == "tools.sbom.cdx.json"


@pytest.mark.parametrize("scripts", [True, False])
def test_it_is_tested_now(visit: Visit, image: Image, service: Service, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.page.goto(f"/images/{image.id}")
    assert visitor.page.get_by_label("Command").input_value() == RECIPE["test"]
    visitor.fill(Command="python -c 'import tinytool; print(tinytool.VERSION)'\necho done")
    visitor.press("Test it")
    visitor.page.wait_for_url("**/tasks/tsk_*")
    task_id = re.search(r"tsk_\w+", visitor.page.url)
    assert task_id is not None
    with service.client() as client:
        assert client.tasks.wait(task_id[0], timeout_s=60).state == "SUCCEEDED"
        assert b"".join(client.tasks.logs(task_id[0])) == b"1.2\ndone\n"


def test_it_goes_out_as_a_file_and_comes_in_again(
    visit: Visit, image: Image, service: Service, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    visitor = visit()
    visitor.allowed.append("422")
    page = visitor.page
    page.goto(f"/images/{image.id}")
    visitor.press("Export it")
    page.get_by_role("link", name="Download tools").wait_for(timeout=60_000)
    with page.expect_download() as download:
        page.get_by_role("link", name="Download tools").click()
    export = tmp_path / download.value.suggested_filename
    download.value.save_as(export)
    assert export.name == "tools.diamond.tar"
    # The command line takes it, and so does the page.
    from diamond.sdk import imagefile

    found = imagefile.read(export)
    imagefile.verify(found)
    assert found.contents.name == "tools" and found.lock.of_kind("pip")["tinytool"] == "1.2"
    page.goto("/images")
    page.get_by_role("link", name="Import a file").click()
    visitor.press("Import it")
    assert "No file was chosen" in page.locator("#file-error").inner_text()
    broken = tmp_path / "broken.tar"
    broken.write_bytes(export.read_bytes()[:-9000])
    page.get_by_label("File").set_input_files(broken)
    visitor.fill(Image_name="kept")
    visitor.press("Import it")
    assert "broken.tar" in page.locator("#file-error").inner_text()
    assert page.get_by_label("Image name").input_value() == "kept"
    with Service(tmp_path_factory.mktemp("elsewhere") / "home") as other:
        wait_for_builder(other)
        away = visit(scripts=False)
        away.page.goto(f"{other.url}/images/import")
        away.page.get_by_label("File").set_input_files(export)
        away.fill(Image_name="theirs")
        away.press("Import it")
        away.page.wait_for_url("**/log?endpoint=local")
        with other.client() as client:
            taken = client.images.get("theirs")
            client.tasks.wait(taken.replicas[0].task_id, timeout_s=120)
        away.page.goto(f"{other.url}/images/{taken.id}")
        assert "imported" in away.page.get_by_role("table", name="Where it is").inner_text()


def test_it_is_copied_and_removed_there(visit: Visit, image: Image, service: Service) -> None:
    with another_agent(service, "second"):
        visitor = visit()
        page = visitor.page
        page.goto(f"/images/{image.id}")
        card = page.get_by_role("region", name="Copy to an endpoint")
        card.get_by_label("Endpoint").select_option("second")
        card.get_by_role("button", name="Copy it there").click()
        page.wait_for_url("**/log?endpoint=second")
        page.get_by_role("link", name="Look at the image").wait_for(timeout=120_000)
        page.get_by_role("link", name="Look at the image").click()
        row = page.get_by_role("row", name=re.compile("^second"))
        assert "Ready" in row.inner_text()
        row.get_by_text("Remove there").click()
        row.get_by_role("button", name="Yes, remove").click()
        assert "It is removed at that endpoint" in page.get_by_role("status").first.inner_text()
        assert "Gone" in page.get_by_role("row", name=re.compile("^second")).inner_text()
        assert "Ready" in page.get_by_role("row", name=re.compile("^local")).inner_text()


def test_what_is_used_is_deleted_only_on_insisting(visit: Visit, service: Service) -> None:
    made = build(service, {"name": "shortlived", "base": "host"})
    with service.client() as client:
        task = client.tasks.create(
            {"run": "sleep 300", "resources": {"image_id": made.id, "infra": "local", "cpus": 1}}
        )
    visitor = visit(scripts=False)
    visitor.allowed += ["409", "404"]
    page = visitor.page
    page.goto(f"/images/{made.id}")
    assert task.name in page.get_by_role("region", name="Who uses it").inner_text()
    page.get_by_text("Delete shortlived").click()
    visitor.press("Yes, delete it everywhere")
    assert "is used by 1 live task" in page.get_by_role("alert").inner_text()
    visitor.press("Delete although it is used")
    assert "The image is deleted" in page.get_by_role("status").inner_text()
    assert page.goto(f"/images/{made.id}").status == 404
    with service.client() as client:
        client.tasks.cancel(task.id)


def pages(visitor: Visitor) -> str:
    return str(visitor.page.get_by_role("navigation", name="Pages").inner_text())


@pytest.mark.parametrize("scripts", [True, False])
def test_hundreds_are_searched_and_paged(many: Service, chromium: Any, scripts: bool) -> None:
    visitor = Visitor(chromium, many.url, scripts=scripts)
    page = visitor.page
    rows = page.get_by_role("table", name="Images").get_by_role("row")
    page.goto("/images?sort=name")
    assert "300 images, page 1 of 6" in pages(visitor)
    assert rows.count() == 51, "fifty, and what they are"
    seen = set()
    for number in range(1, 7):
        seen |= set(page.get_by_role("table", name="Images").get_by_role("link").all_inner_texts())
        if number < 6:
            page.get_by_role("link", name="Next page").click()
            page.get_by_text(f"page {number + 1} of 6").wait_for()
    assert len(seen) == 300 and page.get_by_role("link", name="Next page").count() == 0
    page.get_by_label("Name or owner").fill("OPENFOAM-")
    visitor.press("Search")
    page.get_by_text("60 images, page 1 of 2").wait_for()
    page.get_by_role("link", name="Next page").click()
    page.get_by_text("60 images, page 2 of 2").wait_for()
    assert rows.count() == 11 and page.get_by_label("Name or owner").input_value() == "OPENFOAM-"
    page.get_by_label("State").select_option("FAILED")
    visitor.press("Search")
    page.get_by_text("6 images").wait_for()
    page.get_by_label("Name or owner").fill("no such")
    visitor.press("Search")
    page.get_by_text("No image is like that").wait_for()
    page.goto("/images?sort=size&page=9999")
    assert "page 6 of 6" in pages(visitor), "a page beyond the last is the last"
    page.goto("/images?text=%25&state=nonsense&endpoint=nowhere")
    assert "No image is like that" in page.content()
    page.goto("/images?state=READY&endpoint=local&sort=size")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        visitor.check_width()
        if scripts:
            visitor.check_accessible()
    visitor.leave()


@pytest.mark.parametrize("dark", [False, True])
def test_every_page_is_for_everybody(visit: Visit, image: Image, dark: bool) -> None:
    visitor = visit(dark=dark)
    of_it = (f"/images/{image.id}{path}" for path in ("", "/packages", "/recipe", "/log"))
    for path in (*of_it, "/images", "/images/import"):
        visitor.page.goto(path)
        visitor.check_looks()


def test_it_is_shared_and_handed_on(chromium: Any, wheels: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Service(tmp_path_factory.mktemp("team") / "home", multi_user="1") as team, another_agent(team, "cluster"):
        found = build(team, {"name": "ours", "base": "host"}, "cluster")
        with team.client() as client:
            client.projects.create("lab")
        from diamond.core.home import ClientConfig

        admin = ClientConfig.load(team.home)
        assert admin is not None
        people.invite(admin, "bob", project="lab")
        alice, bob = Visitor(chromium, team.url), Visitor(chromium, team.url, scripts=False)
        alice.allowed += ["422", "404"]
        bob.allowed += ["404", "403"]
        alice.sign_in("alice")
        bob.sign_in("bob")
        assert bob.page.goto(f"/images/{found.id}").status == 404
        alice.page.goto(f"/images/{found.id}")
        share = alice.page.get_by_role("region", name="Share")
        share.get_by_label("Who may use it").select_option("project")
        share.get_by_role("button", name="Save").click()  # in a project of one's own there is nobody to share with
        assert "nobody would see it" in alice.page.locator("#visibility-error").inner_text()
        share.get_by_label("Project").select_option("lab")
        share.get_by_role("button", name="Save").click()
        assert "Saved who may use it" in alice.page.get_by_role("status").first.inner_text()
        bob.page.goto("/images?whose=others")
        bob.page.get_by_role("link", name="alice/ours").click()
        assert bob.page.get_by_role("region", name="Share").count() == 0
        assert bob.page.get_by_role("region", name="Delete").count() == 0
        give = alice.page.get_by_role("region", name="Hand it on")
        give.get_by_label("User name of the new owner").fill("nobody")
        give.get_by_role("button", name="Hand it on").click()
        assert alice.page.get_by_label("User name of the new owner").get_attribute("aria-invalid") == "true"
        alice.page.get_by_label("User name of the new owner").fill("bob")
        alice.press("Hand it on")
        assert "was handed on" in alice.page.get_by_role("status").first.inner_text()
        bob.page.goto(f"/images/{found.id}")
        assert bob.page.get_by_role("region", name="Delete").count() == 1
        alice.leave()
        bob.leave()
