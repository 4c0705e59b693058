"""Charliecloud: layers and images are plain folders, changed and entered with ch-run, by an ordinary account.

Stages run in a copy of the layer before, under `ch-run --write --seccomp`: what `ch-image build --force` does with the
same Containerfile (`definition`), without its three further copies of the whole image a stage. Its own programs are
used for what comes from a registry.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from diamond.agent import programs
from diamond.agent.builders import bases, steps
from diamond.agent.builders.archives import unpack_folder, unpack_image
from diamond.agent.builders.base import BuildContext, BuildProblem, CommandFailed, Commands
from diamond.agent.builders.guarded import read_inside, write_inside
from diamond.agent.builders.keeper import kept
from diamond.agent.builders.removing import remove_tree
from diamond.agent.builders.tars import NO_TAR
from diamond.core.containerfiles import INPUTS, STEPS, containerfile, step_argv
from diamond.core.images import ENV_IN_IMAGE
from diamond.core.recipes import Recipe, Stage

OLDEST = (0, 32)  # the first whose ch-run can pretend to be root (--seccomp), as package managers want
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TMP = "/tmp"  # noqa: S108 - inside an image
_ASK_S = 30.0
_KERNEL = ("dev", "proc", "sys")  # the machine's own are mounted there; what a folder has is not copied
_NEEDED = (*_KERNEL, "etc", "home", "mnt", "opt", "root", "run", "tmp", "usr", "var")
_LENT = stat.S_ISUID | stat.S_ISGID
_ENTER = f'if [ -f {ENV_IN_IMAGE} ]; then . {ENV_IN_IMAGE}; fi; exec "$@"'


class CharliecloudBuilder:
    name = "charliecloud"
    suffix = "image"

    def version(self) -> str:
        if programs.find("ch-run") is None:
            return ""
        said = programs.ask(["ch-run", "--version"], timeout_s=_ASK_S)
        found = re.search(r"[0-9]+\.[0-9.]+", f"{said.out}\n{said.err}")
        return found[0] if found else ""

    def problem(self) -> str:
        if not (version := self.version()):
            return "Charliecloud is not installed here; load its module, or ask for it"
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            return (
                f"Charliecloud {version} cannot install packages as an ordinary account; version "
                f"{'.'.join(map(str, OLDEST))} or newer is needed"
            )
        if programs.ask(["ch-run", "--feature=seccomp"], timeout_s=_ASK_S).status != 0:
            return "Charliecloud was built without seccomp, which installing packages needs; ask for one built with it"
        return self._trouble()

    def _trouble(self) -> str:
        """Enter a container for real, made of this machine's own programs: nothing else tells whether one can."""
        with tempfile.TemporaryDirectory(prefix="diamond-charliecloud-") as name:
            folder = Path(name)
            binds = []
            for top in ("bin", "lib", "lib32", "lib64", "usr"):
                if os.path.islink(f"/{top}"):
                    (folder / top).symlink_to(os.readlink(f"/{top}"))
                elif os.path.isdir(f"/{top}"):
                    (folder / top).mkdir()
                    binds.append(f"--bind=/{top}:/{top}")
            for top in _NEEDED:
                (folder / top).mkdir(exist_ok=True)
            # The second folder that is not there is what --write-fake is needed for.
            argv = ["ch-run", "--write-fake", "--no-passwd", *binds, f"--bind={name}:/not/there", name, "--", "true"]
            said = programs.ask(argv, timeout_s=_ASK_S)
        return "" if said.status == 0 else explain(said.err)

    def check(self, recipe: Recipe) -> None:
        if recipe.base == "host":
            raise BuildProblem(
                "Charliecloud builds containers, and the base `host` is none",
                hint="give a base such as docker://python:3.12-slim, or build with venv",
                code="base",
            )
        if recipe.base.endswith(".sif"):
            raise bases.not_for(bases.Base(kind="sif", where=recipe.base), "Charliecloud")

    def definition(self, recipe: Recipe, stage_names: Sequence[str]) -> str:
        return containerfile(recipe, stage_names, mounts=False)

    def base_key(self, ctx: BuildContext) -> str:
        return bases.base_key(bases.find_base(ctx), ctx)

    # -- building ------------------------------------------------------------------------------------------------

    def make(self, stage: Stage, previous: Path | None, target: Path, ctx: BuildContext) -> None:
        if previous is None:
            self._bring_in(bases.find_base(ctx), target, ctx)
            for name in _NEEDED:
                if not os.path.lexists(target / name):
                    (target / name).mkdir()
        else:
            _copy(previous, target, ctx.commands)
            self._step(stage.name, target, ctx)
        _open_up(target)

    def pack(self, last: Path, target: Path, ctx: BuildContext) -> None:
        # Neither is ever changed again, so they may share their files. Not every file system has hard links.
        try:
            ctx.commands.run(["cp", "-a", "-l", str(last), str(target)], quiet=True)
        except CommandFailed:
            remove_tree(target)
            _copy(last, target, ctx.commands)
        self._step("pack", target, ctx)
        _label(target, {"diamond.image": ctx.work.image_id, "diamond.recipe": ctx.recipe.digest, **ctx.recipe.labels})

    def _step(self, stage: str, image: Path, ctx: BuildContext) -> None:
        given = ctx.folder / "steps"
        if not given.exists():
            steps.write_steps(given, ctx.network, inside=STEPS, sandbox=True)
        tmp = ctx.tmp / "inside"
        tmp.mkdir(exist_ok=True)
        options = ["--write", "--seccomp", "--uid=0", "--gid=0", "--no-passwd", "--cd=/", *_variables(image, "/root")]
        binds = [f"--bind={ctx.inputs}:{INPUTS}", f"--bind={given}:{STEPS}", f"--bind={tmp}:{TMP}"]
        command = ["ch-run", *options, *binds, str(image), "--", *step_argv(stage)]
        # Kept, for where there is no process namespace: daemons that packages start, and all of a step that is stopped,
        # would stay.
        ctx.commands.run(kept([*_alone(), *command]), env=_environ())

    def _bring_in(self, base: bases.Base, target: Path, ctx: BuildContext) -> None:
        if base.kind == "registry":
            self._pull(base.where, target, ctx)
        elif base.kind == "folder" or (base.kind == "image" and base.path.is_dir()):
            target.mkdir()
            for entry in sorted(base.path.iterdir()):
                if entry.name not in _KERNEL:
                    _copy(entry, target / entry.name, ctx.commands)
        elif base.kind == "rootfs":
            target.mkdir()
            _unpack(base.path, target, leave=_KERNEL)
        elif base.kind in ("docker", "oci"):
            _set_variables(target, unpack_image(base.path, target))
        elif base.kind == "squash":
            ctx.commands.run(["ch-convert", "-i", "squash", "-o", "dir", base.where, str(target)], env=_environ())
        else:
            raise bases.not_for(base, "Charliecloud")

    def _pull(self, reference: str, target: Path, ctx: BuildContext) -> None:
        if programs.find("ch-image") is None:
            raise BuildProblem(
                "Charliecloud has no ch-image here, which fetches images from registries",
                hint="ask for it (it needs Python and two of its packages), or use a base that lies on this endpoint",
                code="base",
            )
        storage = ctx.folder / "storage"  # of our own: the account's may be in use, and is the account's
        env = {**_environ(), **ctx.network}
        if "SSL_CERT_FILE" in env:
            env.setdefault("REQUESTS_CA_BUNDLE", env["SSL_CERT_FILE"])  # ch-image reads only the latter
        at = ["-s", str(storage)]
        ctx.commands.run(["ch-image", "pull", "--no-cache", *at, reference, "base"], env=env)
        convert = ["ch-convert", "-i", "ch-image", "-o", "dir", *at, "base", str(target)]
        ctx.commands.run(convert, env=env, quiet=True)
        remove_tree(storage)

    # -- using ---------------------------------------------------------------------------------------------------

    def run(self, image: Path, argv: Sequence[str], ctx: BuildContext, *, quiet: bool = False) -> str:
        # Over the image lies a file system in memory, in which folders to mount on can be made.
        options = ["--write-fake", "--private-tmp", "--cd=/", *_variables(image, TMP)]
        binds = [f"--bind={ctx.inputs}:{ctx.inputs}"]
        command = ["ch-run", *options, *binds, str(image), "--", "/bin/sh", "-c", _ENTER, "sh", *argv]
        return ctx.commands.run(kept([*_alone(), *command]), env=_environ(), quiet=quiet)

    def remove(self, image: Path) -> None:
        """A folder in the store is all there is."""

    def save(self, image: Path, target: Path, commands: Commands) -> None:
        # A tar of a root file system: what podman import, docker import and ch-image import take.
        how = ["--numeric-owner", "--owner=0", "--group=0", "--sort=name", "--use-compress-program=gzip -1"]
        commands.run(["tar", "-C", str(image), "-cf", str(target), *how, "."], quiet=True)

    def load(self, payload: Path, target: Path, commands: Commands) -> None:
        target.mkdir()
        _unpack(payload, target)
        _open_up(target)


