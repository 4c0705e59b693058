"""policy.toml: what the owner of the endpoint allows, whatever the server says.

The file is read at the start, where a mistake stops the agent, and again whenever it changes, where a mistake leaves
the old rules in force and shows as a warning: an editor's slip must not open the endpoint, nor stop its jobs.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from diamond.core.codec import decode
from diamond.core.durations import format_duration, parse_duration
from diamond.core.errors import InstallationProblem, InvalidInput
from diamond.core.resources import Resources, parse_memory
from diamond.core.wire import JobOrder

log = logging.getLogger(__name__)
_GIB = 1024**3


def _number(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 0:
        raise ValueError(f"must be a whole number, 0 or more, not {str(raw)[:40]!r}")
    return raw


def _bytes(raw: object) -> int:
    """``"20GB"``, or a number of bytes."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    if not isinstance(raw, str):
        raise ValueError(f'must be an amount such as "20GB", not {str(raw)[:40]!r}')
    return Resources(memory=parse_memory(raw)).mem_bytes_min


def _names(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(name, str) for name in raw):
        raise ValueError('must be a list of names, such as ["WANDB_API_KEY"]')
    return tuple(raw)


def _rule(parse: Callable[[object], Any], default: Any = None) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules. None means no rule."""

    max_nodes: int | None = _rule(_number)
    max_walltime: int | None = _rule(parse_duration)  # seconds
    max_cpus: int | None = _rule(_number)  # per node
    max_gpus: int | None = _rule(_number)  # per node
    max_memory: int | None = _rule(_bytes)  # bytes per node
    max_concurrent_jobs: int | None = _rule(_number)
    allowed_envs: tuple[str, ...] | None = _rule(_names)
    denied_envs: tuple[str, ...] = _rule(_names, ())
    keep_finished: int = _rule(parse_duration, 7 * 86400)  # seconds
    max_output_bytes: int = _rule(_bytes, _GIB)  # per task
    cache_bytes: int = _rule(_bytes, 20 * _GIB)

    def refusal(self, order: JobOrder) -> str:
        """The rule an order breaks, with both numbers; empty when it is allowed."""
        spec = order.spec
        needs = spec.resources
        time_limit_s = order.time_limit_s or 0
        for rule, allowed, asked, show in (
            ("max_nodes", self.max_nodes, spec.num_nodes, str),
            ("max_cpus", self.max_cpus, needs.cpus_min, str),
            ("max_gpus", self.max_gpus, needs.gpus, str),
            ("max_memory", self.max_memory, needs.mem_bytes_min, _show_bytes),
            ("max_walltime", self.max_walltime, time_limit_s, format_duration),
        ):
            if allowed is not None and asked > allowed:
                return f"policy.toml: {rule} = {show(allowed)}, the task asks for {show(asked)}"
        for name in spec.envs:
            if name in self.denied_envs:
                return f"policy.toml: denied_envs names {name}, which the task sets"
            if self.allowed_envs is not None and name not in self.allowed_envs:
                return f"policy.toml: allowed_envs does not name {name}, which the task sets"
        return ""

    def time_limit_s(self, order: JobOrder) -> int | None:
        """The order's limit; where it has none, the policy's."""
        return self.max_walltime if order.time_limit_s is None else order.time_limit_s

    def describe(self) -> dict[str, str]:
        """The rules in force, for people."""
        shown: dict[str, str] = {}
        for rule in fields(self):
            value = getattr(self, rule.name)
            if value is None or value == ():
                continue
            if rule.name in ("max_walltime", "keep_finished"):
                shown[rule.name] = format_duration(value)
            elif rule.name in ("max_memory", "max_output_bytes", "cache_bytes"):
                shown[rule.name] = _show_bytes(value)
            else:
                shown[rule.name] = ", ".join(value) if isinstance(value, tuple) else str(value)
        return shown


def _show_bytes(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.4g} GiB"


def parse_policy(raw: Mapping[str, Any]) -> Policy:
    """Raises InvalidInput naming the key, and the valid ones if it is unknown."""
    return decode(Policy, raw, strict=True)


class PolicyFile:
    """The policy in force. Used by the loop's thread alone."""

    def __init__(self, path: Path) -> None:
        """Raises InstallationProblem when the file is there and not right."""
        self._path = path
        self._stamp = self._look()
        self.warning = ""
        try:
            self.policy = self._load()
        except (InvalidInput, OSError, ValueError) as error:
            raise InstallationProblem(f"{path}: {error}", hint="mend the file and start the agent again") from error

    def refresh(self) -> bool:
        """Read the file again if it changed; True when other rules are in force now."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            policy = self._load()
        except (InvalidInput, OSError, ValueError) as error:
            self.warning = f"policy.toml was changed but not accepted, the old rules hold: {str(error).splitlines()[0]}"
            log.warning("%s", self.warning)
            return False
        self.warning = ""
        changed, self.policy = policy != self.policy, policy
        return changed

    def _load(self) -> Policy:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return Policy()
        return parse_policy(tomllib.loads(text))

    def _look(self) -> tuple[int, int]:
        try:
            stat = os.stat(self._path)
        except OSError:
            return (0, 0)
        return stat.st_mtime_ns, stat.st_size
