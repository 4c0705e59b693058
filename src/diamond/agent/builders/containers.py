"""Podman and Docker, for a workstation: layers and images live in the engine's own store, and only their names in ours.

A layer is a folder, an image a file; either holds `image.ref` (see `refs.Ref`). Names of layers follow their key, so
that what a killed build left behind is taken over by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from diamond.agent import programs
from diamond.agent.builders import bases, steps
from diamond.agent.builders.base import BuildContext, BuildProblem, Commands
from diamond.agent.builders.nameless import strip_names
from diamond.agent.builders.refs import REF_FILE, Ref
from diamond.core.containerfiles import INPUTS, STEPS, containerfile, full_reference, step_argv
from diamond.core.ids import is_id
from diamond.core.images import ENV_IN_IMAGE
from diamond.core.recipes import Recipe, Stage

_ASK_S = 30.0
_CONTAINER = re.compile(r"diamond-build-(\d+)-(\d+)-[0-9a-f]+")

# Process 1 of a container hears no signal it has no handler for, so this one waits for the program and passes it on.
_ENTER = f"""
if [ -f {ENV_IN_IMAGE} ]; then . {ENV_IN_IMAGE}; fi
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
"$@" &
child=$!
wait "$child"
code=$?
trap - TERM INT
exit "$code"
"""

# Runs the engine's program, and ends the container when told to stop, or when whoever started it dies: what is in a
# container is no child of ours. The engine's program passes a signal on only once the container is up, and not when it
# ends first itself, so the container is ended by its name as well.
_TIED = """
import ctypes, os, signal, subprocess, sys
parent, child, told = os.getppid(), None, []
engine, container = sys.argv[1:3]
def stop(number, frame):
    told.append(number)
    if child is not None:
        child.terminate()
signal.signal(signal.SIGTERM, stop)
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != parent:
    sys.exit(143)
child = subprocess.Popen([engine, *sys.argv[3:]])
if told:
    child.terminate()
