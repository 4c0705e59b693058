"""Puts a job's run directory in place: the user's files, scripts and environment, and room for the exit status.

The only writer of a run directory before the job starts. Every path of a manifest is checked again here, nothing is
ever written through a link, and nothing outside the run directory. Must not talk to schedulers or the journal.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import diamond
from diamond.agent.cache import Cache
from diamond.agent.image_jobs import RUN, Surroundings, entrance, make_view, why_missing, work_envs, work_file
from diamond.agent.image_policy import runs_beside
from diamond.agent.link import Backoff
from diamond.agent.machine import FULL_ERRORS, disk
from diamond.agent.pool_orders import pilot_run, step_measure
from diamond.agent.run_dirs import remove
from diamond.agent.secrets import Vault
from diamond.core.bundles import BundleFile, Manifest, check_relative_path, digest_of_ref, is_bundle_ref
from diamond.core.codec import encode
from diamond.core.errors import DiamondError, DigestMismatch, InvalidInput, Unauthenticated
from diamond.core.ids import is_id
from diamond.core.measuring import MEASURE
from diamond.core.reasons import Reason
from diamond.core.rundir import EXIT_ROOM_BYTES, LAUNCHER_FILES, RunDir
from diamond.core.scripts import ScriptPlan, env_file, job_envs, job_script
from diamond.core.wire import JobOrder

T = TypeVar("T")

_PARALLEL_DOWNLOADS = 4
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class StagingFailed(Exception):
    """The job cannot be staged; `reason` and `detail` become its result."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class StagingStopped(Exception):
    """The agent stops, or the job was cancelled meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One entry of a bundle at its place below work/."""

    path: str
    item: BundleFile
    source: str  # "workdir" or "file_mounts.<target>", for error texts


def place(bundles: dict[str, Manifest]) -> list[Placed]:
    """Where every entry of the bundles goes. Pure. `bundles` is by target, "." for the workdir.

    Raises:
        InvalidInput: two entries want the same place, or one lies below another.
    """
    placed: dict[str, Placed] = {}
    for target, manifest in sorted(bundles.items(), key=lambda pair: (pair[0] != ".", pair[0])):
        source = "workdir" if target == "." else f"file_mounts.{target}"
        for item in manifest.files:
            inside = target if manifest.is_file else f"{target}/{item.path}"
            path = check_relative_path(item.path if target == "." else inside, "path")
            other = placed.get(path)
            if other is not None:
                raise InvalidInput(f"{path!r} is already there from {other.source}", field=source)
            placed[path] = Placed(path=path, item=item, source=source)
    for one in placed.values():
        parts = one.path.split("/")
        for depth in range(1, len(parts)):
            other = placed.get("/".join(parts[:depth]))
            if other is not None:
                what = "a link" if other.item.link_to else "a file"
                raise InvalidInput(
                    f"{one.path!r} cannot be put below {other.path!r}, {what} from {other.source}", field=one.source
                )
    return list(placed.values())


