"""The Apptainer builder, for an ordinary account: no root, no entry in /etc/subuid, no fakeroot program.

A build has one folder, the sandbox, and every stage works in it, in a user namespace in which the account is root (see
`ownership.py` for what that alone does not allow). A layer that is kept is a squashfs file of the sandbox: one file
instead of tens of thousands is what parallel file systems like, and it is made faster than a folder is copied. The
image is a SIF file with the same contents, compressed with zstd where that can be read: in a tenth of gzip's time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from diamond.agent.builders import bases, ownership
from diamond.agent.builders.base import NETWORK_ENVS, BuildContext, BuildProblem, Clock, CommandFailed, Commands
from diamond.agent.builders.keeper import kept
from diamond.agent.builders.removing import remove_tree
from diamond.agent.builders.steps import APT_FILE, STEPS_FILE, write_steps
from diamond.agent.builders.store import make_readable
from diamond.core.definitions import INSIDE, apptainer_definition
from diamond.core.images import ENV_IN_IMAGE
from diamond.core.recipes import Recipe, Stage

OLDEST = (1, 1)  # the first that can go without /etc/subuid
# A stage that took less is done again as quickly as its layer would be read.
WORTH_KEEPING_S = 0.5
_PROBE_S = 20
_MAX_LABELS_BYTES = 1024 * 1024
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")

# Measured on a Debian with Python, 170 MB: gzip 11.8 s for 70 MB, zstd 6 1.2 s for 69 MB, zstd 2 0.5 s for 74 MB.
_LAYER_SQUASH = ("-comp", "zstd", "-Xcompression-level", "2")
_IMAGE_SQUASH = ("-comp", "zstd", "-Xcompression-level", "6")
_SQUASH_OPTIONS = ("-all-root", "-noappend", "-no-progress", "-no-xattrs", "-quiet")

# The build is thrown away when the machine fails, so nothing in it has to reach the disk early.
_APT = """\
Acquire::Languages "none";
DPkg::Options { "--force-unsafe-io"; };
"""

# Numbers of SIF's own: what a data object is, and which machine a partition is for.
_SIF_DEFINITION, _SIF_PARTITION, _SIF_SQUASHFS, _SIF_PRIMARY = "1", "4", "1", "2"
_SIF_MACHINES = {"x86_64": "2", "aarch64": "4", "ppc64le": "6", "s390x": "11", "riscv64": "12"}

# Read by Apptainer itself in whatever program it starts in the image, so that it serves without Diamond too.
_ENV_SCRIPT = f"if [ -r {ENV_IN_IMAGE} ]; then . {ENV_IN_IMAGE}; fi\n"
_FINISH = f"""\
set -e
here=${{0%/*}}
sh "$here/{STEPS_FILE}" pack "$here/inputs"
cp "$here/labels.json" /.singularity.d/labels.json
cp "$here/definition" /.singularity.d/Singularity
cp "$here/env" /.singularity.d/env/91-diamond.sh
chmod 644 /.singularity.d/labels.json /.singularity.d/Singularity
chmod 755 /.singularity.d/env/91-diamond.sh
"""

_IN_IMAGE = f'if [ -r {ENV_IN_IMAGE} ]; then . {ENV_IN_IMAGE}; fi; exec "$@"'


class ApptainerBuilder:
    name = "apptainer"
    suffix = "image.sif"

    # -- what is here ---------------------------------------------------------------------------------------------

    def version(self) -> str:
        return _version()

    def problem(self) -> str:
        if not _tool("apptainer"):
            return (
                "Apptainer is not on PATH; load it (module load apptainer) before the agent starts, or ask the site to "
                "install it"
            )
        if _numbers(_version()) < OLDEST:
            found = _version() or "of unknown version"
            return f"Apptainer {found} is too old to build as an ordinary account; ask the site for 1.1 or newer"
        if missing := [name for name in ("mksquashfs", "unsquashfs") if not _tool(name)]:
            return f"{' and '.join(missing)} is not installed; ask the site for the package squashfs-tools"
        if os.geteuid() != 0 and (refusal := _no_namespaces()):
            return (
                f"this machine refuses user namespaces to ordinary accounts ({refusal}), and without them Apptainer "
                "cannot build; build on another node (`where: login` or `batch`), or ask the site to allow them "
                "(sysctl user.max_user_namespaces)"
            )
        if os.geteuid() != 0 and not ownership.is_supported() and not _tool("fakeroot"):
            return "on this kind of machine a build needs the fakeroot program; ask the site to install it"
        return ""

    def check(self, recipe: Recipe) -> None:
        if recipe.base == "host":
            raise BuildProblem(
                "the endpoint's own system is no base for a container",
                hint="name one, such as docker://python:3.12-slim, or leave out `builder`",
            )

    def definition(self, recipe: Recipe, stage_names: Sequence[str]) -> str:
        return apptainer_definition(recipe, stage_names)

    def base_key(self, ctx: BuildContext) -> str:
        return bases.base_key(bases.find_base(ctx), ctx)

    # -- layers and images ----------------------------------------------------------------------------------------

    def make(self, stage: Stage, previous: Path | None, target: Path, ctx: BuildContext) -> None:
        sandbox = _Sandbox(ctx)
        clock = Clock()
        if stage.name == "base":
            local = sandbox.unpack_base()
        else:
            assert previous is not None
            sandbox.go_on_from(previous)
            clock = Clock()
            sandbox.run(STEPS_FILE, stage.name, f"{INSIDE}/inputs")
            local = False
        if not local and clock.seconds >= WORTH_KEEPING_S:
            sandbox.squash(target, _LAYER_SQUASH)
        sandbox.is_now(target)

    def pack(self, last: Path, target: Path, ctx: BuildContext) -> None:
        sandbox = _Sandbox(ctx)
        sandbox.go_on_from(last)
        sandbox.finish()
        squash = ctx.tmp / "image.squashfs"
        for options in (_IMAGE_SQUASH, ()):
            sandbox.squash(squash, options)
            _write_sif(squash, target, ctx)
            try:
                self.run(target, ["/bin/sh", "-c", "exit 0"], ctx, quiet=True)
            except CommandFailed:
                # Programs that mount images were built without zstd at some sites; all of them know gzip.
                if not options:
                    raise
                remove_tree(target)
            else:
                break
        sandbox.discard()

    def run(self, image: Path, argv: Sequence[str], ctx: BuildContext, *, quiet: bool = False) -> str:
        place = ctx.tmp / "run"
        place.mkdir(exist_ok=True)
        command = [
            *("apptainer", "--silent", "exec", "--cleanenv", "--contain", "--no-home", "--pid", "--pwd", "/"),
            *("--no-mount", "home,cwd,hostfs,bind-paths"),
            *("--workdir", str(place), *_bind(ctx.inputs, str(ctx.inputs), read_only=True), *_gpu_flags()),
            *(str(image), "/bin/sh", "-c", _IN_IMAGE, "sh", *argv),
        ]
        return ctx.commands.run(kept(command), env=_environment(ctx, {"PYTHONNOUSERSITE": "1"}), quiet=quiet)

    def remove(self, image: Path) -> None:
        """Nothing of it is anywhere else."""

    def save(self, image: Path, target: Path, commands: Commands) -> None:
        _same_file(image.resolve(), target)

    def load(self, payload: Path, target: Path, commands: Commands) -> None:
        _same_file(payload, target)
        # An image that others make use of must be theirs to read, and nobody's to change.
        target.chmod(0o644)


class _Sandbox:
    """The folder in which a build's stages work, one after the other. A file beside it says which stage it has reached:
    a stage that was cut short leaves none, and its half is never taken for the whole."""

    def __init__(self, ctx: BuildContext) -> None:
        self._ctx = ctx
        self._root = ctx.tmp / "sandbox"
        self._reached = ctx.tmp / "sandbox.reached"
        self._steps = ctx.folder / "steps"

    def unpack_base(self) -> bool:
        """Begin anew with the recipe's base; whether that is a matter of copying what is on this machine."""
        self._forget()
        base = bases.find_base(self._ctx)
        sources = {"registry": "docker://", "oci": "oci-archive:", "docker": "docker-archive:"}
        if base.kind == "rootfs":
            self._untar(base.path)
            source = str(self._root.with_name("rootfs"))
        else:
            source = sources.get(base.kind, "") + base.where
        argv = ["apptainer", "build", "--sandbox", "--fix-perms", "--force", str(self._root), source]
        env = _environment(self._ctx, self._ctx.network, for_itself=True)
        self._ctx.commands.run(kept([*_as_owner(), *argv]), env=env)
        remove_tree(self._root.with_name("rootfs"))
        remove_tree(self._ctx.tmp / "cache")
        make_readable(self._root)
        return base.kind in ("folder", "sif", "image", "rootfs", "squash")

    def go_on_from(self, layer: Path) -> None:
        """Be what this layer is, unless the sandbox is that already."""
        if self._reached.is_file() and self._reached.read_text() == layer.parent.name:
            self._reached.unlink()
            return
        self._forget()
        argv = [_tool("unsquashfs"), "-no-progress", "-no-xattrs", "-quiet", "-dest", str(self._root), str(layer)]
        self._ctx.commands.run(argv, quiet=True)

    def is_now(self, layer: Path) -> None:
        self._reached.write_text(layer.parent.name)

    def run(self, script: str, *arguments: str) -> None:
        """Run one of Diamond's own scripts in it, as its root, which finds the recipe's text and the way to indexes."""
        ctx = self._ctx
        if not self._steps.is_dir():
            self._write_steps()
        place = self._root / INSIDE.lstrip("/")
        place.mkdir()
        for name in ("resolv.conf", "hosts"):  # mounted over, which needs something to mount over
            file = self._root / "etc" / name
            if not os.path.lexists(file) and file.parent.is_dir() and not file.parent.is_symlink():
                file.touch()
        argv = [
            *(*_as_owner(), "apptainer", "--silent", "exec", *_root_flags(), "--writable", "--cleanenv", "--pid"),
            *("--no-home", "--no-mount", "home,cwd,tmp,hostfs,bind-paths", "--pwd", "/"),
            *_bind(Path("/etc/hosts"), "/etc/hosts", read_only=True),
            *_bind(self._steps, INSIDE, read_only=True),
            *_bind(ctx.inputs, f"{INSIDE}/inputs", read_only=True),
            *(str(self._root), "/bin/sh", f"{INSIDE}/{script}", *arguments),
        ]
        try:
            ctx.commands.run(kept(argv), env=_environment(ctx, {}))
        finally:
            place.rmdir()
        make_readable(self._root)

    def finish(self) -> None:
        """Variables, labels and definition."""
        if not self._steps.is_dir():
            self._write_steps()
        labels = {**_labels(self._root), **self._ctx.recipe.labels}
        (self._steps / "labels.json").write_text(json.dumps(labels))
        self.run("finish.sh")

    def squash(self, target: Path, options: Sequence[str]) -> None:
        remove_tree(target)
        argv = [_tool("mksquashfs"), str(self._root), str(target), *_SQUASH_OPTIONS, *options]
        self._ctx.commands.run([*argv, "-processors", str(_num_cpus())], quiet=True)

    def discard(self) -> None:
        """Remove it while the image is looked at: tens of thousands of files take seconds."""
        threading.Thread(target=self._forget, name="discard-sandbox").start()

    def _write_steps(self) -> None:
        ctx = self._ctx
        write_steps(self._steps, ctx.network, inside=INSIDE, sandbox=True)
        with (self._steps / APT_FILE).open("a") as file:
            file.write(_APT)
            if "SSL_CERT_FILE" in ctx.network:
                file.write(f'Acquire::https::CAInfo "{INSIDE}/SSL_CERT_FILE.crt";\n')
        (self._steps / "inputs").mkdir()
        (self._steps / "definition").write_text(definition_of(ctx))
        (self._steps / "env").write_text(_ENV_SCRIPT)
        (self._steps / "finish.sh").write_text(_FINISH)

    def _untar(self, archive: Path) -> None:
        folder = self._root.with_name("rootfs")
        folder.mkdir()
        argv = ["tar", "-x", "-f", str(archive), "-C", str(folder), "--exclude=./dev/*", "--exclude=dev/*"]
        self._ctx.commands.run([*argv, "--no-same-owner"], quiet=True)
        make_readable(folder)

    def _forget(self) -> None:
        self._reached.unlink(missing_ok=True)
        remove_tree(self._root)


def _labels(root: Path) -> dict[str, str]:
    """Those the base came with. Not through links: programs of a build could have made them lead anywhere."""
    file = root / ".singularity.d" / "labels.json"
    if file.is_symlink() or file.parent.is_symlink() or not file.is_file() or file.stat().st_size > _MAX_LABELS_BYTES:
        return {}
    try:
        found = json.loads(file.read_bytes())
    except ValueError:
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def definition_of(ctx: BuildContext) -> str:
    stage_names = ["base"]
    for name, wanted in (("system", ctx.recipe.system), ("conda", ctx.recipe.conda), ("pip", ctx.recipe.pip)):
        stage_names += [name] if wanted else []
    if ctx.recipe.files or ctx.recipe.build:
        stage_names.append("commands")
    return apptainer_definition(ctx.recipe, stage_names, base_path=ctx.work.base_path)


def _write_sif(squash: Path, target: Path, ctx: BuildContext) -> None:
    """A SIF file is a list of data objects; Apptainer's own `build` would copy the whole sandbox once more."""
    definition = ctx.folder / "definition.def"
    definition.write_text(definition_of(ctx))
    part = target.with_name(f"{target.name}.part")
    sif = ["apptainer", "--silent", "sif"]
    ctx.commands.run([*sif, "new", str(part)], quiet=True)
    add = [*sif, "add", "--groupid", "1", "--datatype"]
    ctx.commands.run([*add, _SIF_DEFINITION, str(part), str(definition)], quiet=True)
    machine = _SIF_MACHINES[os.uname().machine]
    of_partition = ["--parttype", _SIF_PRIMARY, "--partfs", _SIF_SQUASHFS, "--partarch", machine]
    ctx.commands.run([*add, _SIF_PARTITION, *of_partition, str(part), str(squash)], quiet=True)
    squash.unlink()
    part.chmod(0o755)
    os.rename(part, target)


def _as_owner() -> list[str]:
    return [] if os.geteuid() == 0 or not ownership.is_supported() else [sys.executable, "-m", ownership.__name__]


def _root_flags() -> list[str]:
    if os.geteuid() == 0:
        return []
    if not ownership.is_supported():
        return ["--fakeroot"]
    return ["--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command"]


def _gpu_flags() -> list[str]:
    """So that a validation command can see the GPUs of the node it runs on."""
    flags = (("/dev/nvidiactl", "--nv"), ("/dev/kfd", "--rocm"))
    return [flag for device, flag in flags if os.path.exists(device)]


def _bind(source: Path, target: str, *, read_only: bool) -> list[str]:
    """As `--mount`, whose fields can be quoted: a path may hold any character."""
    fields = ["type=bind", f"source={source}", f"destination={target}", *(["ro"] if read_only else [])]
    quoted = ['"' + field.replace('"', '""') + '"' if re.search(r'[",]', field) else field for field in fields]
    return ["--mount", ",".join(quoted)]


def _environment(ctx: BuildContext, inside: Mapping[str, str], *, for_itself: bool = False) -> dict[str, str]:
    """For Apptainer: this process's variables without those that would change what it does, and large files of its own
    in the build's folder. What programs inside get is `inside`, or `network.sh`: never the endpoint's settings."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in NETWORK_ENVS and not re.match(r"(APPTAINER|SINGULARITY)(ENV)?_|LD_PRELOAD$", name)
    }
    logins = ("DOCKER_USERNAME", "DOCKER_PASSWORD", "DOCKER_HOST", "AUTHFILE", "CONFIGDIR")
    for name in (f"{prefix}_{login}" for prefix in ("APPTAINER", "SINGULARITY") for login in logins):
        if for_itself and name in os.environ:
            env[name] = os.environ[name]
    env |= {"APPTAINER_TMPDIR": str(ctx.tmp), "APPTAINER_CACHEDIR": str(ctx.tmp / "cache")}
    return env | (dict(inside) if for_itself else {f"APPTAINERENV_{name}": value for name, value in inside.items()})


def _same_file(source: Path, target: Path) -> None:
    """A second name for it where the file system allows, else a copy; never half of one."""
    part = target.with_name(f"{target.name}.part")
    remove_tree(part)
    try:
        os.link(source, part)
    except OSError:
        shutil.copyfile(source, part)
    os.replace(part, target)


def _tool(name: str) -> str:
    """The program's path; empty when it is not here. Ordinary accounts often lack sbin in their PATH."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SBIN])
    return shutil.which(name, path=path) or ""


def _num_cpus() -> int:
    """Those this process may use, which in a batch job is fewer than the node has."""
    return len(os.sched_getaffinity(0))


@lru_cache
def _version() -> str:
    said = _said(["apptainer", "--version"])
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())[:2]


def _said(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, errors="replace", timeout=_PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _no_namespaces(proc: Path = Path("/proc")) -> str:
    """Why an ordinary account gets no user namespace here; empty when nothing is known to forbid it."""
    if not (proc / "self/ns/user").exists():
        return "the kernel has none"
    for name in ("user/max_user_namespaces", "kernel/unprivileged_userns_clone"):
        with contextlib.suppress(OSError):
            if (proc / "sys" / name).read_text().strip() == "0":
                return f"{name.replace('/', '.')} is 0"
    return ""


__all__ = ["OLDEST", "WORTH_KEEPING_S", "ApptainerBuilder", "definition_of"]
