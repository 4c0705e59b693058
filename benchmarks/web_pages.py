"""Pages in a real browser: what they weigh, how long until the first row, and from a click to the change."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import median

_WITHIN_MS = 60_000


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One visit: over the wire (headers and bodies, as compressed as they came), and until the row was to be seen."""

    bytes: int
    requests: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class Page:
    """`row` is a selector of the first thing a person came for."""

    name: str
    url: str
    row: str


def visit(chromium: Any, page: Page, times: int) -> tuple[list[Loaded], list[Loaded]]:
    """So many cold loads, each in a browser that never was there, and so many warm ones after them."""
    cold, warm = [], []
    for _ in range(times):
        context = chromium.new_context(viewport={"width": 1280, "height": 900})
        _sign_in(context, page.url)
        cold.append(_load(context, page))
        warm.append(_load(context, page))
        context.close()
    return cold, warm


def _sign_in(context: Any, url: str) -> None:
    """Where a cookie is needed to be let in, have it; without anything else in the cache."""
    origin = "/".join(url.split("/")[:3])
    context.request.get(origin + "/dashboard")


def _load(context: Any, page: Page) -> Loaded:
    tab = context.new_page()
    wire = context.new_cdp_session(tab)
    wire.send("Network.enable")
    sizes: list[int] = []
    wire.on("Network.loadingFinished", lambda event: sizes.append(int(event["encodedDataLength"])))
    began = time.perf_counter()
    tab.goto(page.url, wait_until="commit", timeout=_WITHIN_MS)
    tab.locator(page.row).first.wait_for(state="visible", timeout=_WITHIN_MS)
    took = 1000 * (time.perf_counter() - began)
    tab.wait_for_timeout(1500)  # what it still fetches counts by weight
    tab.close()
    return Loaded(bytes=sum(sizes), requests=len(sizes), ms=took)


def click_to_change(chromium: Any, url: str, press: str, see: str, times: int) -> list[float]:
    """Milliseconds from pressing the thing named `press` until `see` is there."""
    took = []
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    _sign_in(context, url)
    for _ in range(times):
        tab = context.new_page()
        tab.goto(url, timeout=_WITHIN_MS)
        target = tab.locator(press).first
        target.wait_for(state="visible", timeout=_WITHIN_MS)
        began = time.perf_counter()
        target.click()
        tab.locator(see).first.wait_for(state="visible", timeout=_WITHIN_MS)
        took.append(1000 * (time.perf_counter() - began))
        tab.close()
    context.close()
    return took


def middle(found: list[Loaded]) -> Loaded:
    return Loaded(
        bytes=int(median([float(one.bytes) for one in found])),
        requests=int(median([float(one.requests) for one in found])),
        ms=median([one.ms for one in found]),
    )
