"""Every route, asked by somebody of every role: what each is answered stands in matrix.txt, and nowhere else.

A route without a row, and a row without a route, fail. Where answers differ, the test prints the rows as they would
have to be: to be thought about first, and pasted only when the new answer is the right one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from diamond.core.accounts import Scope
from diamond.server.api.documents import document
from testing.people import cheap_passwords
from tests.authorisation.requests import REQUESTS, Request
from tests.authorisation.world import PEOPLE, Answer, World, csrf_of, instance_header, make_world, session_cookie

MATRIX = Path(__file__).with_name("matrix.txt")
COLUMNS = ("anonymous", *PEOPLE, "agent", "expired", "wrong-scope")
# What a route asks of whoever comes: nothing, any credential, a scope of a user's, an administrator, or an agent.
NEEDS = ("open", "any", *Scope, "administrator", "agent-token")
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_WIDTH = 64
# Objects that nobody but their owner sees: whose they are is decided by these parameters of a path.
_PRIVATE = ("task_id", "image", "endpoint", "template", "template_id", "ref")


@dataclass(frozen=True)
class Row:
    key: str
    needs: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key:<{_WIDTH}} {self.needs:<13} " + " ".join(
            f"{cell:<{len(name)}}" for name, cell in zip(COLUMNS, self.cells, strict=True)
        )


def read_matrix() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for line in MATRIX.read_text().splitlines():
        words = line.partition("#")[0].split()
        if not words or words[0] == "METHOD":
            continue
        assert len(words) == 3 + len(COLUMNS), f"this row has {len(words) - 3} answers: {line}"
        row = Row(f"{words[0]} {words[1]}", words[2], tuple(words[3:]))
        assert row.needs in NEEDS, f"{row.needs} is none of {', '.join(NEEDS)}: {line}"
        assert row.key not in rows, f"twice: {row.key}"
        rows[row.key] = row
    return rows


def plain(path: str) -> str:
    """As the OpenAPI document writes it."""
    return _PARAMETER.sub(r"{\1}", path)


def routes_of(world: World) -> set[str]:
    """Those the OpenAPI document has, and those it leaves out: pages, and answers without a body."""
    documented = {
        f"{method.upper()} {path}" for path, methods in document(world.app)["paths"].items() for method in methods
    }
    others = {
        f"{method} {plain(route.path)}"
        for route in (*world.app.state.routes, *world.app.routes)
        if isinstance(route, Route)
        for method in route.methods or ()
    }
    return documented | others


def is_page(key: str) -> bool:
    return not key.split()[1].startswith(("/api/", "/agent/", "/metrics", "/openapi"))


def request_of(row: Row) -> Request:
    return REQUESTS.get(row.key.replace("HEAD ", "GET "), Request())


def status_fits(cell: str, status: int) -> bool:
    return cell == str(status) or (cell.endswith("xx") and cell[0] == str(status)[0])


def address_of(key: str, request: Request, names: dict[str, str]) -> str:
    renamed = request.parameters or {}

    def value(match: re.Match[str]) -> str:
        name = renamed.get(match[1], match[1])
        return name[1:] if name.startswith("=") else names[name]

    return _PARAMETER.sub(value, key.split()[1])


async def ask(world: World, row: Row, role: str, names: dict[str, str] | None = None) -> Answer:
    """The route's request as this role would send it: people open pages with a browser, and the rest with a token."""
    request = request_of(row)
    sent: dict[str, Any] = {"query": request.query}
    if request.body:
        sent["body"] = request.body(world)
    form = request.form(world) if request.form else None
    if is_page(row.key) and role in (*PEOPLE, "anonymous", "expired"):
        cookies = {} if role == "anonymous" else session_cookie(world, role)
        if form is not None:
            is_open = row.needs == "open"
            form["csrf"] = world.seed[1] if is_open or role == "anonymous" else csrf_of(world, role)
        sent["cookies"] = cookies | {"diamond_form": world.seed[0]}
    elif role == "wrong-scope":
        sent["token"] = _lacking(world, row.needs)
    elif role != "anonymous":
        sent["token"] = world.tokens[role]
    if form is not None and "csrf" not in form and row.needs == "open":
        sent["cookies"], form["csrf"] = {"diamond_form": world.seed[0]}, world.seed[1]
    if role == "agent":
        sent["headers"] = instance_header()
    path = address_of(row.key, request, names or world.names)
    return await world.ask(row.key.split()[0], path, form=form, **sent)


def settle(world: World, row: Row, answer: Answer) -> None:
    """The next one meets the world as this one did."""
    if row.key.startswith(("GET", "HEAD")) or answer.status >= 400:
        world.forgive()
    else:
        world.restore()


