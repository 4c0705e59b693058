"""Commands about machines: endpoint ls and show; gpus; queue. Registering them is in `diamond.cli.enrolment`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from diamond.cli import endpoint_page, render
from diamond.cli.session import connect, emit, program, say
from diamond.core import clusters
from diamond.core.endpoints import Endpoint, EndpointFacts, QueueEntry

if TYPE_CHECKING:
    from diamond.sdk.client import Client


def ls(*, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.list()
        advice = "" if found or as_json else no_endpoints(client)
    if as_json:
        emit({"endpoints": found})
        return
    if not found:
        say(f"No endpoints. {advice}")
        return
    rows = []
    for each in found:
        facts, usage = each.facts, each.usage
        cpus = clusters.of_endpoint(facts).cpus if facts else 0
        rows.append(
            (
                render.clean(each.name),
                "online" if each.online else "offline",
                render.clean(f"{facts.scheduler} {facts.scheduler_version}" if facts and facts.partitions else "")
                or render.clean(facts.scheduler if facts else ""),
                f"{usage.cpus_used if usage else 0}/{cpus}" if facts else "",
                _gpu_text(each),
                str(usage.jobs_running if usage else ""),
                str(usage.jobs_queued if usage else ""),
                render.ago(each.last_seen_at),
                render.clean(facts.site_name.partition(",")[0] if facts else ""),
            )
        )
    render.print_table(
        ("NAME", "STATE", "SCHEDULER", ">CPUS", "GPUS", ">RUNNING", ">QUEUED", "SEEN", "SITE"),
        rows,
        flexible={"NAME": 16, "GPUS": 10, "SITE": 8},
        droppable=("SITE", "SEEN", "SCHEDULER", "QUEUED", "RUNNING", "GPUS"),
    )


def no_endpoints(client: Client) -> str:
    """What brings in a first endpoint. A server with accounts has none of its own."""
    if client.accounts.sign_in_methods().multi_user:
        return f"{program()} endpoint create NAME registers a cluster; or have one shared with a project of yours"
    return f"{program()} up makes this machine one; {program()} endpoint create NAME registers a cluster"


def _gpu_text(endpoint: Endpoint) -> str:
    """``3/4 a100``: in use, of those there are."""
    if not endpoint.facts:
        return ""
    used = endpoint.usage.gpus_used if endpoint.usage else {}
    total = clusters.of_endpoint(endpoint.facts).gpus
    return ", ".join(f"{used.get(model, 0)}/{number} {render.clean(model)}" for model, number in sorted(total.items()))


def show(name: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.get(name)
    if as_json:
        emit(found)
        return
    endpoint_page.print_page(found)


def gpus(*, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.list()
        advice = "" if found or as_json else no_endpoints(client)
    entries = [entry for each in found if each.facts for entry in _gpu_entries(each, each.facts)]
    if as_json:
        emit({"gpus": entries})
        return
    if not entries:
        say("No endpoint has GPUs." if found else f"No endpoints yet. {advice}")
        return
    rows = [
        (
            render.clean(e["endpoint"]),
            "online" if e["online"] else "offline",
            render.clean(e["partition"]),
            render.clean(e["model"]),
            f"{'' if e['free_is_exact'] else '≤ '}{e['free']}",
            str(e["usable"]),
            str(e["total"]),
            str(e["per_node"]),
            render.size(float(e["mem_bytes"])) if e["mem_bytes"] else "",
        )
        for e in entries
    ]
    heads = ("ENDPOINT", "STATE", "PARTITION", "GPU", ">FREE", ">USABLE", ">TOTAL", ">PER NODE", ">MEMORY")
    flexible = {"ENDPOINT": 12, "PARTITION": 10, "GPU": 10}
    render.print_table(heads, rows, flexible=flexible, droppable=("MEMORY", "USABLE", "STATE", "PER NODE"))


def _gpu_entries(endpoint: Endpoint, facts: EndpointFacts) -> Iterator[dict[str, Any]]:
    """A line for each model in each partition.

    What is in use is known of the endpoint as a whole. A partition that shares its GPUs with others, or has only some
    of them, has no more free ones than that leaves, perhaps fewer.
    """
    used = endpoint.usage.gpus_used if endpoint.usage else {}
    whole = clusters.of_endpoint(facts)
    parts = [
        (one.name, clusters.of_partition(one), one.groups)
        for one in facts.partitions
        if one.is_up and not one.is_hidden
    ]
    for name, part, groups in parts or [("", whole, ())]:
        for model, total in sorted(part.gpus.items()):
            usable, busy = part.usable_gpus.get(model, 0), used.get(model, 0)
            kinds = [gpu for group in groups for gpu in group.gpus if gpu.model == model]
            kinds = kinds or [gpu for gpu in facts.gpus_per_node if gpu.model == model]
            yield {
                "endpoint": endpoint.name,
                "online": endpoint.online,
                "partition": name,
                "model": model,
                "per_node": max((gpu.count for gpu in kinds), default=0),
                "total": total,
                "usable": usable,
                "free": max(0, min(usable, whole.usable_gpus.get(model, 0) - busy)),
                "free_is_exact": not busy or total == whole.gpus.get(model),
                "mem_bytes": max((gpu.mem_bytes for gpu in kinds), default=0),
            }


def queue(endpoint: str | None, *, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.queue(endpoint)
        estimated = {entry.endpoint for entry in found if entry.expected_start_at} if not as_json else set()
        known = {each.name: each.facts for each in client.endpoints.list()} if estimated else {}
    if as_json:
        emit({"queue": found})
        return
    if not found:
        say("Nothing runs or waits.")
        return
    who = {name: facts.scheduler.capitalize() for name, facts in known.items() if facts}
    now = time.time()
    why = [_why(entry, now, who.get(entry.endpoint, "the scheduler")) for entry in found]
    columns = {
        ">#": [str(place) for place in range(1, len(found) + 1)],
        "TASK": [entry.task_id for entry in found],
        "NAME": [render.clean(entry.task_name) or "(another's)" for entry in found],
        "OWNER": [render.clean(entry.owner) for entry in found],
        "ENDPOINT": [render.clean(entry.endpoint) for entry in found],
        "PARTITION": [render.clean(entry.partition) for entry in found],
        "STATE": [render.clean(entry.state) for entry in found],
        "SCHED ID": [render.clean(entry.scheduler_id or "") for entry in found],
        ">PRIO": [str(entry.priority) for entry in found],
        ">CPUS": [str(entry.cpus) for entry in found],
        ">GPUS": [str(entry.gpus or "") for entry in found],
        ">SINCE": [render.duration(entry.started_at or entry.created_at, None, now) for entry in found],
        "JOB": [entry.job_id for entry in found],
        "WHY": why,
    }
    # A sentence needs a line of its own, where a person reads; a program that does wants it in its column.
    in_lines = sys.stdout.isatty()
    empty = {"WHY"} if in_lines else set()
    empty |= {"PARTITION"} if not any(columns["PARTITION"]) else set()
    empty |= {"OWNER"} if len({entry.owner for entry in found}) == 1 else set()  # all one's own
    shown = {head: column for head, column in columns.items() if head not in empty}
    render.print_table(
        list(shown),
        list(zip(*shown.values(), strict=True)),
        flexible={"NAME": 10, "ENDPOINT": 10, "PARTITION": 9},
        droppable=("JOB", "PRIO", "CPUS", "GPUS", "#", "SINCE", "SCHED ID", "PARTITION", "ENDPOINT"),
        below=why if in_lines else (),
    )


def _why(entry: QueueEntry, now: float, who: str) -> str:
    """What a job waits for, and until when, if somebody says."""
    if entry.started_at:
        return ""
    said = [entry.pending_reason] if entry.pending_reason else []
    if entry.expected_start_at:
        said.append(render.expected(entry.expected_start_at, now, render.clean(who)))
    return render.clean("; ".join(said))
