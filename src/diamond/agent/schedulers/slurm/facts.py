"""What a Slurm cluster has and allows, from the text of scontrol and sacctmgr. Pure.

Sites write odd things into these: every value that makes no sense is left out, and nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.slurm.hostlist import compress
from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, NodeUse, Partition

_MIB = 1024**2
_GIB = 1024**3
# Values hold blanks (OS=, Reason=), so a field ends where the next key begins.
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z0-9_/:]*)=")
_UNUSABLE = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "INVAL", "INVALID_REG", "FUTURE"}
_UNUSABLE |= {"UNKNOWN", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN_FAILED"}
_KEPT = {"RESERVED", "MAINT", "MAINTENANCE", "COMPLETING", "BLOCKED", "REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED"}
_NOTHING = {"", "(null)", "N/A", "n/a", "NONE", "None", "UNLIMITED", "Unlimited", "INFINITE", "infinite", "ALL", "all"}
_COUNT = re.compile(r"(\d+)([KMGT]?)")
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def parse_fields(line: str) -> dict[str, str]:
    """One line of `scontrol -o show …` as fields."""
    found = list(_KEY.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=False)}


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: Name = value."""
    config: dict[str, str] = {}
    for line in text.splitlines():
        name, divider, value = line.partition("=")
        if divider and name.strip():
            config.setdefault(name.strip(), value.strip())
    return config


def parse_walltime(text: str) -> int | None:
    """Seconds of `1-12:30:00`, `2:00`, `30`; None for no limit, and for what is no time."""
    if text in _NOTHING:
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:  # days-hours[:minutes[:seconds]]
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) == 1:  # minutes
        numbers = [0, numbers[0], 0]
    else:  # [hours:]minutes:seconds
        numbers = [0] * (3 - len(numbers)) + numbers
    hours, minutes, seconds = numbers
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by model from `gpu:a100:2(S:0-1),gpu:1g.5gb:7,nvme:1`; a GPU without a model is a "gpu"."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", "" if text in _NOTHING else text).split(","):
        parts = [part.strip() for part in item.replace("gres/", "").replace("=", ":").split(":")]
        if parts[0] != "gpu":
            continue
        count = _COUNT.fullmatch(parts[-1]) if len(parts) > 1 else None
        # gpu alone and gpu:a100 mean one.
        number = int(count[1]) * _UNITS[count[2]] if count else 1
        names = [part for part in (parts[1:-1] if count else parts[1:]) if part != "no_consume"]
        model = names[0] if names else "gpu"
        found[model] = found.get(model, 0) + number
    return found


