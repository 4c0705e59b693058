"""A script that only prints, composed in a browser: its curves are named in the form, and are there on its page."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import expect

from testing.browser import Visitor
from testing.service import Service
from testing.waiting import eventually

Visit = Callable[..., Visitor]
REFUSED = ("status of 422",)
PATTERNS = "round {step} of * error {fit/error}\nfinal {result}"


def test_patterns_go_from_the_form_to_the_curves(visit: Visit, service: Service) -> None:
    visitor = visit(scripts=False)
    visitor.allowed += REFUSED
    page = visitor.page
    page.goto("/compose")
    curves = page.get_by_label("Curves", exact=True)
    visitor.fill(Task_name="printing", Command="for n in 1 2 3; do echo round $n of 3: error 0.$n; done")
    curves.fill("error {fit/error")
    visitor.press("Launch")
    expect(page.get_by_text("pattern 1 has a { without a }").first).to_be_visible()
    expect(curves).to_have_value("error {fit/error")
    curves.fill(PATTERNS)
    visitor.press("Form → YAML")
    yaml = page.get_by_label("YAML", exact=True)
    assert "curves:\n- round {step} of * error {fit/error}\n- final {result}\n" in yaml.input_value()
    visitor.press("YAML → form")
    expect(curves).to_have_value(PATTERNS)
    visitor.press("Launch")
    page.wait_for_url(re.compile(r"/tasks/tsk_\w+$"))
    task_id = page.url.rsplit("/", 1)[1]
    with service.client() as client:
        eventually(lambda: client.tasks.get(task_id).state.is_final, within_s=60)
        points = client.tasks.curve(task_id, "fit/error").points
    assert [(point.x, point.last) for point in points] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    page.reload()
    expect(page.get_by_text("fit/error").first).to_be_visible()
