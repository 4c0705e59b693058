"""A virtual environment that may be moved: its files name no place of their own.

Python writes the environment's own path into scripts, activation files and some package records. Layers and images
come into being under one name and are renamed into the store, so those paths are replaced by ones that are worked out
when they are used. What is left alone: the path of the endpoint's Python, which stays where it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from diamond.agent.builders.guarded import read_inside, write_inside

_CONFIG = "pyvenv.cfg"
_SCRIPT_LIMIT = 4 * 1024 * 1024  # a script is text; larger files in bin/ are programs

# sh reads the second line as a command and stops there; to Python the second and third are one string.
_LAUNCHER = b'#!/bin/sh\n\'\'\':\'\nexec "$(dirname -- "$(readlink -f -- "$0")")"/python3 "$0" "$@"\n\'\'\'\n'

# pip's own way for paths that are long or hold blanks.
_PIP_LAUNCHER = re.compile(rb"#!/bin/sh\n'''exec' .*\n' '''\n")

_ACTIVATE = """\
# Source this from bash or zsh: it puts the environment's programs first.
VIRTUAL_ENV=$(cd -- "$(dirname -- "${BASH_SOURCE[0]:-${(%):-%x}}")/.." && pwd)
DIAMOND_IMAGE_ROOT=$VIRTUAL_ENV/root
PATH=$VIRTUAL_ENV/bin:$PATH
export VIRTUAL_ENV DIAMOND_IMAGE_ROOT PATH
if [ -r "$VIRTUAL_ENV/opt/diamond/env.sh" ]; then . "$VIRTUAL_ENV/opt/diamond/env.sh"; fi
unset PYTHONHOME
hash -r 2>/dev/null
"""
_OTHER_SHELLS = ("activate.csh", "activate.fish", "activate.nu", "Activate.ps1", "activate.bat")


def make_movable(folder: Path) -> None:
    """Take the folder's path out of its own files. May be repeated; leaves other files as they are."""
    own = os.fsencode(str(folder))
    for path in sorted((folder / "bin").iterdir()):
        if path.is_file() and not path.is_symlink():
            _free_script(path, own)
    for name in _OTHER_SHELLS:
        (folder / "bin" / name).unlink(missing_ok=True)
    write_inside(folder, "bin/activate", _ACTIVATE)
    lines = [line for line in _config(folder).splitlines(keepends=True) if not line.startswith("command ")]
    write_inside(folder, _CONFIG, "".join(lines))
    for packages in folder.glob("lib/python3*/site-packages"):
        up = os.fsencode(os.path.relpath(folder, packages))
        for path in packages.glob("*.pth"):
            _replace(path, re.compile(rb"(?m)^" + re.escape(own) + rb"(?=/|$)"), up)
        for path in packages.glob("*.egg-link"):
            _replace(path, re.compile(rb"(?m)^" + re.escape(own) + rb"(?=/|$)"), up)
        for path in packages.glob("__editable__*.py"):
            # Packages installed "editable" from the image's own files: a table of paths, as Python source.
            _replace(
                path,
                re.compile(rb"(?P<q>['\"])" + re.escape(own) + rb"(?=/)"),
                rb"__file__.rpartition('/lib/python')[0] + \g<q>",
            )
        for path in packages.glob("*.dist-info/direct_url.json"):
            _replace(path, re.compile(rb"file://" + re.escape(own) + rb"(?=/)"), b"file:///image")


def _free_script(path: Path, own: bytes) -> None:
    if path.stat().st_size > _SCRIPT_LIMIT:
        return
    data = path.read_bytes()
    if not data.startswith(b"#!"):
        return
    first, _, rest = data.partition(b"\n")
    if first.startswith((b"#!" + own + b"/bin/python", b'#!"' + own + b"/bin/python")):
        _write(path, _LAUNCHER + rest)
    elif (match := _PIP_LAUNCHER.match(data)) and own + b"/bin/python" in match[0]:
        _write(path, _LAUNCHER + data[match.end() :])


def _replace(path: Path, pattern: re.Pattern[bytes], by: bytes) -> None:
    data = path.read_bytes()
    changed = pattern.sub(by, data)
    if changed != data:
        _write(path, changed)


def _write(path: Path, data: bytes) -> None:
    """In place of the old file, never into it: another environment may share it by a hard link."""
    mode = path.stat().st_mode & 0o777
    if path.is_symlink():  # to a file that some installers keep for all environments
        path.unlink()
    write_inside(path.parent, path.name, data, mode)


def point_at(folder: Path, python: str) -> None:
    """Have the environment use the Python at `python`, the same minor version as before."""
    programs = folder / "bin"
    for path in programs.iterdir():
        if path.is_symlink() and re.fullmatch(r"python[\d.]*", path.name):
            path.unlink()
    minor = next(folder.glob("lib/python3*")).name
    (programs / minor).symlink_to(python)
    for name in ("python", "python3"):
        (programs / name).symlink_to(minor)
    replaced = {"home": os.path.dirname(python), "executable": os.path.realpath(python)}
    lines = []
    for line in _config(folder).splitlines():
        name = line.partition("=")[0].strip()
        lines.append(f"{name} = {replaced[name]}" if name in replaced else line)
    write_inside(folder, _CONFIG, "\n".join(lines) + "\n")


def _config(folder: Path) -> str:
    return (read_inside(folder, _CONFIG) or b"").decode()
