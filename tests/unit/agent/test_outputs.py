from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from diamond.agent import output_files, outputs
from diamond.agent.link import Link
from diamond.agent.output_files import Found, Notes, Steps
from diamond.agent.outputs import Collector
from diamond.agent.run_dirs import remove
from diamond.agent.work_tree import WorkTree
from diamond.core.errors import Forbidden


def find(work: Path, patterns: tuple[str, ...], check_stop: Callable[[], None] = lambda: None) -> Found:
    with WorkTree(work) as tree:
        return output_files.find(tree, patterns, check_stop)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    for name in ("model.pt", "a/one.txt", "a/two.log", "a/deep/er/three.txt", ".hidden/x", "sp ace/[odd].txt"):
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "secret").write_text("secret")
    return work


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("model.pt", ["model.pt"]),
        ("*.pt", ["model.pt"]),
        ("*.txt", []),
        ("a", ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]),
        ("a/", ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]),
        ("./a/*.txt", ["a/one.txt"]),
        ("**/*.txt", ["a/deep/er/three.txt", "a/one.txt", "sp ace/[odd].txt"]),
        ("a/**", ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]),
        ("a/**/three.txt", ["a/deep/er/three.txt"]),
        ("?/one.txt", ["a/one.txt"]),
        ("[ab]/*.log", ["a/two.log"]),
        (".hidden/x", [".hidden/x"]),
        ("sp*/[[]odd].txt", ["sp ace/[odd].txt"]),
    ],
)
def test_patterns(work: Path, pattern: str, paths: list[str]) -> None:
    found = find(work, (pattern,))
    assert list(found.files) == paths
    assert bool(found.notes) == (not paths)


def test_overlapping_patterns_name_a_file_once(work: Path) -> None:
    found = find(work, ("a/one.txt", "a", "*/one.txt"))
    assert list(found.files) == ["a/deep/er/three.txt", "a/one.txt", "a/two.log"]
    assert not found.notes


@pytest.mark.parametrize("pattern", ["link", "*", "folder/secret", "folder", "folder/*", "**"])
def test_nothing_outside_the_work_directory(work: Path, pattern: str) -> None:
    (work / "link").symlink_to("../secret")
    (work / "folder").symlink_to("..")
    found = find(work, (pattern,))
    assert not any("secret" in (work / real).read_text() for real in found.files.values())
    assert not any(path.startswith("folder") for path in found.files)


@pytest.mark.parametrize("pattern", ["../secret", "/etc/passwd", "~/x", "a/../../secret", ""])
def test_patterns_that_lead_outside_are_noted(work: Path, pattern: str) -> None:
    found = find(work, (pattern, "model.pt"))
    assert list(found.files) == ["model.pt"]
    assert len(found.notes) == 1


def test_a_link_in_the_place_of_the_work_directory_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "run" / "work").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "work").mkdir()
    (tmp_path / "elsewhere" / "work" / "secret").write_text("x")
    (tmp_path / "planted").symlink_to(tmp_path / "elsewhere")
    for work in (tmp_path / "run" / "work", tmp_path / "planted" / "work"):
        found = find(work, ("secret",))
        assert found.files == {}
        assert "a link in the place of its work directory" in found.notes.text()


def test_links_inside_are_followed_and_loops_end(work: Path) -> None:
    (work / "latest").symlink_to("a")
    (work / "a/loop").symlink_to("..")
    (work / "best.pt").symlink_to("model.pt")
    found = find(work, ("latest", "best.pt", "**/*.txt"))
    assert found.files["best.pt"] == "model.pt"
    assert "latest/one.txt" in found.files


def test_what_is_no_file_is_left_out(work: Path) -> None:
    os.mkfifo(work / "pipe")
    (work / "dangling").symlink_to("nowhere")
    assert not find(work, ("pipe", "dangling", "*")).files.keys() & {"pipe", "dangling"}


# Hostile trees


@pytest.mark.parametrize("name", [b"res-\xe9.csv", b"a\nb.csv", b"~x.csv", b"\\x.csv"])
def test_names_that_cannot_be_sent_cost_only_themselves(tmp_path: Path, name: bytes) -> None:
    for one in (name, b"good.csv"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + one)).write_text("x")
    found = find(tmp_path, ("*.csv",))
    assert list(found.files) == ["good.csv"]
    assert len(found.notes) == 1
    assert found.notes.text().encode().isascii(), "the note itself can be sent"


