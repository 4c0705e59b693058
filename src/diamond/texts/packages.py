"""Lists of packages as people have them, as text: requirements.txt and environment.yml, for clients and server alike.

Owns what of such a text can become part of a recipe, and the sentence for what cannot. Nothing is dropped silently: a
line is taken, or refused with the place where it stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.recipes import MAX_PACKAGES, parse_pip
from diamond.texts import yamltext

FOLLOW = re.compile(r"(?P<option>-r|-c|--requirement|--constraint)(?:\s+|=|(?<=-[rc])(?=[^\s=]))(?P<path>\S.*)")
_COMMENT = re.compile(r"(^|\s)#.*$")
_INLINE_OPTION = re.compile(r"\s(--?[a-z][a-z-]*)")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
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
CONDA_KIND = yamltext.Kind(
    name="a conda environment file",
    given="give the path of a file that `conda env export` or a person wrote",
    empty="it needs at least `dependencies`",
    start="dependencies: [python=3.12, numpy]",
)
_CONDA_FIELDS = ("name", "channels", "dependencies", "variables", "prefix", "platforms")
_LOOKS_LIKE_CONDA = re.compile(r"^(?:channels|dependencies)\s*:", re.MULTILINE)


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


Follow = Callable[[str, str, Packages], None]  # what -r and -c name: the option, the path, and where its packages go


def split(text: str, path: str = "the text") -> Packages:
    """A requirements file or a conda environment, whichever it looks like, that was pasted rather than named.

    Raises:
        InvalidInput: naming the line.
    """
    if _LOOKS_LIKE_CONDA.search(text):
        return environment(yamltext.parse(text, path, CONDA_KIND), _refuse)
    found = Packages()
    for number, line in logical_lines(text):
        if follow := FOLLOW.fullmatch(line):
            _refuse(follow["option"], f"{follow['path']} ({path}, line {number})", found)
        found.pip.append(package_line(line, f"{path}, line {number}"))
        if len(found.pip) > MAX_PACKAGES:
            raise TooLarge(f"{path}: more than {MAX_PACKAGES} packages")
    if not found.pip:
        raise InvalidInput(f"{path} names no package", hint="paste a requirements.txt or a conda environment.yml")
    return found


def _refuse(option: str, path: str, _found: Packages) -> None:
    raise InvalidInput(
        f"{option} names another file, {path[:120]}, which is not at the server",
        hint="leave the line out, and paste that file as well",
    )


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
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


def package_line(line: str, where: str) -> str:
    """One requirement; `where` it stands begins every complaint."""
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


def environment(document: yamltext.Document, follow: Follow) -> Packages:
    """A conda environment: channels, dependencies with their ``pip:`` part, and variables.

    Raises:
        InvalidInput: naming the entry.
    """
    found = Packages(files=[document.path])
    raw = document.raw
    for key in raw:
        if key not in _CONDA_FIELDS:
            hint = f"valid fields here: {', '.join(_CONDA_FIELDS)}"
            raise document.located(InvalidInput(f"unknown field {key[:60]!r}", hint=hint, field=key))
    found.name = str(raw.get("name") or "")
    found.channels = [str(each) for each in _list(document, "channels") if each != "nodefaults"]
    for number, item in enumerate(_list(document, "dependencies")):
        where = f"dependencies[{number}]"
        if isinstance(item, str):
            found.conda.append(item.strip())
        elif isinstance(item, Mapping) and list(item) == ["pip"] and isinstance(item["pip"], list):
            for entry in item["pip"]:
                _pip_entry(str(entry).strip(), document, where, follow, found)
        else:
            raise document.located(InvalidInput("must be a package, or `pip:` with a list of packages", field=where))
    variables = raw.get("variables") or {}
    if not isinstance(variables, Mapping):
        raise document.located(InvalidInput("must be a mapping of NAME: value", field="variables"))
    found.envs = {str(key): str(value) for key, value in variables.items()}
    # Conda installs pip when it is named; here the image's Python always has it.
    found.conda = [line for line in found.conda if line != "pip"]
    return found


def _pip_entry(entry: str, document: yamltext.Document, where: str, follow: Follow, found: Packages) -> None:
    if other := FOLLOW.fullmatch(entry):
        follow(other["option"], other["path"], found)
        return
    line, _ = document.positions.get(where, (1, 1))
    found.pip.append(package_line(entry, f"{document.path}, line {line}"))


def _list(document: yamltext.Document, key: str) -> list[Any]:
    value = document.raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise document.located(InvalidInput("must be a list", field=key))
    return value
