"""Recipes: what is accepted, what is refused with the way out, and what the keys of stages depend on."""

from __future__ import annotations

import json
import time
from dataclasses import fields
from typing import Any

import pytest

from diamond.core.codec import encode
from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.recipes import (
    BUILDERS,
    MAX_LABELS,
    MAX_PACKAGES,
    MAX_PIP_LINE,
    STAGE_TITLES,
    Recipe,
    Stage,
    parse_image_name,
    stages,
)

FULL: dict[str, Any] = {
    "name": "mine",
    "base": "docker://debian:13",
    "system": ["git"],
    "conda": ["numpy"],
    "channels": ["conda-forge"],
    "pip": ["six==1.16.0"],
    "constraints": ["urllib3<3"],
    "files": {"/opt/x": "./x"},
    "envs": {"A": "1"},
    "build": "make\n",
    "test": "true",
    "labels": {"a": "b"},
    "builder": "apptainer",
    "where": "login",
    "time_limit": "1h",
}
BUNDLE = "bundle:sha256:" + "0" * 64


def recipe(**changes: Any) -> Recipe:
    return Recipe.parse({"base": "docker://debian:13", **changes})


def refused(field: str, **changes: Any) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        recipe(**changes)
    assert caught.value.field.startswith(field), caught.value
    assert len(str(caught.value)) < 1000  # an error never repeats a huge text
    return caught.value


# ---- bases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("python:3.12-slim", "docker://python:3.12-slim"),
        ("python", "docker://python"),
        ("pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime", "docker://pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"),
        ("docker://registry.example:5000/a/b@sha256:" + "0" * 64, None),
        ("  host ", "host"),
        ("image:mine", None),
        ("image:mine@sha256:" + "a" * 64, None),
        ("image:somebody/theirs", None),
        ("suggested:pytorch", None),
        ("/sw/images/it's here.sif", None),
        ("oci-archive:/sw/x.tar", None),
        ("docker-archive:/sw/x.tar", None),
    ],
)
def test_bases_that_are_meant(written: str, means: str | None) -> None:
    assert recipe(base=written).base == (means or written)


@pytest.mark.parametrize(
    "written",
    [
        *("", " ", "docker://", "docker:// x", "docker://-x", "http://x/y", "docker://a b", "docker://a\nRUN evil"),
        *("../up", "./here", "~/x.sif", "-x", "--nv", "/", "//", "/a/../b", "/a\nb", "/a\x7f", "/" + "a" * 300),
        *("image:", "image:../x", "image:a/b/c", "image:x@sha256:short", "image:" + "x" * 65),
        *("suggested:", "suggested:PyTorch", "suggested:../x", "oci-archive:relative.tar", "docker-archive:x.tar"),
        *("a" * 500, "$(id)", "`id`", "a;b", "ä:1", "/\ud800"),
        *(None, 3, ["a"], {"a": 1}),
    ],
)
def test_bases_that_are_none(written: object) -> None:
    refused("base", base=written)


def test_a_base_is_required() -> None:
    with pytest.raises(InvalidInput) as caught:
        Recipe.parse({})
    assert caught.value.field == "base"


# ---- packages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["git", "g++", "libstdc++6", "libc6:i386", "git=1:2.47.2-0.1", "python3.12", "x264", "7zip"]
)
def test_system_packages_that_are(name: str) -> None:
    assert recipe(system=[name]).system == (name,)


@pytest.mark.parametrize(
    "name",
    [
        *("-y", "--allow-unauthenticated", "git curl", "git;id", "$(id)", "`id`", "git|sh", "git&", "../x", "/x.deb"),
        *(
            "./x.deb",
            "git*",
            "gi?t",
            "git>1",
            "git=",
            "git=1 2",
            "git\x00",
            "gít",
            "http://x/y.rpm",
            "@group",
            "a" * 200,
        ),
        # To apt a trailing minus means "remove it".
        *("bash-", "libc6:amd64-"),
    ],
)
def test_hostile_system_packages(name: str) -> None:
    error = refused("system", system=["fine", name])
    assert error.hint or isinstance(error, TooLarge) or "control" in error.message


