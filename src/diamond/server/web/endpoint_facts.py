"""What an endpoint's agent found out, as pages show it. Only what the facts hold: what is not known is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import quote

from diamond.core import clusters
from diamond.core.durations import format_duration
from diamond.core.endpoint_words import FreeNodes, count, free_nodes, models
from diamond.core.endpoints import Endpoint, EndpointFacts, EndpointUsage, FileSystem, Partition
from diamond.server.web.pages import shown_bytes


class Amount(NamedTuple):
    """How much of one kind of thing there is. `down`: of the total, on nodes that cannot be used now."""

    what: str
    total: int
    busy: int
    free: int
    down: int = 0


class Card(NamedTuple):
    """An endpoint at a glance. `state` and `look` are words and colour of how its agent stands."""

    endpoint: Endpoint
    path: str
    state: str
    look: str
    amounts: list[Amount]
    running: int | None
    queued: int | None
    kind: str
    free_nodes: list[FreeNodes]


_ACCESS = {
    "code": "waits for its agent",
    "expired": "token expired",
    "revoked": "cut off",
    "none": "has no agent",
}


def state_of(endpoint: Endpoint) -> tuple[str, str]:
    if endpoint.online:
        return "online", "good"
    if endpoint.access in _ACCESS and (endpoint.last_seen_at is None or endpoint.access in ("expired", "revoked")):
        return _ACCESS[endpoint.access], "waiting" if endpoint.access == "code" else "bad"
    return ("offline", "bad") if endpoint.last_seen_at is not None else ("never seen", "waiting")


def card_of(endpoint: Endpoint) -> Card:
    facts, usage = endpoint.facts, endpoint.usage
    state, look = state_of(endpoint)
    version = facts.scheduler_version if facts and facts.scheduler != "local" else ""
    kind = f"{facts.scheduler.capitalize()} {version}".strip() if facts else ""
    return Card(
        endpoint,
        f"/endpoints/{quote(endpoint.name, safe='')}",
        state,
        look,
        amounts(facts, usage) if facts else [],
        usage.jobs_running if usage else None,
        usage.jobs_queued if usage else None,
        "This machine's own processes" if kind == "Local" else kind,
        free_nodes(endpoint),
    )


def amounts(facts: EndpointFacts, usage: EndpointUsage | None) -> list[Amount]:
    """GPUs by model; where there are none, cores."""
    whole = clusters.of_endpoint(facts)
    used = usage.gpus_used if usage else {}
    found = []
    for model, total in sorted(whole.gpus.items()):
        usable, busy = whole.usable_gpus.get(model, 0), min(used.get(model, 0), total)
        found.append(Amount(model, total, busy, max(0, usable - busy), total - usable))
    if not found and whole.cpus:
        busy = min(usage.cpus_used if usage else 0, whole.cpus)
        found.append(Amount("cores", whole.cpus, busy, whole.cpus - busy))
    return found


# ---- the page of one -------------------------------------------------------------------------------------------------


class PartitionRow(NamedTuple):
    partition: Partition
    nodes: str
    gpus: str
    cores: str
    memory: str
    longest: str
    default: str
    notes: list[str]
    features: list[str]


def partitions(facts: EndpointFacts) -> list[PartitionRow]:
    return [_partition(one) for one in facts.partitions]


def _partition(one: Partition) -> PartitionRow:
    found = clusters.of_partition(one)
    return PartitionRow(
        one,
        f"{found.usable_nodes} of {found.nodes}" if found.usable_nodes < found.nodes else str(found.nodes),
        models(found.gpus),
        _span([str(number) for number in sorted({group.cpus for group in one.groups} - {0})]),
        _span([shown_bytes(number) for number in sorted({group.mem_bytes for group in one.groups} - {0})]),
        format_duration(one.max_walltime_s) if one.max_walltime_s else "no limit",
        format_duration(one.default_walltime_s) if one.default_walltime_s else "",
        list(_notes(one)),
        list(dict.fromkeys(name for group in one.groups for name in group.features)),
    )


def _notes(one: Partition) -> Iterator[str]:
    if one.is_preemptible:
        yield "preemptible"
    if one.is_hidden:
        yield "hidden"
    if one.min_nodes > 1:
        yield f"at least {count(one.min_nodes, 'node')}"
    if one.max_nodes is not None:
        yield f"at most {count(one.max_nodes, 'node')}"
    for what, names in (("accounts", one.allow_accounts), ("groups", one.allow_groups), ("QoS", one.allow_qos)):
        if names:
            yield f"{what} {', '.join(names)}"


class DiskRow(NamedTuple):
    place: FileSystem
    known: bool
    used_percent: int
    quota: str


def file_systems(facts: EndpointFacts) -> list[DiskRow]:
    return [_disk(place) for place in facts.filesystems]


def _disk(place: FileSystem) -> DiskRow:
    known = place.total_bytes > 0
    used = 100 * (1 - place.free_bytes / place.total_bytes) if known else 0.0
    quota = ""
    if place.quota_bytes > 0:
        percent = 100 * place.quota_used_bytes / place.quota_bytes
        quota = f"{shown_bytes(place.quota_used_bytes)} of {shown_bytes(place.quota_bytes)} ({percent:.0f} %)"
    return DiskRow(place, known, max(0, min(100, round(used))), quota)


def _span(texts: Iterable[str]) -> str:
    """``64``, or ``8 to 32`` where nodes differ."""
    found = list(dict.fromkeys(texts))
    return " to ".join([found[0], found[-1]] if len(found) > 1 else found)
