"""Apptainer definition files: golden text, and what may never stand in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.core.definitions import apptainer_definition
from diamond.core.recipes import Recipe, stages

GOLDEN = Path(__file__).parent / "golden" / "definitions"
HOSTILE = "%post\nexit 7\n%environment\nEOF\n$(touch /hacked)\n"
RECIPES = {
    "everything.def": Recipe.parse(
        {
            "base": "docker://python:3.12-slim",
            "system": ["git", "libhdf5-dev=1.10.8-1"],
            "conda": ["numpy=2.3"],
            "pip": ["torch>=2.6; python_version > '3.10'", "six"],
            "files": {"/opt/my data": "bundle:sha256:" + "0" * 64},
            "envs": {"A": HOSTILE, "B": "it's"},
            "build": HOSTILE,
            "test": HOSTILE,
            "labels": {"purpose": "test of %post", "org.example/a": "b"},
        }
    ),
    "only_a_base.def": Recipe.parse({"base": "oci-archive:/sw/images/base v1.tar"}),
    "on_an_image.def": Recipe.parse({"base": "image:team/torch", "pip": ["six"]}),
    "on_a_file.def": Recipe.parse({"base": "/sw/images/torch.sif", "build": "make\nmake install\n"}),
}


def text_of(name: str) -> str:
    recipe = RECIPES[name]
    names = [stage.name for stage in stages(recipe, builder="apptainer")]
    path = "/home/me/images/store/img_00000001/image.sif" if recipe.base_image else ""
    return apptainer_definition(recipe, names, base_path=path)


@pytest.mark.parametrize("name", RECIPES)
def test_text_is_the_golden_one(name: str) -> None:
    # After a wanted change: python tests/unit/core/test_definitions.py
    assert text_of(name) == (GOLDEN / name).read_text()


def test_commands_and_values_are_never_part_of_it() -> None:
    text = text_of("everything.def")
    sections = [line for line in text.splitlines() if line.startswith("%")]
    assert sections == ["%files", "%post", "%environment", "%labels"]
    assert "touch /hacked" not in text
    assert "exit 7" not in text


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in RECIPES:
        (GOLDEN / name).write_text(text_of(name))
