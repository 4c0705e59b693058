"""What the composer offers: what the chosen endpoint really has, and what this user may take there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from diamond.core.clusters import of_endpoint, of_partition
from diamond.core.durations import format_duration
from diamond.core.endpoints import Endpoint, EndpointFacts, Partition
from diamond.core.projects import Role
from diamond.core.quotas import Quota, shown
from diamond.server.services import endpoints, images, pools, projects, quotas, secrets
from diamond.server.services.context import Context

_MOST_IMAGES = 200
_QUOTA_WORDS = {
    "tasks": "unfinished tasks",
    "nodes": "nodes at once",
    "gpus": "GPUs at once",
    "gpu_hours": "GPU-hours this month",
    "storage_bytes": "storage",
}


@dataclass(kw_only=True)
class Offers:
    """Choices as (value, words). An empty list of partitions, accounts or QoS: nothing is known to choose from."""

    endpoints: list[tuple[str, str]] = field(default_factory=list)
    chosen: Endpoint | None = None
    is_slurm: bool = False
    partitions: list[tuple[str, str]] = field(default_factory=list)
    pools: list[tuple[str, str]] = field(default_factory=list)
    gpu_types: list[tuple[str, str]] = field(default_factory=list)
    accounts: list[tuple[str, str]] = field(default_factory=list)
    qos: list[tuple[str, str]] = field(default_factory=list)
    images: list[tuple[str, str]] = field(default_factory=list)
    more_images: int = 0
    projects: list[tuple[str, str]] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    size: str = ""  # how large the endpoint is, and its limits, in a sentence
    log_path: str = ""


def offers(ctx: Context, user_id: str, values: Mapping[str, str], *, multi_user: bool) -> Offers:
    """For what the form says now."""
    known = endpoints.list_endpoints(ctx, user_id)
    chosen = next((one for one in known if one.name == values.get("endpoint", "").strip()), None)
    facts = chosen.facts if chosen else None
    found = Offers(
        endpoints=[(one.name, _endpoint_words(one)) for one in known],
        chosen=chosen,
        is_slurm=any(one.facts.scheduler == "slurm" for one in known if one.facts and chosen in (None, one)),
        gpu_types=_gpu_types(known if chosen is None else [chosen]),
        pools=_pools(ctx, user_id),
        secrets=[secret.name for secret in secrets.list_secrets(ctx, user_id)],
    )
    if facts is not None:
        found.partitions = [(one.name, _partition_words(one)) for one in facts.partitions if not one.is_hidden]
        found.accounts = [
            (name, f"{name} (by default)" if name == facts.default_account else name) for name in facts.accounts
        ]
        found.qos = [(name, name) for name in facts.qos]
        found.size = _size_words(facts)
        found.log_path = f"{facts.run_root}/JOB/log" if facts.run_root else ""
    if multi_user:
        # Of a project where somebody only looks on, nothing can be launched.
        found.projects = [
            (one.name, (one.title and f"{one.name}: {one.title}") or one.name)
            for one in projects.list_projects(ctx, user_id)
            if one.role in Role.MEMBER.at_least and not one.personal
        ]
    here = chosen.name if chosen is not None and chosen.facts is not None else None
    page, _, total = images.list_images(ctx, user_id, limit=_MOST_IMAGES)
    ready = {replica.endpoint for image in page for replica in image.replicas}
    for image in page:
        at = sorted({replica.endpoint for replica in image.replicas if replica.endpoint} & ready)
        where = "here already" if here in at else f"at {', '.join(at[:3])}" if at else "to be built"
        name = image.name if image.is_mine else image.id
        owner = "" if image.is_mine else f", {image.owner}'s"
        found.images.append((name, f"{image.name} ({where}{owner})"))
    found.more_images = max(0, total - len(page))
    return found


def _endpoint_words(one: Endpoint) -> str:
    kind = one.facts.scheduler if one.facts else "not connected yet"
    return f"{one.name} ({kind}{'' if one.online else ', away'})"


def _pools(ctx: Context, user_id: str) -> list[tuple[str, str]]:
    """One's own by name; others' too, by id where that name is taken."""
    found: dict[str, str] = {}
    for one in sorted(pools.list_pools(ctx, user_id), key=lambda pool: not pool.is_mine):
        whose = "" if one.is_mine else f", {one.owner}'s"
        words = f"{one.name} ({one.endpoint}, {one.slots - one.used} of {one.slots} slots free{whose})"
        found[one.id if one.name in found else one.name] = words
    return list(found.items())


def _partition_words(one: Partition) -> str:
    amounts = of_partition(one)
    words = [f"{amounts.nodes} node{'s' if amounts.nodes != 1 else ''}"]
    words += [f"{number} {model}" for model, number in amounts.gpus.items()]
    if one.max_walltime_s:
        words.append(f"up to {format_duration(one.max_walltime_s)}")
    if one.is_preemptible:
        words.append("may be preempted")
    if not one.is_up:
        words.append("closed now")
    return f"{one.name}{' (by default)' if one.is_default else ''}: {', '.join(words)}"


def _gpu_types(known: Iterable[Endpoint]) -> list[tuple[str, str]]:
    most: dict[str, int] = {}
    for one in known:
        facts = one.facts
        if facts is None:
            continue
        groups = [gpu for part in facts.partitions for group in part.groups for gpu in group.gpus]
        for gpu in groups or facts.gpus_per_node:
            most[gpu.model] = max(most.get(gpu.model, 0), gpu.count)
    return [(model, f"{model} (up to {count} a node)") for model, count in sorted(most.items())]


def _size_words(facts: EndpointFacts) -> str:
    amounts = of_endpoint(facts)
    words = [f"{amounts.nodes} node{'s' if amounts.nodes != 1 else ''}", f"{amounts.cpus} CPUs"]
    words += [f"{number} {model}" for model, number in amounts.gpus.items()]
    if facts.max_walltime_s:
        words.append(f"jobs of up to {format_duration(facts.max_walltime_s)}")
    return ", ".join(words)


def standing(ctx: Context, user_id: str, project: str) -> list[str]:
    """How far the quotas go that a task would count against, in words; nothing where there are no limits."""
    lines = []
    for quota in quotas.list_quotas(ctx, user_id):
        if quota.kind == "user" or quota.name == project:
            lines += _quota_lines(quota)
    return lines


def _quota_lines(quota: Quota) -> list[str]:
    whose = "You" if quota.kind == "user" else f"Project {quota.name}"
    return [
        f"{whose}: {shown(name, getattr(quota.used, name))} of {shown(name, limit)} {_QUOTA_WORDS[name]}"
        for name, limit in quota.limits.given().items()
    ]


def start_words(ctx: Context, user_id: str, endpoint: str | None) -> str:
    """When a task would begin, as far as anybody can tell before it is in the queue."""
    if endpoint is None:
        return "when an endpoint that can run it is connected"
    place = endpoints.get(ctx, user_id, endpoint)
    waiting = [one for one in endpoints.queue(ctx, user_id, endpoint) if one.started_at is None]
    if not place.online:
        return f"when {endpoint} is connected again"
    number = max(len(waiting), place.usage.jobs_queued if place.usage else 0)
    if number:
        return f"behind {number} job{'s' if number != 1 else ''} that wait{'s' if number == 1 else ''} there already"
    return "soon: no job waits there"