@pytest.mark.parametrize(
    "line",
    [
        *(
            "numpy",
            "numpy==2.3.4",
            "numpy>=2,<3",
            "torch[opt]~=2.9 ; python_version > '3.9'",
            "a==1 --hash=sha256:" + "0" * 64,
        ),
        *("pkg @ https://example.org/x.whl", "git+https://example.org/x.git@v1#egg=x", "NumPy", "zope.interface"),
    ],
)
def test_requirement_lines_that_pip_takes(line: str) -> None:
    assert recipe(pip=[line]).pip == (line,)


@pytest.mark.parametrize(
    "line",
    [
        *("-r other.txt", "--index-url https://evil.example", "-e .", "--extra-index-url=x", "-c x", "  -i x", "-"),
        *(
            "./here",
            "../there",
            "/etc/passwd",
            "~/x",
            ".",
            "file:///x",
            "six\x00",
            "six\x07",
            "six\x1b[31m",
            "six\u202e",
        ),
        "six\ud800",
    ],
)
@pytest.mark.parametrize("field", ["pip", "constraints"])
def test_hostile_requirement_lines(field: str, line: str) -> None:
    refused(field, **{field: ["fine", line]})


def test_text_of_several_lines_is_a_list_of_them() -> None:
    text = "# what we need\nnumpy  # for arrays\n\n  six==1 \r\ngit+https://example.org/x#egg=x\nnumpy\n"
    assert recipe(pip=text).pip == ("numpy", "six==1", "git+https://example.org/x#egg=x")
    assert recipe(pip=["a\nb", "c"]).pip == ("a", "b", "c")
    # An option cannot hide behind a separator that only some programs take for a line's end.
    for separator in ("\n", "\r", "\x0b", "\x0c", "\x85", "\u2028"):
        refused("pip", pip=f"six{separator}--index-url=x")


@pytest.mark.parametrize("raw", [3, {"a": 1}, [1], [None], None, [["a"]]])
@pytest.mark.parametrize("field", ["system", "pip", "conda", "channels"])
def test_what_is_no_list_of_lines(field: str, raw: object) -> None:
    refused(field, **{field: raw})


@pytest.mark.parametrize("spec", ["numpy", "numpy=2.3", "numpy>=2,<3", "numpy >= 2", "python=3.12.*", "_openmp_mutex"])
def test_conda_packages_that_are(spec: str) -> None:
    assert recipe(conda=[spec]).conda == (spec,)


@pytest.mark.parametrize(
    "spec", ["--file x", "-c evil", "a b", "a;b", "$(x)", "a[build=x]", "https://x/y.conda", "a\nb;c"]
)
def test_hostile_conda_packages(spec: str) -> None:
    refused("conda", conda=[spec])


@pytest.mark.parametrize("channel", ["-x", "--override", "a b", "$(x)", "a'b", ""])
def test_hostile_channels(channel: str) -> None:
    if channel:
        refused("channels", channels=[channel])
    else:
        assert recipe(channels=[channel]).channels == ()


# ---- text that is kept byte for byte ---------------------------------------------------------------------------------

NASTY = [
    "it's",
    'a "b" $HOME `id` \\ %s !x',
    "one\ntwo\r\n\n",
    "日本 🜲 ﷽ e\u0301",
    "EOF\n%post\nrm -rf /\nEOF",
    " leading and trailing ",
    "",
    "\x01\x7f\x1b[31m",
]


@pytest.mark.parametrize("value", NASTY)
def test_values_commands_and_tests_are_kept_byte_for_byte(value: str) -> None:
    found = recipe(envs={"A": value}, build=value, test=value)
    assert (found.envs["A"], found.build, found.test) == (value, value, value)
    again = Recipe.parse(json.loads(json.dumps(encode(found))))
    assert again == found
    assert again.digest == found.digest


@pytest.mark.parametrize("value", ["\x00", "a\x00b", "\ud800"])
def test_what_no_file_or_variable_can_hold(value: str) -> None:
    refused("envs", envs={"A": value})
    refused("build", build=value)
    refused("test", test=value)


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "A\n", "DIAMOND_X", "RANK", "UID", "Ä", "A;id"])
def test_names_that_are_no_variables(name: str) -> None:
    refused("envs", envs={name: "x"})


