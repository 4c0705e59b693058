"""Where images and kept layers lie at an endpoint. The one place that knows these names.

<root>/
    store/<image_id>/        image.sif, image/ or image.ref, with image.json (ImageFacts) and lock.json
    layers/<builder>/<key>/  `layer`, a file or folder as its builder likes, with layer.json
    tmp/<job_id>/            of a build that runs; `lock` in it is held as long as it does, `claims` names the layers
                             it counts on, which nobody removes meanwhile

Things appear in `store` and `layers` by rename, complete; builds work in `tmp`, on the same file system. Whoever finds
a folder in `tmp` whose lock nobody holds may remove it: its build is dead. Several processes, also on several nodes,
may use one root at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from diamond.agent.builders.refs import REF_FILE, Ref
from diamond.agent.builders.removing import remove_tree
from diamond.core.codec import decode, encode
from diamond.core.compat import sha256_of
from diamond.core.errors import InvalidInput
from diamond.core.ids import is_id
from diamond.core.images import FACTS_FILE, LOCK_FILE, ImageFacts, Lock

BEAT_S = 60.0
QUIET_S = 15 * 60.0
LAYER = "layer"
LAYER_FILE = "layer.json"
_CLAIMS = "claims"
_KEY = re.compile(r"[0-9a-f]{8,64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")


class ImageStore:
    """The images root of one endpoint."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = root / "store"
        self.layers = root / "layers"
        self.tmp = root / "tmp"

    def make(self) -> None:
        for folder in (self.images, self.layers, self.tmp):
            folder.mkdir(parents=True, exist_ok=True)
        self.tmp.chmod(0o700)

    # -- images --------------------------------------------------------------------------------------------------

    def image(self, image_id: str) -> Path:
        """The folder of an image. Raises InvalidInput for what is no id, so that no name leads out of the store."""
        if not is_id(image_id, "img"):
            raise InvalidInput(f"{image_id[:80]!r} is not the id of an image")
        return self.images / image_id

    def facts(self, image_id: str) -> ImageFacts | None:
        """What was recorded of an image; None when it is not here."""
        path = self.image(image_id) / FACTS_FILE
        try:
            return decode(ImageFacts, json.loads(path.read_bytes()))
        except (OSError, ValueError, InvalidInput):
            return None

    def lock(self, image_id: str) -> Lock | None:
        path = self.image(image_id) / LOCK_FILE
        try:
            return decode(Lock, json.loads(path.read_bytes()))
        except (OSError, ValueError, InvalidInput):
            return None

    def publish(self, image_id: str, made: Path, aside: Path) -> Path:
        """Put a complete image folder in its place. One that is there already goes to `aside`; its new path."""
        target = self.image(image_id)
        for _ in range(10):
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, aside / f"replaced-{time.time_ns()}")
            try:
                os.rename(made, target)
            except OSError as error:  # another build of the same image was quicker; the last one stays
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return target
        raise OSError(errno.EBUSY, "an image of this id keeps appearing", str(target))

    def remove_image(self, image_id: str, aside: Path) -> bool:
        """Take an image away; whether there was one. It is out of sight at once, and its bytes go after that."""
        gone = aside / f"removed-{image_id}"
        try:
            os.rename(self.image(image_id), gone)
        except FileNotFoundError:
            return False
        remove_tree(gone)
        return True

    # -- layers --------------------------------------------------------------------------------------------------

    def layer(self, builder: str, key: str) -> Path:
        """Where the layer of this key is, if it is kept."""
        assert _NAME.fullmatch(builder) and _KEY.fullmatch(key), (builder, key)
        return self.layers / builder / key / LAYER

    def has_layer(self, builder: str, key: str) -> bool:
        return os.path.lexists(self.layer(builder, key))

    def keep_layer(self, builder: str, key: str, made: Path, *, replacing: Path | None = None, **record: Any) -> Path:
        """Keep what `made` holds, a folder with `layer` in it; the path to go on with.

        A second layer of the same key is let go, unless `replacing` is given, the workspace of a build that was asked
        for a fresh one: then the old layer goes there. Where another build may be reading the old one right now, that
        stays, and the new one is this build's alone.
        """
        target = self.layer(builder, key).parent
        target.parent.mkdir(parents=True, exist_ok=True)
        _, size_bytes = measure(made / LAYER, digest=False)
        write_json(made / LAYER_FILE, {**record, "size_bytes": size_bytes, "kept_at": time.time()})
        if replacing is not None:
            self.drop_layer(builder, key, replacing)
        try:
            os.rename(made, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if replacing is not None:
                return made / LAYER
            remove_tree(made)
        return target / LAYER

    def drop_layer(self, builder: str, key: str, workspace: Path) -> None:
        """Put a layer aside, out of sight, unless a build other than that of `workspace` counts on it."""
        with _alone(self.tmp):
            if key not in self._claimed(but=workspace):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.layer(builder, key).parent, workspace / f"replaced-{key}-{time.time_ns()}")

    def claim(self, workspace: Path, keys: Iterable[str]) -> None:
        """Say that the build of this workspace counts on these layers, so that nobody takes them away meanwhile."""
        with _alone(self.tmp):
            (workspace / _CLAIMS).write_text("".join(f"{key}\n" for key in keys))

    def _claimed(self, but: Path) -> set[str]:
        """Keys of layers that builds at work count on. Folders of dead builds are swept before any build begins."""
        found: set[str] = set()
        for folder in _listed(self.tmp):
            if folder != but:
                with contextlib.suppress(OSError):
                    found.update((folder / _CLAIMS).read_text().split())
        return found

    def kept(self) -> Iterator[tuple[str, str]]:
        """Builder and key of every kept layer."""
        for builder in _listed(self.layers):
            for key in _listed(builder):
                if _NAME.fullmatch(builder.name) and _KEY.fullmatch(key.name):
                    yield builder.name, key.name

    def remove_layers(self, keep: Collection[str], aside: Path) -> Iterator[tuple[str, Path, int]]:
        """Take away every layer but those to be kept and those that builds at work count on.

        Of each, its builder, where it lies until the next one is asked for, and its size in bytes as recorded.
        """
        with _alone(self.tmp):
            spared = {*keep, *self._claimed(but=aside)}
            gone = []
            for builder, key in prune(self, spared):
                place = aside / f"removed-{builder}-{key}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.layer(builder, key).parent, place)
                    gone.append((builder, place))
        for builder, place in gone:
            yield builder, place / LAYER, _recorded_size(place / LAYER_FILE)
            remove_tree(place)

    # -- builds at work ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def workspace(self, job_id: str, parent: Path | None = None) -> Iterator[Path]:
        """A folder for one build, removed at its end; `parent` is `tmp` unless another is given."""
        assert _NAME.fullmatch(job_id), job_id
        parent = parent or self.tmp
        folder = parent / job_id
        with _alone(parent):
            sweep(parent)
            remove_tree(folder)  # where locks are not to be had, a dead build of the same job is removed here
            folder.mkdir(mode=0o700)
            (folder / "lock").write_text(socket.gethostname())
            held = _hold(folder / "lock")
        over = threading.Event()
        beat = threading.Thread(target=_beat, args=(folder / "lock", over), daemon=True)
        beat.start()
        try:
            yield folder
        finally:
            over.set()
            beat.join()
            remove_tree(folder)
            if held is not None:
                held.close()

    def sizes(self) -> tuple[int, int]:
        """Bytes of images and of kept layers, as recorded when they were made."""
        images = sum(_recorded_size(folder / FACTS_FILE) for folder in _listed(self.images))
        layers = sum(_recorded_size(self.layer(*found).with_name(LAYER_FILE)) for found in self.kept())
        return images, layers


