"""The venv builder: a locked virtual environment on the endpoint's own Python, where there is no container runtime.

An image is a folder: the environment itself (`bin`, `lib`), the recipe's files below `root/`, since a virtual
environment has no `/` of its own, and its variables in `opt/diamond/env.sh`. In it VIRTUAL_ENV and DIAMOND_IMAGE_ROOT
(that `root/`) are set and its `bin` comes first in PATH. It runs where the endpoint's Python is: on the login node and
on compute nodes that have the same one at the same place.

The folder can be moved, see `movable.py`; commands of a recipe must not write its absolute path into files.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from diamond.agent.builders.archives import unpack_folder
from diamond.agent.builders.base import NETWORK_ENVS, BuildContext, BuildProblem, CommandFailed, Commands
from diamond.agent.builders.guarded import read_inside, write_inside
from diamond.agent.builders.keeper import kept
from diamond.agent.builders.movable import make_movable, point_at
from diamond.agent.builders.removing import remove_tree
from diamond.agent.builders.runner import RUNNER_FILE
from diamond.agent.builders.tars import NO_TAR
from diamond.core.recipes import Recipe, Stage
from diamond.core.venvfiles import ROOT, venv_steps

MADE_WITH = "diamond-venv.json"
_ENV = "opt/diamond/env.sh"
_ROOT_LINE = b'export DIAMOND_IMAGE_ROOT="$VIRTUAL_ENV/root"\n'
_OLDEST = (3, 8)
_PROBE_S = 20
_MAX_CHARS = 100
_VARIABLE_OF_OTHERS = re.compile(
    r"PYTHON(HOME|PATH|STARTUP|USERBASE)|VIRTUAL_ENV.*|PIP_(USER|TARGET|PREFIX|ROOT)|CONDA_.*"
)
_IN_ENV = ("/bin/sh", "-c", '. "$1"; shift; exec "$@"', "sh")  # file of variables, then the program and its arguments

_PROBE = """
import ensurepip, json, os, platform, sys, venv
base = getattr(sys, "_base_executable", None) or sys.executable
print(json.dumps({"version": platform.python_version(), "path": base, "libc": " ".join(platform.libc_ver())}))
"""


@dataclass(frozen=True, kw_only=True)
class Python:
    """A Python of the endpoint that can make environments."""

    version: str
    path: str
    libc: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])


class VenvBuilder:
    name = "venv"
    suffix = "image"

    def version(self) -> str:
        found = find_pythons()
        return f"Python {found[0].version}" if found else ""

    def problem(self) -> str:
        if find_pythons():
            return ""
        return (
            "no Python 3 that can make virtual environments is on PATH; load one (module load python) before the agent "
            "starts, or ask the site for the package python3-venv"
        )

    def check(self, recipe: Recipe) -> None:
        other = "or build it where there is Apptainer, Charliecloud or Podman"
        if recipe.base != "host" and not recipe.base_image:
            raise BuildProblem(
                f"a virtual environment cannot start from {recipe.base}",
                hint=f"write base: host, {other}",
                code="needs_container",
            )
        if recipe.system:
            raise BuildProblem(
                f"a virtual environment cannot hold system packages ({_some(recipe.system)})",
                hint=f"leave them out and load the site's modules for them in the task's setup, {other}",
                code="needs_container",
            )
        if recipe.conda:
            raise BuildProblem(
                f"a virtual environment cannot hold conda packages ({_some(recipe.conda)})",
                hint=f"list those that the Python index has under `pip`, {other}",
                code="needs_container",
            )

    def definition(self, recipe: Recipe, stage_names: Sequence[str]) -> str:
        return venv_steps(recipe, stage_names)

    def base_key(self, ctx: BuildContext) -> str:
        if ctx.recipe.base_image:
            if not (Path(ctx.work.base_path) / "pyvenv.cfg").is_file():
                raise BuildProblem(
                    f"the image {ctx.recipe.base_image} is not here, or is not a virtual environment",
                    hint="build it on this endpoint with the venv builder first",
                    code="base_not_found",
                )
            return ctx.work.base_digest
        python = self._python(ctx)
        return f"{python.version} {python.path} {python.libc} {platform.machine()}"

    def make(self, stage: Stage, previous: Path | None, target: Path, ctx: BuildContext) -> None:
        if stage.name == "base":
            self._make_base(target, ctx)
        else:
            assert previous is not None
            _copy(previous, target, ctx.commands)
            if stage.name == "pip":
                self._install(target, ctx)
            elif stage.name == "commands":
                self._run_commands(target, ctx)
            else:
                self.check(ctx.recipe)
        make_movable(target)

    def pack(self, last: Path, target: Path, ctx: BuildContext) -> None:
        _copy(last, target, ctx.commands, share=True)
        earlier = read_inside(target, _ENV)  # of the image it builds on: ours come after and win
        write_inside(target, _ENV, (earlier or _ROOT_LINE) + (ctx.inputs / "env.sh").read_bytes())
        (target / ROOT).mkdir(exist_ok=True)
        _seal(target)

    def run(self, image: Path, argv: Sequence[str], ctx: BuildContext, *, quiet: bool = False) -> str:
        outer = {name: value for name, value in os.environ.items() if name not in NETWORK_ENVS}
        env = {**inside(image, outer), "PYTHONDONTWRITEBYTECODE": "1"}
        command = kept([*_IN_ENV, str(image / _ENV), *argv])
        return ctx.commands.run(command, env=env, cwd=image / ROOT, quiet=quiet)

    def remove(self, image: Path) -> None:
        """Nothing lies outside the folder."""

    def save(self, image: Path, target: Path, commands: Commands) -> None:
        def portable(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            if entry.issym() and re.fullmatch(r"image/bin/python[\d.]*", entry.name):
                return None  # the endpoint's own Python, which `load` finds anew
            if entry.issym() and entry.linkname.startswith("/"):
                raise BuildProblem(
                    f"the image cannot travel: {entry.name} is a link to {entry.linkname}, which is outside of it",
                    hint="have the recipe's commands make relative links, or build the recipe on the other endpoint",
                    code="not_portable",
                )
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            return entry

        with tarfile.open(target, "w:gz", compresslevel=1) as archive:
            archive.add(image, arcname="image", filter=portable)

    def load(self, payload: Path, target: Path, commands: Commands) -> None:
        folder = target.with_name(f"{target.name}.unpacking")
        remove_tree(folder)
        try:
            _unpack(payload, folder)
            python = _same_as(_read_made(folder / "image"))
            point_at(folder / "image", python.path)
            write_inside(folder / "image", MADE_WITH, _made_with(python))
            os.rename(folder / "image", target)
            _seal(target)
        except (*NO_TAR, OSError, StopIteration) as error:
            raise BuildProblem(
                f"the file does not hold a virtual environment of Diamond: {error}", code="not_an_image"
            ) from error
        finally:
            remove_tree(folder)

    def _make_base(self, target: Path, ctx: BuildContext) -> None:
        if ctx.recipe.base_image:
            _copy(Path(ctx.work.base_path), target, ctx.commands)
            return
        python = self._python(ctx)
        ctx.commands.run([python.path, "-m", "venv", str(target)], env=_clean(os.environ))
        point_at(target, python.path)  # in the form that `load` gives it too, so that a copy has the same digest
        (target / ROOT).mkdir()
        (target / MADE_WITH).write_text(_made_with(python))

    def _install(self, target: Path, ctx: BuildContext) -> None:
        argv = [
            str(target / "bin/python3"),
            "-m",
            "pip",
            "install",
            "--requirement",
            str(ctx.inputs / "requirements.txt"),
        ]
        constraints = ctx.inputs / "constraints.txt"
        if constraints.is_file() and constraints.stat().st_size:
            argv += ["--constraint", str(constraints)]
        ctx.commands.run(kept(argv), env=self._build_env(target, ctx), cwd=ctx.folder)

    def _run_commands(self, target: Path, ctx: BuildContext) -> None:
        root = target / ROOT
        root.mkdir(exist_ok=True)
        if any((ctx.inputs / "files").iterdir()):
            # Unlike a copy made by Python, cp follows no link that lies in the way of a folder.
            ctx.commands.run(
                ["cp", "-a", "--reflink=auto", "--remove-destination", f"{ctx.inputs / 'files'}/.", str(root)]
            )
        commands = ctx.inputs / "commands.sh"
        if commands.stat().st_size:
            argv = [
                *_IN_ENV,
                str(ctx.inputs / "env.sh"),
                "/bin/sh",
                str(ctx.inputs / RUNNER_FILE),
                str(commands),
                "build",
            ]
            ctx.commands.run(kept(argv), env=self._build_env(target, ctx), cwd=root)

    def _build_env(self, target: Path, ctx: BuildContext) -> dict[str, str]:
        env = inside(target, os.environ)
        quiet = dict.fromkeys(("PIP_NO_INPUT", "PIP_NO_CACHE_DIR", "PIP_DISABLE_PIP_VERSION_CHECK"), "1")
        return {**env, **quiet, **ctx.network, "TMPDIR": str(ctx.tmp)}

    def _python(self, ctx: BuildContext) -> Python:
        """The newest, or the one the pinned versions were found with."""
        found = find_pythons()
        if not found:
            raise BuildProblem(self.problem(), code="no_python")
        wanted = ".".join(ctx.pins.python.split(".")[:2]) if ctx.pins else ""
        return next((python for python in found if python.minor == wanted), found[0])


def inside(image: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program in the image, before the image's own variables are set."""
    env = _clean(environ)
    env["PATH"] = f"{image / 'bin'}:{env.get('PATH') or os.defpath}"
    return {**env, "VIRTUAL_ENV": str(image), "DIAMOND_IMAGE_ROOT": str(image / ROOT), "PYTHONNOUSERSITE": "1"}