def test_paths_that_are_too_long_to_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diamond.core.bundles.MAX_PATH_BYTES", 100)
    (tmp_path / ("d" * 90)).mkdir()
    (tmp_path / ("d" * 90) / ("f" * 90)).touch()
    (tmp_path / "good").touch()
    found = find(tmp_path, ("**",))
    assert list(found.files) == ["good"]
    assert "too long" in found.notes.text()


def test_one_folder_that_may_not_be_read_costs_only_itself(shared: Path, as_nobody: Callable[..., Any]) -> None:
    def try_it() -> tuple[list[str], list[str]]:
        for name in ("p/f", "q/deep/f", "a.txt"):
            (shared / name).parent.mkdir(parents=True, exist_ok=True)
            (shared / name).touch()
        (shared / "p").chmod(0)
        (shared / "q/deep").chmod(0)
        found = find(shared, ("a.txt", "p/f", "p", "q", "**/*.txt"))
        return list(found.files), found.notes.lines()

    files, notes = as_nobody(try_it)
    assert files == ["a.txt"]
    assert len(notes) == 1 and "Permission denied" in notes[0] and "more)" in notes[0]


def test_patterns_cost_no_more_than_they_are_long(tmp_path: Path) -> None:
    (tmp_path / "/".join("a" * 40)).mkdir(parents=True)
    (tmp_path / "/".join("a" * 40) / "f").touch()
    began = time.monotonic()
    assert not find(tmp_path, ("**/" * 12 + "zzz", "**/a/" * 20 + "zzz", "**/a*/" * 30 + "**/zzz")).files
    assert not find(tmp_path, ("*a" * 60 + "/" + "*a" * 60,)).files
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("**", "a", True),
        ("**/**/b", "b", True),
        ("**/b", "a/a/b", True),
        ("**/b", "a/bb", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("a/**", "a", False),
        ("a/**", "a/x/y", True),
        ("**/a/**/a", "a", False),
        ("**/a/**/a", "x/a/y/a", True),
        ("a**b", "axb", True),
        ("a**b", "a/b", False),
        ("[", "[", True),
        ("[z-a]", "b", False),
    ],
)
def test_steps(pattern: str, path: str, fits: bool) -> None:
    steps = Steps(pattern)
    at = steps.start
    for name in path.split("/"):
        at = steps.take(at, name)
    assert steps.is_match(at) == fits


def test_trees_deeper_than_python_recurses(tmp_path: Path) -> None:
    path = str(tmp_path)
    for _ in range(1500):
        path += "/d"
        os.mkdir(path)
    Path(path, "x").touch()
    (tmp_path / "good").touch()
    assert len(find(tmp_path, ("**",)).files) == 2
    remove(tmp_path / "d")  # pytest cannot


def test_chains_of_links(tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / f"l{number}").symlink_to(f"l{number + 1}")
    (tmp_path / "l1500").touch()
    found = find(tmp_path, ("l*",))
    assert "l1490" in found.files and "l0" not in found.files
    assert len(found.notes) == 1


def test_what_is_beyond_the_limit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "MAX_OUTPUTS", 10)
    for number in range(25):
        (tmp_path / f"{number:02d}").touch()
    found = find(tmp_path, ("*", "**", "03"))
    assert len(found.files) == 10
    assert "15 more are left on the endpoint" in found.notes.text()


def test_notes_are_one_line_a_kind() -> None:
    notes = Notes()
    for number in range(1000):
        notes.add("vanished", f"f{number}")
        notes.add(f"kind {number}", "x" * 1000)
    assert len(notes) < 12
    assert len(notes.text()) < 2000
    assert "output 'f0' vanished (and 999 more)" in notes.text()


class Silent:
    """A server that has everything already."""

    def call(self, *_: Any, **__: Any) -> Any:
        return {"missing": []}


def collector(link: Any) -> Collector:
    return Collector(link=cast(Link, link), stop=threading.Event())


def test_vanished_files_are_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        (tmp_path / f"{number}").touch()

    def vanish(*_: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Collector, "_hash", vanish)
    listed, notes = collector(Silent()).collect(tmp_path, ("*",), 100)
    assert not listed
    assert notes == "output '0' cannot be read: No such file or directory (and 299 more)"


def test_the_list_of_outputs_can_be_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MAX_LISTED_BYTES", 10_000)
    for number in range(50):
        (tmp_path / f"{number:02d}{'結果' * 30}").touch()
    listed, notes = collector(Silent()).collect(tmp_path, ("*",), 100)
    assert 20 < len(listed) < 50
    assert f"(and {49 - len(listed)} more)" in notes


