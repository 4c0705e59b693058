"""What run directories hold for images: the way into a task's image, and the order of a job that looks after images.

Says what files contain; `staging` writes them. Looks at images, changes none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import diamond
from diamond.agent import programs
from diamond.agent.image_policy import IMAGES
from diamond.core.codec import encode
from diamond.core.images import PAYLOAD_FILE, ImageUse
from diamond.core.inside import SHIELD, SHIELD_NAME, enter_script, env_script, inside_script
from diamond.core.rundir import RunDir
from diamond.core.views import HOME, LIBRARY, SHOWN_FILES, SHOWN_FOLDERS, View
from diamond.core.wire import JobOrder

# The whole of run.sh: nothing an order says is part of it. Python would import what lies in the current folder, and
# files that came with the order do; so it starts elsewhere, looks at no folder but its own (-I), and is told of ours.
RUN = """\
# Diamond itself: looks after images, as image-work.json beside this file says.
cd / || exit
exec "$DIAMOND_AGENT_PYTHON" -I -u -c '
import os, sys
if place := os.environ.get("DIAMOND_AGENT_PLACE"):
    sys.path.insert(0, place)
import runpy
runpy.run_module("diamond.agent.builders", run_name="__main__", alter_sys=True)
' "$DIAMOND_RUN_DIR/image-work.json"
"""
_ASK_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What run directories depend on beside their orders.

    Attributes:
        image_root: where images lie; None: in `images` beside the folder of the run directories.
        binds: what programs in containers should see of this endpoint.
        guest_binds: the same of those that are not of the endpoint's owner.
        modules: environment modules that bring its container runtime.
        home: of the account; see `diamond.core.views.View`, also for the next.
        hidden: folders of the agent's own.
        max_image_bytes: of an image that is built here; 0: any.
    """

    image_root: Path | None = None
    binds: tuple[str, ...] = ()
    guest_binds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    home: str = ""
    hidden: tuple[str, ...] = ()
    max_image_bytes: int = 0

    def view(self, *, is_guest: bool) -> View:
        return View(is_guest=is_guest, home=self.home, hidden=self.hidden)

    def root_for(self, run_dir: RunDir) -> Path:
        return self.image_root or run_dir.path.parent.parent / IMAGES


def why_missing(use: ImageUse) -> str:
    """Why a job cannot run in this image; empty when it can, as far as a look at it tells."""
    if use.kind in ("podman", "docker"):
        said = programs.ask([use.kind, "image", "inspect", "--format", "{{.Id}}", use.path], timeout_s=_ASK_S)
        if said.status != 0:
            return f"{use.kind} has no image {use.path} here: {said.err.strip()[-300:]}"
        found_id = said.out.strip().removeprefix("sha256:")
        if use.digest and found_id != use.digest.removeprefix("sha256:"):
            return f"{use.path} is another image than it was: its id is {found_id[:80]}, not {use.digest}"
        return ""
    try:
        found = os.stat(use.path)
    except OSError as error:
        return f"{use.path}: {error.strerror}"
    if not os.access(use.path, os.R_OK):
        return f"{use.path} cannot be read by this account"
    if stat.S_ISREG(found.st_mode):
        if use.size_bytes and found.st_size != use.size_bytes:
            return f"{use.path} has {found.st_size} bytes instead of {use.size_bytes}: it is another image"
    elif not stat.S_ISDIR(found.st_mode):
        return f"{use.path} is neither a file nor a folder"
    return ""


def entrance(
    use: ImageUse,
    run_dir: RunDir,
    envs: Mapping[str, str],
    around: Surroundings,
    library: str,
    secrets: bool = False,
    is_guest: bool = False,
) -> dict[Path, bytes]:
    """The files by which programs get into the image. Those in `shield` are programs.

    Args:
        is_guest: the task is of somebody else than the endpoint's owner.

    Raises:
        InvalidInput: no runtime could be told of these paths.
    """
    path = str(run_dir.path)
    view = around.view(is_guest=is_guest)
    binds = around.guest_binds if is_guest else around.binds
    files = {
        run_dir.inside: inside_script(
            use, run_dir=path, binds=binds, modules=around.modules, library=library, view=view
        ),
        run_dir.enter: enter_script(use, run_dir=path, library=library, secrets=secrets, view=view),
        run_dir.env_script: env_script(envs),
    }
    if use.kind == "apptainer":
        files[run_dir.shield / SHIELD_NAME] = SHIELD
    return {file: text.encode() for file, text in files.items()}


def make_view(run_dir: RunDir, library: str = "") -> None:
    """What stands in for the run directory in a guest's container: places to put its files at, and room for more.

    Made once, before anything of the guest's runs: the guest can write here, so nothing here may be written later.

    Args:
        library: see `ScriptPlan.library`; copied, since not every runtime can show a file for reading alone.
    """
    run_dir.view.mkdir(mode=0o700)
    for name in SHOWN_FILES:
        if os.path.lexists(run_dir.path / name):
            (run_dir.view / name).touch(mode=0o600)
    if library:
        shutil.copyfile(library, run_dir.view / LIBRARY)
    for name in SHOWN_FOLDERS:
        if os.path.lexists(run_dir.path / name):
            (run_dir.view / name).mkdir(mode=0o700)
    (run_dir.view / HOME).mkdir(mode=0o700)
    if run_dir.work.is_symlink():
        os.symlink(os.readlink(run_dir.work), run_dir.view / run_dir.work.name)
    else:
        (run_dir.view / run_dir.work.name).mkdir(mode=0o700)


def work_file(order: JobOrder, run_dir: RunDir, around: Surroundings) -> bytes:
    """image-work.json, as `diamond.agent.builders.build.ImageJob` reads it."""
    raw = {
        "work": encode(order.work),
        "root": str(around.root_for(run_dir)),
        "job_id": order.job_id,
        "run_dir": str(run_dir.path),
        "max_image_bytes": around.max_image_bytes,
    }
    return json.dumps(raw).encode()


def work_envs() -> dict[str, str]:
    """What makes RUN start this very agent's code, be it installed, one file or a source tree."""
    place = str(Path(diamond.__file__).parents[1])
    envs = {"DIAMOND_AGENT_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    if place not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        envs |= {"DIAMOND_AGENT_PLACE": place, "PYTHONPATH": place}  # the latter for programs that it starts
    return envs


def forget_payloads(run_dirs: Iterable[Path]) -> None:
    """The bytes of an image on its way are needed by nobody once the server knows how the job ended."""
    for run_dir in run_dirs:
        with contextlib.suppress(OSError):
            (RunDir(run_dir).work / PAYLOAD_FILE).unlink()
