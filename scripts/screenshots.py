"""`make screenshots`: every page as people see it, for the docs and to look at after a change.

Starts services of its own (an empty one, one with tasks that really ran, one with accounts), visits every place and
what it leads to, light and dark, narrow and wide, and writes a PNG for each into the folder given (build/screenshots).
Exit code 1 when a page complained: an error on the console, a failed request, a page that answers 5xx.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from diamond.server.web.navigation import PLACES  # noqa: E402
from testing import believable, people  # noqa: E402
from testing.browser import Visitor, running_chromium  # noqa: E402
from testing.service import Service  # noqa: E402

WIDTHS = (1280, 400)
MORE = 4  # pages that one place leads to, of those that look alike
TALLEST = 8000  # pixels; of what is longer, only what one sees first
_IS_FILE = re.compile(r"export|download|/log\b|/files?\b|\.[a-z]{2,5}$")
_KIND = re.compile(r"(tsk|img|job|end|ntc|prj|drf)_[a-z0-9]+|[0-9]+")


def main() -> int:
    parser = argparse.ArgumentParser(description="Pictures of every page.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "screenshots")
    parser.add_argument("--only", default="", help="a part of the paths wanted, such as /settings")
    chosen = parser.parse_args()
    complaints: list[str] = []
    with running_chromium() as chromium, tempfile.TemporaryDirectory(prefix="diamond-shots-") as work:
        for name, is_crowded, is_full in (("empty", False, False), ("full", False, True), ("people", True, True)):
            with _service(Path(work) / name, is_crowded, is_full) as service:
                paths = [place.path for place in PLACES if place.admin == is_crowded]
                complaints += _round(chromium, service, name, paths, chosen.folder / name, chosen.only)
    for line in complaints:
        print(f"complaint: {line}", file=sys.stderr)
    return 1 if complaints else 0


@contextmanager
def _service(folder: Path, is_crowded: bool, is_full: bool) -> Iterator[Service]:
    with Service(folder, **({"multi_user": "1"} if is_crowded else {})) as service:
        if is_crowded:
            believable.fill_people(service)
        elif is_full:
            believable.fill_tasks(service)
        yield service


def _round(chromium: Any, service: Service, name: str, paths: list[str], folder: Path, only: str) -> list[str]:
    """Every place and what it leads to; what the visitors complained of."""
    found: list[str] | None = None
    complaints: list[str] = []
    for dark in (False, True):
        for width in WIDTHS:
            visitor = Visitor(chromium, service.url, dark=dark, width=width)
            if service.is_multi_user:
                visitor.sign_in("alice", people.PASSWORD)
            if found is None:
                found = [path for path in ["/", *_reachable(visitor, paths)] if only in path]
            for path, title in _titles(found).items():
                file = folder / f"{title}-{'dark' if dark else 'light'}-{width}.png"
                _shoot(visitor, path, file)
            complaints += [f"{name} {width} {'dark' if dark else 'light'}: {text}" for text in visitor.complaints]
            visitor.context.close()
    return complaints


def _reachable(visitor: Visitor, paths: list[str]) -> list[str]:
    """The places that are there, and below each the first few pages of every kind, two steps deep."""
    found: list[str] = []
    for place in paths:
        answer = visitor.page.goto(place)
        if answer is None or answer.status == 404:
            print(f"skipped: {place} is not there", flush=True)
            visitor.complaints = [text for text in visitor.complaints if "404" not in text]
            continue
        kinds: dict[str, int] = {}
        below = _below(visitor, place, place, kinds)
        deeper = [path for each in below for path in _below(visitor, each, place, kinds)]
        found += dict.fromkeys([place, *below, *deeper])
    return found


def _below(visitor: Visitor, path: str, place: str, kinds: dict[str, int]) -> list[str]:
    visitor.page.goto(path)
    links = visitor.page.evaluate(
        "[...document.querySelectorAll('main a[href]:not([download])')].map((a) => a.pathname)"
    )
    found = []
    for link in dict.fromkeys(links):
        # Pages of the documentation all look alike, the tabs of Settings do not.
        kind = "/help/*" if place == "/help" else _KIND.sub("*", link)
        if link.startswith(f"{place}/") and not _IS_FILE.search(link) and link not in kinds:
            kinds[link] = 1
            kinds[f"kind {kind}"] = kinds.get(f"kind {kind}", 0) + 1
            if kinds[f"kind {kind}"] <= MORE:
                found.append(link)
    return found


def _shoot(visitor: Visitor, path: str, file: Path) -> None:
    visitor.page.goto(path)
    visitor.page.wait_for_timeout(400)  # curves and logs come after the page
    file.parent.mkdir(parents=True, exist_ok=True)
    height = visitor.page.evaluate("document.documentElement.scrollHeight")
    visitor.page.screenshot(path=file, full_page=height <= TALLEST)
    print(file, flush=True)


def _titles(paths: list[str]) -> dict[str, str]:
    """Names of files that stay the same from one run to the next: ids become numbers, in the order they were met."""
    ids: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        kind = match[1] or "n"
        return ids.setdefault(match[0], f"{kind}-{1 + sum(known.startswith(kind) for known in ids.values())}")

    return {path: re.sub(r"[^A-Za-z0-9]+", "-", _KIND.sub(number, path)).strip("-") or "landing" for path in paths}


if __name__ == "__main__":
    sys.exit(main())
