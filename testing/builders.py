"""The benches on which every builder is tried: real builds by the program that jobs run, and looks into the results.

A bench belongs to one builder and one images root. `SiteBench` builds as user1 on the login node of a site, whose only
way to package indexes is a proxy; `HostBench` builds on this machine, for what a workstation has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diamond.core import images
from diamond.core.codec import decode, encode
from diamond.core.ids import new_id
from diamond.core.images import BuildFailure, ImageFacts, ImageWork, Lock
from diamond.core.recipes import Recipe
from testing.cluster import SOURCE, SOURCE_INSIDE
from testing.images import BASE_INSIDE, build_envs
from testing.minihpc import Site
from testing.proxy import Proxy

BUILD_S = 600  # beside other suites, on a slow disk: what counts is that it ends
# A value that arrives only where nobody reads it on the way.
VALUE = 'it\'s "quoted" $HOME `id`\n\ttab, umlaut ü, back\\slash\n'

# Runs a program in an image as the builder does for validation, with nothing of the driver around it.
_LOOK = """
import json, sys, tempfile
from pathlib import Path
from diamond.agent.builders.base import BuildContext, CommandFailed, Commands
from diamond.agent.builders.choice import builder
from diamond.core.images import ImageWork
from diamond.core.recipes import Recipe

name, image, *argv = sys.argv[1:]
with tempfile.TemporaryDirectory(dir=Path(image).parent) as folder:
    for part in ("folder", "inputs", "tmp"):
        (Path(folder) / part).mkdir()
    ctx = BuildContext(
        work=ImageWork(action="test", image_id="img_00000000"), recipe=Recipe(base="host"), commands=Commands(),
        folder=Path(folder) / "folder", inputs=Path(folder) / "inputs", tmp=Path(folder) / "tmp",
    )
    try:
        sys.stdout.write(builder(name).run(Path(image), argv, ctx, quiet=True))
    except CommandFailed as error:
        sys.exit(f"{error}: {error.tail}")