def _names(text: str) -> tuple[str, ...]:
    return () if text in _NOTHING else tuple(name.strip() for name in text.split(",") if name.strip())


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node, with what is handed out of it now."""

    name: str
    cpus: int = 0
    mem_bytes: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    is_usable: bool = True
    is_kept: bool = False  # for a reservation, maintenance, or until a job before has cleared it
    cpus_used: int = 0
    mem_bytes_used: int = 0
    gpus_used: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_free(self) -> bool:
        """Whether a job could have all of it."""
        busy = self.cpus_used or self.mem_bytes_used or any(self.gpus_used.values())
        return self.is_usable and not self.is_kept and not busy

    @property
    def gpus_free(self) -> int:
        if not self.is_usable or self.is_kept:
            return 0
        return max(0, sum(self.gpus.values()) - sum(self.gpus_used.values()))


def parse_nodes(text: str) -> list[Node]:
    """`scontrol -a -d -o show node`."""
    nodes = []
    for line in text.splitlines():
        raw = parse_fields(line)
        if not raw.get("NodeName"):
            continue
        states = set(re.split(r"[+*~#!%$@^-]", raw.get("State", "")))
        memory = (_number(raw.get("RealMemory", "")) or 0) - (_number(raw.get("MemSpecLimit", "")) or 0)
        nodes.append(
            Node(
                name=raw["NodeName"],
                cpus=_number(raw.get("CPUEfctv", "")) or _number(raw.get("CPUTot", "")) or 0,
                mem_bytes=max(0, memory) * _MIB,
                gpus=parse_gres(raw.get("Gres", "")),
                features=_names(raw.get("AvailableFeatures", raw.get("Features", ""))),
                # "all" is the name of one here, and no word for them all.
                partitions=tuple(name for name in raw.get("Partitions", "").split(",") if name not in ("", "(null)")),
                is_kept=bool(states & _KEPT),
                is_usable=not states & _UNUSABLE and "*" not in raw.get("State", ""),
                cpus_used=_number(raw.get("CPUAlloc", "")) or 0,
                mem_bytes_used=(_number(raw.get("AllocMem", "")) or 0) * _MIB,
                gpus_used=parse_gres(raw.get("GresUsed", "")),
            )
        )
    return nodes


def use_of(nodes: Iterable[Node], partitions: Collection[str]) -> tuple[NodeUse, ...]:
    """How the nodes of these partitions stand, by kind of GPU and the partitions they are in."""
    kinds: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Node]] = {}
    for node in nodes:
        where = tuple(sorted(name for name in node.partitions if name in partitions))
        if where:
            models = tuple(sorted(model for model, count in node.gpus.items() if count))
            kinds.setdefault((models, where), []).append(node)
    return tuple(
        NodeUse(
            gpus=models,
            partitions=where,
            nodes=len(same),
            free=sum(node.is_free for node in same),
            down=sum(not node.is_usable for node in same),
            gpus_total=sum(sum(node.gpus.values()) for node in same),
            gpus_free=sum(node.gpus_free for node in same),
        )
        for (models, where), same in sorted(kinds.items())
    )


def _groups(nodes: Iterable[Node], limits: Mapping[str, str]) -> tuple[NodeGroup, ...]:
    most_cpus = _number(limits.get("MaxCPUsPerNode", ""))
    most_mib = _number(limits.get("MaxMemPerNode", ""))
    kinds: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        kinds.setdefault((node.cpus, node.mem_bytes, tuple(sorted(node.gpus.items())), node.features), []).append(node)
    return tuple(
        NodeGroup(
            count=len(same),
            cpus=min(same[0].cpus, most_cpus or same[0].cpus),
            mem_bytes=min(same[0].mem_bytes, most_mib * _MIB if most_mib else same[0].mem_bytes),
            gpus=tuple(Gpu(model=model, count=count) for model, count in sorted(same[0].gpus.items())),
            features=same[0].features,
            unusable=sum(not node.is_usable for node in same),
            nodes=compress(node.name for node in same),
        )
        for same in kinds.values()
    )


def parse_partitions(
    text: str, nodes: Iterable[Node], config: Mapping[str, str], own_groups: Collection[str] | None = None
) -> tuple[Partition, ...]:
    """`scontrol -a -o show partition`, with the nodes in each.

    Those only root may use are nobody's; those of groups that are not the user's (`own_groups`; None: not known) are
    not the user's.
    """
    lines = [raw for raw in map(parse_fields, text.splitlines()) if raw.get("PartitionName")]
    members: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.partitions:
            members.setdefault(name, []).append(node)
    return tuple(
        Partition(
            name=raw["PartitionName"],
            is_default=raw.get("Default") == "YES",
            is_up=raw.get("State", "UP") == "UP",
            is_hidden=raw.get("Hidden") == "YES",
            is_preemptible=_is_preemptible(raw, lines, members, config),
            max_walltime_s=parse_walltime(raw.get("MaxTime", "")),
            default_walltime_s=parse_walltime(raw.get("DefaultTime", "")),
            min_nodes=max(1, _number(raw.get("MinNodes", "")) or 1),
            max_nodes=_number(raw.get("MaxNodes", "")),
            allow_accounts=_names(raw.get("AllowAccounts", "")),
            allow_groups=_names(raw.get("AllowGroups", "")),
            allow_qos=_names(raw.get("AllowQos", "")),
            groups=_groups(members.get(raw["PartitionName"], ()), raw),
        )
        for raw in lines
        if raw.get("RootOnly") != "YES" and _lets_in(_names(raw.get("AllowGroups", "")), own_groups)
    )


def _lets_in(allowed: tuple[str, ...], own_groups: Collection[str] | None) -> bool:
    return not allowed or own_groups is None or any(group in own_groups for group in allowed)


def _is_preemptible(
    raw: Mapping[str, str],
    others: Iterable[Mapping[str, str]],
    members: Mapping[str, list[Node]],
    config: Mapping[str, str],
) -> bool:
    """Whether jobs there lose their nodes to a partition of a higher tier (preempt/qos goes by job, not here)."""
    if not config.get("PreemptType", "").endswith("partition_prio"):
        return False
    if raw.get("PreemptMode", "OFF").split(",")[-1] in ("OFF", "GANG"):
        return False
    here = {node.name for node in members.get(raw["PartitionName"], ())}
    tier = _number(raw.get("PriorityTier", "")) or 0
    return any(
        (_number(other.get("PriorityTier", "")) or 0) > tier
        and any(node.name in here for node in members.get(other["PartitionName"], ()))
        for other in others
    )


@dataclass(frozen=True, kw_only=True)
class Associations:
    """What accounting lets a user charge."""

    accounts: tuple[str, ...] = ()
    default_account: str = ""
    qos: tuple[str, ...] = ()


def parse_associations(text: str) -> Associations:
    """`sacctmgr -nP show assoc user=… format=Account,QOS,DefaultQOS,User` joined with the user's default account."""
    accounts: dict[str, None] = {}
    qos: dict[str, None] = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) >= 2 and parts[0]:
            accounts[parts[0]] = None
            qos |= dict.fromkeys(_names(parts[1]))
    return Associations(accounts=tuple(accounts), qos=tuple(qos))


