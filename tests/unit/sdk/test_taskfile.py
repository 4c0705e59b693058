"""Task files: what they become, what is refused, and that errors say where."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.core.errors import InvalidInput, TooLarge
from diamond.sdk import taskfile


def parse(text: str) -> dict[str, object]:
    return taskfile.parse(text, "t.yaml").raw


def refused(text: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        taskfile.parse(text, "t.yaml")
    return caught.value


def test_plain_values_follow_yaml_1_2() -> None:
    raw = parse("on: yes\na: true\nb: 12\nc: 1.5\nd: null\ne: 02:30:00\nf: 2024-01-01\ng: '5'\nh: .inf\ni: 1e3\n")
    assert raw == {
        "on": "yes",
        "a": True,
        "b": 12,
        "c": 1.5,
        "d": None,
        "e": "02:30:00",
        "f": "2024-01-01",
        "g": "5",
        "h": float("inf"),
        "i": 1000.0,
    }


def test_environment_numbers_keep_their_digits() -> None:
    raw = parse("envs:\n  VERSION: 1.10\n  ID: 007\n  BIG: 1e3\n")
    assert raw["envs"] == {"VERSION": "1.10", "ID": "007", "BIG": "1e3"}


def test_block_text_is_kept_exactly() -> None:
    assert parse("run: |\n  a\n    b\n\n  c: $X\n")["run"] == "a\n  b\n\nc: $X\n"


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("run: a\nname: x\nrun: b\n", 3, "given twice"),
        ("resources:\n  cpus: 1\n  cpus: 2\n", 3, "given twice"),
        ("run: a\n---\nrun: b\n", 2, "second document"),
        ("run: !!python/object/apply:os.system ['id']\n", 1, "tag"),
        ("run: !!str 5\n", 1, "tag"),
        ("1: a\n", 1, "not text"),
        ("true: a\n", 1, "not text"),
        ("? [a, b]\n: c\n", 1, "plain text"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", 3, "not a field name"),
        ("a: &x [*x]\n", 1, "contains itself"),
        ("a: *nope\n", 1, ""),
        ("a: [1, 2\nb: 3\n", 2, "not YAML"),
        ("run: a\n\tb: c\n", 2, "not YAML"),
        ("run: echo a: b\n", 1, "not YAML"),
    ],
)
def test_refusals_name_file_and_line(text: str, line: int, part: str) -> None:
    error = refused(text)
    assert part in error.message
    assert f"t.yaml, line {line}" in error.message
    assert "column" in error.message


def test_alias_bomb_is_counted_not_built() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "more than 100000 values" in refused("\n".join(lines)).message


def test_harmless_aliases_work() -> None:
    assert parse("a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}


def test_depth_is_bounded() -> None:
    assert "levels deep" in refused("a: " + "[" * 200 + "]" * 200).message
    refused("a: " + "[" * 5000)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_empty_file(text: str) -> None:
    assert "is empty" in refused(text).message


@pytest.mark.parametrize("text", ["- a\n", "just text\n"])
def test_top_level_must_be_a_mapping(text: str) -> None:
    assert "mapping" in refused(text).message


def test_load_limits_size_and_encoding(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(TooLarge, match="1 MiB"):
        taskfile.load(big)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"run: a\nname: caf\xe9\n")
    with pytest.raises(InvalidInput, match="line 2: not UTF-8"):
        taskfile.load(latin)
    with pytest.raises(InvalidInput, match="no such file"):
        taskfile.load(tmp_path / "none.yaml")
    with pytest.raises(InvalidInput, match="folder"):
        taskfile.load(tmp_path)


def test_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_bytes(b"\xef\xbb\xbfrun: a\n")
    assert taskfile.load(path).raw == {"run": "a"}


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "t.yaml"
    ref = "bundle:sha256:" + "0" * 64
    path.write_text(f"workdir: ../x\nrun: a\nfile_mounts:\n  d: data\n  h: ~/h\n  a: /abs\n  r: {ref}\n")
    raw = taskfile.load(path).raw
    assert raw["workdir"] == str(tmp_path.parent / "x")
    assert raw["file_mounts"] == {"d": str(tmp_path / "data"), "h": "/home/me/h", "a": "/abs", "r": ref}


@pytest.mark.parametrize(
    ("text", "field", "line"),
    [
        ("run: a\nresources:\n  cpus: many\n", "resources.cpus", 3),
        ("run: a\nresources:\n  cpu: 1\n", "resources.cpu", 3),
        ("run: a\nnmae: x\n", "nmae", 2),
        ("name: x\n", "run", 1),
        ("run: a\n\nenvs:\n  A: true\n", "envs.A", 4),
    ],
)
def test_validation_errors_say_where(text: str, field: str, line: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        taskfile.parse(text, "t.yaml").spec()
    assert caught.value.field == field
    assert f"t.yaml, line {line}," in caught.value.message


@pytest.mark.parametrize(
    ("text", "field", "line", "hint"),
    [
        ("run:\n  - a\n  - b\n", "run", 1, "use `|` and one command per line"),
        ("run: a\nsetup: [b]\n", "setup", 2, "use `|` and one command per line"),
        ("run:\n  echo: a\n", "run", 1, "one command per line"),
        ("run: a\nenvs: [A=1]\n", "envs", 2, "NAME: value"),
        ("run: a\nfile_mounts: [x]\n", "file_mounts", 2, "path in the work directory"),
        ("run: a\nretry: 3\n", "retry", 2, "retry: {max_retries: 3}"),
        ("run: a\nresources: local\n", "resources", 2, "resources: {"),
        ("run: a\ncpus: 3\n", "cpus", 2, "resources: {cpus: …}"),
        ("run: a\nresources:\n  gpus: 3\n", "resources.gpus", 3, "accelerators"),
        ("run: a\nresources:\n  priority: 3\n", "resources.priority", 3, "beside resources"),
        ("command: a\n", "command", 1, "`run`"),
        ("run: a\ntimeout: 3\n", "timeout", 2, "max_duration"),
    ],
)
def test_common_slips_are_understood(text: str, field: str, line: int, hint: str) -> None:
    error = refused(text)
    assert error.field == field
    assert f"t.yaml, line {line}," in error.message
    assert hint in error.hint


@pytest.mark.parametrize("name", ["env", "Run", "num_node", "output"])
def test_near_misses_are_guessed(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        taskfile.parse(f"run: a\n{name}: 1\n" if name != "Run" else "Run: a\n", "t.yaml").spec()
    assert "did you mean" in caught.value.hint


def test_env_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "v")
    assert taskfile.parse_env_options(["A=1", "B=x=y", "C=", "FROM_HERE"]) == {
        "A": "1",
        "B": "x=y",
        "C": "",
        "FROM_HERE": "v",
    }
    with pytest.raises(InvalidInput, match="NOT_SET_ANYWHERE is not set in your environment"):
        taskfile.parse_env_options(["NOT_SET_ANYWHERE"])


def test_with_envs_replaces_and_checks() -> None:
    assert taskfile.with_envs({"envs": {"A": None, "B": "2"}}, {"A": "1"})["envs"] == {"A": "1", "B": "2"}
    with pytest.raises(InvalidInput, match="set by Diamond"):
        taskfile.with_envs({}, {"RANK": "1"})
