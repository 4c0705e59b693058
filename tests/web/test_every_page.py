"""Every place of the navigation: there, accessible, not too wide, without complaints; light and dark, narrow and wide,
with and without scripts; on a server where nothing happened yet, on one where much did, and on one with accounts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from diamond.server.web.navigation import PLACES
from testing import believable, people
from testing.browser import Visitor
from testing.service import Service

WORK = [place.path for place in PLACES if not place.admin]
ADMIN = [place.path for place in PLACES if place.admin]
LOOKS = [(dark, width) for dark in (False, True) for width in (400, 1280)]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("empty") / "home") as running:
        yield running


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("full") / "home") as running:
        believable.fill_tasks(running)
        yield running


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("crowded") / "home", multi_user="1") as running:
        believable.fill_people(running)
        yield running


def _look(chromium: Any, service: Service, path: str, *, scripts: bool) -> None:
    """Axe is a script itself: without scripts the page is looked at for its width and what it says."""
    visitor = Visitor(chromium, service.url, scripts=scripts)
    if service.is_multi_user:
        visitor.page.goto("/sign-in?next=/device")
        visitor.fill(User_name="alice", Password=people.PASSWORD)
        visitor.press("Sign in")
        visitor.page.wait_for_url("**/device")
    for dark, width in LOOKS:
        visitor.page.emulate_media(color_scheme="dark" if dark else "light")
        visitor.page.set_viewport_size({"width": width, "height": 900})
        answer = visitor.page.goto(path)
        assert answer is not None and answer.status == 200, f"{path}: {answer and answer.status}"
        assert visitor.page.get_by_role("heading", level=1).count() == 1, path
        here = visitor.page.get_by_role("navigation", name="Places").locator("[aria-current=page]")
        assert here.count() == 1 and here.get_attribute("href") == path
        visitor.check_width()
        if scripts:
            visitor.check_accessible()
    visitor.leave()


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
@pytest.mark.parametrize("path", WORK)
def test_nothing_happened_yet(chromium: Any, empty: Service, path: str, scripts: bool) -> None:
    _look(chromium, empty, path, scripts=scripts)


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
@pytest.mark.parametrize("path", WORK)
def test_much_happened(chromium: Any, full: Service, path: str, scripts: bool) -> None:
    _look(chromium, full, path, scripts=scripts)


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no-scripts"])
@pytest.mark.parametrize("path", [*ADMIN, "/dashboard", "/settings"])
def test_with_accounts(chromium: Any, crowded: Service, path: str, scripts: bool) -> None:
    _look(chromium, crowded, path, scripts=scripts)