def test_a_file_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "g").write_bytes(b"x")
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: b"x" * 10)
    listed, notes = collector(Silent()).collect(tmp_path, ("g",), 100)
    assert [output.sha256 for output in listed] == [""]
    assert "max_output_bytes" in notes


# Jobs that change their folders while they are looked at


def _swap(folder: Path, target: Path) -> None:
    """What a job may do between any two looks: the folder goes, a link has its name."""
    folder.rename(folder.with_name(f"{folder.name}.was"))
    folder.symlink_to(target)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Something that is none of the job's business, with a file of the same name as one of its own."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "one.txt").write_text("a key")
    (home / "id_ed25519").write_text("a key")
    return home


def test_a_folder_that_becomes_a_link_while_it_is_listed(work: Path, home: Path) -> None:
    looks = []

    def job() -> None:
        looks.append(1)
        if len(looks) == 2:  # the top was listed, and `a` seen to be a folder
            _swap(work / "a", home)

    found = find(work, ("**",), job)
    assert len(looks) > 2
    assert not [path for path in found.files if "id_ed25519" in path or path.startswith("a/")]
    assert "a link that leads out" in found.notes.text()


def test_a_folder_that_becomes_a_link_before_its_files_are_read(work: Path, home: Path) -> None:
    def job() -> None:
        if seen and not (work / "a").is_symlink():
            _swap(work / "a", home)
        seen.append(1)

    seen: list[int] = []
    with WorkTree(work) as tree:
        assert output_files.find(tree, ("a/one.txt", "sp*/*"), job).files["a/one.txt"] == "a/one.txt"
        job()
        assert (work / "a/one.txt").read_text() == "a key", "the path leads elsewhere by now"
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"), tree.open("a/one.txt"):
            pass


@pytest.mark.parametrize("when", ["before it is asked for", "before it is sent"])
def test_a_folder_that_becomes_a_link_while_the_server_is_asked(work: Path, home: Path, when: str) -> None:
    class Slow:
        """Meanwhile the job goes on."""

        sent = b""

        def call(self, method: str, path: str, body: Any) -> Any:
            _swap(work / "a", home)
            return {"missing": [{"digest": digest, "received": 0} for digest in body["digests"]]}

        def send_bytes(self, method: str, path: str, data: bytes, **_: Any) -> Any:
            self.sent += data
            return {"complete": True, "received": len(data)}

    server = Slow()
    if when == "before it is sent":
        (work / "a/one.txt").write_bytes(b"x" * 300_000)  # too large for a pack
    listed, _ = collector(server).collect(work, ("a/one.txt",), 10**9)
    assert [output.path for output in listed] == ["a/one.txt"]
    assert b"a key" not in server.sent


@pytest.mark.parametrize("which", ["work", "run"])
def test_a_work_directory_that_becomes_a_link_after_it_was_found(tmp_path: Path, home: Path, which: str) -> None:
    work = tmp_path / "run/work"
    work.mkdir(parents=True)
    (work / "one.txt").write_text("mine")
    (home / "work").mkdir()
    (home / "work/one.txt").write_text("a key")
    with WorkTree(work) as tree:
        _swap(work if which == "work" else work.parent, home)
        found = output_files.find(tree, ("*.txt",))
        assert list(found.files) == ["one.txt"]
        with tree.open("one.txt") as fd:
            assert os.pread(fd, 100, 0) == b"mine"


def test_links_that_lead_by_the_root_of_this_machine_are_followed_inside_only(work: Path, home: Path) -> None:
    (work / "here").symlink_to(work / "a")
    (work / "there").symlink_to(home)
    (work / "up").symlink_to(f"{work}/../home/one.txt")
    found = find(work, ("here", "there", "up", "a/../../home"))
    assert {path.partition("/")[0] for path in found.files} == {"here"}
    assert found.files["here/one.txt"] == "a/one.txt"


def test_a_server_that_refuses_the_files_is_told_of_them(tmp_path: Path) -> None:
    class Refusing:
        def call(self, *_: Any, **__: Any) -> Any:
            raise Forbidden("no blobs from you")

    (tmp_path / "x").touch()
    listed, notes = collector(Refusing()).collect(tmp_path, ("*",), 100)
    assert [(output.path, output.stored) for output in listed] == [("x", False)]
    assert "refused" in notes
