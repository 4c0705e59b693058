"""Help: the documentation, served by the application itself; nothing of it is ever taken for HTML."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urldefrag

import pytest

from diamond.server.web import manual
from diamond.server.web.navigation import PLACES
from testing.browser import Visitor

Come = Callable[..., Visitor]


@pytest.mark.parametrize("scripts", [True, False])
def test_contents_pages_and_search(visit: Come, scripts: bool) -> None:
    visitor = visit(scripts=scripts)
    visitor.page.goto("/help")
    visitor.page.get_by_role("link", name="User guide").click()
    visitor.page.get_by_role("heading", level=1, name="User guide").wait_for()
    visitor.page.get_by_role("navigation", name="On this page").get_by_role("link").first.click()
    assert "#" in visitor.page.url
    visitor.page.goto("/help")
    visitor.page.get_by_label("Search the documentation").fill("walltime retry")
    visitor.press("Search")
    visitor.page.get_by_role("heading", name="for “walltime retry”").wait_for()
    visitor.page.get_by_role("listitem").filter(has_text="retry").get_by_role("link").first.click()
    assert "/help/" in visitor.page.url
    visitor.page.goto("/help?q=%3Cscript%3Ealert(1)%3C/script%3E")
    visitor.page.get_by_text("Nothing for “<script>alert(1)</script>”").wait_for()


def test_what_is_not_there(visit: Come) -> None:
    visitor = visit()
    visitor.allowed.append("status of 404")
    for path in ("/help/nothing", "/help/../settings.py", "/help/%2e%2e/pyproject", "/help/adr", "/help/user-guide.md"):
        answer = visitor.page.goto(path)
        assert answer is not None and answer.status == 404, path


@pytest.mark.parametrize("width", [400, 1280])
def test_help_on_each_place_is_at_the_top(visit: Come, width: int) -> None:
    visitor = visit(width=width)
    for place in PLACES:
        if place.admin:
            continue
        visitor.page.goto(place.path)
        link = visitor.page.get_by_role("banner").get_by_role("link", name="Help on this page")
        box = link.bounding_box()
        assert box is not None and box["x"] + box["width"] <= width, "to be seen without scrolling"
        link.click()
        visitor.page.wait_for_url(f"**/help/{place.help}")
        section = visitor.page.locator(f"[id='{place.help.partition('#')[2]}']")
        assert section.count() == 1, place.help


def test_help_on_places_of_administrators_is_there() -> None:
    for place in PLACES:
        name, _, section = place.help.partition("#")
        page = manual.page(name)
        assert page is not None and section in {each.id for each in page.sections}, place.help


@pytest.mark.parametrize("dark", [False, True])
def test_accessible_at_every_width(visit: Come, dark: bool) -> None:
    visitor = visit(dark=dark)
    for path in ("/help", "/help?q=quota", "/help?q=zzzz", "/help/user-guide", "/help/threat-model"):
        visitor.page.goto(path)
        visitor.check_looks()


def test_every_page_fits_a_narrow_screen(visit: Come) -> None:
    visitor = visit(width=400)
    for name in manual.names():
        answer = visitor.page.goto(f"/help/{name}")
        assert answer is not None and answer.status == 200
        visitor.check_width()
        assert visitor.page.get_by_role("heading", level=1).count() == 1, name


def test_every_link_leads_somewhere() -> None:
    for name in manual.names():
        page = manual.page(name)
        assert page is not None
        for href in _links(page.pieces):
            place, anchor = urldefrag(href)
            if place.startswith("https://"):
                continue
            assert not place or place.startswith("/help/"), f"{name}: {href}"
            target = manual.page(place.removeprefix("/help/")) if place else page
            assert target is not None, f"{name}: {href}"
            assert not anchor or anchor in _ids(target.pieces), f"{name}: {href}"


def _links(pieces: tuple[manual.Piece, ...]) -> list[str]:
    return [one for piece in pieces for one in ([piece.href] if piece.tag == "a" else []) + _links(piece.children)]


def _ids(pieces: tuple[manual.Piece, ...]) -> set[str]:
    return {one for piece in pieces for one in {piece.id} | _ids(piece.children)}


def test_a_file_cannot_bring_html_or_strange_links(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "user-guide.md").write_text(
        "# Guide <b>x</b>\n\n<script>alert(1)</script>\n\n[a](javascript:alert(1)) [b](data:text/html,x) "
        "[c](http://example.org) [d](../secret.md) [e](//evil.example) [f](https://example.org) <https://g.example>\n\n"
        "![picture](x.png)\n\n<div onclick=x>\n",
        "utf-8",
    )
    monkeypatch.setattr(manual, "folder", lambda: folder)
    for cached in (manual.names, manual.titles, manual.page, manual.pictures):
        cached.cache_clear()
    try:
        page = manual.page("user-guide")
        assert page is not None
        assert _links(page.pieces) == ["https://example.org", "https://g.example"]
        tags = {piece.tag for piece in _all(page.pieces)}
        assert tags <= {"", "h1", "p", "a"}, tags
        assert "<script>alert(1)</script>" in "".join(piece.words() for piece in page.pieces)
    finally:
        for cached in (manual.names, manual.titles, manual.page, manual.pictures):
            cached.cache_clear()


def _all(pieces: tuple[manual.Piece, ...]) -> list[manual.Piece]:
    return [one for piece in pieces for one in (piece, *_all(piece.children))]
