"""The rules of policy.toml: what the owner of the endpoint and its centre allow, whatever the server says.

Which file they come from, and when they hold, is in `policy_files`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from diamond.agent import guest_policy, image_policy, narrowing, pool_orders
from diamond.agent.asked import plain_name
from diamond.agent.patterns import is_under, listed, matches
from diamond.core.codec import decode
from diamond.core.durations import format_duration, parse_duration
from diamond.core.endpoints import EndpointFacts
from diamond.core.recipes import BUILDERS
from diamond.core.resources import Resources, parse_memory
from diamond.core.sbatch.layout import split_gres
from diamond.core.sbatch.options import OPTIONS
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder

log = logging.getLogger(__name__)
_GIB = 1024**3
_ANY_BYTES = 2**62
# Said where others are let in without a word about this.
ON_HOST = (
    "on the host they could read and change everything this account can, its keys and this file among it; add "
    "containers_only = true, or allow_others_on_host = true if that is wanted"
)
UNKNOWN_USER = "unknown"  # what rules call somebody of whom the server says no name
# Options of sbatch that get more than the fields of a task say, by the limit they would get around.
_GETS_CPUS = (
    "mincpus", "sockets-per-node", "cores-per-socket", "extra-node-info", "cpus-per-gpu", "tres-per-task", "resources",
    "ntasks-per-gpu", "ntasks-per-tres", "core-spec", "thread-spec",
)  # fmt: skip
_GETS_GPUS = ("gpus-per-socket", "tres-per-task", "resources")
_GPU_GRES = re.compile(r"(?:gres[/:])?(?:gpu|mps|shard)\b", re.IGNORECASE)  # the last two are parts of GPUs
# They put the whole job, with the script that would enter its image, into a container of somebody else's making; what
# options of a site's plug-ins do (Pyxis has --container-image and --container-mounts) nobody can tell here.
_GETS_OUT = ("container", "container-id", "bb", "bbf")
_ADDRESS = re.compile(r"\b(?!file:)[a-z][a-z0-9+.-]*://(?!/)[^,;\s]*")  # docker://…: a place elsewhere
_PATH = re.compile(r"(?:^|[=,:;\s])((?:~[\w.-]*)?/[^=,:;\s]*|(?:[^=,:;\s]*/)?\.\.(?:/[^=,:;\s]*)?(?=[=,:;\s]|$))")


def _number(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool) or raw < 0:
        raise ValueError(f"must be a whole number, 0 or more, not {str(raw)[:40]!r}")
    return raw


def _hours(raw: object) -> float:
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not 0 <= raw < 1e12:
        raise ValueError(f"must be a number of hours, 0 or more, not {str(raw)[:40]!r}")
    return float(raw)


def _flag(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ValueError(f"must be true or false, not {str(raw)[:40]!r}")
    return raw


def _bytes(raw: object) -> int:
    """``"20GB"``, or a number of bytes."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    if not isinstance(raw, str):
        raise ValueError(f'must be an amount such as "20GB", not {str(raw)[:40]!r}')
    return Resources(memory=parse_memory(raw)).mem_bytes_min


def _names(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(name, str) and name.strip() for name in raw):
        raise ValueError('must be a list of names, such as ["WANDB_API_KEY"]')
    return tuple(name.strip() for name in raw)


def _options(raw: object) -> tuple[str, ...]:
    return tuple(name.removeprefix("--") for name in _names(raw))


def _folders(raw: object) -> tuple[str, ...]:
    folders = tuple(os.path.expanduser(name) for name in _names(raw))
    for folder in folders:
        if not folder.startswith("/"):
            raise ValueError(f'must be a list of absolute paths, such as ["/scratch"], not {folder[:60]!r}')
    return folders


def _folder(raw: object) -> str:
    return _folders([raw])[0]


def _place_of_builds(raw: object) -> str:
    if raw not in image_policy.BUILD_PLACES:
        raise ValueError(f"must be one of {', '.join(image_policy.BUILD_PLACES)}, not {str(raw)[:40]!r}")
    return str(raw)


def _builders(raw: object) -> tuple[str, ...]:
    for name in (names := _names(raw)):
        if not any(matches(builder, [name]) for builder in BUILDERS):
            raise ValueError(f"{name[:40]!r} is none of {', '.join(BUILDERS)}")
    return names