"""


@dataclass(frozen=True)
class Job:
    """A job that ended: its exit code, its log, and the papers it left."""

    code: int
    log: str
    folder: Path  # the work directory, as this process sees it

    def _paper(self, cls: Any, name: str) -> Any:
        assert (self.folder / name).is_file(), f"no {name}; exit code {self.code}\n{self.log}"
        return decode(cls, json.loads((self.folder / name).read_bytes()))

    @property
    def facts(self) -> ImageFacts:
        found = self._paper(ImageFacts, images.FACTS_FILE)
        assert isinstance(found, ImageFacts)
        return found

    @property
    def lock(self) -> Lock:
        found = self._paper(Lock, images.LOCK_FILE)
        assert isinstance(found, Lock)
        return found

    @property
    def failure(self) -> BuildFailure:
        found = self._paper(BuildFailure, images.FAILURE_FILE)
        assert isinstance(found, BuildFailure)
        return found

    @property
    def states(self) -> dict[str, str]:
        """Stage name: how it went, as the log tells."""
        return {record.name: record.state for record in images.parse_stages(self.log)}


class BuilderBench:
    """One builder at work.

    Attributes:
        builder: its name.
        base: a base it can build on here, with Python and pip.
        folder: where images root and run directories are, as the builder knows it.
        suffix: of its images.
    """

    builder = ""
    base = ""
    suffix = ""

    def __init__(self, builder: str, suffix: str, base: str, folder: str) -> None:
        self.builder, self.suffix, self.base, self.folder = builder, suffix, base, folder

    @property
    def root(self) -> str:
        return f"{self.folder}/images"

    # -- what differs between machines ----------------------------------------------------------------------------

    def outside(self, path: str) -> Path:
        """A path of the builder's as this process sees it."""
        raise NotImplementedError

    def start(self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program as the account that builds; both outputs go to `log`."""
        raise NotImplementedError

    def write(self, path: str, text: str) -> None:
        raise NotImplementedError

    def make_folder(self, path: str) -> None:
        raise NotImplementedError

    @property
    def traffic_bytes(self) -> int:
        """What came from and went to package indexes so far; 0 where nobody counts."""
        return 0

    # -- jobs -----------------------------------------------------------------------------------------------------

    def recipe(self, **fields: Any) -> Recipe:
        return Recipe.parse({"base": self.base, "builder": self.builder, **fields})

    def order(self, recipe: Recipe | None = None, **fields: Any) -> ImageWork:
        """An order for this builder; a build unless another action is given."""
        given: dict[str, Any] = {"action": "build", "image_id": new_id("img"), "builder": self.builder} | fields
        return ImageWork(recipe=recipe, **given)

    def prepare(self, work: ImageWork, *, staged: Mapping[str, str | bytes] | None = None, root: str = "") -> str:
        """A run directory for it, with `staged` in its work directory; its path."""
        run_dir = f"{self.folder}/jobs/{new_id('job')}"
        self.make_folder(f"{run_dir}/work")
        for name, contents in (staged or {}).items():
            self.make_folder(os.path.dirname(f"{run_dir}/work/{name}"))
            self.write(f"{run_dir}/work/{name}", "")
            data = contents.encode() if isinstance(contents, str) else contents
            self.outside(f"{run_dir}/work/{name}").write_bytes(data)
        job = {"work": encode(work), "root": root or self.root, "job_id": os.path.basename(run_dir), "run_dir": run_dir}
        self.write(f"{run_dir}/image-work.json", json.dumps(job))
        return run_dir

    def begin(self, run_dir: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        argv = [self.python, "-m", "diamond.agent.builders", f"{run_dir}/image-work.json"]
        return self.start(argv, log=self.outside(run_dir) / "log", env=env)

    def result(self, run_dir: str, process: subprocess.Popen[str]) -> Job:
        code = process.wait(BUILD_S)
        here = self.outside(run_dir)
        return Job(code, (here / "log").read_text(errors="replace"), here / "work")

    def run(
        self,
        work: ImageWork,
        *,
        staged: Mapping[str, str | bytes] | None = None,
        root: str = "",
        env: Mapping[str, str] | None = None,
    ) -> Job:
        run_dir = self.prepare(work, staged=staged, root=root)
        return self.result(run_dir, self.begin(run_dir, env))

    def build(self, recipe: Recipe, *, brings: Mapping[str, str | bytes] | None = None, **fields: Any) -> Job:
        """A build that must succeed; `brings` are contents of the recipe's files, by path in the image."""
        places = {path: f"brought/{number}" for number, path in enumerate(brings or {})}
        staged = {places[path]: contents for path, contents in (brings or {}).items()}
        job = self.run(self.order(recipe, files=places, **fields), staged=staged)
        assert job.code == 0, job.log
        return job

    # -- looking --------------------------------------------------------------------------------------------------

    python = "python3"

    def inside(self, facts: ImageFacts, *argv: str, root: str = "") -> str:
        """What a program says in an image."""
        log = self.outside(self.folder) / f"{new_id('log')}.txt"
        image = f"{root or self.root}/store/{facts.image_id}/{self.suffix}"
        code = self.start([self.python, "-c", _LOOK, self.builder, image, *argv], log=log).wait(BUILD_S)
        said = log.read_text(errors="replace")
        assert code == 0, said
        return said

    def listed(self, part: str) -> list[str]:
        """Names in a part of the images root: "store", "tmp", "layers/NAME"."""
        folder = self.outside(f"{self.root}/{part}")
        return sorted(path.name for path in folder.glob("[!.]*")) if folder.is_dir() else []

    def processes(self, word: str) -> list[tuple[str, ...]]:
        """Command lines of running programs in which this word stands."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove what the bench made."""
        shutil.rmtree(self.outside(self.folder), ignore_errors=True)


class SiteBench(BuilderBench):
    """On the login node of a site, as user1."""

    def __init__(self, site: Site, proxy: Proxy, builder: str, suffix: str, base: str = BASE_INSIDE) -> None:
        super().__init__(builder, suffix, base, f"/scratch/it's {builder} {new_id('run')}")
        self.site = site
        self._proxy = proxy
        self.make_folder(self.folder)

    def outside(self, path: str) -> Path:
        return self.site.path(path)

    def start(self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        variables = {"PYTHONPATH": SOURCE_INSIDE, "PYTHONDONTWRITEBYTECODE": "1", **build_envs(self._proxy)}
        with log.open("a") as file:
            return self.site.popen(argv, env={**variables, **(env or {})}, stdout=file, stderr=file)

    def write(self, path: str, text: str) -> None:
        self.site.write(path, text)

    def make_folder(self, path: str) -> None:
        self.site.run(["mkdir", "-p", path])

    @property
    def traffic_bytes(self) -> int:
        return self._proxy.num_bytes

    def processes(self, word: str) -> list[tuple[str, ...]]:
        return [found.argv for found in self.site.processes() if any(word in part for part in found.argv)]


class HostBench(BuilderBench):
    """On this machine, as the account that runs the tests."""

    python = sys.executable

    def __init__(self, folder: Path, builder: str, suffix: str, base: str) -> None:
        super().__init__(builder, suffix, base, str(folder))

    def outside(self, path: str) -> Path:
        return Path(path)

    def start(self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        variables = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        with log.open("a") as file:
            return subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=file, stderr=file, text=True, env=variables,
                start_new_session=True,
            )  # fmt: skip

    def write(self, path: str, text: str) -> None:
        Path(path).write_text(text)

    def make_folder(self, path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    def processes(self, word: str) -> list[tuple[str, ...]]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                argv = tuple((entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0"))
            except OSError:
                continue
            if any(word in part for part in argv):
                found.append(argv)
        return found
