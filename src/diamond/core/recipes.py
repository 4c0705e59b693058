"""A recipe: what a software environment should contain. The one place that validates one.

Everything in a recipe happens when the image is built. Text that people write (package lines, values, commands) is
checked here as far as it can be, and reaches the build as files: no builder pastes it into a script of its own.

Files a recipe names (`files`) are paths on the user's machine until the client has uploaded them; then they are bundle
references, as in a task.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diamond.core.bundles import MAX_COMPONENT_BYTES, MAX_PATH_BYTES, is_bundle_ref
from diamond.core.codec import decode, encode
from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.fields import parse_envs, parse_script, parse_source

MAX_PACKAGES = 2000
MAX_LINE = 1000
MAX_LIST_CHARS = 4_000_000  # of a whole list: reading more would keep a server busy for seconds
MAX_PIP_LINE = 20_000  # a requirement with the hashes of all its wheels
MAX_LABELS = 200
MAX_NAME = 64
BUILDERS = ("apptainer", "charliecloud", "podman", "docker", "venv")
DEFAULT_TIME_LIMIT_S = 2 * 3600

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
# Debian's and RPM's package names, with an optional version as apt writes it (name=1.2-3) or a glob-free RPM one. None
# ends with a minus: "bash-" is how apt is told to remove bash.
_SYSTEM = re.compile(r"(?!.*-$)[A-Za-z0-9][A-Za-z0-9+._-]{0,126}(?::[a-z0-9]{1,20})?(?:=[A-Za-z0-9.+:~-]{1,120})?")
_CONDA = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,126}(?:[ ]?[=<>!~]{1,2}[ ]?[A-Za-z0-9.*+!_,|<>= -]{1,120})?")
_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/~-]{0,300}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,126}")
_DOCKER = re.compile(r"docker://[A-Za-z0-9][A-Za-z0-9._:/@-]{0,400}")
# Another user's image is named with its owner: image:OWNER/NAME
_IMAGE = re.compile(
    r"image:(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,63}(?:@sha256:[0-9a-f]{64})?"
)
_SUGGESTED = re.compile(r"suggested:[a-z0-9-]{1,40}")
# Never the name of an image in a registry, however much "suggested:PyTorch" looks like one with a tag.
_SCHEMES = ("docker:", "image:", "suggested:", "oci-archive:", "docker-archive:")
# What pip would read as an order to itself rather than as a package. A package index is the endpoint's own setting.
_PIP_OPTIONS = re.compile(r"-")


def parse_image_name(raw: object) -> str:
    if not isinstance(raw, str) or not _NAME.fullmatch(raw.strip()):
        raise ValueError(
            f"{str(raw)[:80]!r} is not an image name; use 1 to {MAX_NAME} letters, digits, '.', '_' and '-', "
            "beginning and ending with a letter or digit"
        )
    return raw.strip()


def parse_base(raw: object) -> str:
    """`docker://…`, `oci-archive:/path`, `/path` (a .sif file or a folder), `image:NAME`, `suggested:KEY`, or `host`.

    Paths are paths on the endpoint. `host` builds on the endpoint's own system, with the venv builder.
    """
    text = raw.strip() if isinstance(raw, str) else ""
    if text == "host" or any(form.fullmatch(text) for form in (_DOCKER, _IMAGE, _SUGGESTED)):
        return text
    path = text.removeprefix("oci-archive:").removeprefix("docker-archive:")
    if path.startswith("/"):
        _check_absolute(path, "the base")
        return text
    if text.lower() == "host" or (
        text != "ghost" and text.isalnum() and difflib.get_close_matches(text, ["host"], 1, 0.75)
    ):
        raise InvalidInput(
            f"{text!r} is not a base",
            hint=f"did you mean host? An image of that name in a registry is docker://{text}",
        )
    if not text.startswith(_SCHEMES) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*(:[A-Za-z0-9._-]+)?", text):
        return parse_base(f"docker://{text}")  # "python:3.12-slim", as people write it
    raise InvalidInput(
        f"{text[:80]!r} is not a base",
        hint="write docker://python:3.12-slim, oci-archive:/path/on/the/endpoint.tar, /path/to/image.sif, "
        "/path/to/folder, image:NAME for an image of Diamond, suggested:pytorch, or host",
    )


def _check_absolute(path: str, what: str) -> str:
    """An absolute path in normal form, which needs no quoting tricks in any builder's file."""
    if not path.startswith("/") or any(ord(c) < 32 or ord(c) == 127 for c in path):
        raise InvalidInput(f"{what} {path[:80]!r} must be an absolute path without control characters")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        raise InvalidInput(f"{what} {path[:80]!r} must not contain '..' and must name something below /")
    try:
        too_long = len(path.encode()) > MAX_PATH_BYTES or any(len(p.encode()) > MAX_COMPONENT_BYTES for p in parts)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} {path[:80]!r} is not valid Unicode") from error
    if too_long:
        raise TooLarge(f"{what} {path[:80]!r} is too long for a file system")
    return "/" + "/".join(parts)


