"""A recipe as an Apptainer definition file. Pure, golden-tested.

What people wrote (commands, values) never stands in a section of it: a line of theirs could look like the next section.
It comes as files in a folder `inputs` beside it, as `diamond.agent.builders.inputs` writes them, and the shell file
`steps.sh` reads them there. Lists of packages are repeated as comments, for whoever reads the file: each is one
printable line (see `diamond.core.recipes`).
"""

from __future__ import annotations

from collections.abc import Sequence

from diamond.core.images import ENV_IN_IMAGE
from diamond.core.recipes import STAGE_TITLES, Recipe

INSIDE = "/.diamond-build"
"""Where the build sees its files, while it lasts."""

_BOOTSTRAPS = {"docker://": "docker", "oci-archive:": "oci-archive", "docker-archive:": "docker-archive"}


def apptainer_definition(recipe: Recipe, stage_names: Sequence[str], *, base_path: str = "") -> str:
    """The definition file that does what these stages do.

    Args:
        base_path: of the Diamond image it builds on, at the endpoint, where that is known.
    """
    sections = [_header(recipe, base_path)]
    steps = [name for name in stage_names if name in STAGE_TITLES and name not in ("base", "test")]
    if "pack" not in steps:
        steps.append("pack")
    sections.append(f"%files\n    inputs {INSIDE}/inputs\n    steps.sh {INSIDE}/steps.sh\n")
    post = "".join(_step(recipe, name) for name in steps)
    sections.append(f"%post\n    set -e\n{post}    rm -rf {INSIDE}\n")
    sections.append(f"%environment\n    . {ENV_IN_IMAGE}\n")
    if recipe.labels:
        sections.append("%labels\n" + "".join(f"    {name} {value}\n" for name, value in recipe.labels.items()))
    return "\n".join(sections)


def _header(recipe: Recipe, base_path: str) -> str:
    for prefix, bootstrap in _BOOTSTRAPS.items():
        if recipe.base.startswith(prefix):
            return f"Bootstrap: {bootstrap}\nFrom: {recipe.base.removeprefix(prefix)}\n"
    note = f"# the base is {recipe.base}\n" if base_path and recipe.base != base_path else ""
    return f"{note}Bootstrap: localimage\nFrom: {base_path or recipe.base}\n"


def _step(recipe: Recipe, name: str) -> str:
    return (
        f"    # {STAGE_TITLES[name]}\n"
        + "".join(f"    #   {line}\n" for line in _contents(recipe, name))
        + f"    sh {INSIDE}/steps.sh {name} {INSIDE}/inputs\n"
    )


def _contents(recipe: Recipe, name: str) -> list[str]:
    if name == "commands":
        number = len((recipe.build or "").splitlines())
        commands = [f"{number} lines of commands: inputs/commands.sh"] if number else []
        return [*(f"file {path}" for path in recipe.files), *commands]
    if name == "pack":
        return [f"variable {variable}" for variable in recipe.envs]
    lines: tuple[str, ...] = {"system": recipe.system, "conda": recipe.conda, "pip": recipe.pip}.get(name, ())
    return list(lines)
