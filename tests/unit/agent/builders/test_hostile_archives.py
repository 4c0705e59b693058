"""No archive reaches a file outside its folder, fills a disk, or fails in a way that says nothing.

What is tried is in `testing/hostile_archives.py`. It runs in a cage, where nothing can be written but a small tmpfs:
code that is wrong about such archives has removed what it should not before.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from testing import caged
from testing.hostile_archives import KINDS, LAYERS, NAMELESS, ROOTS, VENVS

pytestmark = pytest.mark.skipif(caged.why_not() is not None, reason=str(caged.why_not()))

Outcome = dict[str, Any]

# Layers that are unpacked, with what is then below the image's folder.
FINE = {
    "time beyond all": ["a"],
    "time that is none": ["a"],
    "link out": ["a", "{outside}/precious"],
    "link out, opaque": ["a"],
    "link up and out": ["a", "outside/precious"],
    "link in place of a folder": ["a", "outside/precious"],
    "folder in place of a link": ["a/new"],
    "file through a link": ["precious"],
    "hard link to a link, then written": ["a", "l"],
    "root by another name": ["r", "x"],
    "devices": ["x"],
    "all gone at the top": ["new"],
    "notes of a file system": ["a"],
    "whiteout of what the layer itself brings": ["d/new"],
    "opaque after a folder came": ["d/s/new"],
    "good xz": ["a"],
    "good bzip2": ["a"],
}
WORDS = {
    "whiteout of the parent": "takes nothing away that has a name",
    "name of slashes": "'//' is no name of a file",
    "leads up": "leads out",
    "absolute and up": "leads out",
    "zero byte": "zero byte",
    "long component": "255 are allowed",
    "long path": "bytes; 3000 are allowed",
    "deep path": "128 are allowed",
    "deep by links": "128 are allowed",
    "circle of links": "too many links",
    "link of long components": "name too long",
    "hard link to nothing": "no file",
    "hard link to a folder": "a folder",
    "size below nothing": "size of -1",
    "size beyond all": "GB unpacked",
    "endless header": "256 KiB",
    "endless name": "256 KiB",
    "endless holes": "256 KiB",
    "holes of petabytes": "GB unpacked",
    "damaged xz": "damaged",
    "zstd": "zstd",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    found: dict[str, Outcome] = caged.run("testing.hostile_archives:attack")
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_layers_stay_inside(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[f"layer: {name}"]
    assert outcome["untouched"]
    if name in FINE:
        assert (outcome["error"], outcome["message"]) == ("", "")
        # Where the cage has its folder is another machine's matter.
        tree = [f"{{outside}}/{path.rpartition('/')[2]}" if "caged/" in path else path for path in outcome["tree"]]
        assert tree == FINE[name]
    else:
        assert outcome["error"] == "BuildProblem", outcome
        assert WORDS.get(name, "").lower() in outcome["message"].lower()
        assert outcome["hint"]


def test_every_name_above_is_one_that_is_tried() -> None:
    assert not (FINE.keys() | WORDS.keys()) - LAYERS.keys()
    assert not FINE.keys() & WORDS.keys()


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("bytes", "too_large", "'zeros' brings it to more than 2.1 GB unpacked"),
        ("entries", "too_large", "'f100' is one more than the 100 entries"),
        ("disk", "disk_full", "is nearly full"),
        ("files of the disk", "disk_full", "more files"),
        ("names, bytes", "too_large", "'zeros' brings it to more than"),
        ("a base of zeros", "base", "GB when it is uncompressed"),
        ("memory of xz", "base", "Memory usage limit"),
    ],
)
def test_limits_are_named(outcomes: dict[str, Outcome], name: str, code: str, words: str) -> None:
    outcome = outcomes[f"limit: {name}"]
    assert (outcome["error"], outcome["code"]) == ("BuildProblem", code), outcome
    assert words in outcome["message"]
    assert outcome["hint"]


def test_nobody_gets_the_rights_of_another_account(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["rights: of others"]["answer"] == ["0o755"]


@pytest.mark.parametrize("name", NAMELESS)
def test_what_engines_are_given_names_nothing_outside(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[f"nameless: {name}"]
    if name == "good":
        assert outcome["answer"] == ["manifest.json", "a/layer.tar", "b/layer.tar ../a/layer.tar", "c a/layer.tar"]
    else:
        assert outcome["error"] == "BuildProblem", outcome
        assert outcome["untouched"]


@pytest.mark.parametrize("name", VENVS)
def test_a_virtual_environment_has_no_way_out(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[f"venv: {name}"]
    assert outcome["untouched"]
    assert (outcome["error"], outcome["code"]) == ("BuildProblem", "not_an_image"), outcome


@pytest.mark.parametrize("name", ROOTS)
def test_a_root_file_system_stays_inside(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[f"folder: {name}"]
    assert outcome["untouched"]
    trees = {"link out": ["a", "outside/precious"], "names of whiteouts": [".wh...", ".wh.x"], "devices": ["x"]}
    assert outcome["tree"] == trees.get(name, [])
    assert (outcome["error"] == "") == (name in trees), outcome


@pytest.mark.parametrize("name", KINDS)
def test_what_kind_of_base_it_is_takes_no_harm_to_find_out(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[f"kind: {name}"]
    if name.startswith("good"):
        assert outcome["answer"] == "oci"
    else:
        assert (outcome["error"], outcome["code"]) == ("BuildProblem", "base"), outcome


@pytest.mark.parametrize("name", ["a deep tree", "folders without rights", "links"])
def test_trees_are_removed_whatever_is_in_them(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[f"remove: {name}"]
    assert outcome["untouched"]
    assert outcome["answer"] is False  # whether it is still there


def test_a_cage_that_could_be_written_out_of_is_none() -> None:
    code = "from testing import caged; caged._check_read_only('/tmp')"
    done = subprocess.run([sys.executable, "-c", code], cwd=caged.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "can still be written" in done.stderr