def _rule(
    parse: Callable[[object], Any],
    default: Any = None,
    show: Callable[[Any], str] = str,
    *,
    narrow: Callable[[Any, Any], Any],
) -> Any:
    """`narrow` makes one value of a centre's and an owner's (see `narrowing`)."""
    return field(default=default, metadata={"parse": parse, "show": show, "narrow": narrow})


def show_bytes(num_bytes: int) -> str:
    """``8 GiB``, ``512 MiB``: in the unit that leaves a number people can read."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def _hours_text(hours: float) -> str:
    return f"{hours:.6g}"


def _flag_text(value: bool) -> str:
    return str(value).lower()


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The rules. None means no rule. Names may hold * and ?. An empty list of allowed ones allows none."""

    max_nodes: int | None = _rule(_number, narrow=narrowing.least)
    max_walltime: int | None = _rule(parse_duration, show=format_duration, narrow=narrowing.least)  # seconds
    max_cpus: int | None = _rule(_number, narrow=narrowing.least)  # per node
    max_gpus: int | None = _rule(_number, narrow=narrowing.least)  # per node
    max_memory: int | None = _rule(_bytes, show=show_bytes, narrow=narrowing.least)  # bytes per node
    max_gpu_hours: float | None = _rule(_hours, show=_hours_text, narrow=narrowing.least)  # per job
    max_concurrent_jobs: int | None = _rule(_number, narrow=narrowing.least)
    # Whether others than the endpoint's owner run tasks here. None: those alone that `allowed_users` names, if any.
    allow_others: bool | None = _rule(_flag, show=_flag_text, narrow=narrowing.both)
    # Whether they may do so outside of containers, among the files of the account.
    allow_others_on_host: bool = _rule(_flag, False, _flag_text, narrow=narrowing.both)
    allowed_users: tuple[str, ...] | None = _rule(_names, show=listed, narrow=narrowing.common)
    allowed_accounts: tuple[str, ...] | None = _rule(_names, show=listed, narrow=narrowing.common)
    denied_accounts: tuple[str, ...] = _rule(_names, (), listed, narrow=narrowing.union)
    allowed_partitions: tuple[str, ...] | None = _rule(_names, show=listed, narrow=narrowing.common)
    denied_partitions: tuple[str, ...] = _rule(_names, (), listed, narrow=narrowing.union)
    allowed_qos: tuple[str, ...] | None = _rule(_names, show=listed, narrow=narrowing.common)
    allowed_extra: tuple[str, ...] | None = _rule(_options, show=listed, narrow=narrowing.common)
    allowed_envs: tuple[str, ...] | None = _rule(_names, show=listed, narrow=narrowing.common)
    denied_envs: tuple[str, ...] = _rule(_names, (), listed, narrow=narrowing.union)
    containers_only: bool = _rule(_flag, False, _flag_text, narrow=narrowing.either)
    path_roots: tuple[str, ...] | None = _rule(_folders, show=listed, narrow=narrowing.common_folders)
    queue_ahead: bool = _rule(_flag, True, _flag_text, narrow=narrowing.both)
    allow_shells: bool = _rule(_flag, True, _flag_text, narrow=narrowing.both)
    # In tasks of others than the endpoint's owner.
    allow_shells_of_others: bool = _rule(_flag, False, _flag_text, narrow=narrowing.both)
    allow_secrets: bool = _rule(_flag, True, _flag_text, narrow=narrowing.both)  # whether tasks may bring any here
    # Whether nodes may be held for several tasks.
    allow_pools: bool = _rule(_flag, True, _flag_text, narrow=narrowing.both)
    builds: str = _rule(_place_of_builds, "any", narrow=narrowing.place_of_builds)  # where images are built
    allowed_builders: tuple[str, ...] | None = _rule(_builders, show=listed, narrow=narrowing.common)
    allowed_bases: tuple[str, ...] | None = _rule(_names, show=listed, narrow=narrowing.common)
    max_build_time: int | None = _rule(parse_duration, show=format_duration, narrow=narrowing.least)  # seconds
    max_image_bytes: int | None = _rule(_bytes, show=show_bytes, narrow=narrowing.least)
    image_root: str | None = _rule(_folder, narrow=narrowing.folder_within)  # where images lie
    # What containers see, beside what they see anyway.
    image_binds: tuple[str, ...] = _rule(_folders, (), listed, narrow=narrowing.folders_shown)
    keep_finished: int = _rule(parse_duration, 7 * 86400, format_duration, narrow=narrowing.least)  # seconds
    max_output_bytes: int = _rule(_bytes, _GIB, show_bytes, narrow=narrowing.least)  # per task
    cache_bytes: int = _rule(_bytes, 20 * _GIB, show_bytes, narrow=narrowing.least)

    def refusal(
        self,
        order: JobOrder,
        image_root: str = "",
        owner: str = "",
        pilots: Sequence[JobOrder] = (),
        agent_home: Path | None = None,
    ) -> str:
        """The rule an order breaks, its value and what was asked; empty when it is allowed.

        Args:
            image_root: where images lie.
            owner: whose endpoint this is; empty: nobody has said.
            pilots: of a job in a pool, the orders of its pilots as this agent took them up.
            agent_home: whose folders others must not be led into.
        """
        if wrong := image_policy.malformed(order) or pool_orders.malformed(order):
            return wrong
        is_other = bool(owner) and order.user != owner
        if is_other:
            for broken in self._broken_by_others(order, owner):
                return f"policy.toml: {broken}"
        for broken in self._broken(order, image_root, pilots):
            return f"policy.toml: {broken}"
        if is_other and agent_home is not None:
            for broken in guest_policy.broken(self, order, image_root, agent_home):
                return f"policy.toml: {broken}"
        return ""

    @property
    def keeps_others_apart(self) -> bool:
        """Whether it was thought of that tasks on the host can read and change what the account can."""
        return self.containers_only or self.allow_others_on_host

    def others_problem(self, owner: str) -> str:
        """Why a rule that lets others in is not in force; empty when there is none, or it is."""
        names = [name for name in self.allowed_users or () if name != owner]
        if self.keeps_others_apart or not (self.allow_others or (self.allow_others is None and names)):
            return ""
        rule = "allow_others = true" if self.allow_others else f"allowed_users = {listed(tuple(names))}"
        return f"{rule} is not in force, and tasks of others are refused: {ON_HOST}"

    def _broken_by_others(self, order: JobOrder, owner: str) -> Iterator[str]:
        user = plain_name(order.user or UNKNOWN_USER)
        if not self.allow_others and (self.allowed_users is None or self.allow_others is False):
            yield f"allow_others = false, the task is of user {user} and this endpoint is {plain_name(owner)}'s"
        yield from self._named("allowed_users", (order.user or UNKNOWN_USER,), "the task is of user {}")
        if not self.keeps_others_apart:
            yield f"allow_others_on_host = false, the task is of user {user}: {ON_HOST}"

    def _broken(self, order: JobOrder, image_root: str, pilots: Sequence[JobOrder]) -> Iterator[str]:
        yield from self._named("allowed_users", (order.user or UNKNOWN_USER,), "the task is of user {}")
        if not self.allow_pools and (order.pilot is not None or order.place is not None):
            yield f"allow_pools = false, the job {'holds a node of' if order.pilot is not None else 'runs in'} a pool"
        yield from image_policy.broken(self, order, image_root)
        if image_policy.runs_beside(order):
            return  # it takes nothing of the batch scheduler's, and no words of a user's
        yield from self._who(order, pilots)
        yield from self._how_much(order)
        yield from self._what(order.spec)

    def _who(self, order: JobOrder, pilots: Sequence[JobOrder]) -> Iterator[str]:
        # In a pool it is the pilots that Slurm knows; what the task says itself has to be allowed as well.
        asked = pool_orders.asked_of_slurm((order, *pilots))
        # Without a name Slurm takes a default that only it knows, which may be any.
        accounts, partitions = asked.accounts or ("",), asked.partitions or ("",)
        yield from self._named("allowed_accounts", accounts, "the task charges {}", "slurm.account")
        yield from self._named("allowed_partitions", partitions, "the task asks for {}", "slurm.partition")
        yield from self._named("allowed_qos", asked.qos, "the task asks for {}")
        for account in asked.accounts:
            # In capitals it is the same account to Slurm.
            if matches(account.lower(), [name.lower() for name in self.denied_accounts]):
                yield f"denied_accounts = {listed(self.denied_accounts)}, the task asks for {account}"
        if order.after and not self.queue_ahead:
            yield "queue_ahead = false, the job is to wait in the queue behind another of its task"
        for name in asked.partitions:
            if matches(name, self.denied_partitions):
                yield f"denied_partitions = {listed(self.denied_partitions)}, the task asks for {name}"

    def _named(self, rule: str, names: Iterable[str], text: str, field_name: str = "") -> Iterator[str]:
        allowed = getattr(self, rule)
        for name in names if allowed is not None else ():
            if not name:
                yield f"{rule} = {listed(allowed)}, the task names none (set {field_name})"
            elif not matches(name, allowed):
                yield f"{rule} = {listed(allowed)}, {text.format(name)}"

    def _how_much(self, order: JobOrder) -> Iterator[str]:
        spec, needs = order.spec, order.spec.resources
        in_gres, other_gres = split_gres(spec.slurm.gres)
        gpus = needs.gpus + sum(one.count for one in in_gres)
        for rule, asked in (
            ("max_nodes", spec.num_nodes),
            ("max_cpus", needs.cpus_min),
            ("max_gpus", gpus),
            ("max_memory", needs.mem_bytes_min),
            ("max_walltime", order.time_limit_s or 0),
        ):
            allowed = getattr(self, rule)
            if allowed is not None and asked > allowed:
                yield f"{rule} = {self._shown(rule)}, the task asks for {_show(rule, asked)}"
        yield from self._gpu_hours(order, gpus)
        for rule, around in (("max_cpus", _GETS_CPUS), ("max_gpus", _GETS_GPUS), ("max_gpu_hours", _GETS_GPUS)):
            if getattr(self, rule) is None:
                continue
            if spec.slurm.exclusive:
                yield f"{rule} = {self._shown(rule)}, the task asks for whole nodes (slurm.exclusive)"
            for name, option in _extra(spec):
                if name in around:
                    yield f"{rule} = {self._shown(rule)}, which {option[:80]} in slurm.extra would get around"
            if around is _GETS_GPUS and set(order.gpu_type) & set(",:= "):  # it becomes part of a --gres
                yield f"{rule} = {self._shown(rule)}, and {order.gpu_type[:80]!r} is no model of a GPU"
            for part in other_gres if around is _GETS_GPUS else ():
                if _GPU_GRES.match(part):
                    yield f"{rule} = {self._shown(rule)}, and {part[:80]} in slurm.gres is no clear number of GPUs"

    def _gpu_hours(self, order: JobOrder, gpus: int) -> Iterator[str]:
        limit_s = self.time_limit_s(order)
        if self.max_gpu_hours is None or not gpus:
            return
        shown = f"max_gpu_hours = {self._shown('max_gpu_hours')}"
        num_nodes = order.spec.num_nodes
        asked = f"{num_nodes} x {gpus} GPUs"
        if limit_s is None:
            yield f"{shown}, the task asks for {asked} without a time limit (set max_duration)"
        elif (hours := gpus * num_nodes * limit_s / 3600) > self.max_gpu_hours:
            yield f"{shown}, the task asks for {_hours_text(hours)}: {asked} for {format_duration(limit_s)}"

    def _what(self, spec: TaskSpec) -> Iterator[str]:
        image = spec.resources.image_id or ""
        for name, option in _extra(spec) if self.containers_only else ():
            if (name in _GETS_OUT or name not in OPTIONS) and name not in (self.allowed_extra or ()):
                yield (
                    f"containers_only = true, which {option[:80]} in slurm.extra might get around (allowed_extra may "
                    "name it)"
                )
        if self.allowed_extra is not None:
            for name, _ in _extra(spec):
                if not matches(name, self.allowed_extra):
                    yield f"allowed_extra = {listed(self.allowed_extra)}, the task uses --{name}"
        if self.path_roots is not None:
            named = [("resources.image_id", image), *(("slurm.extra", one) for one in spec.slurm.extra)]
            # With a slash in it, sbatch reads the names from a file.
            named += [("slurm.nodelist", spec.slurm.nodelist or ""), ("slurm.exclude", spec.slurm.exclude or "")]
            for where, text in named:
                for path in _PATH.findall(_ADDRESS.sub("", text)):
                    if not is_under(path, self.path_roots):
                        yield f"path_roots = {listed(self.path_roots)}, the task names {path[:200]} in {where}"
        if spec.secrets and not self.allow_secrets:
            yield f"allow_secrets = false, the task names {next(iter(spec.secrets))}"
        for name in (*spec.envs, *spec.secrets):
            if matches(name, self.denied_envs):
                yield f"denied_envs names {name}, which the task sets"
            if self.allowed_envs is not None and not matches(name, self.allowed_envs):
                yield f"allowed_envs does not name {name}, which the task sets"

    def shell_refusal(self, user: str, *, is_other: bool) -> str:
        """The rule against a shell in a task of this user; empty when it is allowed."""
        if not self.allow_shells:
            return "policy.toml: allow_shells = false"
        if is_other and not self.allow_shells_of_others:
            whose = plain_name(user or UNKNOWN_USER)
            return f"policy.toml: allow_shells_of_others = false, the task is of user {whose}"
        return ""

    def time_limit_s(self, order: JobOrder) -> int | None:
        """The order's limit; where it has none, the policy's."""
        if order.time_limit_s is not None:
            return order.time_limit_s
        builds_s = self.max_build_time if order.work is not None and order.work.action == "build" else None
        limits = [
            limit
            for limit in (builds_s, None if image_policy.runs_beside(order) else self.max_walltime)
            if limit is not None
        ]
        return min(limits, default=None)

    def binds(self, found: Iterable[str]) -> tuple[str, ...]:
        """What containers see: what the owner names, and what was found here and lies in a root, if there are roots."""
        kept = [path for path in found if self.path_roots is None or is_under(path, self.path_roots)]
        return tuple(dict.fromkeys([*self.image_binds, *kept]))

    def output_limit(self, order: JobOrder) -> int:
        """Bytes of outputs that leave the endpoint. An image on its way is no output of a task."""
        return self.max_output_bytes if order.work is None else self.max_image_bytes or _ANY_BYTES

    def filter_facts(self, facts: EndpointFacts) -> EndpointFacts:
        """What the endpoint has to offer under these rules, so that the server does not offer more."""
        accounts = _allowed(facts.accounts, self.allowed_accounts, self.denied_accounts)
        if not accounts and self.allowed_accounts is not None:
            # None known would mean that any will do.
            accounts = tuple(name for name in self.allowed_accounts if not set(name) & set("*?["))
        qos = _allowed(facts.qos, self.allowed_qos)
        names = [partition.name for partition in facts.partitions]
        # Without any, the server does not offer to bring images from elsewhere either.
        allowed_builders = () if self.builds == "off" else self.allowed_builders
        builders = _allowed(facts.builders, allowed_builders, ("venv",) if self.containers_only else ())
        kept = _allowed(names, self.allowed_partitions, self.denied_partitions)
        return replace(
            facts,
            partitions=tuple(partition for partition in facts.partitions if partition.name in kept),
            accounts=accounts,
            default_account=facts.default_account if facts.default_account in accounts or not facts.accounts else "",
            qos=qos,
            max_walltime_s=self.max_walltime,
            queues_ahead=facts.queues_ahead and self.queue_ahead,
            allows_shells=facts.allows_shells and self.allow_shells,
            allows_shells_of_others=(facts.allows_shells and self.allow_shells and self.allow_shells_of_others),
            takes_secrets=facts.takes_secrets and self.allow_secrets,
            holds_pools=facts.holds_pools and self.allow_pools,
            allows_others=bool(self.allow_others) and self.keeps_others_apart,
            allowed_users=self.allowed_users if self.keeps_others_apart or self.allowed_users is None else (),
            builders=builders,
            builds=(self.builds if builders else "off") if facts.builders else "",
        )

    def describe(self) -> dict[str, str]:
        """The rules in force, for people."""
        shown: dict[str, str] = {}
        for rule in fields(self):
            value = getattr(self, rule.name)
            is_idle = value is None or (value == () and rule.default == ())
            if not is_idle and not (isinstance(value, bool | str) and value == rule.default):
                shown[rule.name] = self._shown(rule.name)
        return shown

    def _shown(self, rule: str) -> str:
        return _show(rule, getattr(self, rule))


def _show(rule: str, value: Any) -> str:
    return str(Policy.__dataclass_fields__[rule].metadata["show"](value))


def _allowed(names: Iterable[str], allowed: tuple[str, ...] | None, denied: tuple[str, ...] = ()) -> tuple[str, ...]:
    return tuple(name for name in names if (allowed is None or matches(name, allowed)) and not matches(name, denied))


def _extra(spec: TaskSpec) -> Iterator[tuple[str, str]]:
    for option in spec.slurm.extra:
        yield option.removeprefix("--").partition("=")[0], option


def narrowed(centre: Policy, said: Iterable[str], own: Policy) -> Policy:
    """An owner's rules within a centre's. `said`: the rules that the centre's file names; others are the owner's."""
    rules = Policy.__dataclass_fields__
    kept = {name: rules[name].metadata["narrow"](getattr(centre, name), getattr(own, name)) for name in said}
    return replace(own, **kept)


def parse_policy(raw: Mapping[str, Any]) -> Policy:
    """Raises InvalidInput naming the key, and the valid ones if it is unknown."""
    return decode(Policy, raw, strict=True)