@pytest.mark.parametrize(
    "target",
    ["relative", "", "/", "/../etc/passwd", "/opt/../../x", "/a\nb", "/proc/x", "/sys/x", "/dev/null", "/./proc/x"],
)
def test_targets_that_are_no_places_for_files(target: str) -> None:
    refused("files", files={target: "./x"})


def test_targets_are_brought_into_one_form() -> None:
    assert recipe(files={"/opt//a/./b/": "./x"}).files == {"/opt/a/b": "./x"}
    assert recipe(files={"/opt/it's $HOME": "./x"}).files == {"/opt/it's $HOME": "./x"}
    refused("files", files={"/opt/a": "./x", "/opt//a": "./y"})


def test_files_must_be_uploaded_before_a_server_takes_them() -> None:
    recipe(files={"/opt/a": BUNDLE}).check_uploaded()
    with pytest.raises(InvalidInput) as caught:
        recipe(files={"/opt/a": "./x"}).check_uploaded()
    assert caught.value.field == "files./opt/a"


@pytest.mark.parametrize("name", ["../x", ".x", "x.", "-x", "a/b", "a b", "", " ", "x" * 65, "ä", "a\nb", None, 3])
def test_names_that_are_no_names_of_images(name: object) -> None:
    with pytest.raises(ValueError, match="is not an image name"):
        parse_image_name(name)


def test_labels_are_one_line_each() -> None:
    assert recipe(labels={"org.example/team": "x ü"}).labels == {"org.example/team": "x ü"}
    for labels in (
        {"a b": "x"},
        {"-a": "x"},
        {"a": "x\ny"},
        {"a": 1},
        {"a": "x" * 2000},
        {f"l{n}": "" for n in range(999)},
    ):
        refused("labels", labels=labels)


# ---- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"build": "x" * 10_000_000},
        {"test": "\n" * 10_000_000},
        {"pip": "x" * 10_000_000},
        {"pip": "x\n" * 5_000_000},
        {"pip": " " * 10_000_000 + "x #"},
        {"pip": [f"p{n}" for n in range(MAX_PACKAGES + 1)]},
        {"pip": ["a==1 " + "b" * MAX_PIP_LINE]},
        {"system": "a" * 10_000_000},
        {"system": ["a"] * 3 + ["a=" * 5_000_000]},
        {"conda": "a=" + "1," * 5_000_000},
        {"envs": {"A": "x" * 10_000_000}},
        {"envs": {f"A{n}": "x" * 90_000 for n in range(100)}},
        {"base": "a" * 10_000_000},
        {"base": "/" + "a/" * 5_000_000},
        {"base": "image:" + "a" * 10_000_000},
        {"files": {"/" + "a/" * 5_000_000 + "b": "./x"}},
        {"files": {f"/opt/{n}": "./x" for n in range(MAX_LABELS + 1)}},
        {"labels": {"a": "x" * 10_000_000}},
        {"name": "x" * 10_000_000},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_ten_megabytes_are_refused_in_no_time(changes: dict[str, Any]) -> None:
    began = time.monotonic()
    refused(next(iter(changes)), **changes)
    assert time.monotonic() - began < 10


# ---- the rest of the form --------------------------------------------------------------------------------------------


def test_an_unknown_field_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput) as caught:
        Recipe.parse({"base": "host", "packages": []})
    assert "packages" in str(caught.value)
    with pytest.raises(InvalidInput, match="pip"):
        Recipe.parse({"base": "host", "pipp": []})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("builder", "buildah"),
        ("builder", ""),
        ("where", "cloud"),
        ("time_limit", "5s"),
        ("time_limit", "9d"),
        ("time_limit", -1),
    ],
)
def test_choices_and_limits(field: str, value: object) -> None:
    refused(field, **{field: value})


def test_every_builder_can_be_named() -> None:
    assert [recipe(builder=name).builder for name in ("auto", *BUILDERS)] == ["auto", *BUILDERS]


# ---- digests and stage keys ------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "base": "docker://debian:12", "system": ["git", "curl"], "conda": ["numpy=2"], "channels": ["bioconda"],
    "pip": ["six==1.17.0"], "constraints": ["urllib3<4"], "files": {"/opt/y": "./x"}, "envs": {"A": "2"},
    "build": "make \n", "test": "false", "labels": {"a": "c"}, "builder": "venv", "name": "other", "where": "batch",
    "time_limit": "2h",
}  # fmt: skip


