"""Which partition of an endpoint a task goes to, and how long one job of it may run there. Pure.

The same function answers at the server (is it possible at all, and what would happen) and in a dry run. A partition is
suitable when it has enough nodes of one kind with everything the task asks for, and lets jobs in at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from diamond.core.durations import format_duration
from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, Partition
from diamond.core.tasks import TaskSpec

_SOME_TIME_S = 3600
_MOST_NAMED = 30


@dataclass(frozen=True, kw_only=True)
class Obstacle:
    """Why a task cannot run at an endpoint, and which field of the spec to change."""

    field: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where at an endpoint. `walltime_s` is the longest one job may run (None: no limit); a task may need several."""

    partition: str = ""
    gpu_type: str = ""  # the endpoint's own name of the GPU model
    walltime_s: int | None = None
    why: str = ""


def choose(spec: TaskSpec, facts: EndpointFacts) -> Choice | Obstacle:
    """The partition for this task, or the first thing in its way."""
    if facts.scheduler != "slurm" and (named := spec.slurm.first_set):
        return Obstacle(field=f"slurm.{named}", text=f"its scheduler is {facts.scheduler}, not Slurm")
    if spec.slurm.account and facts.accounts and spec.slurm.account not in facts.accounts:
        text = f"it has no account {spec.slurm.account} for you; there are {some_of(facts.accounts)}"
        return Obstacle(field="slurm.account", text=text)
    if not facts.partitions:
        return _without_partitions(spec, facts)
    named_ones = spec.slurm.partitions
    known = {partition.name: partition for partition in facts.partitions}
    for name in named_ones:
        if name not in known:
            shown = some_of([p.name for p in facts.partitions if not p.is_hidden]) or "none"
            return Obstacle(field="slurm.partition", text=f"it has no partition {name}; there are {shown}")
    obstacles: dict[str, Obstacle] = {}
    fitting: list[Partition] = []
    for partition in [known[name] for name in named_ones] or facts.partitions:
        if not named_ones and (partition.is_hidden or not _lets_in(partition, spec, facts)):
            continue
        if obstacle := find_obstacle(spec, partition):
            obstacles[partition.name] = obstacle
        else:
            fitting.append(partition)
    if not fitting:
        return _sum_up(spec, facts, obstacles)
    best = min(fitting, key=lambda partition: _rank(spec, partition))
    # Several named partitions are Slurm's to choose among; it takes the one that starts first.
    chosen = ",".join(p.name for p in fitting) if len(named_ones) > 1 else best.name
    caps = [cap for p in (fitting if len(named_ones) > 1 else [best]) if (cap := _walltime(spec, p, facts)) is not None]
    lasts_s = min(filter(None, (_walltime(spec, best, facts), spec.max_duration)), default=None)
    return Choice(
        partition=chosen,
        gpu_type=_gpu_name(spec, best),
        walltime_s=min(caps, default=None),
        why=_explain(best, fitting, named=bool(named_ones), lasts_s=lasts_s),
    )


def find_obstacle(spec: TaskSpec, partition: Partition) -> Obstacle | None:
    """What makes the task impossible in this partition."""
    need = spec.resources
    if not partition.is_up:
        return Obstacle(field="slurm.partition", text=f"partition {partition.name} is closed")
    if partition.max_nodes is not None and spec.num_nodes > partition.max_nodes:
        most = _nodes(partition.max_nodes)
        return Obstacle(field="num_nodes", text=f"partition {partition.name} allows {most} a job")
    if spec.num_nodes < partition.min_nodes:
        least = _nodes(partition.min_nodes)
        return Obstacle(field="num_nodes", text=f"partition {partition.name} wants {least} or more")
    limit_s = partition.max_walltime_s
    if limit_s is not None and spec.slurm.time_s is not None and spec.slurm.time_s > limit_s:
        text = (
            f"partition {partition.name} allows {format_duration(limit_s)} a job; a longer max_duration makes a chain"
        )
        return Obstacle(field="slurm.time", text=text)
    kinds: Iterable[NodeGroup] = partition.groups
    for what, fits, field in (
        (f"{need.accelerators}", lambda g: gpus_of(g.gpus, need.gpu_type) >= need.gpus, "resources.accelerators"),
        (f"{need.cpus} cores a node", lambda g: g.cpus >= need.cpus_min, "resources.cpus"),
        (
            f"{need.memory} GiB a node",
            lambda g: not g.mem_bytes or g.mem_bytes >= need.mem_bytes_min,
            "resources.memory",
        ),
        (f"the feature {spec.slurm.constraint}", lambda g: _has_features(g, spec), "slurm.constraint"),
    ):
        kinds = [group for group in kinds if fits(group)]
        if not kinds:
            return Obstacle(field=field, text=f"partition {partition.name} has no node with {what}")
    have = sum(group.count for group in kinds)
    if spec.num_nodes > have:
        return Obstacle(field="num_nodes", text=f"partition {partition.name} has {_nodes(have, 'such ')}")
    return None


def _nodes(count: int, kind: str = "") -> str:
    return f"{count} {kind}node" + ("" if count == 1 else "s")


def gpus_of(gpus: Iterable[Gpu], wanted: str | None) -> int:
    """How many GPUs answer to the name asked for (any, when none was named)."""
    return sum(gpu.count for gpu in gpus if wanted is None or is_gpu_model(gpu.model, wanted))


def some_of(words: Sequence[str], separator: str = ", ") -> str:
    """A list as people read it: not a thousand names."""
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    return separator.join(words[:_MOST_NAMED]) + more


