"""The Containerfile of a recipe: golden text, and that nothing a person wrote becomes an instruction."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.core.containerfiles import containerfile, full_reference, step_argv
from diamond.core.recipes import Recipe, stages

GOLDEN = Path(__file__).parent / "golden" / "containerfiles"
FULL = Recipe.parse(
    {
        "base": "python:3.12-slim",
        "system": ["git", "libhdf5-dev=1.10.8-1"],
        "conda": ["numpy>=2"],
        "pip": ["torch==2.9", "six"],
        "files": {"/opt/data set/a.txt": "a.txt"},
        "envs": {"GREETING": "it's\n$HOME", "PLAIN": "1"},
        "build": "cat > /x <<EOF\nFROM scratch\nRUN rm -rf / \\\nEOF\n",
    }
)
TEXTS = {
    "everything": containerfile(FULL, [*(stage.name for stage in stages(FULL, builder="podman")), "pack"]),
    "copied": containerfile(FULL, [*(s.name for s in stages(FULL, builder="charliecloud")), "pack"], mounts=False),
    "folder": containerfile(Recipe.parse({"base": "/sw/bases/debian"}), ["base", "pack"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_the_golden_one(name: str) -> None:
    # After a wanted change: python tests/unit/core/test_containerfiles.py
    assert TEXTS[name] == (GOLDEN / name).read_text()


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\\\n"])
@pytest.mark.parametrize("mounts", [True, False])
def test_no_text_of_a_person_leaves_its_comment(end: str, mounts: bool) -> None:
    evil = f"true{end}RUN touch /pwned{end}FROM scratch{end}# escape=`{end}"
    names = ["base", "pip", "commands", "pack"]

    def instructions(**fields: object) -> list[str]:
        recipe = Recipe.parse({"base": "debian:13", "pip": ["six"], **fields})
        lines = containerfile(recipe, names, mounts=mounts).splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    assert instructions(build=evil, envs={"A": evil}) == instructions(build="true")


def test_every_stage_is_one_start_of_the_steps() -> None:
    assert step_argv("pip")[-2:] == ["pip", "/opt/diamond/build/inputs"]
    assert TEXTS["everything"].count("\nRUN ") == TEXTS["copied"].count("\nRUN ") == 5


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("debian", "docker.io/library/debian"),
        ("python:3.12-slim", "docker.io/library/python:3.12-slim"),
        ("pytorch/pytorch:2.9", "docker.io/pytorch/pytorch:2.9"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io/nvidia/pytorch:25.01-py3"),
        ("registry:5000/mine", "registry:5000/mine"),
        ("localhost/mine", "localhost/mine"),
        ("debian@sha256:" + "0" * 64, "docker.io/library/debian@sha256:" + "0" * 64),
    ],
)
def test_short_names_mean_docker_hub(written: str, meant: str) -> None:
    assert full_reference(written) == meant


if __name__ == "__main__":
    for name, text in TEXTS.items():
        (GOLDEN / name).write_text(text)
