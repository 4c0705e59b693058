"""Files of a run directory that a job has put something else in place of."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from diamond.core.rundir import (
    SMALL_BYTES,
    RunDir,
    may_have_started,
    read_exit,
    read_first_failed_rank,
    read_hang,
    read_json,
    read_process_mark,
    read_small,
    write_atomic,
)

GOOD: dict[str, Any] = {"phase": "run", "exit_code": 3, "started_at": 1.5, "ended_at": 2, "host": "node1"}


def in_time(action: Callable[[], Any]) -> Any:
    """The answer of something that must not wait."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(action()), daemon=True)
    thread.start()
    thread.join(5)
    assert answers, "it waits"
    return answers[0]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_small_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * SMALL_BYTES)
    assert read_small(path) == b"a" * SMALL_BYTES
    path.write_bytes(b"a" * (SMALL_BYTES + 1))
    assert read_small(path) is None
    assert read_small(tmp_path / "none") is None


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "sparse"])
def test_what_is_no_small_file_counts_as_absent(run_dir: RunDir, kind: str) -> None:
    for path in (run_dir.exit, run_dir.started, run_dir.node_exit(0)):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link":
            path.symlink_to("/etc/hostname")
        elif kind == "folder":
            path.mkdir()
        else:
            path.touch()
            os.truncate(path, 700 * 1024**2)
    assert in_time(lambda: read_exit(run_dir)) is None
    assert in_time(lambda: read_process_mark(run_dir)) is None
    assert in_time(lambda: read_first_failed_rank(run_dir)) is None
    assert may_have_started(run_dir)


def test_the_exit_record(run_dir: RunDir) -> None:
    run_dir.exit.write_text(json.dumps(GOOD))
    record = read_exit(run_dir)
    assert record is not None
    assert (record.phase, record.exit_code, record.started_at, record.ended_at) == ("run", 3, 1.5, 2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("exit_code", "1e999"),
        ("exit_code", "9" * 30),
        ("exit_code", "-1"),
        ("exit_code", "256"),
        ("exit_code", "true"),
        ("exit_code", '"0"'),
        ("started_at", "NaN"),
        ("ended_at", "Infinity"),
        ("ended_at", "1e300"),
        ("started_at", "-1e300"),
        ("started_at", "9" * 400),
        ("phase", "[]"),
        ("host", "null"),
    ],
)
def test_records_no_script_writes(run_dir: RunDir, field: str, value: str) -> None:
    pairs = {name: json.dumps(good) for name, good in GOOD.items()} | {field: value}
    run_dir.exit.write_text("{" + ",".join(f'"{name}":{text}' for name, text in pairs.items()) + "}")
    assert read_exit(run_dir) is None


def test_the_host_is_text(run_dir: RunDir) -> None:
    run_dir.exit.write_text(json.dumps(GOOD | {"host": "\ud800a\n" + "b" * 1000}))
    record = read_exit(run_dir)
    assert record is not None
    assert record.host.startswith("?a?b") and len(record.host) == 255


def test_nesting_without_end(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("[" * 60_000)
    assert read_json(tmp_path / "x") == {}


@pytest.mark.parametrize("text", ["-1 0 boot", f"{10**30} 0 boot", f"1 {10**30} boot", "1 x boot", "1 2", "", "\xff"])
def test_marks_no_script_makes(run_dir: RunDir, text: str) -> None:
    run_dir.started.write_text(text, encoding="latin-1")
    assert read_process_mark(run_dir) is None


def test_ranks(run_dir: RunDir) -> None:
    for raw, rank in [("3", 3), ("-1", None), ("9" * 30, None), ("true", None), ("null", None)]:
        run_dir.node_exit(0).write_text(f'{{"first_failed_rank":{raw}}}')
        assert read_first_failed_rank(run_dir) == rank


def test_atomic_writes_do_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".kill.json.{os.getpid()}.{threading.get_ident()}.new")
    write_atomic(tmp_path / "kill.json", b"x")  # the suite's own limit ends it, should it wait
    assert (tmp_path / "kill.json").read_bytes() == b"x"
    assert [path.name for path in tmp_path.iterdir()] == ["kill.json"]


def test_who_stood_still_is_the_one_that_came_least_far(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_hang(run_dir) == ""

    def note(node: int, text: str) -> None:
        (tmp_path / f"hung.node{node}.json").write_text(text)

    note(0, '{"rank": 0, "step": 7, "phase": 3, "text": "rank 0 waits", "stack": "a", "final": false}')
    assert read_hang(run_dir) == "", "it was brought back"
    note(1, '{"rank": 5, "step": 7, "phase": 1, "text": "rank 5 reads", "stack": "File x", "final": true}')
    note(2, "not JSON")
    note(3, '{"step": -1, "phase": 1, "text": "nobody", "final": true}')
    note(4, '{"step": 1e400, "phase": [], "text": 3}')
    assert read_hang(run_dir) == "rank 5 reads\nFile x"


def test_threads_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write_atomic, target, b"whole") for _ in range(200)]:
            done.result()
    assert target.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_guest_leaves_is_found_in_its_view_and_not_through_links(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "job_01")
    run_dir.view.mkdir(parents=True)
    assert not run_dir.is_out_of_time
    (run_dir.view / "out-of-time").touch()
    assert run_dir.is_out_of_time
    note = {"step": 3, "phase": 1, "text": "rank 5 reads", "stack": "File x", "final": True}
    (tmp_path / "elsewhere.json").write_text(json.dumps(note | {"text": "of the account"}))
    (run_dir.view / "hung.node0.json").symlink_to(tmp_path / "elsewhere.json")
    assert read_hang(run_dir) == ""
    (run_dir.view / "hung.node1.json").write_text(json.dumps(note))
    assert read_hang(run_dir) == "rank 5 reads\nFile x"
