"""A recipe file: YAML to a `Recipe`, with the lists of packages folded in that people already have in other files.

Owns the fields a file may have beyond those of a recipe (`requirements`, `pyproject`, `extras`, `environment`) and
where its local paths lie. What a recipe's fields mean is in `diamond.core.recipes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diamond.core.bundles import is_bundle_ref
from diamond.core.errors import InvalidInput
from diamond.core.recipes import Recipe, parse_image_name
from diamond.texts import yamltext

KIND = yamltext.Kind(
    name="a recipe",
    given="give the path of a recipe, e.g. diamond image build image.yaml, or a folder that has one",
    empty="a recipe needs at least a `base` field",
    start="base: docker://python:3.12-slim",
)
# In a folder: a recipe under one of these names, else the lists of packages that it has.
RECIPE_NAMES = ("image.yaml", "image.yml", "recipe.yaml", "recipe.yml")
_LISTS = (("environment", "environment.yml"), ("environment", "environment.yaml"), ("requirements", "requirements.txt"))
_FOLDED = ("requirements", "pyproject", "extras", "environment")
_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe))
# What people write who come from container files, conda or SkyPilot, and how it is said here.
_MEANT = {
    **dict.fromkeys(("from", "image", "image_id", "base_image"), "what it starts from is `base`"),
    **dict.fromkeys(("apt", "packages", "apt_packages", "yum", "dnf"), "packages of the distribution are `system`"),
    **dict.fromkeys(("python", "pip_packages", "dependencies"), "Python packages are `pip`"),
    **dict.fromkeys(("run", "commands", "post", "setup", "build_commands"), "commands are `build`"),
    **dict.fromkeys(("env", "environment_variables", "variables"), "variables are `envs`"),
    **dict.fromkeys(("copy", "file_mounts", "add"), "files are `files`:  absolute path in the image: path here"),
    **dict.fromkeys(("validate", "validation", "check"), "the validation command is `test`"),
    **dict.fromkeys(("timeout", "max_duration"), "the time limit of the build is `time_limit`"),
}


class RecipeFile(yamltext.Document):
    """What a recipe file says, and where. Its lists of packages are folded in already."""

    def recipe(self) -> Recipe:
        """Validate. Raises InvalidInput that names the file, line and column of the field."""
        try:
            return Recipe.parse(self.raw)
        except InvalidInput as error:
            raise self.located(error) from error


def load(path: str | os.PathLike[str]) -> RecipeFile:
    """Read a recipe: a YAML file, ``-`` for standard input, a folder that has one, or a list of packages by itself.

    ``environment.yml``, ``requirements.txt`` and ``pyproject.toml`` are known by their names. In a folder the first of
    `RECIPE_NAMES` counts; without one, its conda environment, requirements and pyproject together. Such a recipe has
    no `base` yet.

    Raises:
        InvalidInput: naming the file, and line, column and field where there are any.
    """
    shown = os.fspath(path)
    where = Path(shown).expanduser()
    if shown != "-" and where.is_dir():
        for name in RECIPE_NAMES:
            if (where / name).is_file():
                return load(where / name)
        return _from_lists(where, shown)
    if (kind := list_kind(where.name)) and shown != "-":
        raw: dict[str, Any] = {kind: str(where.absolute())}
        return RecipeFile(shown, folded(raw, where.absolute().parent))
    text, shown, folder = yamltext.read_text(path, KIND)
    document = yamltext.parse(text, shown, KIND)
    try:
        return RecipeFile(document.path, folded(document.raw, folder), document.positions)
    except InvalidInput as error:
        raise document.located(error) from error


def list_kind(name: str) -> str:
    """Which field a file of this name belongs to; empty when it is no list of packages known by its name."""
    if name == "pyproject.toml":
        return "pyproject"
    if name in ("environment.yml", "environment.yaml"):
        return "environment"
    return "requirements" if name.endswith(".txt") else ""


def _from_lists(folder: Path, shown: str) -> RecipeFile:
    raw: dict[str, Any] = {}
    for field, name in _LISTS:
        if (folder / name).is_file():
            raw.setdefault(field, name)
    # A project's dependencies are often the loose form of what requirements.txt pins.
    if "requirements" not in raw and (folder / "pyproject.toml").is_file():
        raw["pyproject"] = "pyproject.toml"
    if not raw:
        names = ", ".join((*RECIPE_NAMES[:1], "environment.yml", "requirements.txt", "pyproject.toml"))
        raise InvalidInput(f"{shown} has no recipe", hint=f"it should hold one of {names}", field="FILE")
    return RecipeFile(shown, folded(raw, folder.absolute()))


def folded(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The raw recipe with the files it names read in, and local paths absolute, taken from `folder`.

    Values of the wrong type are left for validation to judge.

    Raises:
        InvalidInput: naming the field of the recipe, and file and line of the list.
    """
    _check_slips(raw)
    found = {key: value for key, value in raw.items() if key not in _FOLDED}
    files = found.get("files")
    if isinstance(files, Mapping):
        found["files"] = {
            target: _absolute(source, folder) if isinstance(source, str) else source for target, source in files.items()
        }
    for field in ("requirements", "pyproject", "environment"):
        for name in _names(raw, field):
            try:
                _add(found, field, Path(yamltext.absolute(name, folder)), raw)
            except InvalidInput as error:
                where = error.field or field
                raise type(error)(error.message, hint=error.hint, field=where) from error
    if raw.get("extras") and not raw.get("pyproject"):
        raise InvalidInput("extras are those of a project", hint="add  pyproject: pyproject.toml", field="extras")
    return found


