"""Folders as manifests: ignore rules, refusals, determinism and the cache of digests."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from diamond.core.errors import Conflict, InvalidInput, TooLarge
from diamond.core.home import Home
from diamond.sdk import folders
from testing.dying import finish, in_child


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work"
    path.mkdir()
    return path


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(root: Path, home: Home) -> list[str]:
    return [item.path for item in folders.scan(root, home=home).manifest.files]


def test_ignore_rules_as_git_has_them(work: Path, home: Home) -> None:
    put(
        work,
        {
            ".gitignore": "*.log\n/data/\n!keep.log\nbuild/\n",
            "a.py": "",
            "x.log": "",
            "keep.log": "",
            "data/d.bin": "",
            "sub/data/d.bin": "",
            "sub/.gitignore": "*.tmp\n!x.log\n",
            "sub/x.log": "",
            "sub/y.tmp": "",
            "y.tmp": "",
            "build/deep/o": "",
            ".git/config": "",
            "sub/.git": "gitdir: elsewhere",
            "__pycache__/a.pyc": "",
        },
    )
    assert names(work, home) == [
        ".gitignore",
        "a.py",
        "keep.log",
        "sub/.gitignore",
        "sub/data/d.bin",
        "sub/x.log",
        "y.tmp",
    ]


def test_diamondignore_wins_in_both_directions(work: Path, home: Home) -> None:
    put(
        work,
        {
            ".gitignore": "data/\n",
            ".diamondignore": "!data/\nsecret\n!__pycache__/\n",
            "sub/.gitignore": "!secret\n",
            "data/d": "",
            "sub/secret": "",
            "__pycache__/x": "",
        },
    )
    assert names(work, home) == [".diamondignore", ".gitignore", "__pycache__/x", "data/d", "sub/.gitignore"]


def test_same_contents_same_manifest(tmp_path: Path, home: Home) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    put(one, {"b": "2", "a/x": "1", "a.txt": "3"})
    put(two, {"a.txt": "3", "a/x": "1", "b": "2"})
    os.utime(two / "b", (1, 1))
    first, second = folders.scan(one, home=home).manifest, folders.scan(two, home=home).manifest
    assert first.digest == second.digest
    assert [item.path for item in first.files] == sorted(item.path for item in first.files)
    (two / "b").chmod(0o755)
    assert folders.scan(two, home=home).manifest.digest != first.digest


def test_links_inside_are_kept(work: Path, home: Home) -> None:
    put(work, {"a/f": "x"})
    (work / "a" / "up").symlink_to("../a/f")
    (work / "abs").symlink_to(work / "a" / "f")
    (work / "folder").symlink_to("a")
    links = {item.path: item.link_to for item in folders.scan(work, home=home).manifest.files if item.link_to}
    assert links == {"a/up": "../a/f", "abs": "a/f", "folder": "a"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../outside"])
def test_link_leading_out_is_refused_by_name(work: Path, home: Home, target: str) -> None:
    (work / "evil").symlink_to(target)
    with pytest.raises(InvalidInput, match="evil"):
        folders.scan(work, home=home)


def test_ignored_link_does_no_harm(work: Path, home: Home) -> None:
    (work / "evil").symlink_to("/etc/passwd")
    put(work, {".diamondignore": "evil\n"})
    assert names(work, home) == [".diamondignore"]


def test_pipes_and_sockets_are_refused(work: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(work / "pipe")
    with pytest.raises(InvalidInput, match="pipe is a named pipe"):
        folders.scan(work, home=home)
    (work / "pipe").unlink()
    monkeypatch.chdir(work)  # socket names are short
    server = socket.socket(socket.AF_UNIX)
    server.bind("sock")
    server.close()
    with pytest.raises(InvalidInput, match="sock is a socket"):
        folders.scan(work, home=home)


@pytest.mark.parametrize("name", [b"caf\xe9", b"a\nb", b"a\x1b[2Jb", b"\x7f"])
def test_odd_names_are_refused_and_shown_harmlessly(work: Path, home: Home, name: bytes) -> None:
    with open(os.path.join(os.fsencode(work), name), "w"):
        pass
    with pytest.raises(InvalidInput) as caught:
        folders.scan(work, home=home)
    assert caught.value.message.isprintable()


def test_unusual_but_valid_names_are_taken(work: Path, home: Home) -> None:
    wanted = sorted(["größe.txt", "with space", "-dash", "数据", "#hash"])
    put(work, dict.fromkeys(wanted, "x"))
    assert names(work, home) == wanted


def test_unreadable_file_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # unlike tmp_path, one that others may enter
        work = Path(folder) / "work"
        put(work, {"closed": "x"})
        (work / "closed").chmod(0)
        for path in (work, work.parent):
            path.chmod(0o755)

        def scan() -> None:
            if os.geteuid() == 0:  # root reads everything
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            with pytest.raises(InvalidInput, match="closed cannot be read"):
                folders.scan(work, home=Home(Path(folder) / "home"))

        finish([in_child(scan)])


def test_change_while_reading_is_noticed(work: Path, home: Home) -> None:
    put(work, {"f": "x" * 100})

    def meddle(done: int, total: int, files: int) -> None:
        (work / "f").write_text("y" * 100)

    with pytest.raises(Conflict, match="f changed while"):
        folders.scan(work, home=home, progress=meddle)


def test_change_between_scan_and_upload_is_noticed(work: Path, home: Home) -> None:
    put(work, {"f": "x"})
    (item,) = folders.scan(work, home=home).sources.values()
    put(work, {"f": "yy"})
    with pytest.raises(Conflict):
        folders.open_unchanged(item)


def test_single_file(work: Path, home: Home) -> None:
    put(work, {"data.bin": "abc"})
    manifest = folders.scan(work / "data.bin", home=home).manifest
    assert manifest.is_file
    assert [item.path for item in manifest.files] == ["data.bin"]
    assert manifest.files[0].digest == "sha256:" + hashlib.sha256(b"abc").hexdigest()


def test_missing_folder(work: Path, home: Home) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        folders.scan(work / "none", home=home)


def test_large_files_are_hashed_once(work: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    big = work / "big"
    big.write_bytes(b"x" * 100_000)
    os.utime(big, (1_000_000_000, 1_000_000_000))
    first = folders.scan(work, home=home).manifest
    cache = json.loads((home.path / "cache" / "hashes.json").read_text())
    assert list(cache["files"]) == [str(big)]
    monkeypatch.setattr(folders, "_hash", lambda item, progress: pytest.fail("hashed again"))
    assert folders.scan(work, home=home).manifest == first


def test_a_file_written_just_now_is_not_cached(work: Path, home: Home) -> None:
    (work / "big").write_bytes(b"x" * 100_000)
    folders.scan(work, home=home)
    assert not (home.path / "cache" / "hashes.json").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1}', '{"version": 1, "files": {"x": 3}}'])
def test_broken_cache_is_ignored(work: Path, home: Home, text: str) -> None:
    put(work, {"f": "x"})
    cache = home.path / "cache" / "hashes.json"
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert names(work, home) == ["f"]


def test_size_guard_names_the_largest_parts(work: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    put(work, {"data/huge": "x" * 1000, "small": "x"})
    monkeypatch.setattr(folders, "MAX_TOTAL_BYTES", 500)
    with pytest.raises(TooLarge, match=r"largest parts: data/ "):
        folders.scan(work, home=home)
    monkeypatch.setattr(folders, "MAX_TOTAL_BYTES", 10**9)
    monkeypatch.setattr(folders, "MAX_FILES", 1)
    with pytest.raises(TooLarge, match="2 files"):
        folders.scan(work, home=home)