def _lacking(world: World, needs: str) -> str:
    """A token with everything but what the route needs, of the one who could use it otherwise."""
    if needs == "administrator":
        return world.tokens["admin without admin"]
    return world.tokens[f"owner without {needs}" if needs in tuple(Scope) else "owner without admin"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DIAMOND_URL", "DIAMOND_TOKEN", "DIAMOND_HOME"):
            patch.delenv(name, raising=False)
        with cheap_passwords():
            made = make_world(tmp_path_factory.mktemp("matrix"))
            yield made
        made.ctx.db.close()


async def _form_seed(world: World) -> tuple[str, str]:
    """What a browser that has opened a page with a form holds: a cookie, and a field of the form."""
    page = await world.ask("GET", "/sign-in")
    cookie = re.match(r"diamond_form=([^;]+)", page.headers["set-cookie"])
    field = re.search(rb'name="csrf" value="([0-9a-f]+)"', page.body)
    assert cookie and field, page.words
    return cookie[1], field[1].decode()


async def _open(world: World) -> None:
    world.restore()
    world.seed = await _form_seed(world)


def test_every_route_has_a_row_and_every_row_a_route(world: World) -> None:
    rows, routes = set(read_matrix()), routes_of(world)
    assert not routes - rows, "routes that matrix.txt does not know:\n  " + "\n  ".join(sorted(routes - rows))
    assert not rows - routes, "rows of matrix.txt for routes that are gone:\n  " + "\n  ".join(sorted(rows - routes))
    assert set(REQUESTS) <= routes, f"requests for routes that are gone: {set(REQUESTS) - routes}"


def test_everybody_gets_the_answer_that_the_table_says(world: World) -> None:
    async def whole() -> list[str]:
        await _open(world)
        wrong = []
        for row in read_matrix().values():
            found = []
            for role, cell in zip(COLUMNS, row.cells, strict=True):
                answer = await ask(world, row, role)
                fits = status_fits(cell, answer.status)
                found.append(cell if fits else f"{answer.status}")
                if not fits:
                    wrong.append(f"# {role}, not {cell}: {answer.words}")
                settle(world, row, answer)
            if tuple(found) != row.cells:
                wrong.append(str(Row(row.key, row.needs, tuple(found))))
        return wrong

    wrong = asyncio.run(whole())
    assert not wrong, "answers that differ from matrix.txt:\n" + "\n".join(wrong)


def test_what_is_private_does_not_exist_for_anybody_else(world: World) -> None:
    """The same routes with objects of the owner's that are shared with nobody: 404, never 403, whoever asks."""

    async def whole() -> list[str]:
        await _open(world)
        wrong, asked = [], 0
        for row in read_matrix().values():
            request = request_of(row)
            named = {(request.parameters or {}).get(name, name) for name in _PARAMETER.findall(row.key)}
            if not named & {*_PRIVATE, "done_id"} or "/projects/" in row.key:
                continue
            asked += 1
            for role in PEOPLE:
                answer = await ask(world, row, role, world.names | world.private)
                expected = _PRIVATE_ANSWERS.get((row.key, role), "owner" if role == "owner" else "404")
                if expected == "owner":
                    fits = answer.status < 400 or answer.status == 409
                else:
                    fits = status_fits(expected, answer.status)
                if not fits:
                    wrong.append(f"{row.key} as {role}: {answer.status}, not {expected}: {answer.words}")
                settle(world, row, answer)
        assert asked > 25
        return wrong

    wrong = asyncio.run(whole())
    assert not wrong, "\n".join(wrong)


def test_removing_what_is_anothers_does_nothing(world: World) -> None:
    """Where the table says 204 for everybody, because repeating it is harmless, only the owner's does anything."""
    keys = ("DELETE /api/v1/shells/{shell_id}", "DELETE /api/v1/image-drafts/{draft_id}")

    async def whole() -> None:
        await _open(world)
        rows = read_matrix()
        for key in keys:
            look = rows[key.replace("DELETE", "GET")]
            for role in PEOPLE:
                assert (await ask(world, rows[key], role)).status == 204
                seen = (await ask(world, look, "owner")).status
                assert seen == (404 if role == "owner" else 200), (key, role)
                if role == "owner":
                    world.restore()

    asyncio.run(whole())


def test_no_list_holds_what_is_not_for_the_one_who_asks(world: World) -> None:
    """Who may ask for a list is in the table; here: what is in it. Ids of the owner's things are in no other's list."""
    own = {"token_id", "session_id", "identity_id", "draft_id", "rule_id", "shell_id"}

    async def whole() -> list[str]:
        await _open(world)
        hidden = {name: {world.names[key] for key in own} | set(world.private.values()) - {"own"} for name in PEOPLE}
        hidden["stranger"] |= {
            world.names[key] for key in ("task_id", "done_id", "job_id", "image", "invitation_id", "ref")
        }
        found, shown = [], b""
        for row in read_matrix().values():
            if not row.key.startswith("GET ") or "{" in row.key or row.needs == "administrator":
                continue
            for role in ("stranger", "viewer", "member", "admin"):
                answer = await ask(world, row, role)
                found += [f"{row.key} tells {role} of {one}" for one in hidden[role] if one.encode() in answer.body]
            shown += (await ask(world, row, "owner")).body
        # They would be found if they were there: the owner's own lists have them.
        assert not [one for one in hidden["stranger"] - {world.names["shell_id"]} if one.encode() not in shown]
        return found

    found = asyncio.run(whole())
    assert not found, "\n".join(found)


# The only exceptions: administrators stop what is anybody's and give it to somebody else, without seeing it.
_PRIVATE_ANSWERS = {
    ("POST /api/v1/tasks/{task_id}/transfer", "admin"): "2xx",
    ("POST /api/v1/images/{image}/transfer", "admin"): "2xx",
    ("POST /api/v1/endpoints/{name}/transfer", "admin"): "2xx",
    **{("POST /api/v1/admin/tasks/{task_id}/cancel", role): "403" for role in PEOPLE},
    ("POST /api/v1/admin/tasks/{task_id}/cancel", "admin"): "2xx",
}