def _lines(raw: object, longest: int = MAX_LINE) -> list[str]:
    """A list of lines, or one text of several, without blank lines and comments."""
    if isinstance(raw, str):
        raw = raw.splitlines()
    if not isinstance(raw, list | tuple) or not all(isinstance(item, str) for item in raw):
        raise ValueError("must be a list of lines of text")
    if (size := sum(map(len, raw)) + len(raw)) > MAX_LIST_CHARS:
        raise TooLarge(f"is {size} characters long; at most {MAX_LIST_CHARS} are allowed")
    lines = []
    for number, item in enumerate(raw):
        for one in item.splitlines() or [""]:
            text = re.sub(r"(^|\s)#.*$", "", one).strip()
            if len(text) > longest:
                raise TooLarge(f"is {len(text)} characters long; at most {longest} are allowed", field=f"[{number}]")
            if not text.isprintable():
                raise InvalidInput(f"{text[:80]!r} contains control characters", field=f"[{number}]")
            if text:
                lines.append(text)
    if len(lines) > MAX_PACKAGES:
        raise TooLarge(f"has {len(lines)} entries; at most {MAX_PACKAGES} are allowed")
    return list(dict.fromkeys(lines))


def _matching(form: re.Pattern[str], what: str, hint: str) -> Any:
    def parse(raw: object) -> tuple[str, ...]:
        lines = _lines(raw)
        for line in lines:
            if not form.fullmatch(line):
                raise InvalidInput(f"{line[:80]!r} is not {what}", hint=hint)
        return tuple(lines)

    return {"parse": parse}


def parse_pip(raw: object) -> tuple[str, ...]:
    """Requirement lines as pip takes them, without its options."""
    lines = _lines(raw, MAX_PIP_LINE)
    for line in lines:
        if _PIP_OPTIONS.match(line):
            raise InvalidInput(
                f"{line[:80]!r} is an option of pip, not a package",
                hint="leave it out: the package index is a setting of the endpoint; list packages of other files here",
            )
        if re.match(r"[./~]|file:", line):
            raise InvalidInput(
                f"{line[:80]!r} is a path", hint="bring the package in with `files` and install it in `build`"
            )
        if second := _second_package(line):
            raise InvalidInput(
                f"{line[:80]!r} has another package, {second[:40]!r}, in the same line",
                hint="write one package a line, each with its version if it matters: idna==3.10",
            )
    return tuple(lines)


def _second_package(line: str) -> str:
    """What stands after a requirement as if it were one more (``six idna``); pip would refuse it late, in the build."""
    head = line.partition(";")[0]
    if "@" in head or "://" in head:  # an address, whose form is pip's business
        return ""
    if comma := re.match(r"[A-Za-z0-9._-]+\s*,\s*([A-Za-z0-9]\S*)", head):
        return comma[1]
    # Single blanks, and none beside what binds two words, so that every blank left separates.
    words = re.sub(r" ?([][<>=!~,()]+) ?", _bind, " ".join(head.split())).split()
    for word in words[1:]:
        if word.startswith("-"):  # an option such as --hash, with whatever belongs to it
            return ""
        if word[0].isalnum():
            return word
    return ""


def _bind(found: re.Match[str]) -> str:
    ends = found[1][-1] in "])" and found[0].endswith(" ")
    return found[1] + (" " if ends else "")


def parse_labels(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping) or len(raw) > MAX_LABELS:
        raise ValueError(f"must be a mapping of at most {MAX_LABELS} names to texts")
    for name, value in raw.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name):
            raise InvalidInput(f"{str(name)[:80]!r} is not a label", hint="use letters, digits, '.', '_', '/' and '-'")
        if not isinstance(value, str) or len(value) > MAX_LINE or not value.isprintable():
            raise InvalidInput("must be one line of text", field=name)
    return dict(raw)


