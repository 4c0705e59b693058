"""How pages are made: templates that escape everything, files that browsers keep for ever, and errors for people.

Every page comes from a template below templates/, over base.html. Must not know a particular page.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

import diamond
from diamond.core import quotas
from diamond.core.accounts import MIN_PASSWORD
from diamond.core.durations import format_duration
from diamond.core.errors import DiamondError, Forbidden, NotFound, Unauthenticated
from diamond.server.auth import NO_CREDENTIAL, SAFE_METHODS, check_same_origin
from diamond.server.compression import smaller, takes_gzip
from diamond.server.forms_token import masked
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.services.sessions import SIGNED_OUT
from diamond.server.settings import Settings
from diamond.server.web.navigation import links

_HERE = Path(__file__).parent
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_IMPORT = re.compile(rb'from "\./([a-z_]+\.js)"')
_FOR_EVER = "public, max-age=31536000, immutable"
HOME_PAGE = "/dashboard"
_MAX_NEXT = 500
_TICKED = re.compile(r"`([^`\n]+)`")
# Fields that pages themselves fill in, and those that hold what must never be shown again.
_UNTYPED = ("csrf", "key", "once", "seen", "back", "next", "base", "version", "go", "do", "as_new", "username")
_SECRET = re.compile(r"password|token|^(value|again|code)$")
PART_HEADER = "Diamond-Part"
MADE_HEADER = "Diamond-Made"
LOOKED_AT = "diamond.looked_at"  # in a request's scope: before anything was looked up for it
THEME_COOKIE = "diamond_theme"
THEMES = ("light", "dark")


def _bare(suffix: str, data: bytes) -> bytes:
    """Without comments that stand on lines of their own: they are for whoever reads the source, not for browsers."""
    if suffix == ".js":
        return re.sub(rb"^[ \t]*//[^\n]*\n", b"", data, flags=re.MULTILINE)
    return re.sub(rb"/\*.*?\*/\s*", b"", data, flags=re.DOTALL) if suffix == ".css" else data


def _read_static() -> tuple[dict[str, str], dict[str, tuple[bytes, str]]]:
    """Names by which pages call for files, and the files by the names that browsers see.

    Those hold a part of the contents' hash: a browser may keep a file for ever, and gets a new one with the first page
    after an upgrade. Where a script imports another ("./chart.js"), it gets that one's name; so its own changes too.
    """
    names: dict[str, str] = {}
    files: dict[str, tuple[bytes, str]] = {}

    def name_of(path: Path) -> str:
        if path.name not in names:
            data = _bare(path.suffix, path.read_bytes())
            if path.suffix == ".js":
                data = _IMPORT.sub(
                    lambda found: b'from "./%s"' % name_of(path.parent / found[1].decode()).encode(), data
                )
            names[path.name] = f"{path.stem}.{hashlib.sha256(data).hexdigest()[:16]}{path.suffix}"
            files[names[path.name]] = (data, _TYPES[path.suffix])
        return names[path.name]

    for path in sorted((_HERE / "static").iterdir()):
        if path.suffix in _TYPES:
            name_of(path)
    return names, files


_NAMES, _FILES = _read_static()
# The same for everybody and no secret, so what it shrinks to tells nobody anything; done once, not for each request.
_SMALL = {name: gzip.compress(data, mtime=0) for name, (data, _) in _FILES.items()}


def moment(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at)) if at is not None else "never"


def iso(at: float) -> str:
    """For the `datetime` of a <time>; static/live.js turns that into the reader's own clock."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def shown_bytes(number: float | None) -> str:
    """1.5 GiB."""
    if number is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return ""


def sentence(text: str) -> str:
    """An error's words, which are written to follow a colon, as they stand alone."""
    return text if not text else text[0].upper() + text[1:] + ("" if text[-1] in ".!?:" else ".")


def code(text: str) -> Markup:
    """What is written between backticks, as the same words have it in a terminal, is shown as code."""
    found = _TICKED.split(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(each) if at % 2 else escape(each) for at, each in enumerate(found)
    )