@lru_cache(maxsize=20_000)
def is_gpu_model(model: str, wanted: str) -> bool:
    """``H100`` names an "NVIDIA H100 80GB HBM3"; ``A100-80GB`` names an "NVIDIA A100-SXM4-80GB"."""
    have = set(re.split(r"[\s_/-]+", model.lower()))
    return set(re.split(r"[\s_/-]+", wanted.lower())) <= have


def _without_partitions(spec: TaskSpec, facts: EndpointFacts) -> Choice | Obstacle:
    cap = facts.max_walltime_s
    if spec.slurm.time_s is not None:
        if cap is not None and spec.slurm.time_s > cap:
            return Obstacle(field="slurm.time", text=f"it runs jobs for at most {format_duration(cap)}")
        cap = spec.slurm.time_s
    return Choice(walltime_s=cap)


def _lets_in(partition: Partition, spec: TaskSpec, facts: EndpointFacts) -> bool:
    """Whether to try a partition nobody named: one for certain accounts only with one of them."""
    mine = {spec.slurm.account} if spec.slurm.account else {*facts.accounts, facts.default_account}
    return not partition.allow_accounts or bool(mine & set(partition.allow_accounts))


def _has_features(group: NodeGroup, spec: TaskSpec) -> bool:
    """Whether a constraint of plain names joined by & can be met; anything cleverer is left to Slurm."""
    wanted = spec.slurm.constraint or ""
    if not wanted or re.search(r"[^A-Za-z0-9_.&,-]", wanted):
        return True
    return set(re.split(r"[&,]", wanted)) <= set(group.features)


def _walltime(spec: TaskSpec, partition: Partition, facts: EndpointFacts) -> int | None:
    if spec.slurm.time_s is not None:
        return spec.slurm.time_s
    caps = [cap for cap in (partition.max_walltime_s, facts.max_walltime_s) if cap is not None]
    # With nothing said, the site's own default holds: asking for the longest would wait the longest.
    if spec.max_duration is None and partition.default_walltime_s is not None:
        caps.append(partition.default_walltime_s)
    return min(caps, default=None)


def _rank(spec: TaskSpec, partition: Partition) -> tuple[bool, bool, bool, bool, float, float, str]:
    has_gpus = any(group.gpus for group in partition.groups)
    limit_s = partition.max_walltime_s
    # Whoever says nothing about time does not mean the two minutes of a debug queue.
    wanted_s = spec.slurm.time_s or spec.max_duration or _SOME_TIME_S
    too_short = limit_s is not None and limit_s < wanted_s
    need = spec.resources
    fitting = sum(group.count for group in partition.groups if gpus_of(group.gpus, need.gpu_type) >= need.gpus)
    return (
        partition.is_preemptible,
        has_gpus and not need.gpus,  # GPU nodes are for those who use the GPUs
        too_short,
        not partition.is_default,
        1 - fitting / max(1, partition.nodes),  # made for this kind of node, rather than having some of it
        float("inf") if limit_s is None else limit_s,  # queues for long jobs move slowly
        partition.name,
    )


def _gpu_name(spec: TaskSpec, partition: Partition) -> str:
    wanted = spec.resources.gpu_type
    if not wanted:
        return ""
    names = [gpu.model for group in partition.groups for gpu in group.gpus if is_gpu_model(gpu.model, wanted)]
    return min(names, key=len, default="")


def _explain(best: Partition, fitting: list[Partition], *, named: bool, lasts_s: float | None) -> str:
    if named:
        return f"partition {best.name}, as the task says"
    most_s = best.max_walltime_s
    limit = f", jobs up to {format_duration(most_s)}" if most_s is not None else ""
    if lasts_s is not None and (most_s is None or lasts_s < most_s):
        limit += f"{', of which' if limit else ','} this one gets {format_duration(lasts_s)}"
    others = [partition.name for partition in fitting if partition is not best]
    also = f"; {some_of(others)} would do as well" if others else ""
    return f"partition {best.name} has what it needs{limit}{also}"


def _sum_up(spec: TaskSpec, facts: EndpointFacts, obstacles: dict[str, Obstacle]) -> Obstacle:
    if len(obstacles) == 1:
        return next(iter(obstacles.values()))
    if not obstacles:
        return Obstacle(field="slurm.account", text="none of its partitions is open to the accounts it has here")
    need = spec.resources
    by_field = {obstacle.field for obstacle in obstacles.values()}
    if need.gpus and "resources.accelerators" in by_field:
        text = f"no partition has {need.accelerators} a node; there are {_gpus_by_partition(facts)}"
        return Obstacle(field="resources.accelerators", text=text)
    if "slurm.time" in by_field and by_field <= {"slurm.time", "slurm.partition"}:
        limits = [
            f"{partition.name} {format_duration(partition.max_walltime_s)}"
            for partition in facts.partitions
            if partition.is_up and partition.name in obstacles and partition.max_walltime_s is not None
        ]
        text = f"no open partition allows so long a job ({some_of(limits)}); a longer max_duration makes a chain"
        return Obstacle(field="slurm.time", text=text)
    text = some_of([obstacle.text for obstacle in obstacles.values()], "; ")
    return Obstacle(field=next(iter(obstacles.values())).field, text=text)


def _gpus_by_partition(facts: EndpointFacts) -> str:
    shown: dict[str, list[str]] = {}
    for partition in facts.partitions:
        kinds = sorted({f"{gpu.model}:{gpu.count}" for group in partition.groups for gpu in group.gpus})
        if kinds and not partition.is_hidden and partition.is_up:
            shown.setdefault("/".join(kinds), []).append(partition.name)
    return some_of([f"{kinds} in {some_of(names)}" for kinds, names in shown.items()], "; ") or "no GPUs in any"
