"""The audit log as administrators read it: in words, filtered, in pages, checked, exported; and changed unseen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from testing import people
from testing.browser import Visitor
from testing.service import Service

Come = Callable[..., Visitor]
REFUSED = "the server responded with a status of 4"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("audit") / "home", multi_user="1") as running:
        with running.client() as client:
            client.projects.create("lab", title="<script>alert(1)</script>")
            for number in range(60):
                client.tokens.create(f"token {number}", scopes=["read"])
        yield running


def come(visit: Come, path: str = "/audit", **how: object) -> Visitor:
    visitor = visit(**how)
    visitor.page.goto("/sign-in?next=/audit")
    visitor.fill(User_name="alice", Password=people.PASSWORD)
    visitor.press("Sign in")
    visitor.page.wait_for_url("**/audit")
    if path != "/audit":
        visitor.page.goto(path)
    return visitor


@pytest.mark.parametrize("scripts", [True, False])
def test_who_did_what_newest_first(visit: Come, scripts: bool) -> None:
    visitor = come(visit, scripts=scripts)
    visitor.allowed.append(REFUSED)
    rows = visitor.page.get_by_role("table").get_by_role("row")
    assert "alice signed in (password)" in rows.nth(1).inner_text()
    assert "127.0.0.1" in rows.nth(1).inner_text()
    assert rows.count() == 51
    visitor.page.get_by_role("link", name="Older").click()
    visitor.page.get_by_role("link", name="Newest").wait_for()
    assert visitor.page.get_by_text("alice made project lab").is_visible()
    visitor.page.goto("/audit")
    visitor.page.get_by_label("What", exact=True).fill("project")
    visitor.press("Filter")
    visitor.page.get_by_text("alice made project lab").wait_for()
    assert rows.count() == 2
    visitor.page.get_by_text("alice made project lab").click()
    assert "project.created" in visitor.page.get_by_role("table").inner_text()
    visitor.page.get_by_label("What", exact=True).fill("No Action!")
    visitor.press("Filter")
    assert visitor.page.get_by_label("What", exact=True).get_attribute("aria-invalid") == "true"
    visitor.page.goto("/audit?user=nobody&since=2020-01-01&until=2020-01-02")
    visitor.page.get_by_text("No entry fits.").wait_for()
    assert visitor.page.get_by_label("From day").input_value() == "2020-01-01"
    visitor.page.goto("/audit?since=soon&before=999999999999999999999999")
    assert "is not a day" in visitor.page.content()


def test_it_is_exported(visit: Come) -> None:
    visitor = come(visit)
    with visitor.page.expect_download() as download:
        visitor.page.get_by_role("link", name="Export").click()
    lines = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert lines[0]["kind"] == "diamond-audit" and lines[-1]["kind"] == "end"
    assert any(line.get("action") == "project.created" for line in lines)


@pytest.mark.parametrize("dark", [False, True])
def test_accessible_at_every_width(visit: Come, dark: bool) -> None:
    visitor = come(visit, dark=dark)
    for path in ("/audit", "/audit?user=nobody", "/audit/verify", "/audit/verify?head="):
        visitor.page.goto(path)
        visitor.check_looks()


def test_what_was_changed_is_found(visit: Come, service: Service) -> None:
    """Last: it leaves a log that was tampered with."""
    visitor = come(visit, "/audit/verify")
    visitor.allowed.append(REFUSED)
    head = visitor.page.get_by_role("region", name="The end of the log").inner_text().strip()
    visitor.press("Check it")
    visitor.page.get_by_text("The log is whole").wait_for()
    visitor.page.get_by_label("An earlier end of the log").fill("not one")
    visitor.press("Check it")
    assert visitor.page.get_by_label("An earlier end of the log").get_attribute("aria-invalid") == "true"
    visitor.page.get_by_label("An earlier end of the log").fill(head)
    visitor.press("Check it")
    visitor.page.get_by_text("it still holds the entry you named").wait_for()
    engine = sa.create_engine(f"sqlite:///{service.home.server / 'diamond.db'}")
    with engine.begin() as connection:
        # Whoever has the database can do away with what refuses changes; not with the hashes.
        guards = connection.execute(sa.text("SELECT name FROM sqlite_master WHERE type='trigger' AND tbl_name='audit'"))
        for guard in guards.scalars().all():
            connection.execute(sa.text(f"DROP TRIGGER {guard}"))
        changed = connection.execute(sa.text("UPDATE audit SET user = 'mallory' WHERE seq = 7"))
        assert changed.rowcount == 1
    engine.dispose()
    visitor.page.get_by_label("An earlier end of the log").fill("")
    visitor.press("Check it")
    assert "from entry 7 on" in visitor.page.get_by_role("alert").inner_text()
