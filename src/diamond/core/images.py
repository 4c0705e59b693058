"""Images: what was built from a recipe, where it lies, and how a task is told to use it.

An `Image` is a recipe under a name, of one owner. A `Replica` of it is one built (or copied) result at one endpoint,
with digest, architecture and lock: what a task runs in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diamond.core.compat import StrEnum
from diamond.core.projects import Visibility
from diamond.core.recipes import Recipe

# Files a build leaves in its work directory; the server keeps them as the build task's outputs.
FACTS_FILE = "image.json"  # ImageFacts
LOCK_FILE = "lock.json"  # Lock
SBOM_FILE = "sbom.cdx.json"  # CycloneDX 1.6
DEFINITION_FILE = "definition.txt"  # what the builder was given: definition file, Containerfile or command list
FAILURE_FILE = "failure.json"  # BuildFailure; only when it failed
PAYLOAD_FILE = "image.payload"  # an image on its way: a .sif file, or a tar of a folder
BUILD_OUTPUTS = (FACTS_FILE, LOCK_FILE, SBOM_FILE, DEFINITION_FILE, FAILURE_FILE)

# In the image, whichever builder made it. Read by `sh` before the task's own variables are set.
ENV_IN_IMAGE = "/opt/diamond/env.sh"

# A line of a build's log by which stages are recognised: "diamond: stage 2/5 pip: Python packages"
STAGE_LINE = re.compile(r"^diamond: stage (\d{1,3})/(\d{1,3}) ([a-z]{1,20}): (.{1,200})$", re.MULTILINE | re.ASCII)
STAGE_DONE_LINE = re.compile(
    r"^diamond: stage ([a-z]{1,20}) (done|kept|failed) in (\d{1,9}(?:\.\d{1,6})?) s$", re.MULTILINE | re.ASCII
)


class ReplicaState(StrEnum):
    BUILDING = "BUILDING"  # or on its way from another endpoint
    READY = "READY"
    FAILED = "FAILED"
    GONE = "GONE"  # removed, or found missing where it should be


_PACKAGE_WORD = re.compile(r"[A-Za-z0-9_][^\s\x00-\x20\x7f]{0,299}")


def _package_word(raw: object) -> str:
    """Locks come from endpoints and other installations and are given to package managers: one word, no option."""
    if not isinstance(raw, str) or not _PACKAGE_WORD.fullmatch(raw):
        raise ValueError(f"{str(raw)[:80]!r} is not a package's name or version")
    return raw


@dataclass(frozen=True, kw_only=True)
class Package:
    """One installed package. `kind` is "deb", "rpm", "apk", "pip" or "conda"."""

    kind: str = field(metadata={"parse": _package_word})
    name: str = field(metadata={"parse": _package_word})
    version: str = field(metadata={"parse": _package_word})

    @property
    def is_plain(self) -> bool:
        """Whether it can be told to a package manager; metadata of a package in an image may hold anything."""
        return all(_PACKAGE_WORD.fullmatch(word) for word in (self.kind, self.name, self.version))


@dataclass(frozen=True, kw_only=True)
class Lock:
    """Exact versions of everything found installed, sorted by kind and name."""

    packages: tuple[Package, ...] = ()
    python: str = ""  # version of the image's default Python; empty when it has none
    os: str = ""  # "debian 13"

    def of_kind(self, kind: str) -> dict[str, str]:
        return {package.name: package.version for package in self.packages if package.kind == kind}


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    name: str
    title: str
    seconds: float = 0.0
    state: str = "done"  # "done", "kept" (from an earlier build), "running", "failed", "waiting"
    key: str = ""  # of the layer it made, so that pruning spares what images were made of


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What a build says of its result. Written last: an image without it is not one."""

    image_id: str
    recipe_digest: str
    builder: str  # one of recipes.BUILDERS
    builder_version: str = ""
    architecture: str = ""  # as uname -m says
    digest: str = ""  # sha256 of the file; of a folder: of its manifest, see `agent.builders.store.tree_digest`
    size_bytes: int = 0
    path: str = ""  # on the endpoint
    built_at: float = 0.0
    seconds: float = 0.0
    stages: tuple[StageRecord, ...] = ()
    num_packages: int = 0
    python: str = ""
    os: str = ""


