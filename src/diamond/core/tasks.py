"""A task: what a user asked for (`TaskSpec`) and how it stands (`Task`). The one place that validates a spec.

The same checks run in the client before anything is uploaded and in the server before anything is written,
so there is one error text. Files a spec names (`workdir`, `file_mounts`) are paths on the user's machine
until the client has uploaded them; then they are bundle references (see `diamond.core.bundles`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diamond.core.bundles import check_relative_path, is_bundle_ref
from diamond.core.codec import decode
from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.jobs import Job
from diamond.core.reasons import DEFAULT_RETRY_ON, MEANINGS, Reason
from diamond.core.resources import Resources
from diamond.core.slurm import SlurmOptions
from diamond.core.states import Desired, TaskState

MAX_NAME = 128
MAX_SCRIPT_BYTES = 1024 * 1024
MAX_ENV_VALUE_BYTES = 100 * 1024  # Linux refuses to exec with one string over 128 KiB
MAX_ENVS_BYTES = 1024 * 1024
MAX_ENVS = 1000
MAX_PATTERNS = 200
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_RESERVED_ENV = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}
)
# Bash keeps these for itself: setting one is an error there, or changes what a script means.
_SHELL_ENV = frozenset({"UID", "EUID", "PPID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO", "POSIXLY_CORRECT"})
_PATH_ENV = frozenset({"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MANPATH"})
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"must be text, not {type(raw).__name__}; put quotes around it")
    return raw


def parse_name(raw: object) -> str:
    name = _text(raw).strip()
    if not name:
        raise ValueError("must not be empty; leave the field out to have one made")
    if len(name) > MAX_NAME:
        raise TooLarge(f"is {len(name)} characters long; at most {MAX_NAME} are allowed")
    if _UNSAFE.search(name):
        raise ValueError("must be one line of printable text, without control characters")
    return name


def parse_script(raw: object) -> str:
    """Shell text, kept byte for byte: it is written to a file and never pasted into another script."""
    script = _text(raw)
    if "\x00" in script:
        raise ValueError("must not contain NUL characters")
    try:
        size = len(script.encode())
    except UnicodeEncodeError as error:
        raise ValueError("must be valid Unicode text") from error
    if size > MAX_SCRIPT_BYTES:
        raise InvalidInput(
            f"is {size} bytes long; at most {MAX_SCRIPT_BYTES} are allowed",
            hint="put the script into the workdir and call it from `run`",
        )
    return script


def parse_run(raw: object) -> str:
    script = parse_script(raw)
    if not script.strip():
        raise ValueError("must not be empty; give the command to run")
    return script


def parse_envs(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise ValueError("must be a mapping of NAME: value")
    if len(raw) > MAX_ENVS:
        raise TooLarge(f"has {len(raw)} entries; at most {MAX_ENVS} are allowed")
    envs: dict[str, str] = {}
    total = 0
    for name, value in raw.items():
        check_env_name(name)
        envs[name] = _env_value(name, value)
        total += len(name) + len(envs[name].encode())
    if total > MAX_ENVS_BYTES:
        raise TooLarge(
            f"add up to {total} bytes; at most {MAX_ENVS_BYTES} are allowed",
            hint="put large values into a file in the workdir",
        )
    return envs


def check_env_name(name: object) -> None:
    if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
        raise InvalidInput(
            f"{str(name)[:60]!r} is not a variable name",
            hint="use letters, digits and underscores, not starting with a digit",
        )
    if name in _RESERVED_ENV or name.startswith("DIAMOND_"):
        raise InvalidInput(f"{name} is set by Diamond itself", hint="choose another name")
    if name in _SHELL_ENV:
        raise InvalidInput(f"{name} belongs to the shell and cannot be set", hint="choose another name")


def _env_value(name: str, value: object) -> str:
    if value is None:
        raise InvalidInput("has no value", hint=f"give it with --env {name}=VALUE, or write it here", field=name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidInput("must be text or a number", hint='put quotes around it, e.g. "true"', field=name)
    text = str(value)
    if "\x00" in text:
        raise InvalidInput("must not contain NUL characters", field=name)
    if name in _PATH_ENV and "$" in text:
        raise InvalidInput(
            "variables are not expanded here, so a literal '$' would stand in it",
            hint=f"set it in the command instead: export {name}=/my/folder:${name}",
            field=name,
        )
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput("must be valid Unicode text", field=name) from error
    if size > MAX_ENV_VALUE_BYTES:
        raise TooLarge(
            f"is {size} bytes long; at most {MAX_ENV_VALUE_BYTES} are allowed",
            hint="put it into a file in the workdir",
            field=name,
        )
    return text


def parse_source(raw: object) -> str:
    """A path on the user's machine, or the reference of what was uploaded from there."""
    source = _text(raw)
    if not source.strip() or "\x00" in source or len(source) > 4096:
        raise ValueError("must be a path to a file or folder")
    return source


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
    workdir: str | None = field(default=None, metadata={"parse": parse_source})
    num_nodes: int = field(default=1, metadata=_whole_number(1, 100_000))
    ranks_per_node: int = field(default=1, metadata=_whole_number(0, 1024))  # 0: `run` starts its own
    resources: Resources = field(default_factory=Resources)
    envs: dict[str, str] = field(default_factory=dict, metadata={"parse": parse_envs})
    file_mounts: dict[str, str] = field(default_factory=dict, metadata={"parse": parse_file_mounts})
    setup: str | None = field(default=None, metadata={"parse": parse_script})
    run: str = field(metadata={"parse": parse_run})
    outputs: tuple[str, ...] = field(default=(), metadata={"parse": parse_outputs})
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_duration: int | None = field(default=None, metadata={"parse": parse_duration})  # seconds
    priority: int = field(default=0, metadata=_whole_number(-1000, 1000))
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

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


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file a task left behind. `stored` says whether its bytes are at the server (else only on the endpoint)."""

    path: str
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
    spec: TaskSpec | None = None  # only in the detail view
    jobs: tuple[Job, ...] = ()  # only in the detail view, oldest first
    outputs: tuple[Output, ...] = ()  # only in the detail view

    @property
    def sentence(self) -> str:
        return MEANINGS[self.reason].sentence if self.reason else ""
