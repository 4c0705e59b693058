"""Lists of packages in the files people already have: requirements.txt, pyproject.toml, environment.yml.

Owns what of such a file can become part of a recipe, and the sentence for what cannot. Nothing is dropped silently:
a line is taken, or the file is refused with the line's number.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.recipes import MAX_PACKAGES
from diamond.texts import yamltext
from diamond.texts.packages import CONDA_KIND, FOLLOW, Packages, environment, logical_lines, package_line

MAX_FILES = 50
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_SELF = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*\[(?P<extras>[^\]]*)\]")


def read_requirements(path: Path) -> Packages:
    """A requirements file with all files it names by ``-r`` and ``-c``, which are relative to the file that names them.

    Comments go, lines that end with a backslash are joined, environment markers and hashes stay.

    Raises:
        InvalidInput: naming file and line.
    """
    found = Packages()
    _follow(path, found, found.pip, ())
    return found


def _follow(path: Path, found: Packages, into: list[str], above: tuple[Path, ...]) -> None:
    real = Path(os.path.realpath(path))
    if real in above:
        raise InvalidInput(f"{path} names itself, by way of {above[-1].name}", hint="remove one of the -r lines")
    if len(found.files) >= MAX_FILES:
        raise TooLarge(f"{path}: more than {MAX_FILES} files name each other", hint="put the packages into fewer files")
    text = _text(path)
    found.files.append(str(path))
    for number, line in logical_lines(text):
        where = f"{path}, line {number}"
        if follow := FOLLOW.fullmatch(line):
            # What a constraints file includes are constraints, whichever way it does so.
            is_constraint = follow["option"] in ("-c", "--constraint") or into is found.constraints
            target = Path(yamltext.absolute(follow["path"].strip("\"' "), real.parent))
            _follow(target, found, found.constraints if is_constraint else found.pip, (*above, real))
            continue
        into.append(package_line(line, where))
        if len(into) > MAX_PACKAGES:
            raise TooLarge(f"{where}: more than {MAX_PACKAGES} packages")


def read_pyproject(path: Path, extras: Sequence[str] = ()) -> Packages:
    """`project.dependencies`, and those of the extras named. The project itself is not installed.

    Raises:
        InvalidInput: naming what is missing, or cannot be known without building the project.
    """
    try:
        document = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{path}: this is not TOML: {error}") from error
    project = document.get("project")
    if not isinstance(project, Mapping):
        poetry = "tool" in document and "poetry" in document["tool"]
        raise InvalidInput(
            f"{path} has no [project] table",
            hint="it is in Poetry's own form: write a requirements file with `poetry export`, and name that"
            if poetry
            else "list the packages under project.dependencies",
        )
    dynamic = project.get("dynamic") or []
    for name in ("dependencies", *(["optional-dependencies"] if extras else [])):
        if name in dynamic:
            raise InvalidInput(
                f"{path}: project.{name} is made when the project is built, so it cannot be read here",
                hint="name the file it is made from in `requirements`",
            )
    optional = project.get("optional-dependencies") or {}
    found = Packages(files=[str(path)], name=str(project.get("name") or ""))
    _table_lines(project.get("dependencies") or [], f"{path}, project.dependencies", found.pip)
    done: set[str] = set()
    waiting = [_normal(extra) for extra in extras]
    known = {_normal(str(name)): (str(name), lines) for name, lines in optional.items()}
    while waiting:
        extra = waiting.pop(0)
        if extra in done:
            continue
        done.add(extra)
        if extra not in known:
            have = ", ".join(name for name, _ in known.values()) or "none"
            raise InvalidInput(f"{path} has no extra {extra!r}", hint=f"it has: {have}", field="extras")
        lines: list[str] = []
        _table_lines(known[extra][1], f"{path}, project.optional-dependencies.{known[extra][0]}", lines)
        for line in lines:
            # "this-project[a,b]": a common way to say that an extra contains others.
            own = _SELF.fullmatch(line)
            if own and found.name and _normal(own["name"]) == _normal(found.name):
                waiting += [_normal(part.strip()) for part in own["extras"].split(",") if part.strip()]
            else:
                found.pip.append(line)
    return found


def _table_lines(raw: Any, where: str, into: list[str]) -> None:
    if not isinstance(raw, list) or not all(isinstance(line, str) for line in raw):
        raise InvalidInput(f"{where} must be a list of texts")
    into += [package_line(line.strip(), f"{where}[{number}]") for number, line in enumerate(raw) if line.strip()]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def read_environment(path: Path) -> Packages:
    """A conda environment file, with the files its ``pip:`` part names.

    Raises:
        InvalidInput: naming the entry.
    """
    text, shown, folder = yamltext.read_text(path, CONDA_KIND)

    def follow(option: str, named: str, found: Packages) -> None:
        into = found.constraints if option in ("-c", "--constraint") else found.pip
        _follow(Path(yamltext.absolute(named, folder)), found, into, ())

    return environment(yamltext.parse(text, shown, CONDA_KIND), follow)


def _text(path: Path) -> str:
    kind = yamltext.Kind(name="a list of packages", given="give the path of a file on this machine", empty="", start="")
    text, _, _ = yamltext.read_text(path, kind)
    return text
