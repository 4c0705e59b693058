"""An endpoint in words, for the terminal and for pages alike. Pure. Nothing here is cleaned: whoever shows it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from diamond.core import clusters, sites
from diamond.core.durations import format_duration
from diamond.core.endpoints import Endpoint, EndpointFacts
from diamond.core.quotas import shown


class FreeNodes(NamedTuple):
    """How the nodes with one kind of GPU stand; `kind` names it, and is empty for nodes without GPUs."""

    kind: str
    nodes: int
    free: int
    down: int
    gpus: int
    gpus_free: int

    @property
    def busy(self) -> int:
        return max(0, self.nodes - self.free - self.down)

    @property
    def words(self) -> str:
        """``3 of 8 nodes free, 1 down; 14 of 32 GPUs free``."""
        text = f"{self.free} of {count(self.nodes, 'node')} free" + (f", {self.down} down" if self.down else "")
        return text + (f"; {self.gpus_free} of {count(self.gpus, 'GPU')} free" if self.gpus else "")


def about(endpoint: Endpoint) -> list[tuple[str, str]]:
    """What it is, in rows of a name and a value; those that say nothing are left out."""
    facts = endpoint.facts
    if facts is None:
        return []
    # The scheduler inside the agent has the agent's version.
    version = "" if facts.scheduler == "local" else facts.scheduler_version
    accounts = [f"{name} (default)" if name == facts.default_account else name for name in facts.accounts]
    site = sites.find(facts.site) if facts.site else None
    rows = [
        ("Site", facts.site_name or (site.name if site else "")),
        ("Organisation", site.organisation if site else ""),
        ("Scheduler", f"{facts.scheduler.capitalize()} {version}".strip()),
        ("Host", f"{facts.os_user}@{facts.hostname}" if facts.hostname else facts.os_user),
        ("Agent", f"{facts.agent_version}, Python {facts.python}" if facts.agent_version else ""),
        ("Agent token", _expiry(endpoint)),
        ("Architecture", facts.architecture),
        ("Size", size(facts)),
        ("GPUs", gpus(facts)),
        ("Accounts", ", ".join(accounts)),
        ("QoS", ", ".join(facts.qos)),
        ("Containers", ", ".join(facts.runtimes) or "none found"),
        ("Images", _images(facts)),
        *_not_used(facts),
        ("Longest job", format_duration(facts.max_walltime_s) if facts.max_walltime_s else ""),
        ("Shells", _shells(facts)),
        ("Secrets", "" if facts.takes_secrets else "not taken there"),
        ("Others' tasks", _others(facts)),
        ("Jobs in", facts.run_root),
        ("Images in", facts.image_root),
    ]
    return [(name, value) for name, value in rows if value]


def _expiry(endpoint: Endpoint) -> str:
    if endpoint.token_expires_at is None:
        return ""
    day = time.strftime("%Y-%m-%d", time.gmtime(endpoint.token_expires_at))
    if endpoint.access == "expired":
        return f"expired on {day}; enrol the agent again"
    return f"valid until {day}; a connected agent renews it"


def policy_origin(facts: EndpointFacts, ago: Callable[[float], str]) -> list[tuple[str, str]]:
    """Which files the rules in force were read from, and since when they hold."""
    rows = [("read from", ", ".join(facts.policy_files))]
    rows += [("in force since", ago(facts.policy_changed_at) if facts.policy_changed_at else "")]
    return [(name, value) for name, value in rows if value]


def free_nodes(endpoint: Endpoint) -> list[FreeNodes]:
    """Free nodes by kind of GPU, those without GPUs last; of the partitions that the endpoint offers."""
    facts, usage = endpoint.facts, endpoint.usage
    if facts is None or usage is None:
        return []
    offered = {partition.name for partition in facts.partitions}
    kinds: dict[str, FreeNodes] = {}
    for each in usage.nodes:
        if offered.isdisjoint(each.partitions):
            continue
        kind = " and ".join(each.gpus)
        known = kinds.get(kind, FreeNodes(kind, 0, 0, 0, 0, 0))
        more = (each.nodes, each.free, each.down, each.gpus_total, each.gpus_free)
        kinds[kind] = FreeNodes(kind, *(have + new for have, new in zip(known[1:], more, strict=True)))
    return sorted(kinds.values(), key=lambda one: (not one.kind, one.kind))


def size(facts: EndpointFacts) -> str:
    """``104 nodes, 3 down; 6912 cores; the largest with 128 cores and 2 TiB``."""
    memory = f" and {shown('storage_bytes', facts.mem_bytes_per_node)}" if facts.mem_bytes_per_node else ""
    each = f"{count(facts.cpus_per_node, 'core')}{memory}"
    if not facts.partitions:
        return f"{count(facts.nodes, 'node')} with {each}"
    found = clusters.of_endpoint(facts)
    down = f", {found.nodes - found.usable_nodes} down" if found.usable_nodes < found.nodes else ""
    return f"{count(found.nodes, 'node')}{down}; {count(found.cpus, 'core')}; the largest with {each}"


def gpus(facts: EndpointFacts) -> str:
    """``400 × a100``; of a single machine, with their memory."""
    if facts.partitions:
        return models(clusters.of_endpoint(facts).gpus) or "none"
    texts = [
        f"{gpu.count} × {gpu.model}" + (f" {shown('storage_bytes', gpu.mem_bytes)}" if gpu.mem_bytes else "")
        for gpu in facts.gpus_per_node
    ]
    return ", ".join(texts) or "none"


def models(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} × {model}" for model, number in sorted(counts.items()) if number)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _images(facts: EndpointFacts) -> str:
    """How images are made there, and what they take."""
    if not facts.builders or facts.builds in ("", "off"):
        return "not built there" if facts.builds == "off" or facts.architecture else ""
    where = {"login": " on the login node", "batch": " as batch jobs"}.get(facts.builds, "")
    text = f"built with {', '.join(facts.builders)}{where}"
    if facts.image_bytes or facts.layer_bytes:
        taken, kept = (shown("storage_bytes", number) for number in (facts.image_bytes, facts.layer_bytes))
        text += f"; {taken}, and {kept} of kept steps"
    return text


def _not_used(facts: EndpointFacts) -> Iterator[tuple[str, str]]:
    """What was too much to take in; why what is there makes no images.

    Of programs that are not there, only where nothing else makes any.
    """
    for what in facts.cut:
        yield "Left out", what
    if facts.builds == "off":
        return  # by a rule, which is shown
    present = {name.split(" ")[0] for name in facts.runtimes} | {"venv"}
    for name, problem in facts.builder_problems.items():
        if name in present or not facts.builders:
            yield f"Not with {name}", problem


def _shells(facts: EndpointFacts) -> str:
    if not facts.allows_shells:
        return "not allowed"
    if facts.allows_others and not facts.allows_shells_of_others:
        return "only in tasks of the endpoint's owner"
    return ""


def _others(facts: EndpointFacts) -> str:
    if facts.others_problem:
        return f"not taken: {facts.others_problem}"
    if facts.allowed_users is not None:
        return f"only of {', '.join(facts.allowed_users)}" if facts.allowed_users else "not taken"
    return "taken" if facts.allows_others else ""