def prune(store: ImageStore, keep: Collection[str]) -> list[tuple[str, str]]:
    """The layers that nobody needs any more."""
    return [(builder, key) for builder, key in store.kept() if key not in keep]


def sweep(parent: Path) -> list[str]:
    """Remove what dead builds left in a folder of workspaces; their names.

    A lock that nobody holds proves it for builds of this node. Some file systems keep locks on each node to itself, so
    a build of another node must also have been quiet for a while.
    """
    removed = []
    for folder in _listed(parent):
        lock = folder / "lock"
        try:
            is_ours = lock.read_text(errors="replace") == socket.gethostname()
            quiet_s = time.time() - lock.stat().st_mtime
        except OSError:
            continue
        if (is_ours or quiet_s > QUIET_S) and (held := _hold(lock)) is not None:
            remove_tree(folder)
            held.close()
            removed.append(folder.name)
    return removed


def _beat(lock: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(lock)


def _hold(path: Path) -> BinaryIO | None:
    """The lock; None when another process has it, or the file system knows no locks."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """No other build comes or is swept meanwhile. A new folder is not locked at first, and would look dead."""
    with (parent / ".lock").open("ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _recorded_size(path: Path) -> int:
    try:
        size_bytes = json.loads(path.read_bytes()).get("size_bytes", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return size_bytes if isinstance(size_bytes, int) else 0


def write_json(path: Path, value: Any) -> None:
    """By rename, so that a reader sees all of it or nothing."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(encode(value), indent=1) + "\n")
    os.replace(part, path)


def make_readable(folder: Path) -> None:
    """Let the owner read every file and use every folder below this one. Links are not followed."""
    pending = [str(folder)]
    while pending:
        current = pending.pop()
        _permit(current, os.lstat(current).st_mode, 0o700)
        with os.scandir(current) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(entry.path)
                elif stat.S_ISREG(mode):
                    _permit(entry.path, mode, 0o400)


def _permit(path: str, mode: int, wanted: int) -> None:
    if mode & wanted != wanted:
        with contextlib.suppress(PermissionError):
            os.chmod(path, stat.S_IMODE(mode) | wanted)


def measure(path: Path, *, digest: bool = True) -> tuple[str, int]:
    """Digest ("sha256:…", or empty when it is not wanted) and size of a file, or of all below a folder."""
    if path.name == REF_FILE:  # the image itself lies in an engine's own store
        ref = Ref.read(path)
        return (ref.digest if digest else "", ref.size_bytes)
    if not path.is_dir():
        if not digest:
            return "", path.stat().st_size
        with path.open("rb") as file:
            return f"sha256:{sha256_of(file)}", os.fstat(file.fileno()).st_size
    return (tree_digest(path) if digest else "", tree_size(path))


def tree_size(folder: Path) -> int:
    total = 0
    for current, _, names in os.walk(folder):
        total += sum(os.lstat(os.path.join(current, name)).st_size for name in names)
    return total


def tree_digest(folder: Path) -> str:
    """The digest of a folder: of the list of all its entries, by path, with what each is and the digest of its bytes.

    Times and owners are left out: they differ between two copies of one image.
    """
    whole = hashlib.sha256()
    for current, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(current, name))]
        for name in sorted([*names, *folders]):
            path = os.path.join(current, name)
            mode = os.lstat(path).st_mode
            if name in links or stat.S_ISLNK(mode):
                what = f"link {os.readlink(path)}"
            elif stat.S_ISDIR(mode):
                what = f"folder {stat.S_IMODE(mode):o}"
            elif stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    what = f"file {stat.S_IMODE(mode):o} {sha256_of(file)}"
            else:
                what = "other"
            entry = f"{os.path.relpath(path, folder)}\0{what}\0"
            whole.update(entry.encode(errors="surrogateescape"))
    return f"sha256:{whole.hexdigest()}"