def _unpack(archive: Path, target: Path, leave: Sequence[str] = ()) -> None:
    try:
        unpack_folder(archive, target, leave=leave)
    except (*NO_TAR, OSError) as error:
        raise BuildProblem(
            f"{archive} is not a tar of a root file system that can be unpacked here: {error}",
            hint="write it with `podman export` or `tar`; it may be compressed with gzip, bzip2 or xz",
            code="base",
        ) from error


@lru_cache(maxsize=1)
def _alone() -> tuple[str, ...]:
    """So that programs of a build have no other process of this account to end; looking into one their user namespace
    forbids them anyway. Where `unshare` is too old for that, they have."""
    begin = (programs.find("unshare") or "", *("--user", "--map-current-user", "--pid", "--fork", "--kill-child"))
    whole = (*begin, "--mount-proc")
    return whole if begin[0] and programs.ask([*whole, "true"], timeout_s=_ASK_S).status == 0 else ()


def _environ() -> dict[str, str]:
    """ch-run wants $USER, which batch jobs and services do not always have."""
    return {"USER": str(os.geteuid()), **os.environ}


def _variables(image: Path, home: str) -> list[str]:
    """Of the image instead of this machine's."""
    found = ["--unset-env=*", "--env-no-expand", f"--set-env=PATH={PATH}", f"--set-env=HOME={home}"]
    file = image / "ch/environment"
    linked = file.is_symlink() or file.parent.is_symlink()
    return [*found, f"--set-env={file}"] if file.is_file() and not linked else found


