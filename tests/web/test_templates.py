"""Templates, by people with a browser: the gallery, saving, changing, two at once, and those that come with Diamond."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.core.states import TaskState
from testing.browser import Visitor
from testing.service import Service

Visit = Callable[..., Visitor]
HOSTILE = "<img src=x onerror=alert(1)> \u05d0 & more"
WITH_TORCH = ("distributed-pytorch", "fine-tune", "image-segmentation", "pde-surrogate", "second-order")
BUILT_IN = tuple(sorted((*WITH_TORCH, "parameter-sweep")))


@pytest.mark.parametrize("scripts", [True, False])
def test_a_task_is_saved_used_changed_and_removed(visit: Visit, service: Service, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    page = visitor.page
    name = f"{HOSTILE} {scripts}"
    page.goto("/compose")
    visitor.fill(Task_name="of a template", Command="echo begun")
    page.get_by_text("Save as a template").click()
    visitor.fill(Template_name=name, Description="Says that it begun.")
    visitor.press("Save as template")
    page.get_by_role("heading", name="Change it").wait_for()
    assert page.get_by_role("heading", level=1).inner_text() == name
    page.goto("/templates")
    page.get_by_role("link", name=f"Use {name}").click()
    assert page.get_by_label("Command", exact=True).input_value() == "echo begun"
    page.goto("/templates")
    page.get_by_role("link", name=name, exact=True).click()
    visitor.fill(Description="Says hello.", YAML="run: echo hello\n")
    visitor.press("Save changes")
    page.get_by_text("Your changes are saved.").wait_for()
    assert "echo hello" in page.get_by_label("YAML", exact=True).input_value()
    if scripts:
        visitor.check_accessible()
        visitor.check_width()
    page.get_by_text("Remove this template…").click()
    page.get_by_role("button", name="Remove “").click()
    page.get_by_text("The template is removed.").wait_for()
    with service.client() as client:
        assert name not in [each.name for each in client.templates.list()]


@pytest.mark.parametrize("scripts", [True, False])
def test_the_task_type_leads_to_templates(visit: Visit, service: Service, scripts: bool) -> None:
    with service.client() as client:
        mine = client.templates.save(f"<i>mine</i> {scripts}", {"name": "begun", "run": "echo mine"})
    visitor = visit(scripts=scripts)
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Task_name="typed before")
    assert not page.get_by_role("heading", name="Begin with a template").is_visible()
    page.get_by_label("Task type").select_option("template")
    page.get_by_role("heading", name="Begin with a template").wait_for()
    assert not page.get_by_label("Task name").is_visible() and not page.get_by_label("YAML").is_visible()
    if scripts:
        for width in (400, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            visitor.check_width()
            visitor.check_accessible()
    page.get_by_label("Task type").select_option("distributed")
    assert page.get_by_label("Task name").input_value() == "typed before", "nothing is lost by looking"
    page.get_by_label("Task type").select_option("template")
    assert page.get_by_role("link", name="Use Fine-tune").is_visible(), "what comes with Diamond as well"
    page.get_by_role("link", name=f"Use <i>mine</i> {scripts}").click()
    page.wait_for_url(f"**/compose?template={mine.id}")
    assert page.get_by_label("Task type").input_value() == "command"
    assert page.get_by_label("Task name").input_value() == "begun"
    with service.client() as client:
        client.templates.remove(mine.id)


def test_no_task_is_made_while_a_template_is_being_chosen(visit: Visit) -> None:
    """As a browser sends it that shows both, or whose user presses Enter in a field."""
    visitor = visit(scripts=False)
    visitor.allowed.append("status of 422")
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Command="echo typed")
    page.get_by_label("Task type").select_option("template")
    page.get_by_label("Task type").press("Enter")
    page.locator("#composer").evaluate("form => form.requestSubmit()")
    page.locator("#type-error").get_by_text("No template is chosen yet").wait_for()
    page.get_by_label("Task type").select_option("command")
    assert page.get_by_label("Command", exact=True).input_value() == "echo typed"


def test_errors_stand_beside_their_fields(visit: Visit, service: Service) -> None:
    visitor = visit(scripts=False)
    visitor.allowed += ["status of 422", "status of 409"]
    page = visitor.page
    page.goto("/compose")
    visitor.fill(Command="echo x")
    page.get_by_text("Save as a template").click()
    visitor.press("Save as template")
    page.locator("#template_name-error").get_by_text("Must not be empty").wait_for()
    assert page.get_by_label("Command", exact=True).input_value() == "echo x"
    visitor.fill(Template_name="fine-tune")
    visitor.press("Save as template")
    page.locator("#template_name-error").get_by_text("already").wait_for()
    with service.client() as client:
        made = client.templates.save("to be changed", {"run": "echo x"})
        page.goto(f"/templates/{made.id}")
        visitor.fill(YAML="run: echo x\nnum_nodes: -1\n")
        visitor.press("Save changes")
        page.locator("#yaml-error").get_by_text("whole number").wait_for()
        assert "-1" in page.get_by_label("YAML", exact=True).input_value()
        client.templates.remove(made.id)


def test_the_later_of_two_is_told_and_shown_both(visit: Visit, service: Service) -> None:
    visitor = visit()
    visitor.allowed += ["status of 409"]
    page = visitor.page
    with service.client() as client:
        made = client.templates.save("shared", {"run": "echo first"}, description="first")
        page.goto(f"/templates/{made.id}")
        client.templates.change(made.id, version=1, spec={"run": "echo theirs"}, description="theirs")
        with pytest.raises(Conflict):
            client.templates.change(made.id, version=1, description="mine")
        visitor.fill(Description="mine", YAML="run: echo mine\n")
        visitor.press("Save changes")
        page.get_by_role("heading", name="Two versions").wait_for()
        assert "echo theirs" in page.get_by_role("region", name="The version that was saved meanwhile").inner_text()
        assert "echo mine" in page.get_by_label("YAML", exact=True).input_value()
        visitor.check_accessible()
        assert client.templates.get(made.id).spec == {"run": "echo theirs"}
        visitor.press("Save changes")
        page.get_by_text("Your changes are saved.").wait_for()
        now = client.templates.get(made.id)
        assert (now.spec, now.version) == ({"run": "echo mine\n"}, 3) or now.spec == {"run": "echo mine"}
        client.templates.remove(made.id)


def test_many_are_shown_by_pages_and_found(visit: Visit, service: Service) -> None:
    visitor = visit()
    page = visitor.page
    with service.client() as client:
        made = [client.templates.save(f"number {n}", {"run": f"echo {n}"}) for n in range(30)]
        page.goto("/templates")
        expect(page.get_by_role("link", name=re.compile("^Use number"))).to_have_count(24)
        page.get_by_role("link", name="Older ones").click()
        expect(page.get_by_role("link", name=re.compile("^Use number"))).to_have_count(6)
        page.get_by_label("Search").fill("number 17")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("link", name=re.compile("^Use "))).to_have_count(1)
        page.get_by_label("Search").fill("nothing like it")
        page.get_by_role("button", name="Search").click()
        page.get_by_text("No saved template has").wait_for()
        for each in made:
            client.templates.remove(each.id)


@pytest.mark.parametrize("key", BUILT_IN)
def test_each_that_comes_with_diamond_runs_as_it_is(visit: Visit, service: Service, key: str) -> None:
    """Chosen in the gallery, and launched without a change; what it promises to leave behind is there."""
    if key in WITH_TORCH:
        pytest.importorskip("torch", reason="needs torch, which this template trains with")
    visitor = visit()
    page = visitor.page
    page.goto(f"/templates/{key}")
    page.get_by_role("link", name="Use it").click()
    visitor.press("Launch")
    page.wait_for_url(re.compile(r"/tasks/tsk_\w+$"))
    task_id = page.url.rsplit("/", 1)[1]
    with service.client() as client:
        task = client.tasks.wait(task_id, timeout_s=240)
        log = b"".join(client.tasks.logs(task_id)).decode()
        assert task.state is TaskState.SUCCEEDED, log
        assert task.spec is not None
        assert {item.path for item in task.outputs} == set(task.spec.outputs)
        assert client.tasks.metrics(task_id), "it logs numbers to look at"


def test_the_gallery_is_what_the_tests_run(service: Service) -> None:
    with service.client() as client:
        found = client.templates.list()
        assert tuple(each.id for each in found if each.builtin) == BUILT_IN
        assert all(each.description for each in found)
        with pytest.raises(Forbidden):
            client.templates.remove("fine-tune")
        with pytest.raises(NotFound):
            client.templates.get("nothing")
        with pytest.raises(InvalidInput) as caught:
            client.templates._transport.json("POST", "/api/v1/templates", body={"name": "x", "spec": {"runn": "y"}})
        assert caught.value.field == "spec.runn"