def has_accounting(config: Mapping[str, str]) -> bool:
    return config.get("AccountingStorageType", "").endswith("slurmdbd")


def facts_of(
    *, config: Mapping[str, str], nodes: list[Node], partitions: tuple[Partition, ...], known: Associations
) -> EndpointFacts:
    """The cluster as an endpoint: sizes are those of its largest node, GPUs those of any."""
    gpus: dict[str, int] = {}
    for node in nodes:
        for model, count in node.gpus.items():
            gpus[model] = max(gpus.get(model, 0), count)
    return EndpointFacts(
        scheduler="slurm",
        scheduler_version=config.get("SLURM_VERSION", ""),
        nodes=len(nodes),
        cpus_per_node=max((node.cpus for node in nodes), default=0),
        mem_bytes_per_node=max((node.mem_bytes for node in nodes), default=0),
        gpus_per_node=tuple(Gpu(model=model, count=count) for model, count in sorted(gpus.items())),
        partitions=partitions,
        accounts=known.accounts,
        default_account=known.default_account,
        qos=known.qos,
        queues_ahead=True,
    )


def why_never(job: Submission, facts: EndpointFacts) -> str:
    """Why no partition the job may go to can ever run it, in numbers; empty when one can, or nothing is known."""
    wanted = set((job.partition or job.slurm.partition or "").split(",")) - {""}
    asked = [one for one in facts.partitions if (one.name in wanted if wanted else one.is_default)]
    groups = [group for one in asked for group in one.groups]
    if not groups or len(asked) < len(wanted):
        return ""
    where = f"in partition {', '.join(one.name for one in asked)}"
    cpus, memory = max(group.cpus for group in groups), max(group.mem_bytes for group in groups)
    if job.cpus > cpus:
        return f"{job.cpus} CPUs per node are asked for; the largest node {where} has {cpus}"
    if memory and job.mem_bytes > memory:
        return (
            f"{job.mem_bytes / _GIB:.4g} GiB of memory per node are asked for; "
            f"the largest node {where} has {memory / _GIB:.4g} GiB"
        )
    if job.gpus:
        counts = [gpu.count for group in groups for gpu in group.gpus if job.gpu_type in (None, "", gpu.model)]
        kind = f"{job.gpu_type} GPUs" if job.gpu_type else "GPUs"
        # A request without a type may be served by several models of one node.
        most = max(counts, default=0) if job.gpu_type else max(sum(gpu.count for gpu in one.gpus) for one in groups)
        if job.gpus > most:
            return f"{job.gpus} {kind} per node are asked for; no node {where} has more than {most}"
    nodes = max(sum(group.count for group in one.groups) for one in asked)
    if job.num_nodes > nodes:
        return f"{job.num_nodes} nodes are asked for; {where} there are {nodes}"
    return ""
