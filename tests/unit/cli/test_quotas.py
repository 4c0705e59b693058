"""`diamond quota`: bars for people, JSON for programs, and mistakes that say what to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import launch, main, quotas
from diamond.core.quotas import Limits, Quota, QuotaSetting, Use
from diamond.core.states import TaskState
from diamond.core.tasks import Task

DECEMBER = 1_796_083_200.0
MINE = Quota(kind="user", name="alice", limits=Limits(), used=Use(tasks=3), renews_at=DECEMBER)
PDE = Quota(
    kind="project",
    name="pde",
    limits=Limits(nodes=8, gpu_hours=100.0, storage_bytes=2**40),
    used=Use(tasks=1, nodes=6, gpu_hours=101.25, storage_bytes=2**30),
    left={"nodes": 2, "gpu_hours": 0, "storage_bytes": 2**40 - 2**30},
    own=True,
    renews_at=DECEMBER,
)
Given = Callable[..., list[tuple[str, tuple[Any, ...]]]]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    def give(**answers: Any) -> list[tuple[str, tuple[Any, ...]]]:
        calls: list[tuple[str, tuple[Any, ...]]] = []

        def method(name: str, answer: Any) -> Callable[..., Any]:
            def call(*args: Any, **_options: Any) -> Any:
                calls.append((name, args))
                return answer

            return call

        group = SimpleNamespace(**{name: method(name, answer) for name, answer in answers.items()})

        @contextmanager
        def connect(**_options: object) -> Iterator[Any]:
            yield SimpleNamespace(quotas=group, tasks=group, url="http://127.0.0.1:7421")

        monkeypatch.setattr(quotas, "connect", connect)
        monkeypatch.setattr(launch, "connect", connect)
        return calls

    return give


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(list(arguments))
    return int(caught.value.code or 0)


def test_quota_shows_bars_and_what_renews(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(list=[MINE, PDE])
    assert call("quota") == 0
    assert capsys.readouterr().out.splitlines() == [
        "User alice",
        "  unfinished tasks               3, no limit",
        "  nodes at once                  0, no limit",
        "  GPUs at once                   0, no limit",
        "  GPU-hours a month              0, no limit",
        "  storage                        0 B, no limit",
        "",
        "Project pde",
        "  unfinished tasks               1, no limit",
        "  nodes at once      ████████░░  6 of 8",
        "  GPUs at once                   0, no limit",
        "  GPU-hours a month  ██████████  101.2 of 100, renewed on 1 December (UTC)",
        "  storage            █░░░░░░░░░  1 GiB of 1 TiB",
    ]
    assert call("quota", "--json") == 0
    found = json.loads(capsys.readouterr().out)["quotas"]
    assert [(one["name"], one["left"].get("nodes")) for one in found] == [("alice", None), ("pde", 2)]


def test_set_changes_what_is_named_and_keeps_the_rest(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    calls = given(get=PDE, set=PDE)
    arguments = ("--gpus", "16", "--gpu-hours", "none", "--storage", "500GiB")
    assert call("quota", "set", "project", "pde", *arguments) == 0
    wanted = Limits(nodes=8, gpus=16, storage_bytes=500 * 2**30)
    assert calls == [("get", ("project", "pde")), ("set", ("project", "pde", wanted))]
    assert "nodes at once" in capsys.readouterr().out


def test_defaults_need_no_name(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    default = Quota(kind="every-user", name="all", limits=Limits(tasks=5), used=Use())
    calls = given(get=default, set=default, clear=default)
    assert call("quota", "set", "every-user", "--tasks", "5") == 0
    assert call("quota", "clear", "every-user", "--json") == 0
    assert call("quota", "show", "every-user") == 0
    assert calls[1:] == [
        ("set", ("every-user", "all", Limits(tasks=5))),
        ("clear", ("every-user", "all")),
        ("get", ("every-user", "all")),
    ]
    assert "Every user\n  unfinished tasks   5\n  nodes at once      no limit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("set", "team", "x", "--gpus", "1"), "KIND: 'team' is none of user, project"),
        (("set", "user", "--gpus", "1"), "NAME: which user?"),
        (("set", "user", "alice"), "no limit was given"),
        (("set", "user", "alice", "--gpus", "many"), "--gpus: 'many' is not a number"),
        (("set", "user", "alice", "--tasks", "-3"), "--tasks: must be a whole number"),
        (("set", "user", "alice", "--storage", "big"), "--storage: 'big' is not an amount of storage"),
    ],
)
def test_mistakes_say_what_to_write(
    given: Given, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    calls = given(get=PDE, set=PDE)
    assert call("quota", *arguments) == 2
    assert words in capsys.readouterr().err
    assert calls == []


def test_ls_is_a_table_and_says_what_to_do_when_empty(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(all=[QuotaSetting(kind="every-user", name="all", limits=Limits(gpus=8), updated_at=1.0)])
    assert call("quota", "ls") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["KIND", "NAME", "TASKS", "NODES", "GPUS"]
    assert row.split()[:3] == ["every-user", "all", "8"]
    given(all=[])
    assert call("quota", "ls") == 0
    assert "quota set every-user" in capsys.readouterr().err


def test_a_launch_tells_what_it_comes_close_to(given: Given, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    note = "project pde: with this task 9 of 10 unfinished tasks"
    given(create=Task(id="tsk_000000001", name="x", state=TaskState.QUEUED, warnings=(note,)))
    file = tmp_path / "t.yaml"
    file.write_text("run: 'true'\n")
    assert call("launch", "-d", str(file)) == 0
    assert f"Note: {note}" in capsys.readouterr().err


def test_a_dry_run_tells_it_too(given: Given, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    note = "project pde may hold 8 nodes at once and holds 6; this task asks for 4 and waits until others end"
    given(plan={"endpoint": "hpc", "why": ["it is free"], "warnings": [note]})
    file = tmp_path / "t.yaml"
    file.write_text("run: 'true'\n")
    assert call("launch", "--dry-run", str(file)) == 0
    assert capsys.readouterr().out.endswith(f"Where\n  hpc\n  - it is free\n  - note: {note}\n")