def _set_variables(image: Path, lines: Sequence[str]) -> None:
    """In the file where Charliecloud itself leaves what an image sets; a value of several lines has no place there."""
    write_inside(image, "ch/environment", "".join(f"{line}\n" for line in lines if "\n" not in line))


def _label(image: Path, labels: dict[str, str]) -> None:
    """Beside what Charliecloud knows of the image. The file is replaced: the layer below has the same one."""
    name = "ch/metadata.json"
    try:
        known = json.loads(read_inside(image, name) or b"")
    except (ValueError, RecursionError):
        known = None
    if not isinstance(known, dict):
        known = {"arch": None, "cwd": "/", "env": {}, "shell": ["/bin/sh", "-c"], "volumes": [], "history": []}
    earlier = known.get("labels")
    known["labels"] = {**(earlier if isinstance(earlier, dict) else {}), **labels}
    write_inside(image, name, json.dumps(known, indent=2, sort_keys=True))


def _copy(source: Path, target: Path, commands: Commands) -> None:
    commands.run(["cp", "-a", "--reflink=auto", str(source), str(target)], quiet=True)


def _open_up(folder: Path) -> None:
    """Everything in it can be read by whoever may enter the store, and removed by its owner; nothing else is in it
    than folders, files and links, and none of them lends anybody its owner's rights: all of it can travel.

    Inside, the build was root, to whom a file's mode means nothing; outside it is an ordinary account again.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        parent = waiting.pop()
        _permit(parent, os.lstat(parent).st_mode, 0o755)
        with os.scandir(parent) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    _permit(entry.path, entry.stat(follow_symlinks=False).st_mode, 0o644)
                elif not entry.is_symlink():
                    os.unlink(entry.path)


def _permit(path: str, mode: int, wanted: int) -> None:
    if mode & wanted != wanted or mode & _LENT:
        os.chmod(path, stat.S_IMODE(mode) & ~_LENT | wanted)


_CAUSES = (
    (
        r"unshare|namespaces|CLONE_NEWUSER",
        "the kernel does not let ordinary accounts make user namespaces, which Charliecloud needs; have "
        "user.max_user_namespaces raised (and kernel.unprivileged_userns_clone=1 where that exists)",
    ),
    (
        r"overlay|write-fake",
        "the kernel does not let ordinary accounts mount overlay file systems, which Charliecloud needs "
        "(--write-fake); Linux 5.11 or newer does",
    ),
)


def explain(said: str) -> str:
    """What ch-run's complaint means and what to do about it."""
    for pattern, cause in _CAUSES:
        if re.search(pattern, said):
            return cause
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return f"Charliecloud cannot start a container here: {lines[-1] if lines else 'it said nothing'}"
