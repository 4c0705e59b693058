"""The driver of a build: which steps are needed, in which order, what is kept, and when the result is an image.

A builder makes one layer from the one before. Here is decided which layers are there already, and that nothing appears
in the endpoint's store before it is complete, inspected and validated. A build that is killed at any moment leaves
nothing but its own temporary folder, which the next one removes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diamond.agent.builders import choice
from diamond.agent.builders.base import BuildContext, Builder, BuildProblem, Clock, Commands, network_envs
from diamond.agent.builders.inputs import write_inputs
from diamond.agent.builders.inspect import inspect
from diamond.agent.builders.refs import REF_FILE, Ref
from diamond.agent.builders.runner import RUNNER_FILE
from diamond.agent.builders.store import LAYER, ImageStore, measure, write_json
from diamond.core import images, recipes
from diamond.core.codec import encode
from diamond.core.images import ImageFacts, ImageWork, Lock, StageRecord
from diamond.core.recipes import STAGE_TITLES, Recipe, Stage
from diamond.core.sbom import cyclonedx

# The smallest image with Python, unpacked and packed, takes about this much; a build with less never ends well.
MIN_FREE_BYTES = 1024**3
# Where tools are told to put large temporary files, as users of clusters know it.
_TMP_ENVS = ("APPTAINER_TMPDIR", "TMPDIR")
_PLAIN = re.compile(r"/[A-Za-z0-9._/+@=-]*")


@dataclass(frozen=True, kw_only=True)
class ImageJob:
    """One job that looks after images, as the agent's staging writes it to `image-work.json`.

    Attributes:
        work: what to do.
        root: the endpoint's images root.
        run_dir: of the job; results go to its work directory.
        max_image_bytes: of the endpoint's policy; 0: any.
    """

    work: ImageWork
    root: str
    job_id: str
    run_dir: str
    max_image_bytes: int = 0


@dataclass
class Bench:
    """What the parts of a job share while it runs. `stage` is what an error is about."""

    job: ImageJob
    store: ImageStore
    commands: Commands
    work_dir: Path
    folder: Path
    tmp: Path
    stage: str = "base"
    records: list[StageRecord] = field(default_factory=list)

    @property
    def work(self) -> ImageWork:
        return self.job.work


@contextlib.contextmanager
def bench(job: ImageJob, commands: Commands) -> Iterator[Bench]:
    """A job's places: made now, gone at its end."""
    store = ImageStore(Path(job.root))
    store.make()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(store.workspace(job.job_id))
        tmp = folder / "tmp"
        if (elsewhere := temporary_parent(store.root)) is not None:
            tmp = stack.enter_context(store.workspace(job.job_id, elsewhere))
        else:
            tmp.mkdir()
        yield Bench(job, store, commands, Path(job.run_dir) / "work", folder, tmp)


def temporary_parent(root: Path) -> Path | None:
    """A folder of this account where the machine wants large temporary files; None: there is none, take the root.

    Programs that builders use do not quote paths in their own scripts; from a root with blanks or quotes in its name
    they are kept away.
    """
    wanted = [os.environ.get(name, "") for name in _TMP_ENVS]
    if not _PLAIN.fullmatch(str(root)):
        wanted.append(tempfile.gettempdir())
    for name in wanted:
        if not _PLAIN.fullmatch(name) or not os.access(name, os.W_OK | os.X_OK):
            continue
        parent = Path(name) / f"diamond-builds-{os.getuid()}"
        with contextlib.suppress(OSError):
            parent.mkdir(mode=0o700, exist_ok=True)
            # In a folder that all may write to, another account could have put something under this name.
            if parent.lstat().st_uid == os.getuid() and not parent.is_symlink():
                parent.chmod(0o700)
                if free_bytes(parent) >= MIN_FREE_BYTES:
                    return parent
    return None


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def check_space(bench: Bench, wanted_bytes: int = MIN_FREE_BYTES) -> None:
    for path in (bench.folder, bench.tmp):
        if (free := free_bytes(path)) < wanted_bytes:
            raise BuildProblem(
                f"the disk of {path.parent} has {free / 1e9:.1f} GB left, and this needs {wanted_bytes / 1e9:.1f}",
                hint="remove images and kept layers you do not need (diamond image prune), or have the agent keep "
                "images on a larger file system: image_root in its policy.toml",
                code="disk_full",
            )


def context(bench: Bench, recipe: Recipe) -> BuildContext:
    inputs = bench.folder / "inputs"
    write_inputs(inputs, recipe, bench.work, bench.work_dir)
    (bench.folder / "builder").mkdir()
    return BuildContext(
        work=bench.work, recipe=recipe, folder=bench.folder / "builder", inputs=inputs, tmp=bench.tmp,
        commands=bench.commands, network=network_envs(), pins=bench.work.pins,
    )  # fmt: skip


def say(text: str) -> None:
    print(f"diamond: {text}", flush=True)