def test_the_digest_depends_on_contents_and_on_nothing_else() -> None:
    assert set(CHANGES) == {item.name for item in fields(Recipe)} == set(FULL)
    whole = Recipe.parse(FULL).digest
    assert whole.startswith("sha256:") and len(whole) == 71
    for name, value in CHANGES.items():
        changed = Recipe.parse({**FULL, name: value}).digest
        assert (changed == whole) is (name in ("name", "where", "time_limit")), name
    assert Recipe.parse(dict(reversed(FULL.items()))).digest == whole
    assert Recipe.parse({**FULL, "envs": {"B": "2", "A": "1"}}).digest == Recipe.parse(
        {**FULL, "envs": {"A": "1", "B": "2"}}
    ).digest  # fmt: skip


def keys(raw: dict[str, Any], **options: Any) -> dict[str, str]:
    found: list[Stage] = stages(Recipe.parse(raw), **{"builder": "apptainer", **options})
    assert [stage.title for stage in found] == [STAGE_TITLES[stage.name] for stage in found]
    return {stage.name: stage.key for stage in found}


# The first stage that each part of a recipe has a say in; those after it build on its result.
FIRST = {
    "base": "base", "system": "system", "conda": "conda", "channels": "conda", "pip": "pip", "constraints": "pip",
    "files": "commands", "envs": "commands", "build": "commands",
}  # fmt: skip


def test_a_stage_key_changes_with_its_part_and_those_before_it() -> None:
    order = ["base", "system", "conda", "pip", "commands"]
    before = keys(FULL)
    assert list(before) == order
    assert len(set(before.values())) == len(order)
    for name, value in CHANGES.items():
        after = keys({**FULL, name: value})
        changed = [stage for stage in order if before[stage] != after[stage]]
        assert changed == (order[order.index(FIRST[name]) :] if name in FIRST else []), name


def test_stage_keys_are_the_same_on_every_machine_and_version() -> None:
    """A changed key means that nobody's kept layers are found any more: then it was meant."""
    assert keys(FULL) == {
        "base": "f860de39aeb6a68bf6f98ef141b98e52",
        "system": "10ef60aa3fdd994385271b89a9c533b7",
        "conda": "3c643e4b578ed4f03e7f89032f973177",
        "pip": "e8dcb1ce4aeb986d9b0ae59c9e639351",
        "commands": "f3a480eb2a2a53546bbb9ea6e3cb9541",
    }


def test_builder_base_state_and_pins_are_part_of_every_key() -> None:
    before = keys(FULL)
    for options in ({"builder": "venv"}, {"base_key": "sha256:1"}, {"pins": {"python": "3.12"}}):
        after = keys(FULL, **options)
        assert not set(before.values()) & set(after.values()), options
    assert keys(FULL, pins={}) == keys(FULL, pins=None) == before


def test_steps_with_nothing_to_do_are_left_out() -> None:
    assert list(keys({"base": "host"})) == ["base"]
    assert list(keys({"base": "host", "envs": {"A": "1"}, "test": "true"})) == ["base"]
    assert list(keys({"base": "host", "channels": ["x"], "constraints": ["six<2"], "pip": []})) == ["base"]
    assert list(keys({"base": "host", "files": {"/a": "./x"}})) == ["base", "commands"]


def test_parts_cannot_be_shifted_from_one_stage_to_another() -> None:
    """The same words in different places are different things."""
    seen: set[str] = set()
    for raw in (
        {"system": ["numpy"]}, {"pip": ["numpy"]}, {"conda": ["numpy"]}, {"build": "numpy"},
        {"pip": ["a", "b"]}, {"pip": ["a"], "constraints": ["b"]}, {"build": "a", "envs": {"B": "c"}},
        {"build": "a", "files": {"/B": "c"}},
    ):  # fmt: skip
        last = list(keys({"base": "host", **raw}).values())[-1]
        assert last not in seen
        seen.add(last)


@pytest.mark.parametrize(("base", "name"), [("image:a@sha256:" + "1" * 64, "a@sha256:" + "1" * 64), ("host", "")])
def test_the_image_it_builds_on(base: str, name: str) -> None:
    assert recipe(base=base).base_image == name
