"""People in a real browser, who notice what must not happen: errors on the console, pages that fail, addresses outside,
and what keeps somebody with a screen reader out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from testing.people import PASSWORD

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
WIDTHS = (400, 1280)
_WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


@contextmanager
def running_chromium() -> Iterator[Any]:
    """Skips the test, by name, where there is no browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, to drive a browser")
    if not CHROMIUM:
        pytest.skip("needs a browser: chromium or google-chrome on PATH")
    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as playwright, pytest.MonkeyPatch.context() as patch:
        for action in ("click", "press"):
            patch.setattr(sync_api.Locator, action, _arriving(getattr(sync_api.Locator, action)))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        try:
            yield browser
        finally:
            browser.close()


def _arriving(action: Callable[..., None]) -> Callable[..., None]:
    """The same, back when the page it led to is all there: by itself it is back when that has only begun to come, and
    whoever counts or reads at once meets half of it."""

    @wraps(action)
    def whole(locator: Any, *args: Any, **how: Any) -> None:
        action(locator, *args, **how)
        if not locator.page.is_closed():
            locator.page.wait_for_load_state("domcontentloaded")

    return whole


class Visitor:
    """Somebody with a browser of their own. `complaints` must be empty at the end: `leave` asserts it.

    Attributes:
        page: Playwright's; find everything by role and label.
        allowed: parts of complaints that the test itself brings about (say "503" while a server restarts).
    """

    def __init__(
        self, chromium: Any, url: str, *, scripts: bool = True, dark: bool = False, width: int = 1280, height: int = 900
    ) -> None:
        self.url = url
        self.context = chromium.new_context(
            base_url=url,
            java_script_enabled=scripts,
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
        )
        self.context.set_default_timeout(20_000)
        self.complaints: list[str] = []
        self.allowed: list[str] = []
        self.asked: list[str] = []  # every address that left the browser
        self.page = self.new_tab()

    def new_tab(self) -> Any:
        page = self.context.new_page()
        page.on("request", self._on_request)
        page.on("response", self._on_response)
        page.on("pageerror", lambda error: self._complain(f"script: {error}"))
        page.on("console", lambda line: self._complain(f"console: {line.text}") if line.type == "error" else None)
        return page

    def _complain(self, text: str) -> None:
        self.complaints.append(text)

    def _on_request(self, request: Any) -> None:
        self.asked.append(request.url)
        host = urlsplit(request.url).hostname
        if request.url.startswith("http") and host not in ("127.0.0.1", "localhost", urlsplit(self.url).hostname):
            self._complain(f"asked outside: {request.url}")

    def _on_response(self, response: Any) -> None:
        if response.status >= 500:
            self._complain(f"{response.status} from {response.url}")

    def fill(self, **fields: str) -> None:
        for label, text in fields.items():
            self.page.get_by_label(label.replace("_", " "), exact=True).fill(text)

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name).first.click()

    def sign_in(self, name: str, password: str = PASSWORD) -> None:
        self.page.goto("/sign-in")
        self.fill(User_name=name, Password=password)
        self.press("Sign in")
        self.page.wait_for_url("**/dashboard")

    def check_accessible(self) -> None:
        """No violation of WCAG 2.2 A and AA that axe-core finds on the page as it is now."""
        from axe_playwright_python.sync_playwright import Axe

        asked = {"runOnly": {"type": "tag", "values": _WCAG}, "resultTypes": ["violations"]}  # the rest only in numbers
        found = Axe().run(self.page, options=asked).response
        broken = [
            f"{each['id']} ({each['help']}): {[node['html'][:160] for node in each['nodes'][:3]]}"
            for each in found["violations"]
        ]
        assert not broken, f"{self.page.url}: {broken}"

    def check_width(self) -> None:
        """The page itself does not scroll sideways."""
        wide = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{self.page.url} is {wide} px too wide"

    def check_looks(self, *, height: int = 900) -> None:
        """For everybody, on a small and on a large screen; the page then is as wide as the large one."""
        for width in WIDTHS:
            self.page.set_viewport_size({"width": width, "height": height})
            self.check_accessible()
            self.check_width()

    def shoot(self, path: Path) -> None:
        self.page.screenshot(path=path, full_page=True)

    def leave(self) -> None:
        self.context.close()
        left = [text for text in self.complaints if not any(part in text for part in self.allowed)]
        assert not left, left