def build(bench: Bench) -> ImageFacts:
    """Build the image of `bench.work.recipe`, put it in the store and its papers in the work directory.

    Raises:
        CommandFailed, BuildProblem: `bench.stage` says where.
    """
    clock = Clock()
    recipe = bench.work.recipe
    if recipe is None:
        raise BuildProblem("the order holds no recipe", hint="start the build again", code="order")
    builder = choice.builder(bench.work.builder or choice.choose(recipe, _usable()))
    if problem := builder.problem():
        raise BuildProblem(problem, code="builder")
    builder.check(recipe)
    check_space(bench)
    ctx = context(bench, recipe)
    base_key = bench.work.base_digest or builder.base_key(ctx)
    stages = recipes.stages(recipe, builder=builder.name, base_key=base_key, pins=encode(bench.work.pins or {}))
    run = _Run(bench, builder, ctx, stages)
    image = run.make_image()
    lock = inspect(lambda argv: builder.run(image, argv, ctx, quiet=True))
    if recipe.test:
        with run.stage("test"):
            builder.run(image, ["/bin/sh", str(ctx.inputs / RUNNER_FILE), str(ctx.inputs / "test.sh"), "test"], ctx)
    bench.stage = "pack"
    definition = builder.definition(recipe, [*(stage.name for stage in stages), "pack"])
    facts = finish(
        bench, builder, image, lock,
        ImageFacts(
            image_id=bench.work.image_id, recipe_digest=recipe.digest, builder=builder.name,
            builder_version=builder.version(), architecture=platform.machine(), built_at=time.time(),
            stages=tuple(bench.records), seconds=clock.seconds,
        ),
        recipe, definition,
    )  # fmt: skip
    say(f"image ready in {clock.seconds:.1f} s: {facts.size_bytes / 1e6:.1f} MB, {facts.digest}")
    return facts


def _usable() -> list[str]:
    return [name for name, problem in choice.usable().items() if not problem]


class _Run:
    """The steps of one build."""

    def __init__(self, bench: Bench, builder: Builder, ctx: BuildContext, stages: Sequence[Stage]) -> None:
        self._bench, self._builder, self._ctx, self._stages = bench, builder, ctx, stages
        self._count = 0
        self._total = len(stages) + 1 + bool(ctx.recipe.test)

    def make_image(self) -> Path:
        """All missing layers, then the image from the last one; its path, not yet in the store."""
        store, name = self._bench.store, self._builder.name
        store.claim(self._bench.folder, [stage.key for stage in self._stages])
        kept = [not self._bench.work.fresh and store.has_layer(name, stage.key) for stage in self._stages]
        first = len(kept) - kept[::-1].index(True) if True in kept else 0  # of those to be made
        previous: Path | None = None
        for number, stage in enumerate(self._stages):
            if number < first:
                previous = store.layer(name, stage.key)
                with self.stage(stage.name, "kept"):
                    pass
                continue
            with self.stage(stage.name):
                previous = self._make(stage, previous)
        assert previous is not None
        image = self._bench.folder / "publish" / self._builder.suffix
        image.parent.mkdir()
        with self.stage("pack"):
            self._builder.pack(previous, image, self._ctx)
        return image

    def _make(self, stage: Stage, previous: Path | None) -> Path:
        made = self._bench.folder / "layers" / stage.key
        made.mkdir(parents=True)
        clock = Clock()
        self._builder.make(stage, previous, made / LAYER, self._ctx)
        store, name, fresh = self._bench.store, self._builder.name, self._bench.work.fresh
        if not os.path.lexists(made / LAYER):  # not worth keeping, its builder found
            if fresh:
                store.drop_layer(name, stage.key, self._bench.folder)
            return made / LAYER
        replacing = self._bench.folder if fresh else None
        return store.keep_layer(name, stage.key, made, replacing=replacing, stage=stage.name, seconds=clock.seconds)

    @contextlib.contextmanager
    def stage(self, name: str, state: str = "done") -> Iterator[None]:
        """One stage as the log shows it."""
        self._bench.stage = name
        self._count += 1
        say(f"stage {self._count}/{self._total} {name}: {STAGE_TITLES[name]}")
        clock = Clock()
        try:
            yield
        except Exception:
            state = "failed"
            raise
        finally:
            say(f"stage {name} {state} in {clock.seconds:.1f} s")
            key = next((stage.key for stage in self._stages if stage.name == name), "")
            record = StageRecord(name=name, title=STAGE_TITLES[name], seconds=clock.seconds, state=state, key=key)
            self._bench.records.append(record)


def finish(
    bench: Bench, builder: Builder, image: Path, lock: Lock, facts: ImageFacts, recipe: Recipe | None, definition: str
) -> ImageFacts:
    """Complete what is said of an image, put it in the store, then write its papers; image.json is the last of them."""
    digest, size_bytes = measure(image)
    if 0 < bench.job.max_image_bytes < size_bytes:
        raise BuildProblem(
            f"the image has {size_bytes / 1e9:.2f} GB, and this endpoint allows {bench.job.max_image_bytes / 1e9:.2f}",
            hint="leave packages out, or remove what the build commands leave behind",
            code="too_large",
        )
    place = bench.store.image(bench.work.image_id) / image.name
    facts = replace(
        facts, digest=digest, size_bytes=size_bytes, num_packages=len(lock.packages), python=lock.python, os=lock.os,
        path=Ref.read(image).name if builder.suffix == REF_FILE else str(place),
    )  # fmt: skip
    write_json(image.parent / images.LOCK_FILE, lock)
    write_json(image.parent / images.FACTS_FILE, facts)
    write_json(bench.work_dir / images.LOCK_FILE, lock)
    if recipe is not None:
        write_json(bench.work_dir / images.SBOM_FILE, cyclonedx(facts, lock, recipe))
    if definition:
        (bench.work_dir / images.DEFINITION_FILE).write_text(definition)
    bench.store.publish(bench.work.image_id, image.parent, bench.folder)
    write_json(bench.work_dir / images.FACTS_FILE, facts)
    return facts