def _add(found: dict[str, Any], field: str, path: Path, raw: Mapping[str, Any]) -> None:
    from diamond.sdk import requirements

    if field == "requirements":
        packages = requirements.read_requirements(path)
    elif field == "pyproject":
        packages = requirements.read_pyproject(path, _names(raw, "extras"))
    else:
        packages = requirements.read_environment(path)
    for name in ("pip", "constraints", "conda", "channels"):
        if lines := getattr(packages, name):
            found[name] = [*_lines(found.get(name)), *lines]
    envs = found.get("envs")
    if packages.envs and (envs is None or isinstance(envs, Mapping)):
        found["envs"] = {**packages.envs, **(envs or {})}
    if packages.name and found.get("name") is None:
        # A name for conda or a package index need not be one for an image.
        with contextlib.suppress(ValueError):
            found["name"] = parse_image_name(packages.name)


def _names(raw: Mapping[str, Any], field: str) -> list[str]:
    value = raw.get(field)
    if value is None:
        return []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        what = "a name or a list of names" if field == "extras" else "the path of a file, or a list of them"
        raise InvalidInput(f"must be {what}", field=field)
    return list(names)


def _lines(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.splitlines()
    return list(value) if isinstance(value, list | tuple) else []


def _absolute(source: str, folder: Path) -> str:
    if is_bundle_ref(source) or not source.strip() or "\x00" in source:
        return source
    return yamltext.absolute(source, folder)


def _check_slips(raw: Mapping[str, Any]) -> None:
    """Speaks before validation does, where it can say more."""
    for field in ("build", "test"):
        value = raw.get(field)
        if isinstance(value, list | dict):
            kind = "a list" if isinstance(value, list) else "a mapping"
            raise InvalidInput(f"must be text, not {kind}", hint="use `|` and one command per line", field=field)
    for field, form in (("envs", "NAME: value"), ("files", "/path/in/the/image: path here"), ("labels", "name: text")):
        if isinstance(raw.get(field), list):
            hint = f"write {form}, one a line and without dashes"
            raise InvalidInput("must be a mapping, not a list", hint=hint, field=field)
    for key in raw:
        if key not in _FIELDS and key not in _FOLDED and key in _MEANT:
            raise InvalidInput(f"unknown field {key!r}", hint=_MEANT[key], field=key)
    valid = (*_FIELDS, *_FOLDED)
    for key in raw:
        if key not in valid:  # here and not in validation, which does not know the lists of packages
            shown = str(key)[:80]
            near = difflib.get_close_matches(shown, valid, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidInput(
                f"unknown field {shown!r}", hint=f"{guess}valid fields here: {', '.join(valid)}", field=shown
            )
    for field in ("pip", "constraints", "conda", "channels"):
        value = raw.get(field)
        if value is not None and not isinstance(value, str | list | tuple):
            raise InvalidInput("must be a list of lines of text", field=field)


def changed(
    raw: Mapping[str, Any],
    *,
    name: str | None = None,
    base: str | None = None,
    system: Sequence[str] = (),
    pip: Sequence[str] = (),
    envs: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The raw recipe with what a command line says besides: packages are added, the rest replaced."""
    found = dict(raw)
    found |= {key: value for key, value in (("name", name), ("base", base)) if value is not None}
    for key, more in (("system", system), ("pip", pip)):
        if more:
            found[key] = [*_lines(found.get(key)), *more]
    if envs:
        before = found.get("envs")
        found["envs"] = {**(before if isinstance(before, Mapping) else {}), **envs}
    return found
