"""Pasted lists of packages: taken whole, or refused with the line."""

from __future__ import annotations

import pytest

from diamond.core.errors import InvalidInput
from diamond.texts import packages


def test_requirements_are_taken_without_notes() -> None:
    found = packages.split("# ours\nnumpy==2.3.4  # pinned\n\nscipy>=1.14 \\\n  ,<2\ntorch; python_version > '3.9'\n")
    assert found.pip == ["numpy==2.3.4", "scipy>=1.14   ,<2", "torch; python_version > '3.9'"]
    assert (found.conda, found.channels, found.envs) == ([], [], {})


def test_a_conda_environment_is_told_by_what_it_says() -> None:
    found = packages.split(
        "name: climate\nchannels:\n  - conda-forge\n  - nodefaults\ndependencies:\n  - python=3.12\n  - pip\n"
        "  - pip:\n    - einops\nvariables: {VERSION: 1.10}\n"
    )
    assert (found.name, found.channels, found.conda) == ("climate", ["conda-forge"], ["python=3.12"])
    assert (found.pip, found.envs) == (["einops"], {"VERSION": "1.10"})


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("numpy\n--index-url https://example.org/simple\n", "line 2", "setting of the endpoint"),
        ("numpy\n-r more.txt\n", "line 2", "paste that file as well"),
        ("-e .\n", "line 1", "files"),
        ("six idna\n", "line 1", "one package a line"),
        ("${TOKEN}@example\n", "line 1", "write the value out"),
        ("# nothing\n", "names no package", "requirements.txt"),
        ("dependencies:\n  - {conda: x}\n", "line 2", ""),
        ("dependencies:\n  - pip:\n    - -c limits.txt\n", "limits.txt", "paste that file as well"),
        ("dependencies: numpy\n", "must be a list", ""),
        ("channels: [a]\nwhatever: 1\n", "unknown field", "dependencies"),
        ("dependencies: [a\n", "not YAML", ""),
    ],
)
def test_what_cannot_be_taken_is_named(text: str, says: str, hint: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        packages.split(text)
    assert says in refused.value.message
    assert hint in refused.value.hint
