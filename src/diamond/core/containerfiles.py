"""The stages of a recipe as a Containerfile. Pure text, for people, and for a build without Diamond.

Nothing a person wrote becomes an instruction: every RUN starts Diamond's own steps with a stage's name, and those read
the recipe's text from files (`inputs`). What the text is stands beside it as comments. Diamond's builders start the
same steps, one container a stage, so that each can be kept and stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from diamond.core.recipes import STAGE_TITLES, Recipe

# Where a build sees what it works with; gone when it is done.
INPUTS = "/opt/diamond/build/inputs"
STEPS = "/opt/diamond/build/steps"
_USE = {
    True: "podman build --build-context inputs=FOLDER --build-context steps=FOLDER --file THIS-FILE",
    False: "ch-image build --force --file THIS-FILE FOLDER-WITH-inputs-AND-steps",
}
_MOUNTS = tuple(f"--mount=type=bind,from={name},target={at}" for name, at in (("inputs", INPUTS), ("steps", STEPS)))


def step_argv(stage: str) -> list[str]:
    """What does a stage's work, inside."""
    return ["/bin/sh", f"{STEPS}/steps.sh", stage, INPUTS]


def full_reference(reference: str) -> str:
    """An image's name with its registry: short names mean Docker Hub, whatever the engine is set up to search.

    >>> full_reference("python:3.12"), full_reference("nvcr.io/nvidia/pytorch")
    ('docker.io/library/python:3.12', 'nvcr.io/nvidia/pytorch')
    """
    first, slash, _ = reference.partition("/")
    if not slash:
        return f"docker.io/library/{reference}"
    return reference if "." in first or ":" in first or first == "localhost" else f"docker.io/{reference}"


def containerfile(recipe: Recipe, stage_names: Sequence[str], *, mounts: bool = True) -> str:
    """The Containerfile of these stages.

    Args:
        stage_names: of `recipes.stages`, and "pack".
        mounts: `inputs` and `steps` are build contexts of these names, mounted while a RUN lasts. Without, for programs
            that cannot mount, they are folders in the one context, and are copied.
    """
    lines = [f"# {_USE[mounts]}", "", *_notes(recipe, "base"), f"FROM {_from(recipe)}"]
    # Packages are installed as root. ch-image builds as root always, and knows no USER.
    lines += ["USER 0", "WORKDIR /"] if mounts else ["WORKDIR /", f"COPY inputs {INPUTS}", f"COPY steps {STEPS}"]
    for name in stage_names:
        if name != "base":
            lines += ["", *_notes(recipe, name)]
            lines.append(" ".join(["RUN", *(_MOUNTS if mounts else ()), json.dumps(step_argv(name))]))
    if "pack" in stage_names:
        # What a base does when it is started is not wanted in a task.
        lines += ["ENTRYPOINT []", 'CMD ["/bin/sh"]']
    return "\n".join(lines) + "\n"


def _from(recipe: Recipe) -> str:
    if recipe.base.startswith("docker://"):
        return full_reference(recipe.base.removeprefix("docker://"))
    return "localhost/diamond-base"  # a file, a folder or another image, brought in under this name


def _notes(recipe: Recipe, stage: str) -> Iterator[str]:
    if stage == "base":
        yield from _comment(STAGE_TITLES["base"], [recipe.base])
    elif stage == "system":
        yield from _comment(STAGE_TITLES["system"], recipe.system)
    elif stage == "conda":
        channels = [f"from {channel}" for channel in recipe.channels]
        yield from _comment(STAGE_TITLES["conda"], [*channels, *recipe.conda])
    elif stage == "pip":
        yield from _comment(STAGE_TITLES["pip"], [*recipe.pip, *(f"with {line}" for line in recipe.constraints)])
    elif stage == "commands":
        yield from _comment(STAGE_TITLES["commands"], [*recipe.files, *_split(recipe.build or "")])
    elif stage == "pack":
        named = [f"{name}={value}" for name, value in recipe.envs.items()]
        yield from _comment("variables", [line for text in named for line in _split(text)])


def _comment(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield f"# {title}" + (":" if lines else "")
    yield from (f"#   {line}".rstrip() for line in lines)


def _split(text: str) -> list[str]:
    # Every character that some reader takes for the end of a line ends one here, or text would leave its comment.
    return text.splitlines()