while True:
    try:
        code = child.wait(1)
        break
    except subprocess.TimeoutExpired:
        if told:
            subprocess.run([engine, "kill", container], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
if told:
    for verb in (["kill"], ["rm", "--force"]):
        subprocess.run([engine, *verb, container], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sys.exit(128 - code if code < 0 else code)
"""


class EngineBuilder:
    """What Podman and Docker have in common: nearly all of their command line."""

    name: str
    suffix = REF_FILE
    run_options: tuple[str, ...]
    commit_options: tuple[str, ...]
    oldest: tuple[int, ...]

    def version(self) -> str:
        if programs.find(self.name) is None:
            return ""
        found = re.search(r"version v?([0-9][0-9.]*)", programs.ask([self.name, "--version"], timeout_s=_ASK_S).out)
        return found[1] if found else ""

    def problem(self) -> str:
        if not (version := self.version()):
            return f"{self.name} is not installed here; install your distribution's package of it"
        if tuple(int(part) for part in version.split(".")[:2] if part) < self.oldest:
            wanted = ".".join(str(part) for part in self.oldest)
            return f"{self.name} {version} is too old to build with; version {wanted} or newer is needed"
        return self._trouble()

    def _trouble(self) -> str:
        raise NotImplementedError

    def check(self, recipe: Recipe) -> None:
        if recipe.base == "host":
            raise BuildProblem(
                f"{self.name} builds containers, and the base `host` is none",
                hint="give a base such as docker://python:3.12-slim, or build with venv",
                code="base",
            )
        if recipe.base.endswith(".sif"):
            raise bases.not_for(bases.Base(kind="sif", where=recipe.base), self.name)

    def definition(self, recipe: Recipe, stage_names: Sequence[str]) -> str:
        return containerfile(recipe, stage_names)

    def base_key(self, ctx: BuildContext) -> str:
        return bases.base_key(bases.find_base(ctx), ctx)

    # -- building ------------------------------------------------------------------------------------------------

    def make(self, stage: Stage, previous: Path | None, target: Path, ctx: BuildContext) -> None:
        name = f"localhost/diamond-layer:{stage.key}-{_place(ctx)}"
        if previous is None:
            self._sweep()
            brought = f"localhost/diamond-base:{secrets.token_hex(8)}"
            below = self._bring_in(bases.find_base(ctx), brought, ctx)
            ctx.commands.run([self.name, "tag", below, name], quiet=True)
            if below == brought:
                programs.ask([self.name, "rmi", brought], timeout_s=_ASK_S)
        else:
            self._step(stage.name, previous, name, ctx)
        target.mkdir()
        self._ref(name).write(target / REF_FILE)

    def pack(self, last: Path, target: Path, ctx: BuildContext) -> None:
        self._sweep()
        name = f"localhost/diamond/{ctx.work.image_id}"
        labels = {"diamond.image": ctx.work.image_id, "diamond.recipe": ctx.recipe.digest, **ctx.recipe.labels}
        before = self._inspect(name)
        self._step("pack", last, name, ctx, *(f"--label={key}={value}" for key, value in labels.items()))
        self._ref(name).write(target)
        if before:  # of an earlier build of this image; it has no name any more
            programs.ask([self.name, "rmi", before], timeout_s=_ASK_S)

    def _step(self, stage: str, previous: Path, name: str, ctx: BuildContext, *options: str) -> None:
        """Do a stage's work in a container of the layer before, and keep what it became under `name`.

        Not with the engine's `build`: when that is told to stop, what it runs goes on, and nobody knows its name.
        """
        below = self._known(previous)
        given = ctx.folder / "steps"
        if not given.exists():
            steps.write_steps(given, ctx.network, inside=STEPS, sandbox=False)
        volumes = [f"--volume={ctx.inputs}:{INPUTS}:ro", f"--volume={given}:{STEPS}:ro"]
        with self._container() as container:
            argv = [*self._run(container), "--user=0", "--workdir=/", *volumes, *options, below]
            ctx.commands.run([*argv, "-c", _ENTER, "sh", *step_argv(stage)])
            changes = ["--change=ENTRYPOINT []", '--change=CMD ["/bin/sh"]']
            ctx.commands.run([self.name, "commit", *self.commit_options, *changes, container, name], quiet=True)

    def _run(self, container: str) -> list[str]:
        # Its output comes to us alone: some engines would write every build to the machine's journal as well.
        options = ["--network=host", "--pull=never", "--log-driver=none", "--entrypoint=/bin/sh"]
        tied = [sys.executable, "-I", "-c", _TIED]
        return [*tied, self.name, container, "run", f"--name={container}", *options, *self.run_options]

    @contextlib.contextmanager
    def _container(self) -> Iterator[str]:
        """A name for a container, which is gone afterwards: its programs are no children of ours, and would stay."""
        container = f"diamond-build-{os.getpid()}-{_began(os.getpid())}-{secrets.token_hex(4)}"
        try:
            yield container
        finally:
            self._end(container)

    def _end(self, container: str) -> None:
        # At once: `rm --force` alone would first wait for programs to end by themselves.
        for verb in (["kill"], ["rm", "--force"]):
            programs.ask([self.name, *verb, container], timeout_s=_ASK_S)

    def _sweep(self) -> None:
        """Remove containers of builds that were killed: their names say whose they are."""
        argv = [self.name, "ps", "--all", "--filter=name=diamond-build-", "--format={{.Names}}"]
        for name in programs.ask(argv, timeout_s=_ASK_S).out.split():
            if (found := _CONTAINER.fullmatch(name)) and _began(int(found[1])) != int(found[2]):
                self._end(name)

    def _known(self, layer: Path) -> str:
        """The name of a kept layer. The engine's store is its owner's, who may have tidied it."""
        name = Ref.read(layer).name
        if not self._inspect(name):
            raise BuildProblem(
                f"{self.name} no longer has {name}, which an earlier build kept",
                hint="build without kept layers (--fresh), or remove them (diamond image prune)",
                code="layer",
            )
        return name

    def _bring_in(self, base: bases.Base, name: str, ctx: BuildContext) -> str:
        """The recipe's base in the engine's store; its name there: `name`, unless it has one of its own."""
        if base.kind == "registry":
            reference = full_reference(base.where)
            if not reference.startswith("localhost/"):
                ctx.commands.run([self.name, "pull", reference], env=self._env(ctx))
            return reference
        if base.kind == "image":
            if base.path.is_file() and base.path.name == REF_FILE:
                return Ref.read(base.path).id
            if base.where.startswith("localhost/diamond/"):
                return base.where
            raise bases.not_for(base, self.name)
        if base.kind in ("docker", "oci"):
            self._take(base.path, base.kind, name, ctx.tmp, ctx.commands)
            return name
        if base.kind == "rootfs":
            ctx.commands.run([self.name, "import", base.where, name], quiet=True)
            return name
        if base.kind != "folder":
            raise bases.not_for(base, self.name)
        packed = ctx.tmp / f"base-{secrets.token_hex(4)}.tar"
        try:
            # Devices and other kernels' files are not part of an image. A folder that an ordinary user unpacked has
            # one owner, who was root inside.
            owner = [] if base.path.stat().st_uid == 0 else ["--owner=0", "--group=0"]
            leave = [f"--exclude=./{name}/*" for name in ("dev", "proc", "sys")]
            where = ["-C", base.where, "-cf", str(packed)]
            ctx.commands.run(["tar", *where, "--numeric-owner", "--anchored", *owner, *leave, "."], quiet=True)
            ctx.commands.run([self.name, "import", str(packed), name], quiet=True)
            return name
        finally:
            packed.unlink(missing_ok=True)

    def _take(self, archive: Path, kind: str, name: str, folder: Path, commands: Commands) -> None:
        """The image in an archive, under `name` and no other: the archive's own would be taken from images here."""
        copy = folder / f"nameless-{secrets.token_hex(4)}.tar"
        try:
            strip_names(archive, copy)
            commands.run([self.name, "tag", self._load(copy, kind, commands), name], quiet=True)
        finally:
            copy.unlink(missing_ok=True)

    def _load(self, archive: Path, kind: str, commands: Commands) -> str:
        """The image in an archive without names, in the engine's store; its id."""
        raise NotImplementedError

    def _inspect(self, name: str) -> str:
        """The id of an image; empty when there is none of this name."""
        said = programs.ask([self.name, "image", "inspect", "--format", "{{.Id}}", name], timeout_s=_ASK_S)
        return said.out.strip() if said.status == 0 else ""

    def _ref(self, name: str) -> Ref:
        argv = [self.name, "image", "inspect", "--format", "{{.Id}} {{.Size}}", name]
        image, size = Commands().run(argv, quiet=True).split()[-2:]
        return Ref(name=name, id=image.removeprefix("sha256:"), size_bytes=int(size))

    @staticmethod
    def _env(ctx: BuildContext) -> dict[str, str]:
        return {**os.environ, **ctx.network}

    # -- using ---------------------------------------------------------------------------------------------------

    def run(self, image: Path, argv: Sequence[str], ctx: BuildContext, *, quiet: bool = False) -> str:
        with self._container() as container:
            command = [*self._run(container), f"--volume={ctx.inputs}:{ctx.inputs}:ro", Ref.read(image).id]
            return ctx.commands.run([*command, "-c", _ENTER, "sh", *argv], quiet=quiet)

    def remove(self, image: Path) -> None:
        try:
            ref = Ref.read(image)
        except (OSError, ValueError):
            return
        if self._inspect(ref.name).removeprefix("sha256:") == ref.id:  # else the name is another image's by now
            programs.ask([self.name, "rmi", ref.name], timeout_s=_ASK_S)

    def save(self, image: Path, target: Path, commands: Commands) -> None:
        commands.run([self.name, "save", *self._save_options(), f"--output={target}", Ref.read(image).id], quiet=True)

    def _save_options(self) -> Sequence[str]:
        return ()

    def load(self, payload: Path, target: Path, commands: Commands) -> None:
        # Whoever made the file chose the name in it; here it gets one that is nobody else's.
        own = target.parent.name if is_id(target.parent.name, "img") else f"load-{secrets.token_hex(8)}"
        name = f"localhost/diamond/{own}"
        self._take(payload, bases.archive_kind(payload), name, target.parent, commands)
        self._ref(name).write(target)


class PodmanBuilder(EngineBuilder):
    name = "podman"
    run_options = ("--http-proxy=false", "--security-opt=label=disable")
    commit_options = ("--quiet", "--format=oci")
    oldest = (3, 4)  # Ubuntu 22.04's

    def _trouble(self) -> str:
        """Start a container for real: nothing else tells whether one starts. Its files are this machine's own."""
        folder = Path(tempfile.mkdtemp(prefix="diamond-podman-"))
        try:
            folder.chmod(0o755)
            volumes = []
            for top in ("bin", "lib", "lib32", "lib64", "usr"):
                if os.path.islink(f"/{top}"):
                    (folder / top).symlink_to(os.readlink(f"/{top}"))
                elif os.path.isdir(f"/{top}"):
                    volumes.append(f"--volume=/{top}:/{top}:ro")
            options = ["--rm", "--network=host", *self.run_options, *volumes]
            said = programs.ask([self.name, "run", *options, "--rootfs", str(folder), "/bin/true"], timeout_s=_ASK_S)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return "" if said.status == 0 else explain(said.err or "it did not end in time")

    def _load(self, archive: Path, kind: str, commands: Commands) -> str:
        # The last line is the image's id.
        return commands.run([self.name, "pull", f"{kind}-archive:{archive}"], quiet=True).split()[-1]

    def _save_options(self) -> Sequence[str]:
        return ("--format=oci-archive",)


class DockerBuilder(EngineBuilder):
    name = "docker"
    run_options = ()
    commit_options = ()
    oldest = (20, 10)  # the first with `run --pull`

    def version(self) -> str:
        said = programs.ask([self.name, "--version"], timeout_s=_ASK_S).out if programs.find(self.name) else ""
        return "" if "podman" in said.lower() else super().version()  # Podman under Docker's name is Podman

    def _trouble(self) -> str:
        said = programs.ask([self.name, "info", "--format", "{{.ServerVersion}}"], timeout_s=_ASK_S)
        if said.status != 0 or not said.out.strip():
            if "permission denied" in said.err:
                return "Docker's engine does not let this account in; have it added to the group docker"
            return "Docker's engine does not answer; start it, or set DOCKER_HOST to where it is"
        return ""

    def _load(self, archive: Path, kind: str, commands: Commands) -> str:
        said = commands.run([self.name, "load", f"--input={archive}"], quiet=True)
        found = re.findall(r"^Loaded image(?: ID)?: (\S+)$", said, re.MULTILINE)
        if not found:
            raise BuildProblem(f"{archive} holds no image that Docker can load", code="base")
        return str(found[-1])


_CAUSES = (
    (
        r"setrlimit|RLIMIT",
        "Podman may not raise the limits it wants for containers; set default_ulimits (nofile and nproc) in "
        "containers.conf to what this account has",
    ),
    (
        r"hybrid mode",
        "crun does not work with this machine's mixture of cgroup versions; install runc and set runtime = "
        '"runc" in containers.conf',
    ),
    (
        r"newuidmap|newgidmap|subuid|subgid|insufficient UIDs|not enough",
        "this account has no range of user ids for containers; have one added to /etc/subuid and /etc/subgid "
        "(usermod --add-subuids) and newuidmap installed (package uidmap)",
    ),
    (
        r"user namespaces?|CLONE_NEWUSER|clone.*[Oo]peration not permitted",
        "the kernel does not let ordinary accounts make user namespaces; have user.max_user_namespaces raised",
    ),
    (r"runtime.*not found|no such file.*(crun|runc)|could not find.*runtime", "Podman has no runtime; install crun"),
    (r"No space left|quota", "there is no space left where Podman keeps its images; see `podman system df`"),
)


def _place(ctx: BuildContext) -> str:
    """Tells images roots apart: several may share an engine, and what one tidies away another still has."""
    return hashlib.sha256(os.fsencode(ctx.folder.parents[1])).hexdigest()[:12]


def _began(pid: int) -> int:
    """When a process started, in the kernel's ticks: with its number it is a name nobody else ever has. 0: it ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def explain(said: str) -> str:
    """What Podman's complaint means and what to do about it."""
    for pattern, cause in _CAUSES:
        if re.search(pattern, said):
            return cause
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return f"Podman cannot start a container here: {lines[-1] if lines else 'it said nothing'}"
