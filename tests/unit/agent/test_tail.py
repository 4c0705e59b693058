from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.tail import Piece, read_from


def test_reads_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    assert read_from(path, 0, 4) == Piece(data=b"0123", is_end=False)
    assert read_from(path, 4, 100) == Piece(data=b"456789")
    assert read_from(path, 4, 6) == Piece(data=b"456789")
    assert read_from(path, 10, 100) == Piece()
    assert read_from(path, 0, 0) == Piece(is_end=False)
    assert read_from(path, 10, 0) == Piece()


def test_a_file_that_shrank_or_went_away_is_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abc")
    assert read_from(path, 5, 100) == Piece()
    path.unlink()
    assert read_from(path, 0, 100) == Piece()
    assert read_from(tmp_path / "none/log", 0, 100) == Piece()


def test_what_a_job_puts_in_place_of_its_log(tmp_path: Path) -> None:
    secret, log = tmp_path / "secret", tmp_path / "log"
    secret.write_text("secret")
    log.symlink_to(secret)
    assert read_from(log, 0, 100) == Piece(problem="not a plain file")
    log.unlink()
    os.mkfifo(log)
    assert read_from(log, 0, 100) == Piece(problem="not a plain file")
    log.unlink()
    log.mkdir()
    assert read_from(log, 0, 100) == Piece(problem="not a plain file")


def test_a_file_that_may_not_be_read_has_ended(shared: Path, as_nobody: Callable[..., Any]) -> None:
    def read() -> Piece:
        (shared / "log").write_bytes(b"abc")
        (shared / "log").chmod(0)
        return read_from(shared / "log", 0, 100)

    assert as_nobody(read) == Piece(problem="Permission denied")


def test_a_shortage_of_our_own_ends_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "open", fail)
    assert read_from(tmp_path / "log", 0, 100) == Piece(is_end=False)