def parse_files(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise ValueError("must be a mapping of absolute path in the image: path on this machine")
    if len(raw) > MAX_LABELS:
        raise TooLarge(f"has {len(raw)} entries; at most {MAX_LABELS} are allowed")
    files: dict[str, str] = {}
    for target, source in raw.items():
        path = _check_absolute(str(target), "the target")
        if path in files:
            raise InvalidInput(f"{path!r} is named twice", hint="give each target one source")
        if path.split("/")[1] in ("proc", "sys", "dev"):
            raise InvalidInput(f"{path!r} is not a place for files", hint="put it below /opt")
        files[path] = parse_source(source)
    return files


def _one_of(*values: str) -> Any:
    def parse(raw: object) -> str:
        if raw not in values:
            raise ValueError(f"{str(raw)[:40]!r} is not one of {', '.join(values)}")
        return str(raw)

    return {"parse": parse}


def _parse_time_limit(raw: object) -> int:
    seconds = parse_duration(raw)
    if not 60 <= seconds <= 7 * 86400:
        raise ValueError("must be from one minute to seven days")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An environment as its user describes it. Field order is the order documents, errors and the builder show.

    Attributes:
        base: what it starts from, see `parse_base`.
        system: packages of the base's own distribution (apt, dnf or apk).
        conda: packages from `channels`, into an environment that is the image's default Python.
        pip: requirement lines, for that same Python.
        constraints: requirement lines that restrict versions of what is installed, and install nothing themselves.
        files: absolute path in the image: what to put there.
        envs: variables that are set in every task that runs in the image, unless the task sets them itself.
        build: shell commands, run by bash -e (sh -e where there is no bash) after all else is installed.
        test: the validation command; the image is offered only when it ends with exit code 0.
        builder: one of BUILDERS; "auto" takes the best the endpoint has.
        where: "login", "batch" or "auto": as the endpoint's policy prefers.
    """

    name: str | None = field(default=None, metadata={"parse": parse_image_name})
    base: str = field(metadata={"parse": parse_base})
    system: tuple[str, ...] = field(
        default=(),
        metadata=_matching(_SYSTEM, "a package name", "write one package a line, e.g. git or libhdf5-dev=1.10.8-1"),
    )
    conda: tuple[str, ...] = field(
        default=(), metadata=_matching(_CONDA, "a conda package", "write e.g. numpy, numpy=2.3 or numpy>=2")
    )
    channels: tuple[str, ...] = field(
        default=("conda-forge",), metadata=_matching(_CHANNEL, "a conda channel", "write a name or an address")
    )
    pip: tuple[str, ...] = field(default=(), metadata={"parse": parse_pip})
    constraints: tuple[str, ...] = field(default=(), metadata={"parse": parse_pip})
    files: dict[str, str] = field(default_factory=dict, metadata={"parse": parse_files})
    envs: dict[str, str] = field(default_factory=dict, metadata={"parse": parse_envs})
    build: str | None = field(default=None, metadata={"parse": parse_script})
    test: str | None = field(default=None, metadata={"parse": parse_script})
    labels: dict[str, str] = field(default_factory=dict, metadata={"parse": parse_labels})
    builder: str = field(default="auto", metadata=_one_of("auto", *BUILDERS))
    where: str = field(default="auto", metadata=_one_of("auto", "login", "batch"))
    time_limit: int = field(default=DEFAULT_TIME_LIMIT_S, metadata={"parse": _parse_time_limit})  # seconds

    @staticmethod
    def parse(raw: object) -> Recipe:
        """Validate what a person wrote.

        Raises:
            InvalidInput: naming the field and the fix.
        """
        return decode(Recipe, raw, strict=True)

    def check_uploaded(self) -> None:
        """Refuse paths of the user's machine: at the server they mean nothing."""
        for target, ref in self.files.items():
            if not is_bundle_ref(ref):
                raise InvalidInput(
                    f"{ref[:80]!r} is a path on the client's machine, which the server cannot see",
                    hint="upload it first (POST /api/v1/bundles) and give its reference; the CLI and the Python client "
                    "do this for you",
                    field=f"files.{target}",
                )

    @property
    def base_image(self) -> str:
        """The reference of the Diamond image it builds on (`NAME`, `NAME@sha256:…`); empty when it is another base."""
        return self.base.removeprefix("image:") if self.base.startswith("image:") else ""

    def content(self) -> dict[str, Any]:
        """What the result depends on: not its name, nor where and for how long it is built."""
        plain = replace(self, name=None, where="auto", time_limit=DEFAULT_TIME_LIMIT_S)
        return {key: value for key, value in encode(plain).items() if key not in ("name", "where", "time_limit")}

    @property
    def digest(self) -> str:
        """The recipe's hash: the same for the same contents, on any machine."""
        return "sha256:" + _hash(self.content())


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of a build whose result can be kept. `key` names everything that led to it."""

    name: str  # "base", "system", "conda", "pip", "commands"
    title: str
    key: str


STAGE_TITLES = {
    "base": "base image",
    "system": "system packages",
    "conda": "conda packages",
    "pip": "Python packages",
    "commands": "files and build commands",
    "pack": "packing",
    "test": "validation",
}


def stages(recipe: Recipe, *, builder: str, base_key: str = "", pins: Mapping[str, Any] | None = None) -> list[Stage]:
    """The steps whose results are kept, in order; steps with nothing to do are left out. Pure.

    Args:
        base_key: tells one state of a base from another where its name does not (a file's digest, an image's).
        pins: exact versions to install, when building from a lock; they are part of what the result depends on.
    """
    key = _hash(["diamond-1", builder, recipe.base, base_key, encode(pins or {})])[:32]
    found = [Stage(name="base", title=STAGE_TITLES["base"], key=key)]
    parts: list[tuple[str, Any]] = [
        ("system", recipe.system),
        ("conda", (recipe.conda, recipe.channels) if recipe.conda else ()),
        ("pip", (recipe.pip, recipe.constraints) if recipe.pip else ()),
        ("commands", (recipe.files, recipe.build, recipe.envs) if recipe.files or recipe.build else ()),
    ]
    for name, contents in parts:
        if contents:
            key = _hash([key, name, encode(contents)])[:32]
            found.append(Stage(name=name, title=STAGE_TITLES[name], key=key))
    return found
