"""Lists of packages in the files people already have: requirements.txt, pyproject.toml, environment.yml.

Owns what of such a file can become part of a recipe, and the sentence for what cannot. Nothing is dropped silently:
a line is taken, or the file is refused with the line's number.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.recipes import MAX_PACKAGES, parse_pip
from diamond.sdk import yamltext

MAX_FILES = 50
_COMMENT = re.compile(r"(^|\s)#.*$")
_FOLLOW = re.compile(r"(?P<option>-r|-c|--requirement|--constraint)(?:\s+|=|(?<=-[rc])(?=[^\s=]))(?P<path>\S.*)")
_INLINE_OPTION = re.compile(r"\s(--?[a-z][a-z-]*)")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_SELF = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*\[(?P<extras>[^\]]*)\]")
_KNOWN_INLINE = ("--hash",)
# Options of pip that people have in such files, and why a recipe has no place for them.
_OPTIONS = {
    **dict.fromkeys(
        ("-i", "--index-url", "--extra-index-url", "--no-index", "-f", "--find-links", "--trusted-host"),
        "where packages come from is a setting of the endpoint (PIP_INDEX_URL and its like in the agent's "
        "environment), so that a recipe works at every site; remove the line",
    ),
    **dict.fromkeys(
        ("-e", "--editable"),
        "an editable install points to a folder of this machine; bring the package in with `files` and install it in "
        "`build`",
    ),
    **dict.fromkeys(
        ("--no-binary", "--only-binary", "--prefer-binary", "--pre", "--use-feature", "--require-hashes"),
        "a recipe takes packages only; run pip with that option in `build`",
    ),
}
_CONDA_KIND = yamltext.Kind(
    name="a conda environment file",
    given="give the path of a file that `conda env export` or a person wrote",
    empty="it needs at least `dependencies`",
    start="dependencies: [python=3.12, numpy]",
)


@dataclass(kw_only=True)
class Packages:
    """What a file (and those it names) asks for, in the order it stands there."""

    pip: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    conda: list[str] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    envs: dict[str, str] = field(default_factory=dict)
    name: str = ""
    files: list[str] = field(default_factory=list)  # everything that was read, for messages


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
    for number, line in _logical_lines(text):
        where = f"{path}, line {number}"
        if follow := _FOLLOW.fullmatch(line):
            # What a constraints file includes are constraints, whichever way it does so.
            is_constraint = follow["option"] in ("-c", "--constraint") or into is found.constraints
            target = Path(yamltext.absolute(follow["path"].strip("\"' "), real.parent))
            _follow(target, found, found.constraints if is_constraint else found.pip, (*above, real))
            continue
        into.append(_package(line, where))
        if len(into) > MAX_PACKAGES:
            raise TooLarge(f"{where}: more than {MAX_PACKAGES} packages")


def _package(line: str, where: str) -> str:
    option = line.split(maxsplit=1)[0].partition("=")[0] if line.startswith("-") else ""
    for inline in _INLINE_OPTION.finditer(line.partition(";")[0] + line.partition(";")[2]):
        option = option or (inline[1] if inline[1] not in _KNOWN_INLINE else "")
    if option:
        raise InvalidInput(
            f"{where}: {option} is an option of pip, which a recipe does not take",
            hint=_OPTIONS.get(option, "remove it: a recipe lists packages"),
        )
    if _VARIABLE.search(line):
        raise InvalidInput(
            f"{where}: {line[:80]!r} has a variable in it, which would be expanded at another machine",
            hint="write the value out; a password belongs into the endpoint's own settings of pip, not into a recipe",
        )
    try:
        (taken,) = parse_pip([line])
    except InvalidInput as error:
        raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    return taken


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines joined at backslashes, without comments and blanks, with the number each begins at."""
    began = 0
    parts: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        is_comment = raw.lstrip().startswith("#")
        line = "" if is_comment else raw
        began = began if parts else number
        if line.endswith("\\") and not is_comment:
            parts.append(line[:-1])
            continue
        joined = _COMMENT.sub("", "".join([*parts, line])).strip()
        parts = []
        if joined:
            yield began, joined
    if rest := _COMMENT.sub("", "".join(parts)).strip():
        yield began, rest


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
    into += [_package(line.strip(), f"{where}[{number}]") for number, line in enumerate(raw) if line.strip()]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def read_environment(path: Path) -> Packages:
    """A conda environment file: channels, dependencies with their ``pip:`` part, and variables.

    Raises:
        InvalidInput: naming the entry.
    """
    text, shown, folder = yamltext.read_text(path, _CONDA_KIND)
    document = yamltext.parse(text, shown, _CONDA_KIND)
    found = Packages(files=[shown])
    raw = document.raw
    known = ("name", "channels", "dependencies", "variables", "prefix", "platforms")
    for key in raw:
        if key not in known:
            raise document.located(
                InvalidInput(f"unknown field {key[:60]!r}", hint=f"valid fields here: {', '.join(known)}", field=key)
            )
    found.name = str(raw.get("name") or "")
    found.channels = [str(each) for each in _list(document, "channels") if each != "nodefaults"]
    for number, item in enumerate(_list(document, "dependencies")):
        where = f"dependencies[{number}]"
        if isinstance(item, str):
            found.conda.append(item.strip())
        elif isinstance(item, Mapping) and list(item) == ["pip"] and isinstance(item["pip"], list):
            for entry in item["pip"]:
                _pip_entry(str(entry).strip(), document, where, folder, found)
        else:
            raise document.located(InvalidInput("must be a package, or `pip:` with a list of packages", field=where))
    variables = raw.get("variables") or {}
    if not isinstance(variables, Mapping):
        raise document.located(InvalidInput("must be a mapping of NAME: value", field="variables"))
    found.envs = {str(key): str(value) for key, value in variables.items()}
    # Conda installs pip when it is named; here the image's Python always has it.
    found.conda = [line for line in found.conda if line != "pip"]
    return found


def _pip_entry(entry: str, document: yamltext.Document, where: str, folder: Path, found: Packages) -> None:
    if follow := _FOLLOW.fullmatch(entry):
        into = found.constraints if follow["option"] in ("-c", "--constraint") else found.pip
        _follow(Path(yamltext.absolute(follow["path"], folder)), found, into, ())
        return
    line, _ = document.positions.get(where, (1, 1))
    found.pip.append(_package(entry, f"{document.path}, line {line}"))


def _list(document: yamltext.Document, key: str) -> list[Any]:
    value = document.raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise document.located(InvalidInput("must be a list", field=key))
    return value


def _text(path: Path) -> str:
    kind = yamltext.Kind(name="a list of packages", given="give the path of a file on this machine", empty="", start="")
    text, _, _ = yamltext.read_text(path, kind)
    return text
