"""Whether a checkpoint that another library wrote is whole: a seal where the adapter had time to put one, else a look
into the files. Must not know who wrote them, nor load anything of them: what is read here is not trusted yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from diamond.train.errors import TrainError

SEAL = "diamond.json"
_BLOCK = 1 << 22
_HEADER_BYTES = 100 << 20  # the most that the safetensors format allows
_ZIPPED = (".pt", ".pth", ".bin", ".ckpt")  # what torch.save makes
_calls = 0


def say(text: str) -> None:
    sys.stderr.write(f"diamond.train: {text}\n")
    sys.stderr.flush()


def seal(folder: Path) -> None:
    """Write down what every file of the folder holds, once all of it is on the disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != SEAL:
            files[str(path.relative_to(folder))] = _measured(path, sync=True)
    target = folder / SEAL
    unfinished = target.with_suffix(".unfinished")
    with unfinished.open("w") as file:
        json.dump({"version": 1, "files": files}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, target)
    sync(folder)
    sync(folder.parent)


def sync(path: Path) -> None:
    with contextlib.suppress(OSError):  # some network file systems cannot
        at = os.open(path, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)


def fault(path: Path) -> str:
    """What is wrong with a checkpoint, a file or a folder; nothing if it is whole."""
    try:
        if path.is_file():
            return _file_fault(path)
        if (path / SEAL).exists():
            return _seal_fault(path)
        for one in sorted(path.rglob("*")):
            if one.is_file() and (found := _file_fault(one)):
                return f"{one.relative_to(path)} {found}"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    return ""


def newest(
    folder: str | os.PathLike[str], name: re.Pattern[str], look: Callable[[Path], str] = fault
) -> str | None:  # fmt: skip
    """The checkpoint with the largest number that is whole. Where ranks are joined already, rank 0 looks for all.

    Raises:
        TrainError: there were whole ones once, and all are damaged now.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return _newest(Path(folder), name, look)
    global _calls
    _calls += 1
    key, store = f"diamond/adapters/newest/{_calls}", dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            said: dict[str, Any] = {"path": _newest(Path(folder), name, look)}
        except TrainError as error:
            store.set(key, json.dumps({"error": str(error), "hint": error.hint}))
            raise
        store.set(key, json.dumps(said))
    else:
        said = json.loads(store.get(key))
        if "error" in said:
            raise TrainError("rank 0 found no whole checkpoint", hint=said["hint"])
    found: str | None = said["path"]
    return found


def numbered(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Newest first; `name` has the number as its only group."""
    with contextlib.suppress(FileNotFoundError):
        found = [(int(match[1]), path) for path in folder.iterdir() if (match := name.fullmatch(path.name))]
        return [path for _, path in sorted(found, reverse=True)]
    return []


def _newest(folder: Path, name: re.Pattern[str], look: Callable[[Path], str]) -> str | None:
    damaged = []
    for path in numbered(folder, name):
        wrong = look(path)
        if not wrong:
            return str(path)
        say(f"{path} is not whole ({wrong}); going back to the one before it")
        if path.is_file() or (path / SEAL).exists():
            damaged.append(path.name)
    if damaged:  # a folder that was only begun is no loss; these were finished, and work is in them
        raise TrainError(
            f"no checkpoint in {folder} is whole any more ({', '.join(damaged)})",
            hint="bring back a copy of one, or move the folder away to begin anew",
        )
    return None


# ---- single files ----------------------------------------------------------------------------------------------------


def _seal_fault(folder: Path) -> str:
    try:
        files = json.loads((folder / SEAL).read_text())["files"]
        for name, (size, check) in files.items():
            if _measured(folder / name) != (size, check):
                return f"{name} is not what was written"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{SEAL}: {error}"
    return ""


def _file_fault(path: Path) -> str:
    if path.suffix == ".safetensors":
        return _safetensors_fault(path)
    if path.suffix in _ZIPPED:
        return _zip_fault(path)
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return "ends early"
    if path.suffix == ".distcp":  # nothing in it tells where it ends
        return "was not sealed"
    return ""


def _safetensors_fault(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        lead = file.read(8)
        if len(lead) < 8:
            return "ends early"
        (length,) = struct.unpack("<Q", lead)
        if length > min(size, _HEADER_BYTES):
            return "ends early"
        try:
            header = json.loads(file.read(length))
            end = max((one["data_offsets"][1] for key, one in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return "has a damaged header"
    return "" if size == 8 + length + end else "ends early"


def _zip_fault(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    while member.read(_BLOCK):  # the end of a member is where its checksum is compared
                        pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError):
        return "ends early or is damaged"
    return ""


def _measured(path: Path, *, sync: bool = False) -> tuple[int, int]:
    size = check = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            check = zlib.crc32(block, check)
            size += len(block)
        if sync:
            os.fsync(file.fileno())
    return size, check
