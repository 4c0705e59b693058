"""Writes a recipe's text as files, the way every builder finds it (`BuildContext.inputs`). No text is changed.

Nothing here can lead out of the folder it writes: files a recipe brings are copied from the job's work directory, where
staging put them, and links among them must stay among them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from diamond.agent.builders.base import BuildProblem
from diamond.agent.builders.inspect import normal_name
from diamond.agent.builders.runner import RUNNER, RUNNER_FILE
from diamond.core.bundles import check_relative_path
from diamond.core.images import ImageWork, Lock
from diamond.core.recipes import Recipe

_PIN_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+:@~-]*")
_PIN_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+!:^~-]*")
_SYSTEM_KINDS = ("deb", "rpm", "apk")


def write_inputs(target: Path, recipe: Recipe, work: ImageWork, work_dir: Path) -> None:
    """Make the folder `target` with all of them.

    Args:
        work_dir: where `work.files` are.

    Raises:
        BuildProblem: a file is not where it should be, or a link leads out.
    """
    target.mkdir(parents=True)
    pins = work.pins or Lock()
    _write(target / "system.txt", _lines(pinned_system(recipe, pins)))
    _write(target / "conda.txt", _lines(pinned_conda(recipe, pins)))
    _write(target / "channels.txt", _lines(recipe.channels))
    _write(target / "requirements.txt", _lines(recipe.pip))
    _write(target / "constraints.txt", _lines(constraints(recipe, pins)))
    _write(target / "env.sh", env_text(recipe.envs))
    _write(target / "commands.sh", recipe.build or "")
    _write(target / "test.sh", recipe.test or "")
    _write(target / RUNNER_FILE, RUNNER)
    (target / "files").mkdir()
    for path, source in work.files.items():
        _copy(work_dir, source, target / "files", path)


def env_text(envs: Mapping[str, str]) -> str:
    """The variables for any POSIX sh, values byte for byte."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in envs.items())


def pinned_system(recipe: Recipe, pins: Lock) -> list[str]:
    """`name=version` for every package the lock knows; a version that the recipe itself asks for stays."""
    known: dict[str, str] = {}
    for kind in _SYSTEM_KINDS:
        known |= _known(pins, kind)
    return [line if "=" in line or line not in known else f"{line}={known[line]}" for line in recipe.system]


def pinned_conda(recipe: Recipe, pins: Lock) -> list[str]:
    """`name=version` for every package the lock knows, else the recipe's line."""
    known = _known(pins, "conda")
    names = [re.split(r"[ =<>!~]", line, maxsplit=1)[0] for line in recipe.conda]
    return [f"{name}={known[name]}" if name in known else line for name, line in zip(names, recipe.conda, strict=True)]


def constraints(recipe: Recipe, pins: Lock) -> list[str]:
    """The recipe's constraints and, for what it installs from a lock, one exact version of each package."""
    pinned = _known(pins, "pip") if recipe.pip else {}
    # A package that the recipe names by an address cannot be constrained by a version as well.
    direct = {normal_name(re.split(r"[@\[ ]", line, maxsplit=1)[0]) for line in recipe.pip if "@" in line}
    exact = [f"{name}=={version}" for name, version in pinned.items() if normal_name(name) not in direct]
    return [*recipe.constraints, *exact]


def _known(pins: Lock, kind: str) -> dict[str, str]:
    """What the lock pins of a kind. A lock may come from elsewhere, and each of these becomes part of a line that
    package managers read: nothing in it may be an option or a second line."""
    found = pins.of_kind(kind)
    for name, version in found.items():
        if not (_PIN_NAME.fullmatch(name) and _PIN_VERSION.fullmatch(version)):
            raise BuildProblem(
                f"the lock pins {name[:80]!r} to {version[:80]!r}, which is no name and version of a package",
                hint="build without the lock, or take the one an image was built with",
                code="lock",
            )
    return found


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())


def _copy(work_dir: Path, source: str, files: Path, path: str) -> None:
    """Put `source` of the work directory at `path` of the tree that goes to `/` of the image."""
    origin = work_dir / check_relative_path(source, "the source")
    target = files / check_relative_path(path.lstrip("/"), "the target")
    if not os.path.lexists(origin):
        raise BuildProblem(
            f"the file for {path} did not arrive at the endpoint", hint="start the build again", code="files"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    if origin.is_dir() and not origin.is_symlink():
        _check_links(origin, path)
        shutil.copytree(origin, target, symlinks=True, dirs_exist_ok=True)
    elif origin.is_symlink():
        raise BuildProblem(f"the file for {path} is a link", hint="give the file itself", code="files")
    elif target.is_dir():
        raise BuildProblem(f"{path} is given as a file and as a folder", hint="give it once", code="files")
    else:
        shutil.copy(origin, target)


def _check_links(folder: Path, path: str) -> None:
    """Every link in it leads to something in it; anything else would be read from the endpoint, or from nowhere."""
    top = os.path.realpath(folder)
    for parent, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            entry = os.path.join(parent, name)
            if not os.path.islink(entry):
                continue
            leads = os.path.normpath(os.path.join(os.path.realpath(parent), os.readlink(entry)))
            if leads != top and not leads.startswith(top + os.sep):
                shown = os.path.relpath(entry, folder)
                raise BuildProblem(
                    f"{shown} in the folder for {path} is a link that leads out of it",
                    hint="replace the link by what it points to",
                    code="files",
                )
