"""The endpoint's image store: complete or not there, safe against names, tidy after the dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.builders import store as stores
from diamond.agent.builders.removing import remove_tree
from diamond.agent.builders.store import ImageStore, measure, prune, sweep, tree_digest, write_json
from diamond.core.errors import InvalidInput
from diamond.core.images import FACTS_FILE, ImageFacts

KEY = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "images")
    made.make()
    return made


def make_image(folder: Path, contents: str, image_id: str = "img_00000001") -> Path:
    folder.mkdir()
    (folder / "image.sif").write_text(contents)
    facts = ImageFacts(image_id=image_id, recipe_digest="", builder="apptainer", size_bytes=len(contents))
    write_json(folder / FACTS_FILE, facts)
    return folder


def test_an_image_replaces_the_one_before(store: ImageStore, tmp_path: Path) -> None:
    for contents in ("first", "second"):
        with store.workspace("job_1") as folder:
            place = store.publish("img_00000001", make_image(folder / "publish", contents), folder)
        assert (place / "image.sif").read_text() == contents
    assert store.sizes() == (len("second"), 0)
    assert list(store.tmp.glob("[!.]*")) == []
    found = store.facts("img_00000001")
    assert found is not None and found.builder == "apptainer"


@pytest.mark.parametrize("image_id", ["", ".", "..", "../x", "img_", "img_../../x", "job_00000001", "img_a\n", "a/b"])
def test_names_never_lead_out(store: ImageStore, image_id: str) -> None:
    for use in (store.image, store.facts, store.lock):
        with pytest.raises(InvalidInput):
            use(image_id)


def test_an_image_without_its_facts_is_none(store: ImageStore) -> None:
    store.image("img_00000001").mkdir()
    assert store.facts("img_00000001") is None
    (store.image("img_00000001") / FACTS_FILE).write_text("{half")
    assert store.facts("img_00000001") is None


def test_the_second_layer_of_a_key_is_let_go(store: ImageStore) -> None:
    for contents in ("first", "second"):
        with store.workspace("job_1") as folder:
            (folder / "made").mkdir()
            (folder / "made" / "layer").write_text(contents)
            place = store.keep_layer("apptainer", KEY, folder / "made", stage="pip")
    assert place == store.layer("apptainer", KEY)
    assert place.read_text() == "first"
    assert store.sizes() == (0, len("first"))
    assert json.loads(place.with_name("layer.json").read_text())["stage"] == "pip"
    assert prune(store, {KEY}) == []
    assert prune(store, ()) == [("apptainer", KEY)]
    with store.workspace("job_1") as folder:
        assert [size for _, _, size in store.remove_layers((), folder)] == [len("first")]
        assert list(store.remove_layers((), folder)) == []
    assert list(store.kept()) == []


def keep(store: ImageStore, folder: Path, contents: str, *, fresh: bool = False) -> Path:
    (folder / contents).mkdir()
    (folder / contents / "layer").write_text(contents)
    return store.keep_layer("venv", KEY, folder / contents, replacing=folder if fresh else None, stage="pip")


def test_a_fresh_layer_takes_the_place_of_the_old_one(store: ImageStore) -> None:
    for contents in ("first", "second"):
        with store.workspace("job_1") as folder:
            store.claim(folder, [KEY])
            assert keep(store, folder, contents, fresh=True) == store.layer("venv", KEY)
        assert store.layer("venv", KEY).read_text() == contents


def test_layers_that_a_build_at_work_counts_on_stay_as_they_are(store: ImageStore) -> None:
    with store.workspace("job_1") as reader:
        keep(store, reader, "first")
        store.claim(reader, [KEY])
        with store.workspace("job_2") as other:
            assert list(store.remove_layers((), other)) == []
            mine = keep(store, other, "second", fresh=True)
            assert mine.read_text() == "second"
        assert store.layer("venv", KEY).read_text() == "first"
    with store.workspace("job_2") as other:  # the reader has ended
        assert [size for _, _, size in store.remove_layers((), other)] == [len("first")]


def test_what_dead_builds_left_is_removed_and_living_ones_stay(store: ImageStore) -> None:
    program = (
        "import os, sys; from pathlib import Path; from diamond.agent.builders.store import ImageStore\n"
        "with ImageStore(Path(sys.argv[1])).workspace(sys.argv[2]) as folder:\n"
        "    (folder / 'half').mkdir(); (folder / 'half').chmod(0)\n"
        "    print('ready', flush=True); sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", program, str(store.root)]
    both = [
        subprocess.Popen([*argv, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in ("job_dead", "job_alive")
    ]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    dead, alive = both
    dead.kill()
    dead.communicate()
    with store.workspace("job_mine"):
        assert {path.name for path in store.tmp.glob("[!.]*")} == {"job_alive", "job_mine"}
    alive.communicate("")
    assert alive.returncode == 0
    assert list(store.tmp.glob("[!.]*")) == []


def test_builds_of_other_nodes_are_dead_only_after_a_silence(store: ImageStore) -> None:
    folder = store.tmp / "job_elsewhere"
    folder.mkdir()
    (folder / "lock").write_text("another-node")
    assert sweep(store.tmp) == []
    before = time.time() - stores.QUIET_S - 1
    os.utime(folder / "lock", (before, before))
    assert sweep(store.tmp) == ["job_elsewhere"]


def test_a_living_build_is_heard(store: ImageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "BEAT_S", 0.01)
    with store.workspace("job_1") as folder:
        os.utime(folder / "lock", (1, 1))
        until = time.monotonic() + 10
        while (folder / "lock").stat().st_mtime == 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert (folder / "lock").stat().st_mtime > 1


def test_a_tree_is_known_by_its_contents(tmp_path: Path) -> None:
    def tree(name: str) -> Path:
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "a").write_text("a")
        (folder / "b").write_bytes(b"\xff")
        (folder / "link").symlink_to("sub")
        os.symlink(b"sub/\xff", os.fsencode(folder) + b"/odd\xff")
        return folder

    one, two = tree("one"), tree("two")
    os.utime(two / "b", (1, 1))
    assert tree_digest(one) == tree_digest(two)
    assert measure(one)[1] == measure(two)[1]
    known = tree_digest(one)
    changes = [
        lambda: (one / "sub" / "a").write_text("b"),
        lambda: (one / "sub" / "a").chmod(0o755),
        lambda: (one / "sub" / "a").rename(one / "sub" / "c"),
        lambda: ((one / "link").unlink(), (one / "link").symlink_to("b")),
        lambda: (one / "empty").mkdir(),
    ]
    seen = {known}
    for change in changes:
        change()
        seen.add(tree_digest(one))
    assert len(seen) == len(changes) + 1


def test_folders_without_permissions_are_removed(shared: Path, as_nobody: Callable[[Callable[[], Any]], Any]) -> None:
    folder = shared / "odd"

    def act() -> bool:
        (folder / "a" / "b").mkdir(parents=True)
        (folder / "a" / "b" / "file").write_text("x")
        (folder / "a" / "b").chmod(0)
        (folder / "a").chmod(0o500)
        remove_tree(folder)
        return folder.exists()

    assert as_nobody(act) is False
