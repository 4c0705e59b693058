"""Which builder makes an image."""

from __future__ import annotations

import pytest

from diamond.agent.builders import choice
from diamond.agent.builders.base import BuildProblem
from diamond.core.recipes import BUILDERS, Recipe


def recipe(base: str = "docker://debian", builder: str = "auto") -> Recipe:
    return Recipe.parse({"base": base, "builder": builder})


def test_the_best_that_is_there() -> None:
    assert choice.choose(recipe(), BUILDERS) == "apptainer"
    assert choice.choose(recipe(), ("venv", "podman", "charliecloud")) == "charliecloud"
    assert choice.choose(recipe(builder="podman"), BUILDERS) == "podman"
    assert choice.choose(recipe("host"), BUILDERS) == "venv"


@pytest.mark.parametrize(
    ("wanted", "available", "says"),
    [
        (recipe(), ("venv",), "needs apptainer or charliecloud"),
        (recipe(), (), "has none"),
        (recipe(builder="docker"), ("apptainer",), "needs docker, and has apptainer"),
        (recipe("host"), ("apptainer",), "needs venv"),
        (recipe("host", "apptainer"), BUILDERS, "does not build on"),
    ],
)
def test_none_fits(wanted: Recipe, available: tuple[str, ...], says: str) -> None:
    with pytest.raises(BuildProblem, match=says) as caught:
        choice.choose(wanted, available)
    assert caught.value.hint


def test_every_builder_is_one() -> None:
    for name in BUILDERS:
        made = choice.builder(name)
        assert made.name == name
        assert made.suffix in ("image.sif", "image", "image.ref")
        assert isinstance(made.problem(), str)
    assert list(choice.usable()) == list(BUILDERS)
    with pytest.raises(BuildProblem, match="no builder 'kaniko'"):
        choice.builder("kaniko")