@dataclass(frozen=True, kw_only=True)
class BuildFailure:
    """Why a build failed, for a person."""

    stage: str
    message: str  # one sentence
    line: str = ""  # the line of the recipe that it was about, where that is known: "pip: no-such-package==1"
    excerpt: str = ""  # the decisive lines of the log
    hint: str = ""
    code: str = ""  # a key of agent.builders.diagnosis.TABLE


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One result at one endpoint."""

    endpoint: str
    state: ReplicaState
    origin: str = "built"  # "built", "copied", "linked", "rebuilt", "imported"
    task_id: str = ""  # the task that makes (made) it
    detail: str = ""
    facts: ImageFacts | None = None
    failure: BuildFailure | None = None
    created_at: float = 0.0
    ready_at: float | None = None
    used_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class Image:
    id: str
    name: str
    owner: str  # a user's name
    visibility: Visibility = Visibility.PRIVATE
    project: str = ""
    recipe_digest: str = ""
    created_at: float = 0.0
    replicas: tuple[Replica, ...] = ()
    recipe: Recipe | None = None  # only in the detail view
    labels: dict[str, str] = field(default_factory=dict)
    is_mine: bool = True
    used_by: tuple[str, ...] = ()  # ids of live tasks that run in it; only in the detail view

    @property
    def state(self) -> ReplicaState:
        """The best of its replicas."""
        states = {replica.state for replica in self.replicas}
        order = (ReplicaState.READY, ReplicaState.BUILDING, ReplicaState.FAILED)
        return next((state for state in order if state in states), ReplicaState.GONE)


@dataclass(frozen=True, kw_only=True)
class ImageUse:
    """How a job gets its image. Part of a JobOrder.

    Attributes:
        kind: the builder that made it, which says how it is entered.
        path: on the endpoint; of podman and docker, the name of the image in their own store.
        digest: what it should be; empty for an image Diamond did not build.
        size_bytes: of the file, to notice at a glance that it is another one.
    """

    kind: str
    path: str
    image_id: str = ""
    name: str = ""
    digest: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ImageWork:
    """What a job that looks after images should do. Part of a JobOrder; such a job has no commands of a user's own
    outside the recipe.

    Attributes:
        action: "build"; "export": put the image's payload among the outputs; "import": take it in from the work
            directory; "link": take over an image another account built on this file system, if it can be read;
            "remove"; "prune": remove kept layers no listed image needs.
        builder: resolved; never "auto" in an order.
        where: "login" or "batch".
        base_path: of the Diamond image it builds on, at this endpoint; base_digest tells its state.
        pins: exact versions to install.
        files: absolute path in the image: path below the work directory where staging put it.
        source_path, digest, size_bytes: of what is linked, imported or exported.
    """

    action: str
    image_id: str
    name: str = ""
    recipe: Recipe | None = None
    builder: str = ""
    where: str = "login"
    base_path: str = ""
    base_digest: str = ""
    pins: Lock | None = None
    files: dict[str, str] = field(default_factory=dict)
    source_path: str = ""
    digest: str = ""
    size_bytes: int = 0
    fresh: bool = False  # do not use kept layers
    keep: tuple[str, ...] = ()  # of prune: keys of layers still needed; empty: none
    facts: ImageFacts | None = None  # of import and link: what the other endpoint said of it
    lock: Lock | None = None


def parse_stages(log: str) -> tuple[StageRecord, ...]:
    """How far a build is, from its log. Pure; a stage nobody has heard of yet is not listed."""
    found: dict[str, StageRecord] = {}
    for match in STAGE_LINE.finditer(log):
        found[match[3]] = StageRecord(name=match[3], title=match[4], state="running")
    for match in STAGE_DONE_LINE.finditer(log):
        if (record := found.get(match[1])) is not None:
            found[match[1]] = StageRecord(name=record.name, title=record.title, seconds=float(match[3]), state=match[2])
    return tuple(found.values())
