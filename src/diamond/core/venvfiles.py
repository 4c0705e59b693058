"""The steps of a virtual environment, as commands a person can read. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from diamond.core.recipes import Recipe

# A virtual environment has no / of its own: a recipe's files lie below this folder of the image.
ROOT = "root"


def venv_steps(recipe: Recipe, stage_names: Sequence[str]) -> str:
    """What these stages do; the recipe's own text stands in comments, since it is never pasted into a command."""
    steps = {
        "base": ["python3 -m venv IMAGE" if not recipe.base_image else f"cp -a {recipe.base} IMAGE"],
        "pip": [
            "IMAGE/bin/python -m pip install --requirement requirements.txt",
            *(f"#   {line}" for line in recipe.pip),
        ],
        "commands": [
            *(f"# {target} -> IMAGE/{ROOT}{target}" for target in sorted(recipe.files)),
            *(["bash -e commands.sh"] if recipe.build else []),
            *(f"#   {line}" for line in (recipe.build or "").splitlines()),
        ],
    }
    lines = ["# A virtual environment on the endpoint's own Python."]
    for name in stage_names:
        lines += steps.get(name, [])
    lines += [f"# variable {name}" for name in recipe.envs]
    return "\n".join(lines) + "\n"
