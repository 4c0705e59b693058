"""The file that Compare exports: safe to open in a spreadsheet, and still a table of numbers for programs."""

from __future__ import annotations

import csv
import io
import math
import re

import httpx
import pytest

from diamond.core.states import TaskState
from diamond.core.tasks import Task
from diamond.server.services.comparisons import Cell, Row
from diamond.server.web.compare import compare_path, csv_text, safe_cell, shown_cell
from tests.unit.server.conftest import World, launch


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+cmd", "'+1+cmd"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("  =1", "'  =1"),
        ("x;=1+1", "x;'=1+1"),
        ("x;  @SUM(A1);y", "x;'  @SUM(A1);y"),
        ("x\t-2+3;+1", "x\t'-2+3;'+1"),
        ('x;"=1+1"', 'x;\'"=1+1"'),
        ("true\n=1+1", "true\n'=1+1"),
        ("=1;=2", "'=1;'=2"),
        ("a;b\tc", "a;b\tc"),
        ("\r=1", "'\r=1"),
        ("＝1", "'＝1"),
        ("--lr 0.1", "'--lr 0.1"),
        ("-5", "-5"),
        ("+1.5e-3", "+1.5e-3"),
        ("-.5", "-.5"),
        ("plain", "plain"),
        ("a=b", "a=b"),
        ("", ""),
        (None, ""),
        (True, "true"),
        (-3, "-3"),
        (-0.1, "-0.1"),
        (1e-12, "1e-12"),
        (math.nan, "NaN"),
        (-math.inf, "-Infinity"),
    ],
)
def test_no_cell_is_a_formula_and_numbers_stay_numbers(value: Cell, written: str) -> None:
    assert safe_cell(value) == written


def test_a_line_for_each_run_and_a_column_for_each_thing() -> None:
    runs = [Task(id=f"tsk_{number}", name=name, state=TaskState.SUCCEEDED) for number, name in enumerate("a=")]
    rows = [
        Row(group="Commands", key="run", label="run", cells=('echo "x, y"\ntrue', "=1"), kind="text"),
        Row(group="Metrics", key="metric =evil", label="=evil", cells=(0.1, None)),
        Row(group="Metrics", key="=metric", label="x", cells=(-1.5, 2)),
        Row(group="Result", key="started_at", label="Started", cells=(0.0, None), kind="time"),
    ]
    text = csv_text(runs, rows)
    assert text.endswith("\r\n")
    read = list(csv.DictReader(io.StringIO(text, newline="")))
    assert read == [
        {
            "task": "tsk_0", "name": "a", "run": 'echo "x, y"\ntrue', "metric =evil": "0.1", "'=metric": "-1.5",
            "started_at": "1970-01-01T00:00:00Z",
        },
        {"task": "tsk_1", "name": "'=", "run": "'=1", "metric =evil": "", "'=metric": "2", "started_at": ""},
    ]  # fmt: skip


def test_cells_are_written_as_people_read_them() -> None:
    def shown(cell: Cell, kind: str = "value") -> str:
        return shown_cell(Row(group="Task", key="k", label="k", cells=(cell,), kind=kind), cell)

    assert shown(0.123456789) == "0.123457" and shown(math.nan) == "NaN" and shown(None) == ""
    assert shown(True) == "yes" and shown(90.0, "span") == "1m 30s" and shown(0.25, "span") == "0.25s"
    assert shown("bundle:sha256:" + "0123456789abcdef" * 4, "ref") == "bundle:sha256:0123456789ab…"


def test_addresses_hold_what_was_chosen() -> None:
    assert compare_path([]) == "/compare"
    assert compare_path(["tsk_a", "tsk_b"], q="x&y", after="") == "/compare?task=tsk_a&task=tsk_b&q=x%26y"


def test_a_newcomer_is_told_what_to_do_first(world: World) -> None:
    async def look(client: httpx.AsyncClient) -> None:
        page = await client.get("/compare", headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert "nothing to compare yet" in page.text and 'href="/compose"' in page.text
        exported = await client.get("/compare.csv")
        assert exported.text == "task,name\r\n" and exported.headers["content-type"] == "text/csv; charset=utf-8"
        assert "attachment" in exported.headers["content-disposition"]

    world.run(look)


def test_scripts_import_each_other_by_names_that_change_with_them_and_travel_small(world: World) -> None:
    async def look(client: httpx.AsyncClient) -> None:
        made = await client.post("/api/v1/tasks", json={"spec": {"run": "true"}})
        page = await client.get(f"/tasks/{made.json()['id']}/curves")
        (address,) = re.findall(r'src="(/static/curves\.[0-9a-f]{16}\.js)"', page.text)
        script = await client.get(address, headers={"Accept-Encoding": "gzip"})
        assert script.headers["content-encoding"] == "gzip" and script.headers["vary"] == "Accept-Encoding"
        assert int(script.headers["content-length"]) < len(script.content) / 2
        plain = await client.get(address, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.content == script.content
        (imported,) = re.findall(r'from "\./(chart\.[0-9a-f]{16}\.js)"', script.text)
        assert f"/static/{imported}" in page.text, "the same file that the page fetches ahead"
        assert (await client.get(f"/static/{imported}")).status_code == 200

    world.run(look)


def test_times_of_a_spec_are_compared_as_times(world: World) -> None:
    async def look(client: httpx.AsyncClient) -> None:
        one = await launch(client, run="true", max_duration="1h", retry={"max_retries": 1, "backoff": "90s"})
        page = (await client.get(f"/compare?task={one['id']}", headers={"Accept": "text/html"})).text
        assert "1h 00m" in page and "1m 30s" in page and "3600" not in page

    world.run(look)
