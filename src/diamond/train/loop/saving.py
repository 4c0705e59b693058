"""Checkpoints on disk: whole or not there, checked when they are read, and written while training goes on.

A checkpoint is a folder `step-<n>`. It is written under another name, each rank its part, and gets its own only when
all parts are on the disk and `manifest.json` names every file with its size and checksum. So one that can be seen is
complete, and one that was damaged later is found out. Must not know what a run is.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed._state_dict_utils import CompanionMismatch, _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from diamond.train.errors import TrainError

MANIFEST = "manifest.json"
SUSPECTS = "failed-at-once.json"
_NAME = re.compile(r"^step-(\d+)$")
_UNFINISHED = ".unfinished"
_ASIDE = f".before{_UNFINISHED}"  # what another is about to take the place of
_WAIT = timedelta(hours=1)
_BLOCK = 1 << 22
# One process is meant to be one; torch says so in every checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Found:
    """A checkpoint that is complete, as far as its manifest says."""

    path: Path
    step: int
    world: int
    meta: dict[str, Any]
    files: dict[str, tuple[int, int]]  # size, checksum


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; what was there before still is."""


class Saver:
    """Writes and reads the checkpoints of one run. `save` and `wait` are called by all ranks at the same step.

    Attributes:
        blocked_s, took_s: of each checkpoint so far: how long training stood still, and until it was safe.
    """

    def __init__(self, folder: Path, *, rank: int, world: int, group: Any, store: Any, keep: int, cuda: bool) -> None:
        self.folder = folder
        self.rank, self._world, self._group, self._store, self._keep = rank, world, group, store, keep
        self._copies: dict[str, Any] | None = None  # on the host; made once and used again
        self._stream = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
        self._staged = threading.Event()
        self._staged.set()
        self._finished: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "diamond-save")
        self.blocked_s: list[float] = []
        self.took_s: list[float] = []
        self._superseded: list[Path] = []
        self.on_safe: Callable[[], None] = lambda: None  # called when one is, on rank 0, in another thread

    # ---- writing -----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any], own: bytes, common: bytes, meta: dict[str, Any]) -> None:
        """Begin to write. Until `staged`, nothing in `state` may change; the rest was copied by the caller.

        Args:
            own: what only this rank has; `common`: what rank 0 writes for all.
        """
        self.wait()
        began = time.monotonic()
        target = self.folder / f"step-{step:09}{_UNFINISHED}"
        target.mkdir(parents=True, exist_ok=True)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # what the last step still computes is to be in it
        self._staged.clear()
        self._finished = self._pool.submit(self._work, state, target, step, own, common, meta, began)
        self.blocked_s.append(time.monotonic() - began)

    def staged(self) -> float:
        """Wait until what is being saved may change: before the optimizer changes it. Returns for how many seconds."""
        if self._staged.is_set():
            return 0.0
        began = time.monotonic()
        self._staged.wait()
        waited = time.monotonic() - began
        self.blocked_s[-1] += waited
        return waited

    def wait(self) -> None:
        """Until the last one is safe.

        Raises:
            SaveFailed: it is not, and the ones before it are what there is.
        """
        self.staged()
        if self._finished is not None:
            last, self._finished = self._finished, None
            last.result()

    def annotate(self, step: int, more: dict[str, Any]) -> None:
        """Add to what a checkpoint that is safe says about itself. If that fails, it is as it was."""
        path = self.folder / f"step-{step:09}" / MANIFEST
        if self.rank == 0:
            with contextlib.suppress(OSError, ValueError, KeyError):
                said = json.loads(path.read_text())
                said["meta"].update(more)
                _write(path.with_suffix(_UNFINISHED), json.dumps(said).encode())
                os.replace(path.with_suffix(_UNFINISHED), path)

    @property
    def is_busy(self) -> bool:
        return self._finished is not None and not self._finished.done()

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _work(
        self,
        state: dict[str, Any],
        target: Path,
        step: int,
        own: bytes,
        common: bytes,
        meta: dict[str, Any],
        began: float,
    ) -> None:
        """All that training does not wait for, in a thread of its own."""
        try:
            try:
                copies = self._copied(state)
            finally:
                self._staged.set()
            state_dict_saver.save(
                copies, checkpoint_id=target / "state", process_group=self._group, no_dist=self._world == 1
            )
            _write(target / f"rank-{self.rank}.pt", own)
            if self.rank == 0:
                _write(target / "common.pt", common)
            mine = {
                str(path.relative_to(target)): _measured(path)
                for path in sorted(target.rglob("*"))
                if path.is_file() and self._is_mine(path)
            }
        except BaseException as error:  # torch's own is no Exception
            self._tell(step, {"error": _why(error)})
            shutil.rmtree(target, ignore_errors=True)
            raise SaveFailed(_why(error)) from error
        self._tell(step, {"files": mine})
        if self.rank == 0:
            self._commit(target, step, mine, meta)
        self.took_s.append(time.monotonic() - began)

    def _copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state in the host's memory. On a GPU in a stream of its own, from which the training's does not wait."""
        if self._copies is None:
            self._copies = _create_cpu_state_dict(state, pin_memory=self._stream is not None)
        with torch.cuda.stream(self._stream):
            try:
                copies = _copy_state_dict(state, self._copies, non_blocking=self._stream is not None)
            except CompanionMismatch:  # it has other parts than last time
                self._copies = _create_cpu_state_dict(state, pin_memory=self._stream is not None)
                copies = _copy_state_dict(state, self._copies, non_blocking=self._stream is not None)
        if self._stream is not None:
            self._stream.synchronize()
        return copies

    def _is_mine(self, path: Path) -> bool:
        name = path.name
        if name.endswith(".distcp"):
            return name.startswith(f"__{self.rank}_")
        return name == f"rank-{self.rank}.pt" or (self.rank == 0 and not name.startswith("rank-"))

    def _key(self, step: int, rank: int) -> str:
        return f"diamond/saved/{step}/{rank}"

    def _tell(self, step: int, said: dict[str, Any]) -> None:
        if self._world > 1 and self.rank != 0:
            self._store.set(self._key(step, self.rank), json.dumps(said))

    def _commit(self, target: Path, step: int, files: dict[str, Any], meta: dict[str, Any]) -> None:
        others = [self._key(step, rank) for rank in range(1, self._world)]
        if others:
            self._store.wait(others, _WAIT)
        for key in others:
            said = json.loads(self._store.get(key))
            self._store.delete_key(key)
            if "error" in said:
                shutil.rmtree(target, ignore_errors=True)
                raise SaveFailed(f"rank {key.rpartition('/')[2]}: {said['error']}")
            files = {**files, **said["files"]}
        text = json.dumps({"version": 1, "step": step, "world": self._world, "meta": meta, "files": files})
        _write(target / MANIFEST, text.encode())
        final = self.folder / f"step-{step:09}"
        aside = final.with_name(final.name + _ASIDE)
        if final.exists():  # of an earlier run that came as far, or of this one: saved in the midst of a turn
            os.replace(final, aside)
        os.replace(target, final)
        _sync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)
        self.on_safe()
        (self.folder / SUSPECTS).unlink(missing_ok=True)
        gone = [path for path in self._superseded if path != final]
        self._superseded = []
        for old in gone:
            shutil.rmtree(old, ignore_errors=True)
        for old in self.listed()[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def listed(self) -> list[Path]:
        """Newest first, whole or damaged."""
        with contextlib.suppress(FileNotFoundError):
            named = [path for path in self.folder.iterdir() if _NAME.match(path.name)]
            return sorted(named, key=lambda path: path.name, reverse=True)
        return []

    def begin(self) -> None:
        """Make the folder, and remove what a killed process left half written there.

        Raises:
            TrainError: nothing can be written there, so a run would be lost at its end.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trial = self.folder / f".trial{_UNFINISHED}"
            trial.touch()
            trial.unlink()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # room may come
                raise TrainError(
                    f"checkpoints cannot be written to {self.folder}: {error.strerror}",
                    hint="give run() another folder as `checkpoints`, one that this account may write to",
                ) from error
        with contextlib.suppress(OSError):
            for path in list(self.folder.iterdir()):
                if path.name.endswith(_ASIDE) and not (kept := path.with_name(path.name[: -len(_ASIDE)])).exists():
                    os.replace(path, kept)  # it was killed in the moment between
                elif path.name.endswith(_UNFINISHED):
                    (shutil.rmtree if path.is_dir() else os.unlink)(path)

    def newest_whole(
        self, agree: Callable[[bool], bool], say: Callable[[str], None], *, without: Collection[str] = ()
    ) -> Found | None:
        """The newest checkpoint that is as it was written; ranks share the work of looking. Of those `without`, none.

        Raises:
            TrainError: there are some, and all are damaged.
        """
        paths = self.listed()
        for path in paths:
            if not agree(path.name not in without):
                continue
            found, problem = self._look(path)
            if agree(not problem):
                return found
            say(f"{path} is damaged{f' ({problem})' if problem else ''}; going back to the one before it")
        if paths:
            raise TrainError(
                f"none of the {len(paths)} checkpoints in {self.folder} is whole"
                if not without
                else f"none of the {len(paths)} checkpoints in {self.folder} can be gone on from",
                hint="move the folder away to begin anew, or bring back a copy of one of them",
            )
        return None

    def supersede(self, found: Found | None) -> None:
        """The run goes on from here: what is newer is not of it, and goes with the first new checkpoint. Kept beside
        that, it would be taken for the newest."""
        self._superseded = [path for path in self.listed() if found is None or path.name > found.path.name]

    def suspects(self) -> list[str]:
        """Checkpoints from which a run went on and failed before it saved anything."""
        try:
            return [str(name) for name in json.loads((self.folder / SUSPECTS).read_text())]
        except (OSError, ValueError, TypeError):
            return []

    def suspect(self, found: Found) -> None:
        """Add one; several ranks may do so at once, all with the same one."""
        trial = self.folder / f"{SUSPECTS}.{self.rank}{_UNFINISHED}"
        with contextlib.suppress(OSError):
            _write(trial, json.dumps(sorted({*self.suspects(), found.path.name})).encode())
            os.replace(trial, self.folder / SUSPECTS)

    def _look(self, path: Path) -> tuple[Found | None, str]:
        try:
            raw = json.loads((path / MANIFEST).read_text())
            files = {name: (int(size), int(check)) for name, (size, check) in raw["files"].items()}
            found = Found(path=path, step=int(raw["step"]), world=int(raw["world"]), meta=raw["meta"], files=files)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return None, f"{MANIFEST}: {error}"
        for at, (name, wanted) in enumerate(sorted(found.files.items())):
            if at % self._world == self.rank:
                try:
                    if _measured(path / name) != wanted:
                        return found, f"{name} is not what was written"
                except OSError as error:
                    return found, f"{name}: {error.strerror}"
        return found, ""

    def load(self, found: Found, state: dict[str, Any]) -> None:
        """Fill the tensors of `state`, each rank its shards of whatever shards were written."""
        state_dict_loader.load(
            state, checkpoint_id=found.path / "state", process_group=self._group, no_dist=self._world == 1
        )


def _why(error: BaseException) -> str:
    """In a line: what a rank of torch's own failures says, or the error itself."""
    inner = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
    return str(inner) or type(inner).__name__


def packed(value: Any, what: str = "the state of a rank") -> bytes:
    written = io.BytesIO()
    try:
        torch.save(value, written)
    except Exception as error:
        raise TrainError(
            f"{what} cannot be saved: {error}",
            hint="keep numbers, text, lists, dictionaries and tensors there; no open files, locks or lambdas",
        ) from error
    return written.getvalue()


def read_part(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)  # ours, and checked against the manifest


def _measured(path: Path) -> tuple[int, int]:
    size = check = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            check = zlib.crc32(block, check)
            size += len(block)
    return size, check


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # some network file systems cannot
        at = os.open(path, os.O_RDONLY)
        try:
            os.fsync(at)
        finally:
            os.close(at)
