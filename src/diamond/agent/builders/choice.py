"""Which builder makes an image. Pure, but for `usable`, which looks at this machine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module

from diamond.agent.builders.base import Builder, BuildProblem
from diamond.core.recipes import BUILDERS, Recipe

# By name, in the order of preference of `recipes.BUILDERS`. Loaded when asked for: a build needs one of them.
_CLASSES = {
    "apptainer": ("diamond.agent.builders.apptainer", "ApptainerBuilder"),
    "charliecloud": ("diamond.agent.builders.charliecloud", "CharliecloudBuilder"),
    "podman": ("diamond.agent.builders.containers", "PodmanBuilder"),
    "docker": ("diamond.agent.builders.containers", "DockerBuilder"),
    "venv": ("diamond.agent.builders.venv", "VenvBuilder"),
}
assert tuple(_CLASSES) == BUILDERS


def builder(name: str) -> Builder:
    """Raises BuildProblem for a name nobody knows."""
    if name not in _CLASSES:
        raise BuildProblem(f"there is no builder {name!r}", hint=f"known here: {', '.join(_CLASSES)}")
    module, cls = _CLASSES[name]
    made: Callable[[], Builder] = getattr(import_module(module), cls)
    return made()


def usable() -> dict[str, str]:
    """Every builder by name, best first, with what keeps it from working on this machine; empty: nothing known."""
    return {name: builder(name).problem() for name in BUILDERS}


def choose(recipe: Recipe, available: Collection[str]) -> str:
    """The builder for this recipe, of those that an endpoint has.

    Raises:
        BuildProblem: none of them fits.
    """
    if recipe.base == "host":
        wanted: tuple[str, ...] = ("venv",)
    elif recipe.builder != "auto":
        wanted = (recipe.builder,)
    else:
        wanted = tuple(name for name in BUILDERS if name != "venv")
    if recipe.base == "host" and recipe.builder not in ("auto", "venv"):
        raise BuildProblem(
            f"the base is the endpoint's own system, which {recipe.builder} does not build on",
            hint="leave out `builder`, or name a base such as docker://python:3.12-slim",
        )
    if found := next((name for name in wanted if name in available), ""):
        return found
    here = ", ".join(name for name in BUILDERS if name in available) or "none"
    raise BuildProblem(
        f"the endpoint cannot build this recipe: it needs {' or '.join(wanted)}, and has {here}",
        hint="choose another endpoint"
        + ("" if recipe.base == "host" else ", or `base: host` for a Python environment"),
    )