def find_pythons(path: str | None = None) -> tuple[Python, ...]:
    """Every Python on PATH that can make environments, newest first, one of each version."""
    return _find(os.environ.get("PATH", "") if path is None else path)


@lru_cache(maxsize=8)
def _find(path: str) -> tuple[Python, ...]:
    found: dict[str, Python] = {}
    for folder in path.split(os.pathsep):
        for name in ("python3", *(f"python3.{minor}" for minor in range(20, _OLDEST[1] - 1, -1))):
            program = os.path.join(folder, name)
            if folder and os.access(program, os.X_OK) and os.path.isfile(program):
                python = _probe(program)
                if python is not None and python.order >= _OLDEST:
                    found.setdefault(python.version, python)
    return tuple(sorted(found.values(), key=lambda python: python.order, reverse=True))


def _probe(program: str) -> Python | None:
    try:
        done = subprocess.run(
            [program, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            env=_clean(os.environ),
            check=True,
        )
        return Python(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError):
        return None


def _same_as(made: Mapping[str, str]) -> Python:
    """The Python here that an environment made elsewhere can use.

    Raises:
        BuildProblem: code "not_portable"; building the recipe here from its lock is the other way.
    """
    hint = "build it here from its lock instead"
    if made["architecture"] != platform.machine():
        raise BuildProblem(
            f"the image is for {made['architecture']}, and this endpoint is {platform.machine()}",
            hint=hint, code="not_portable",
        )  # fmt: skip
    minor = ".".join(made["python"].split(".")[:2])
    python = next((python for python in find_pythons() if python.minor == minor), None)
    if python is None:
        raise BuildProblem(
            f"the image needs Python {minor}, which this endpoint does not have", hint=hint, code="not_portable"
        )
    if _numbers(made["libc"]) > _numbers(python.libc):
        raise BuildProblem(
            f"the image was made with {made['libc']}, and this endpoint has the older {python.libc}",
            hint=hint, code="not_portable",
        )  # fmt: skip
    return python


def _read_made(image: Path) -> dict[str, str]:
    """What the payload says of itself, which whoever made it may have written. Raises ValueError."""
    found = json.loads(read_inside(image, MADE_WITH) or b"")
    wanted = ("python", "libc", "architecture")
    known = {name: str(found.get(name)) for name in wanted} if isinstance(found, dict) else {}
    if not known or any(found.get(name) != value or len(value) > _MAX_CHARS for name, value in known.items()):
        raise ValueError(f"{MADE_WITH} is not what Diamond writes")
    return known


def _made_with(python: Python) -> str:
    facts = {"python": python.version, "libc": python.libc, "architecture": platform.machine()}
    return json.dumps(facts, sort_keys=True) + "\n"


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what would lead Python or pip elsewhere."""
    return {name: value for name, value in environ.items() if not _VARIABLE_OF_OTHERS.fullmatch(name)}


def _copy(source: Path, target: Path, commands: Commands, *, share: bool = False) -> None:
    """A copy to be changed; with `share`, one that has its files in common with the source, and is only read."""
    if share:
        try:
            commands.run(["cp", "-a", "--link", str(source), str(target)], quiet=True)
            return
        except CommandFailed:  # a file system without hard links
            remove_tree(target)
    commands.run(["cp", "-a", "--reflink=auto", str(source), str(target)])
    for path, _ in _entries(target):
        os.chmod(path, os.stat(path).st_mode | 0o200)


def _seal(image: Path) -> None:
    """Everybody may read it and nobody change it, so that no task alters what others run in; the same modes always."""
    for path, is_folder in _entries(image):
        os.chmod(path, 0o555 if is_folder or os.stat(path).st_mode & 0o100 else 0o444)


def _entries(folder: Path) -> Iterator[tuple[str, bool]]:
    """Every folder, from the innermost out, and file below it and the folder itself; links are left out."""
    for current, _, names in os.walk(folder, topdown=False):
        yield from ((path, False) for name in names if not os.path.islink(path := os.path.join(current, name)))
        yield current, True


def _unpack(payload: Path, folder: Path) -> None:
    """Unpack what another machine made, and nothing outside `folder`."""
    folder.mkdir(parents=True)
    unpack_folder(payload, folder, closed=True)


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:3]) + (" …" if len(items) > 3 else "")
