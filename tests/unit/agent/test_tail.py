from __future__ import annotations

import os
from pathlib import Path

from diamond.agent.tail import read_from, size_of


def test_reads_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0123456789")
    assert read_from(path, 0, 4) == b"0123"
    assert read_from(path, 4, 100) == b"456789"
    assert read_from(path, 10, 100) == b""
    assert read_from(path, 0, 0) == b""


def test_a_file_that_shrank_or_went_away_is_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abc")
    assert read_from(path, 5, 100) == b""
    path.unlink()
    assert (read_from(path, 0, 100), size_of(path)) == (b"", 0)


def test_what_a_job_puts_in_place_of_its_log(tmp_path: Path) -> None:
    secret, log = tmp_path / "secret", tmp_path / "log"
    secret.write_text("secret")
    log.symlink_to(secret)
    assert (read_from(log, 0, 100), size_of(log)) == (b"", 0)
    log.unlink()
    os.mkfifo(log)
    assert (read_from(log, 0, 100), size_of(log)) == (b"", 0)
    log.unlink()
    log.mkdir()
    assert (read_from(log, 0, 100), size_of(log)) == (b"", 0)
