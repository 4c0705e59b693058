"""The commands about secrets: where a value may come from, and that none is shown or taken from the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import main, secrets
from diamond.core.secrets import Secret

VALUE = "planted value é"


class Kept:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.listed: list[Secret] = []

    def set(self, name: str, value: str, *, project: str | None = None) -> Secret:
        self.calls.append((name, value, project))
        return Secret(name=name, project=project or "", updated_at=1.0)

    def list(self) -> list[Secret]:
        return self.listed

    def remove(self, name: str, *, project: str | None = None) -> None:
        self.calls.append((name, project))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    found = Kept()

    @contextmanager
    def connect(**_: object) -> Iterator[Any]:
        yield SimpleNamespace(secrets=found)

    monkeypatch.setattr(secrets, "connect", connect)
    return found


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(["secret", *arguments])
    return int(caught.value.code or 0)


def typed(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))


@pytest.mark.parametrize(("raw", "value"), [(f"{VALUE}\n", VALUE), (VALUE, VALUE), ("two\nlines\n\n", "two\nlines\n")])
def test_a_value_from_standard_input(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raw: str, value: str
) -> None:
    typed(monkeypatch, raw.encode())
    assert call("set", "HF_TOKEN") == 0
    assert kept.calls == [("HF_TOKEN", value, None)]
    shown = capsys.readouterr()
    assert "secrets: [HF_TOKEN]" in shown.out and value not in shown.out + shown.err


def test_a_value_from_a_file_is_taken_byte_for_byte(
    kept: Kept, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("line\n")
    assert call("set", "KEY", "--file", str(tmp_path / "key"), "--project", "lab", "--json") == 0
    assert kept.calls == [("KEY", "line\n", "lab")]
    assert json.loads(capsys.readouterr().out)["project"] == "lab"
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    assert call("set", "KEY", "--file", str(tmp_path / "key")) == 2
    assert "UTF-8" in capsys.readouterr().err
    assert call("set", "KEY", "--file", str(tmp_path / "absent")) == 2


def test_a_value_is_never_an_argument(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("set", "KEY", VALUE) == 2
    assert not kept.calls


def test_a_short_one_is_warned_of(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, b"abc\n")
    assert call("set", "PIN") == 0
    assert "too short to be hidden" in capsys.readouterr().err
    for raw in (b"\n", b"x" * 70_000, b"a\0b"):
        typed(monkeypatch, raw)
        assert call("set", "PIN") == 1
    typed(monkeypatch, b"value")
    assert call("set", "not a name") == 2
    assert len(kept.calls) == 1


def test_listing_and_removing(kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("ls") == 0
    assert "diamond secret set NAME" in capsys.readouterr().err
    kept.listed = [Secret(name="A", updated_at=1.0), Secret(name="B", project="lab", updated_at=1.0, used_at=2.0)]
    assert call("list") == 0
    shown = capsys.readouterr().out
    assert "(your own)" in shown and "lab" in shown and "never" in shown
    assert call("ls", "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["secrets"]] == ["A", "B"]
    typed(monkeypatch, b"")
    assert call("rm", "A") == 1, "there is nobody to ask"
    assert call("rm", "A", "-y", "--project", "lab") == 0
    assert call("rm", "A", "--json") == 0
    assert kept.calls == [("A", "lab"), ("A", None)]
