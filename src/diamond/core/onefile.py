"""The one-file agent: a zip that any Python from 3.10 on runs, with nothing installed.

Holds `core`, `planner` (without pools), `agent` and `train` as they are here, and what those need beyond a bare
Python 3.10: the standard library's own TOML reader, and NVML's binding where this installation has it. The same sources
give the same bytes: names are sorted, times fixed, nothing is compressed (compressors differ).
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable  # novm: for the type checker only

_PACKAGES = ("core", "planner", "agent", "train")
_LEFT_OUT = ("diamond/planner/pools",)  # needs numpy and scipy, and only servers decide about pools
_SUFFIXES = (".py", ".json", ".toml", ".sh", ".txt")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_SHEBANG = b"#!/usr/bin/env python3\n"
# Must be understood by every Python there is, so that an old one can say what is missing.
_MAIN = """\
import os
import sys

if sys.version_info < (3, 10):
    for name in ("python3.14", "python3.13", "python3.12", "python3.11", "python3.10"):
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            path = os.path.join(folder or ".", name)
            if os.path.isfile(path) and os.access(path, os.X_OK):
                os.execv(path, [path] + sys.argv)
    sys.exit(
        "diamond-agent: this is Python %d.%d at %s, and 3.10 or newer is needed. Load one (module load python, "
        "conda activate ...) and run the same line again." % (sys.version_info[0], sys.version_info[1], sys.executable)
    )

from diamond.agent.command import main

sys.exit(main())
"""


@lru_cache(maxsize=1)
def build() -> bytes:
    """The file's bytes. Made once in a process, from what is installed here."""
    buffer = io.BytesIO()
    buffer.write(_SHEBANG)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(_contents()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3
            archive.writestr(entry, data)
    return buffer.getvalue()


def digest() -> str:
    """SHA-256 of the file, in hex."""
    return _digest_of(build())


@lru_cache(maxsize=1)
def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _contents() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", _MAIN.encode()
    root = resources.files("diamond")
    yield "diamond/__init__.py", (root / "__init__.py").read_bytes()
    for package in _PACKAGES:
        yield from _folder(root / package, f"diamond/{package}")
    carried = (root / "core").joinpath("_tomllib")
    if not carried.is_dir():  # when this is itself a one-file agent it is there already
        yield from _folder(resources.files("tomllib"), "diamond/core/_tomllib")
    if importlib.util.find_spec("pynvml") is not None and (source := _source_of("pynvml")) is not None:
        yield "pynvml.py", source


def _folder(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        inner = f"{name}/{entry.name}"
        if entry.is_dir():
            if entry.name != "__pycache__" and inner not in _LEFT_OUT:
                yield from _folder(entry, inner)
        elif entry.name.endswith(_SUFFIXES):
            yield inner, entry.read_bytes()


def _source_of(module: str) -> bytes | None:
    """The source of a module that is one file; None where it is not."""
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    source = getattr(loader, "get_source", lambda _name: None)(module)
    return source.encode() if isinstance(source, str) else None