class Stager:
    """Thread-safe: jobs may be staged side by side."""

    def __init__(
        self,
        *,
        cache: Cache,
        stop: threading.Event,
        scheduler: str = "local",
        around: Callable[[], Surroundings] = Surroundings,
        vault: Vault | None = None,
        is_other: Callable[[JobOrder], bool] = lambda _: False,
    ) -> None:
        """`scheduler` is the name of the one that will run the scripts; `around` tells how things are now; `is_other`,
        whether an order is of somebody else than the endpoint's owner."""
        self.vault = vault or Vault()
        self._cache = cache
        self._around = around
        self._is_other = is_other
        self._scheduler = scheduler
        self._stop = stop
        self._downloads = ThreadPoolExecutor(_PARALLEL_DOWNLOADS, thread_name_prefix="download")
        train = importlib.resources.files("diamond").joinpath("train")
        self._steward = importlib.resources.files("diamond").joinpath("agent").joinpath("steward.py").read_bytes()
        self._launcher = {
            name: file.read_bytes() for name in LAUNCHER_FILES if (file := train.joinpath(name)).is_file()
        }

    def close(self) -> None:
        self._downloads.shutdown(wait=False, cancel_futures=True)

    def stage(self, order: JobOrder, path: Path, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Make the run directory at `path`, from scratch: whatever an earlier, interrupted attempt left is removed.

        Waits for a server that is away, as long as it takes. Call only for jobs never submitted.

        Raises:
            StagingFailed: with the job's result.
            StagingStopped: the agent stops, or `is_cancelled` turned true.
        """
        try:
            remove(path)
            run_dir = RunDir(path)
            path.mkdir(parents=True, mode=0o700)
            previous = _previous(order, path)
            _check_image(order)
            if previous is not None and order.work is None:  # a job of images begins in a folder nobody else wrote to
                run_dir.link_work(previous.work_root)
            else:
                run_dir.work.mkdir(mode=0o700)
                if order.spec.bundle_refs:
                    self._bring_files(order, run_dir, is_cancelled)
            self._write_scripts(order, run_dir, previous)
            if order.spec.secrets and order.work is None:
                self._bring_secrets(order, run_dir, is_cancelled)  # last: what fails leaves none behind
            if order.work is None and self._is_contained_guest(order):
                make_view(run_dir, _library())
        except OSError as error:
            where = error.filename or path
            if error.errno in FULL_ERRORS:
                free = disk(path.parent).free_bytes
                detail = f"{where}: {error.strerror} ({free / 1024**2:.0f} MiB free)"
                raise StagingFailed(Reason.DISK_FULL, detail) from error
            raise StagingFailed(Reason.STAGING_FAILED, f"{where}: {error.strerror}") from error
        except DiamondError as error:
            raise StagingFailed(Reason.STAGING_FAILED, str(error)) from error

    def _is_contained_guest(self, order: JobOrder) -> bool:
        return order.image is not None and order.image.kind != "venv" and self._is_other(order)

    def _bring_secrets(self, order: JobOrder, run_dir: RunDir, is_cancelled: Callable[[], bool]) -> None:
        def should_stop() -> bool:
            return self._stop.is_set() or is_cancelled()

        try:
            secrets = self._patiently(partial(self.vault.fetch, order.job_id), should_stop)
        except DiamondError as error:
            raise StagingFailed(Reason.SECRET_MISSING, str(error)) from error
        if missing := set(order.spec.secrets) - {secret.variable for secret in secrets}:
            raise StagingFailed(Reason.SECRET_MISSING, f"the server did not give {', '.join(sorted(missing))}")
        self.vault.put(order, run_dir, secrets)

    # The user's files

    def _bring_files(self, order: JobOrder, run_dir: RunDir, is_cancelled: Callable[[], bool]) -> None:
        def should_stop() -> bool:
            return self._stop.is_set() or is_cancelled()

        bundles: dict[str, Manifest] = {}
        for target, ref in order.spec.bundle_refs.items():
            if not is_bundle_ref(ref):
                raise InvalidInput(f"{ref[:80]!r} is not a bundle reference", field=target)
            bundles[target] = self._patiently(partial(self._cache.manifest, digest_of_ref(ref)), should_stop)
        placed = place(bundles)
        sizes = {one.item.digest: one.item.size_bytes for one in placed if not one.item.link_to}
        with self._cache.pinned(sizes):
            missing = self._cache.missing(sizes)
            self._check_room(run_dir, sum(one.item.size_bytes for one in placed) + sum(sizes[d] for d in missing))
            fetches = [
                self._downloads.submit(
                    self._patiently, partial(self._cache.fetch, digest, sizes[digest], should_stop), should_stop
                )
                for digest in sizes
            ]
            try:
                for fetch in fetches:
                    fetch.result()
            except BaseException:
                for fetch in fetches:
                    fetch.cancel()
                raise
            self._materialise(run_dir.work, placed)

    def _patiently(self, action: Callable[[], T], should_stop: Callable[[], bool]) -> T:
        backoff = Backoff()
        damaged = 0
        while not should_stop():
            try:
                return action()
            except DigestMismatch:
                damaged += 1
                if damaged > 1:
                    raise
            except DiamondError as error:
                if not error.transient and not isinstance(error, Unauthenticated):
                    raise
                self._stop.wait(backoff.next_s())
        raise StagingStopped

    @staticmethod
    def _check_room(run_dir: RunDir, need_bytes: int) -> None:
        free = disk(run_dir.path).free_bytes
        if need_bytes > free:
            raise StagingFailed(
                Reason.DISK_FULL,
                f"the task's files need {need_bytes / 1024**2:.0f} MiB in {run_dir.path.parent}, "
                f"{free / 1024**2:.0f} MiB are free",
            )

    def _materialise(self, work: Path, placed: list[Placed]) -> None:
        folders: set[Path] = {work}
        # Links come last: as long as there are none, no file can be written through one.
        for one in sorted(placed, key=lambda one: bool(one.item.link_to)):
            path = work / one.path
            if path.parent not in folders:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                folders.add(path.parent)
            if one.item.link_to:
                os.symlink(one.item.link_to, path)
                continue
            fd = os.open(path, _NEW_FILE, 0o700 if one.item.executable else 0o600)
            with os.fdopen(fd, "wb") as target, open(self._cache.blob_path(one.item.digest), "rb") as source:
                shutil.copyfileobj(source, target, 1024 * 1024)
                if target.tell() != one.item.size_bytes:
                    raise InvalidInput(f"{one.path!r} has {target.tell()} bytes instead of {one.item.size_bytes}")

    # Diamond's own files

    def _write_scripts(self, order: JobOrder, run_dir: RunDir, previous: RunDir | None) -> None:
        spec, around = order.spec, self._around()
        is_pilot = order.pilot is not None
        is_work = order.work is not None or is_pilot  # whose program is Diamond's own
        is_guest = not is_work and self._is_contained_guest(order)
        scheduler = "local" if runs_beside(order) else self._scheduler
        envs = job_envs(
            task_id=order.task_id,
            task_name=order.task_name,
            job_id=order.job_id,
            attempt=order.attempt,
            num_nodes=spec.num_nodes,
            user_envs=spec.envs if not is_work else work_envs() if order.work is not None else {},
        )
        plan = ScriptPlan(
            job_id=order.job_id,
            run_dir=str(run_dir.path),
            ranks_per_node=0 if is_work else spec.ranks_per_node,
            has_setup=bool(spec.setup) and not is_work,
            launcher_python=sys.executable,
            scheduler=scheduler,
            num_nodes=spec.num_nodes,
            min_nodes=0 if order.place is not None else spec.min_nodes or 0,
            chained=order.chained and not is_work,
            previous=str(previous.path) if previous is not None else "",
            modules=spec.slurm.modules if scheduler == "slurm" else (),
            library="" if is_work else _library(),
            image=order.image is not None and not is_work,
            is_guest=is_guest,
            secrets=bool(spec.secrets) and not is_work,
            measure=scheduler == "slurm" and not is_work,
            time_limit_s=order.time_limit_s,
            slot=order.place.share if order.place is not None else None,
        )
        _write(run_dir.order, json.dumps(encode(order)).encode())
        if plan.has_setup and spec.setup:
            _write(run_dir.setup, spec.setup.encode())
        if is_pilot:
            _write(run_dir.steward, self._steward)
        elif is_work:
            _write(run_dir.image_work, work_file(order, run_dir, around))
        elif order.image is not None:
            run_dir.shield.mkdir(mode=0o700)
            way_in = entrance(order.image, run_dir, envs, around, plan.library, plan.secrets, is_guest=is_guest)
            for path, data in way_in.items():
                _write(path, data, 0o700 if path.parent == run_dir.shield else 0o600)
        run = pilot_run(plan.launcher_python) if is_pilot else RUN if is_work else spec.run
        _write(run_dir.run, run.encode())
        _write(run_dir.env, env_file(envs))
        _write(run_dir.script, job_script(plan).encode())
        if plan.measure:
            _write(run_dir.measure, (MEASURE if order.place is None else step_measure(MEASURE)).encode())
        if plan.ranks_per_node > 1 or (plan.ranks_per_node == 1 and spec.num_nodes > 1):
            if len(self._launcher) < len(LAUNCHER_FILES):
                raise StagingFailed(Reason.LAUNCH_FAILED, "diamond/train/launch.py is missing from this installation")
            for name, data in self._launcher.items():
                _write(run_dir.path / name, data)
        _write(run_dir.exit_room, b" " * EXIT_ROOM_BYTES)
        _write(run_dir.stream("log"), b"")
        if is_guest:  # places for what its programs append, which make no file there themselves
            for name in ("metrics", "train"):
                _write(run_dir.stream(name), b"")


def _check_image(order: JobOrder) -> None:
    """Before anything is fetched: without its image the job would fail on the node, or worse, run outside of it."""
    spec = order.spec
    if order.work is not None:
        return
    if order.image is None:
        if spec.resources.image_id or spec.image is not None:
            raise StagingFailed(Reason.IMAGE_MISSING, "the task names an image, and the server did not say where it is")
    elif why := why_missing(order.image):
        raise StagingFailed(Reason.IMAGE_MISSING, why)


def _library() -> str:
    """The one-file agent, which holds `diamond.train` too. An installed agent's neighbours are not the job's to see."""
    place = Path(diamond.__file__).parents[1]
    return str(place) if place.is_file() else ""


def _previous(order: JobOrder, path: Path) -> RunDir | None:
    """The run directory to go on in; None for a first job, and when nothing is left of the one before."""
    if not order.continues or not is_id(order.continues, "job"):
        return None
    found = RunDir(path.parent / order.continues)
    if found.work_root.is_dir():
        return found
    if order.after:
        # It may never start: without that directory it could not even tell that the task is over.
        raise StagingFailed(Reason.STAGING_FAILED, f"the work directory of {order.continues} is gone")
    return None


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """A new file. Not flushed to disk: a job whose staging a power cut interrupted is staged again."""
    fd = os.open(path, _NEW_FILE, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(fd)
