"""A task: what a user asked for (`TaskSpec`) and how it stands (`Task`). The one place that validates a spec.

The same checks run in the client before anything is uploaded and in the server before anything is written,
so there is one error text. Files a spec names (`workdir`, `file_mounts`) are paths on the user's machine
until the client has uploaded them; then they are bundle references (see `diamond.core.bundles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diamond.core import bounds
from diamond.core.bundles import check_relative_path, is_bundle_ref
from diamond.core.codec import decode
from diamond.core.curves import parse_curves
from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.fields import parse_envs, parse_name, parse_run, parse_script, parse_source
from diamond.core.jobs import Job
from diamond.core.projects import Visibility, parse_project
from diamond.core.reasons import DEFAULT_RETRY_ON, MEANINGS, Reason
from diamond.core.recipes import Recipe
from diamond.core.resources import Resources
from diamond.core.secrets import SecretUse, parse_secrets
from diamond.core.slurm import SlurmOptions
from diamond.core.states import Desired, TaskState

MAX_PATTERNS = 200


def parse_file_mounts(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise ValueError("must be a mapping of path in the work directory: path on this machine")
    if len(raw) > MAX_PATTERNS:
        raise TooLarge(f"has {len(raw)} entries; at most {MAX_PATTERNS} are allowed")
    mounts: dict[str, str] = {}
    for target, source in raw.items():
        path = check_relative_path(target, "the target")
        if path in mounts:
            raise InvalidInput(f"{path!r} is named twice", hint="give each target one source")
        mounts[path] = parse_source(source)
    return mounts


def parse_outputs(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = [raw]
    if not isinstance(raw, list | tuple):
        raise ValueError("must be a list of paths or patterns, relative to the work directory")
    if len(raw) > MAX_PATTERNS:
        raise TooLarge(f"has {len(raw)} entries; at most {MAX_PATTERNS} are allowed")
    return tuple(check_relative_path(item, "an output") for item in raw)


def _whole_number(low: int, high: int) -> Any:
    def parse(raw: object) -> int:
        if not isinstance(raw, int) or isinstance(raw, bool) or not low <= raw <= high:
            raise ValueError(f"must be a whole number from {low} to {high}, not {str(raw)[:40]!r}")
        return raw

    return {"parse": parse}


def parse_retry_on(raw: object) -> tuple[Reason, ...]:
    if isinstance(raw, str):
        raw = [raw]
    retryable = [reason.value for reason in DEFAULT_RETRY_ON]
    extra = [r.value for r in (Reason.OUT_OF_MEMORY, Reason.TIME_LIMIT, Reason.DISK_FULL)]
    if not isinstance(raw, list | tuple):
        raise ValueError(f"must be a list of reasons: {', '.join(retryable + extra)}")
    chosen = []
    for item in raw:
        name = str(item).upper()
        if name not in retryable + extra:
            raise InvalidInput(
                f"{str(item)[:60]!r} is not a reason a task can be retried on",
                hint=f"valid reasons: {', '.join(retryable + extra)}",
            )
        chosen.append(Reason(name))
    return tuple(chosen)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When a failed attempt is followed by another."""

    max_retries: int = field(default=0, metadata=_whole_number(0, 1000))
    on: tuple[Reason, ...] = field(default=DEFAULT_RETRY_ON, metadata={"parse": parse_retry_on})
    backoff: int = field(default=10, metadata={"parse": parse_duration})  # seconds before the first retry
    max_backoff: int = field(default=600, metadata={"parse": parse_duration})

    def delay_s(self, failures: int) -> int:
        """Seconds to wait after the `failures`-th failed attempt (1-based): doubling, capped."""
        return int(min(self.max_backoff, self.backoff * 2 ** min(failures - 1, 30)))


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task as its user describes it. Field order is the order documents and errors show."""

    name: str | None = field(default=None, metadata={"parse": parse_name})
    project: str | None = field(default=None, metadata={"parse": parse_project})  # None: its owner's own
    pool: str | None = field(default=None, metadata={"parse": parse_name})  # in whose nodes it runs; see core.pools
    workdir: str | None = field(default=None, metadata={"parse": parse_source})
    num_nodes: int = field(default=1, metadata=_whole_number(1, 100_000))
    # With how many nodes a training goes on when others are lost; None: a job ends with the first node it loses.
    min_nodes: int | None = field(default=None, metadata=_whole_number(1, 100_000))
    ranks_per_node: int = field(default=1, metadata=_whole_number(0, 1024))  # 0: `run` starts its own
    resources: Resources = field(default_factory=Resources)
    image: Recipe | None = None  # the environment it runs in, described here; resources.image_id names one instead
    envs: dict[str, str] = field(default_factory=dict, metadata={"parse": parse_envs})
    secrets: dict[str, SecretUse] = field(default_factory=dict, metadata={"parse": parse_secrets})  # by variable
    file_mounts: dict[str, str] = field(default_factory=dict, metadata={"parse": parse_file_mounts})
    setup: str | None = field(default=None, metadata={"parse": parse_script})
    run: str = field(metadata={"parse": parse_run})
    outputs: tuple[str, ...] = field(default=(), metadata={"parse": parse_outputs})
    # Patterns of numbers in what it prints; None: well-known shapes are recognised, (): no curves from its output.
    curves: tuple[str, ...] | None = field(default=None, metadata={"parse": parse_curves})
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_duration: int | None = field(default=None, metadata={"parse": parse_duration})  # seconds
    priority: int = field(default=0, metadata=_whole_number(-1000, 1000))
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

    def __post_init__(self) -> None:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise InvalidInput(
                f"{self.min_nodes} nodes are more than the task has",
                hint=f"give at most num_nodes, which is {self.num_nodes}",
                field="min_nodes",
            )
        if self.min_nodes is not None and self.ranks_per_node == 0:
            raise InvalidInput(
                "Diamond cannot bring back ranks that `run` starts itself",
                hint="leave min_nodes out, or give ranks_per_node and let Diamond start them",
                field="min_nodes",
            )
        self._check_pool()
        if self.image is not None and self.resources.image_id:
            raise InvalidInput(
                "the task names an image and describes one as well",
                hint="keep either `image` (a recipe) or resources.image_id (the name of an image)",
                field="image",
            )
        if both := [name for name in self.secrets if name in self.envs]:
            raise InvalidInput(
                f"{both[0]} is set in envs as well", hint="keep it in one of the two", field=f"secrets.{both[0]}"
            )

    def _check_pool(self) -> None:
        needs = self.resources
        if self.pool is None and (needs.is_elastic or needs.slots):
            if needs.slots:
                raise InvalidInput(
                    "slots are those of a pool, and the task names none",
                    hint="name one (pool: NAME, see `diamond pool ls`), or say cpus and accelerators instead",
                    field="resources.slots",
                )
            raise InvalidInput(
                f"{needs.accelerators} leaves the number to a pool, and the task names none",
                hint='name one (pool: NAME, see `diamond pool ls`), or give one number, as in "H100:4"',
                field="resources.accelerators",
            )
        if needs.slots and needs.accelerators:
            raise InvalidInput(
                "the task gives accelerators as well", hint="keep one of the two", field="resources.slots"
            )
        if self.pool is not None and needs.is_elastic and (self.num_nodes > 1 or self.min_nodes is not None):
            raise InvalidInput(
                "in a pool the number of nodes follows from the number of slots",
                hint="leave it out, or give one number of accelerators instead of a range",
                field="num_nodes" if self.num_nodes > 1 else "min_nodes",
            )
        if self.pool is not None and needs.is_elastic and self.ranks_per_node == 0:
            raise InvalidInput(
                "Diamond cannot change the number of ranks that `run` starts itself",
                hint="leave ranks_per_node out: there is a rank for every slot",
                field="ranks_per_node",
            )

    @staticmethod
    def parse(raw: object) -> TaskSpec:
        """Validate what a person wrote.

        Raises:
            InvalidInput: naming the field and the fix.
        """
        return decode(TaskSpec, raw, strict=True)

    @property
    def bundle_refs(self) -> dict[str, str]:
        """Where each uploaded bundle goes, relative to the work directory ("." for the workdir itself)."""
        refs = {".": self.workdir} if self.workdir else {}
        return refs | self.file_mounts

    def check_uploaded(self) -> None:
        """Refuse paths of the user's machine: at the server they mean nothing."""
        for target, ref in self.bundle_refs.items():
            if not is_bundle_ref(ref):
                raise InvalidInput(
                    f"{ref[:80]!r} is a path on the client's machine, which the server cannot see",
                    hint="upload it first (POST /api/v1/bundles) and give its reference, "
                    "bundle:sha256:…; the CLI and the Python client do this for you",
                    field="workdir" if target == "." else f"file_mounts.{target}",
                )
        if self.image is not None:
            try:
                self.image.check_uploaded()
            except InvalidInput as error:
                raise type(error)(error.message, hint=error.hint, field=f"image.{error.field}") from error


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file a task left behind. `stored` says whether its bytes are at the server (else only on the endpoint)."""

    path: str = field(metadata=bounds.text(4096))
    size_bytes: int
    sha256: str = ""
    stored: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """How a task stands. Times are Unix seconds (UTC)."""

    id: str
    name: str
    state: TaskState
    desired: Desired = Desired.RUN
    reason: Reason | None = None
    detail: str = ""  # what is particular to this case; `sentence` is what holds for the reason in general
    endpoint: str | None = None
    attempt: int = 0
    exit_code: int | None = None
    priority: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    next_attempt_at: float | None = None
    pending_reason: str = ""
    expected_start_at: float | None = None  # the scheduler's own estimate, while the task waits in its queue
    kind: str = "command"  # "build" and "transfer" look after images
    owner: str = ""  # a user's name
    project: str = ""
    visibility: Visibility = Visibility.PRIVATE
    image: str = ""  # the name of the image it runs in (or looks after), or a path on the endpoint; empty: none
    image_id: str = ""  # of an image of Diamond
    spec: TaskSpec | None = None  # only in the detail view
    jobs: tuple[Job, ...] = ()  # only in the detail view, oldest first
    outputs: tuple[Output, ...] = ()  # only in the detail view
    # Only in the answer that made it: limits it comes close to, who can read its secrets; why it goes where it goes.
    warnings: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        return MEANINGS[self.reason].sentence if self.reason else ""
