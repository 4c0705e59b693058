"""`diamond pool record` and `diamond simulate` of what it wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import main, pool_records
from diamond.core.codec import decode, encode
from diamond.core.pool_records import FORMAT, PoolRecord
from tests.unit.planner.test_pool_recorded import pool, task

RECORD = pool(task(1), task(2, at=20.0, ended_at=430.0))


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main([str(one) for one in arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pool.json"
    path.write_text("\n " + json.dumps(encode(RECORD)))
    return path


def test_a_record_is_replayed_beside_what_happened(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("simulate", file) == 0
    whole, _, tasks = capsys.readouterr().out.partition("TASK")
    assert whole.split()[:4] == ["POLICY", "RECORDED", "PREDICTED", "RATIO"]
    assert " ".join(whole.splitlines()[1].split()[:6]) == "diamond 5.2 min 5.2 min 1.00"
    assert [line.split()[0] for line in tasks.splitlines()[1:3]] == ["1", "2"]


def test_as_json_and_as_pictures(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("simulate", file, "--policy", "diamond", "-p", "fifo", "--out", tmp_path / "out", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["replays"]] == ["diamond", "fifo"]
    first = found["replays"][0]
    assert first["ratio"] == pytest.approx(first["predicted_mean_s"] / first["recorded_mean_s"])
    assert [one["recorded_s"] for one in first["tasks"]] == [214.0, 410.0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == found["files"]
    assert "gantt-diamond.svg" in found["files"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nodes", "4x4"], "--nodes"),
        (["--first", "3"], "--first"),
        (["--restart", "5s"], "--restart"),
        (["--policy", "magic"], "--policy"),
    ],
)
def test_options_that_a_record_has_no_use_for(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert call("simulate", file, *arguments) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ("{}", "kind"),
        ('{"a":' * 100_000, "JSON"),
        (json.dumps(encode(RECORD) | {"format": FORMAT + 1}), "format"),
        (json.dumps(encode(RECORD) | {"slots_per_node": -1}), "slots_per_node"),
        (json.dumps(encode(RECORD) | {"tasks": []}), "tasks"),
    ],
)
def test_what_is_no_record_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str
) -> None:
    path = tmp_path / "pool.json"
    path.write_text(text)
    assert call("simulate", path) == 1
    said = capsys.readouterr().err
    assert named in said and "Traceback" not in said


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers with the record; what was asked for."""
    asked: list[str] = []

    def record(name: str) -> PoolRecord:
        asked.append(name)
        return RECORD

    @contextmanager
    def connect() -> Iterator[Any]:
        yield SimpleNamespace(pools=SimpleNamespace(record=record))

    monkeypatch.setattr(pool_records, "connect", connect)
    return asked


def test_what_is_written_can_be_replayed(client: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pool", "record", "my pool", "-o", tmp_path / "p.json") == 0
    assert client == ["my pool"]
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    captured = capsys.readouterr()
    assert captured.out == "" and "2 tasks on 1 node" in captured.err
    assert call("simulate", tmp_path / "p.json", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["replays"][0]["tasks"]) == 2


def test_without_a_file_it_goes_to_standard_output(client: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pool", "record", "p") == 0
    assert decode(PoolRecord, json.loads(capsys.readouterr().out)) == RECORD


def test_with_json_it_says_what_it_wrote_or_prints_it(
    client: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.json"
    assert call("pool", "record", "p", "-o", file, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"file": str(file), "tasks": 2, "nodes": 1} and captured.err == ""
    assert decode(PoolRecord, json.loads(file.read_text())) == RECORD
    assert call("pool", "record", "p", "--json") == 0
    assert decode(PoolRecord, json.loads(capsys.readouterr().out)) == RECORD
    assert call("pool", "record", "p", "-o", tmp_path / "nowhere" / "p.json", "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "--output"


def test_where_it_cannot_be_written(client: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("pool", "record", "p", "-o", tmp_path / "nowhere" / "p.json") == 2
    assert "--output" in capsys.readouterr().err