def browser_name(agent: str) -> str:
    """What a person calls the program that sent this User-Agent line, as far as it says."""
    name = next((shown for mark, shown in _BROWSERS if mark in agent), "")
    system = next((shown for mark, shown in _SYSTEMS if mark in agent), "")
    return " on ".join(part for part in (name, system) if part) or agent[:60] or "unknown"


# In this order: most of them claim to be the ones below as well.
_BROWSERS = (("Edg/", "Edge"), ("OPR/", "Opera"), ("Firefox/", "Firefox"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
_SYSTEMS = (
    ("Android", "Android"), ("iPhone", "iPhone"), ("iPad", "iPad"), ("Windows", "Windows"), ("Mac OS X", "macOS"),
    ("Linux", "Linux"),
)  # fmt: skip


def _asset(name: str) -> str:
    return f"/static/{_NAMES[name]}"


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters["moment"] = moment
    made.filters["bytes"] = shown_bytes
    made.filters["amount"] = lambda number, name: quotas.shown(name, number)
    made.filters["span"] = format_duration
    made.filters["iso"] = iso
    made.filters["sentence"] = sentence
    made.filters["code"] = code
    made.filters["browser"] = browser_name
    made.globals["min_password"] = MIN_PASSWORD
    made.globals["asset"] = _asset
    made.globals["once_key"] = lambda: secrets.token_hex(16)
    made.globals["version"] = diamond.__version__
    return made


_TEMPLATES = _environment()


def show(
    request: Request,
    template: str,
    *,
    who: Identity | None = None,
    status: int = 200,
    headers: dict[str, str] | None = None,
    **values: Any,
) -> HTMLResponse:
    """A page. `who` is signed in, as its top line shows; their forms hold `who.csrf`."""
    values.setdefault("csrf", masked(who.csrf) if who and who.csrf else "")
    values.setdefault("errors", {})
    values.setdefault("notice", "")
    values.setdefault("problem", None)
    multi_user = settings_of(request).multi_user
    # A page that is open asks for itself again, without its frame: see static/live.js.
    is_part = who is not None and PART_HEADER in request.headers
    made = f"{request.scope.get(LOOKED_AT, 0.0):.6f}"
    text = _TEMPLATES.get_template(template).render(
        who=who,
        person=_person(who),
        looked_at=made,
        multi_user=multi_user,
        layout="part.html" if is_part else "app.html" if who is not None else "base.html",
        places=links(who, request.url.path, multi_user=multi_user) if who is not None and not is_part else [],
        theme=theme_of(request),
        here=request.url.path,
        answered=request.method not in SAFE_METHODS,  # its address alone would give another page
        # The answer to a form cannot be asked for again, unless its page says that GET has what is live there.
        is_live=values.pop("is_live", request.method in SAFE_METHODS),
        **values,
    )
    response = HTMLResponse(text, status, {"Vary": PART_HEADER, MADE_HEADER: made, **(headers or {})})
    # Only what is asked for by its address and belongs to somebody signed in: `masked` keeps their forms' secret, and
    # answers to forms may hold others (a new token, an enrolment line).
    return smaller(request, response) if who is not None and request.method in SAFE_METHODS else response


def _person(who: Identity | None) -> str:
    """Whose page it is, for static/keep.js: what they typed is not for whoever comes next in the same tab."""
    return hashlib.sha256(f"diamond keep {who.user_id}".encode()).hexdigest()[:24] if who is not None else ""


def theme_of(request: Request) -> str:
    """What the person chose in Settings; "" leaves it to the browser."""
    chosen = request.cookies.get(THEME_COOKIE, "")
    return chosen if chosen in THEMES else ""


def problem_page(request: Request, error: DiamondError, *, who: Identity | None = None) -> Response:
    """What went wrong, for a person: the same words as the API's."""
    headers = {}
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="diamond"'
    if error.status == 413:
        headers["Connection"] = "close"
    if error.transient:
        headers["Retry-After"] = "2"
    # What is refused, or not there, is so the second time too.
    is_passing = error.transient or error.status in (408, 429) or error.status >= 500
    again = request.url.path if request.method in SAFE_METHODS and is_passing else ""
    sign_in = f"/sign-in?next={quote(_came_from(request), safe='/')}" if error.status == 401 else ""
    values: dict[str, Any] = {"problem": error, "again": again, "sign_in": sign_in, "back": _came_from(request)}
    if error.status == 401:
        values["typed"] = _typed(request)
    return show(request, "problem.html", who=who, status=error.status, headers=headers, **values)


def _typed(request: Request) -> dict[str, str]:
    """What somebody wrote who is no longer signed in, by field; nothing secret, and nothing that another site sent."""
    try:
        check_same_origin(request)
    except Forbidden:
        return {}
    sent: dict[str, str] = request.scope.get("diamond.form") or {}
    return {
        name.replace("_", " ").capitalize(): text
        for name, text in sent.items()
        if text.strip() and name not in _UNTYPED and not _SECRET.search(name)
    }


def _signed_out(error: Unauthenticated) -> Unauthenticated:
    """For a person whose browser sent a form without a cookie that still holds; the API's words are for programs."""
    if error.message not in (NO_CREDENTIAL, SIGNED_OUT):
        return error
    return Unauthenticated(
        "you are no longer signed in, so what you sent was not done", hint="sign in, then go back and send it again"
    )


def _came_from(request: Request) -> str:
    """The page of ours whose form this is: there people go on after they have signed in again."""
    page = urlsplit(request.headers.get("referer", ""))
    here = page.path + (f"?{page.query}" if page.query else "")
    return safe_next(here) if page.netloc == request.headers.get("host", "") else HOME_PAGE


def nothing_here(request: Request) -> Response:
    return show(request, "nothing_here.html", status=404, path=request.url.path[:200])


def to(path: str) -> RedirectResponse:
    """Go on at one of our pages, with GET."""
    return RedirectResponse(path, 303)


def sign_in_path(request: Request) -> str:
    """Where to sign in, to come back here."""
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return f"/sign-in?next={quote(safe_next(here), safe='/')}"


def safe_next(asked: str, default: str = HOME_PAGE) -> str:
    """Where to go after signing in: a path of this server, or else `default`.

    Browsers read ``//host``, ``/\\host`` and paths with line breaks or tabs as addresses of other servers. What is left
    is plain ASCII that begins with one slash.
    """
    plain = asked.isascii() and asked.isprintable() and not any(char in asked for char in ' \\"<>')
    if not plain or not asked.startswith("/") or asked.startswith("//") or len(asked) > _MAX_NEXT:
        return default
    return default if asked.startswith("/sign-") else asked


def ctx_of(request: Request) -> Context:
    found: Context = request.app.state.runtime.ctx
    return found


def settings_of(request: Request) -> Settings:
    found: Settings = request.app.state.runtime.settings
    return found


class PageRoute(APIRoute):
    """A route for browsers: whoever is not signed in is led there, and errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def explained(request: Request) -> Response:
            try:
                return await answer(request)
            except Unauthenticated as error:
                if request.method in SAFE_METHODS and "authorization" not in request.headers:
                    return to(sign_in_path(request))
                return problem_page(request, error if "authorization" in request.headers else _signed_out(error))
            except DiamondError as error:
                return problem_page(request, error)
            except RequestValidationError:
                return problem_page(request, NotFound("there is no such page", hint="check the address"))

        return explained


def page_router() -> APIRouter:
    return APIRouter(include_in_schema=False, route_class=PageRoute)


router = page_router()


@router.api_route("/static/{name}", methods=["GET", "HEAD"])
async def static(request: Request, name: str) -> Response:
    found = _FILES.get(name)
    if found is None:
        raise NotFound(f"there is no file {name[:80]!r}", hint="reload the page that asked for it")
    headers = {"Content-Type": found[1], "Cache-Control": _FOR_EVER, "Vary": "Accept-Encoding"}
    if takes_gzip(request):
        return Response(_SMALL[name], headers=headers | {"Content-Encoding": "gzip"})
    return Response(found[0], headers=headers)
