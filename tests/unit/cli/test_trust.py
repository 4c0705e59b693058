"""Commands about the audit log and notices, as far as no server is needed."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import audit, main, notify
from diamond.core.audit import FIRST, AuditEntry, AuditHead, AuditVerdict, hash_of
from diamond.core.codec import encode
from diamond.core.errors import NotFound
from diamond.core.notices import Channel, NoticeRule, NoticeTest

RULE = NoticeRule(
    id="ntc_000000001", channel=Channel.WEBHOOK, target="https://example.org/x", events=("task.failed",),
    created_at=1.0, failures=3, last_error="example.org answered 500\x1b[2J", waiting=2, delivered_at=5.0,
)  # fmt: skip
Given = Callable[..., list[tuple[str, Any, Any]]]


def chain(count: int) -> list[AuditEntry]:
    entries, previous = [], FIRST
    for seq in range(1, count + 1):
        entry = AuditEntry(
            seq=seq, at=1.5 * seq, action="task.created", user="alice\x1b[2J", object="tsk_1", address="192.0.2.1",
            data={"name": "x", "list": [1]}, previous=previous,
        )  # fmt: skip
        previous = hash_of(encode(entry))
        entries.append(replace(entry, hash=previous))
    return entries


def lines(entries: list[AuditEntry]) -> bytes:
    about = {"kind": "diamond-audit", "format": 1, "after": {"seq": 0, "hash": FIRST}}
    end = {"kind": "end", "head": {"seq": entries[-1].seq, "hash": entries[-1].hash}}
    return b"".join(json.dumps(item).encode() + b"\n" for item in (about, *map(encode, entries), end))


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(list(argv))
    return int(caught.value.code or 0)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """A client whose `audit` and `notices` answer what a test says; gives what they were asked."""

    def give(**answers: Any) -> list[tuple[str, Any, Any]]:
        asked: list[tuple[str, Any, Any]] = []

        def answer(name: str, value: Any) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                asked.append((name, args, options))
                if isinstance(value, Exception):
                    raise value
                return value

            return called

        calls = SimpleNamespace(**{name: answer(name, value) for name, value in answers.items()})

        @contextmanager
        def connect() -> Iterator[Any]:
            yield SimpleNamespace(audit=calls, notices=calls)

        for module in (audit, notify):
            monkeypatch.setattr(module, "connect", connect)
        return asked

    return give


def test_entries_are_shown_harmlessly(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    asked = given(entries=iter(chain(2)))
    assert call("audit", "ls", "--user", "alice", "--action", "task", "--since", "2h", "-n", "5") == 0
    shown = capsys.readouterr().out
    assert "task.created" in shown and "192.0.2.1" in shown and "name=x list=[1]" in shown and "\x1b" not in shown
    ((_, _, options),) = asked
    assert (options["user"], options["action"], options["limit"], options["until"]) == ("alice", "task", 5, None)
    assert isinstance(options["since"], float)


def test_entries_as_json_and_none_at_all(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(entries=iter(chain(1)))
    assert call("audit", "ls", "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["seq"] == 1
    given(entries=iter([]))
    assert call("audit", "ls", "--mine", "--until", "2026-01-31") == 0
    assert "No entries" in capsys.readouterr().err


def test_times_and_options_that_make_no_sense(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given()
    assert call("audit", "ls", "--since", "yesterdayish") == 2
    assert "--since" in capsys.readouterr().err
    assert call("audit", "ls", "--mine", "--user", "bob") == 2
    assert call("audit", "verify", "--head", "12") == 2
    assert call("audit", "verify", "--file", "/no/such/file") == 2


def test_head_and_verdict(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    head = AuditHead(seq=7, hash="ab" * 32, at=1.0)
    asked = given(head=head, verify=AuditVerdict(ok=True, entries=7, seq=7, hash=head.hash))
    assert call("audit", "head") == 0
    assert capsys.readouterr().out.strip() == str(head)
    assert call("audit", "verify", "--head", str(head)) == 0
    assert "7 entries" in capsys.readouterr().out
    assert asked[-1][1][0].seq == 7
    given(verify=AuditVerdict(ok=False, entries=2, seq=2, hash="", broken=3, problem="entry 3 was changed"))
    assert call("audit", "verify") == 1
    assert "entry 3 was changed" in capsys.readouterr().err
    assert call("audit", "verify", "--json") == 1
    assert json.loads(capsys.readouterr().out)["broken"] == 3


def test_files_are_checked_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = chain(4)
    file = tmp_path / "audit.jsonl"
    file.write_bytes(lines(entries))
    assert call("audit", "verify", "--file", str(file), "--head", f"2:{entries[1].hash}") == 0
    assert call("audit", "verify", "--file", str(file), "--head", f"2:{entries[2].hash}") == 1
    assert call("audit", "verify", "--file", str(file), "--head", f"9:{entries[2].hash}") == 1
    file.write_bytes(lines(entries).replace(b'"x"', b'"y"', 1))
    assert call("audit", "verify", "--file", str(file)) == 1
    assert "entry 1 was changed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines(entries))))
    assert call("audit", "verify", "--file", "-") == 0
    file.write_text("something else")
    assert call("audit", "verify", "--file", str(file)) == 2


def test_an_export_is_private_and_checked_as_it_is_written(
    given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = lines(chain(3))
    given(export=iter([whole[:50], whole[50:]]))
    file = tmp_path / "out.jsonl"
    assert call("audit", "export", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 3
    assert file.read_bytes() == whole
    assert file.stat().st_mode & 0o777 == 0o600
    assert call("audit", "export", str(file)) != 0, "what was exported before is not replaced"
    assert "is there already" in capsys.readouterr().err
    given(export=iter([whole[:-120]]))
    assert call("audit", "export", str(tmp_path / "other.jsonl")) != 0, "a broken line is not passed over"
    assert os.listdir(tmp_path) == ["out.jsonl"]
    assert call("audit", "export", str(tmp_path / "no" / "folder")) == 2


def test_rules_are_made_with_the_key_shown_once(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    asked = given(create=replace(RULE, key="dmdw_secret"))
    assert call("notify", "add", "webhook", "https://example.org/x", "--on", "failed,ready") == 0
    shown = capsys.readouterr()
    assert shown.out.split() == [RULE.id, "dmdw_secret"]
    assert asked[0][1] == ("webhook", "https://example.org/x", ("task.failed", "image.ready"))
    assert call("notify", "add", "email", "alice@example.org", "--json") == 0
    assert asked[-1][1] == ("email", "alice@example.org", ("task.succeeded", "task.failed"))
    for wrong in (("pigeon", "x"), ("email", "not an address"), ("email", "a@b.org", "--on", "nonsense")):
        assert call("notify", "add", *wrong) == 2, wrong


def test_rules_are_listed_with_what_is_wrong(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(list=[RULE, replace(RULE, id="ntc_2", paused_at=9.0), replace(RULE, id="ntc_3", failures=0, last_error="")])
    assert call("notify", "ls") == 0
    shown = capsys.readouterr().out
    assert "failing" in shown and "paused" in shown and "answered 500" in shown and "\x1b" not in shown
    given(list=[])
    assert call("notify", "list") == 0
    assert "diamond notify add" in capsys.readouterr().err


def test_rules_are_changed_tried_and_removed(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    asked = given(change=RULE, remove=None, test=NoticeTest(delivered=False, error="it refuses connections"))
    assert call("notify", "set", RULE.id, "--on", "all", "--resume") == 0
    assert asked[0] == ("change", (RULE.id,), {"events": ("all",), "paused": False})
    assert call("notify", "set", RULE.id) == 2
    assert call("notify", "rm", RULE.id, "--json") == 0
    capsys.readouterr()
    assert call("notify", "test", RULE.id) == 1
    assert "refuses connections" in capsys.readouterr().err
    given(remove=NotFound("you have no rule 'x'", field="RULE"))
    assert call("notify", "rm", "x") == 1
