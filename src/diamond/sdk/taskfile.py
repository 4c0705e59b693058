"""A task file: where its local paths lie, and what the command line may say instead.

How YAML becomes values is in `diamond.texts`; what fields mean in `diamond.core.tasks`. An `image` described
in the file itself is a recipe, with all that `diamond.sdk.recipefile` allows in one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from diamond.core.bundles import is_bundle_ref
from diamond.core.errors import InvalidInput
from diamond.core.fields import check_env_name
from diamond.core.projects import PROJECT_ENV, parse_project
from diamond.core.tasks import TaskSpec
from diamond.sdk import recipefile
from diamond.texts import tasktext, yamltext


class TaskFile(yamltext.Document):
    """What a task file says, and where."""

    def spec(self) -> TaskSpec:
        """Validate. Raises InvalidInput that names the file, line and column of the field."""
        try:
            return TaskSpec.parse(self.raw)
        except InvalidInput as error:
            raise self.located(error) from error


def load(path: str | os.PathLike[str]) -> TaskFile:
    """Read a task file; ``-`` is standard input. Local paths in it become absolute.

    Raises:
        InvalidInput: naming the file, and line, column and field where there are any.
    """
    text, shown, folder = yamltext.read_text(path, tasktext.KIND)
    found = parse(text, shown)
    try:
        return TaskFile(found.path, localise(found.raw, folder), found.positions)
    except InvalidInput as error:
        raise found.located(error) from error


def parse(text: str, path: str = "<text>") -> TaskFile:
    """Turn YAML text into a dictionary of plain values. Raises InvalidInput with the place."""
    document = tasktext.read(text, path)
    return TaskFile(document.path, document.raw, document.positions)


def localise(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make the local paths of a raw spec absolute, taking relative ones from `folder`; ``~`` is the home folder.

    What is not a path (a bundle reference, or a value of the wrong type) is left for validation to judge.

    Raises:
        InvalidInput: a file that the recipe in `image` names cannot be taken.
    """
    found = dict(raw)
    if isinstance(found.get("workdir"), str):
        found["workdir"] = _absolute(found["workdir"], folder)
    mounts = found.get("file_mounts")
    if isinstance(mounts, Mapping):
        found["file_mounts"] = {
            target: _absolute(source, folder) if isinstance(source, str) else source
            for target, source in mounts.items()
        }
    if isinstance(found.get("image"), Mapping):
        try:
            found["image"] = recipefile.folded(found["image"], folder)
        except InvalidInput as error:
            field = f"image.{error.field}" if error.field else "image"
            raise type(error)(error.message, hint=error.hint, field=field) from error
    return found


def with_envs(raw: Mapping[str, Any], envs: Mapping[str, str]) -> dict[str, Any]:
    """The spec with `envs` set or replaced. Raises InvalidInput for a name that cannot be used."""
    if not envs:
        return dict(raw)
    for name in envs:
        try:
            check_env_name(name)
        except InvalidInput as error:
            raise InvalidInput(error.message, hint=error.hint, field="envs") from error
    before = raw.get("envs")
    return {**raw, "envs": {**(before if isinstance(before, Mapping) else {}), **envs}}


def parse_env_options(pairs: list[str]) -> dict[str, str]:
    """``K=V`` words of a command line; a bare ``K`` takes the value it has here. The value may contain ``=``."""
    envs: dict[str, str] = {}
    for pair in pairs:
        name, given, value = pair.partition("=")
        if not given and name not in os.environ:
            raise InvalidInput(
                f"{name[:60]} is not set in your environment", hint=f"write --env {name[:60]}=VALUE", field="--env"
            )
        envs[name] = value if given else os.environ[name]
    return envs


def _absolute(source: str, folder: Path) -> str:
    if is_bundle_ref(source) or not source.strip() or "\x00" in source:
        return source
    return yamltext.absolute(source, folder)


def in_project(spec: TaskSpec) -> TaskSpec:
    """In the project that the environment names, where the spec names none."""
    name = os.environ.get(PROJECT_ENV, "").strip()
    if spec.project is not None or not name:
        return spec
    try:
        return replace(spec, project=parse_project(name))
    except ValueError as error:
        raise InvalidInput(str(error), hint="mend or unset it", field=PROJECT_ENV) from error
