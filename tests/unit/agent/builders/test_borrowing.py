"""Images of others on the same file system: what was checked is what runs, whatever their owner does next."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from diamond.agent.builders.borrowing import borrow, is_ours
from diamond.agent.builders.store import measure

GOOD, BAD = b"the image" * 1000, b"something else"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    path = folder / "image.sif"
    path.write_bytes(GOOD)
    path.chmod(0o644)
    return path


def test_what_nobody_else_can_change_is_linked(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "image.sif"
    assert borrow(source, target) == (digest_of(GOOD), False)
    assert target.is_symlink() and target.read_bytes() == GOOD


def opened_file(source: Path) -> None:
    source.chmod(0o664)


def opened_folder(source: Path) -> None:
    source.parent.chmod(0o777)


@pytest.mark.parametrize("opened", [opened_file, opened_folder])
def test_what_others_can_change_is_copied_and_stays_as_it_was_checked(
    source: Path, tmp_path: Path, opened: object
) -> None:
    assert callable(opened)
    opened(source)
    target = tmp_path / "image.sif"
    assert borrow(source, target) == (digest_of(GOOD), True)
    source.write_bytes(BAD)  # in place
    (tmp_path / "other").write_bytes(BAD)
    os.replace(tmp_path / "other", source)  # and by another of its name
    assert not target.is_symlink()
    assert measure(target)[0] == digest_of(GOOD)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another account")
def test_an_image_of_another_account_is_copied(source: Path, tmp_path: Path) -> None:
    for number, path in enumerate((source, source.parent)):
        os.chown(path, 4242, 4242)
        assert not is_ours(source)
        assert borrow(source, tmp_path / f"copy{number}") == (digest_of(GOOD), True)
        os.chown(path, 0, 0)
    assert is_ours(source)


def test_a_link_is_followed_once_and_then_gone(source: Path, tmp_path: Path) -> None:
    """Not the link is kept but what it led to: whoever may change the link changes nothing."""
    link = tmp_path / "linked" / "image.sif"
    link.parent.mkdir()
    link.symlink_to(source)
    target = tmp_path / "image.sif"
    assert borrow(link, target)[0] == digest_of(GOOD)
    link.unlink()
    link.write_bytes(BAD)
    assert target.read_bytes() == GOOD


def test_folders_are_ours_when_all_in_them_is(tmp_path: Path) -> None:
    folder = tmp_path / "image"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "sh").write_text("#!")
    (folder / "sh").symlink_to("bin/sh")
    digest = measure(folder)[0]
    assert borrow(folder, tmp_path / "linked") == (digest, False)
    (folder / "bin" / "sh").chmod(0o666)
    digest = measure(folder)[0]
    assert borrow(folder, tmp_path / "copied") == (digest, True)
    (folder / "bin" / "sh").write_text("#! another")
    assert measure(tmp_path / "copied")[0] == digest


def test_what_is_no_image_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "image.sif"
    os.mkfifo(pipe, 0o666)
    pipe.chmod(0o666)
    with pytest.raises(OSError, match="not a plain file"):
        borrow(pipe, tmp_path / "copy")
    with pytest.raises(FileNotFoundError):
        borrow(tmp_path / "nothing", tmp_path / "copy")
