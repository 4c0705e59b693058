"""Commands about machines: endpoint create, ls and show; gpus; queue."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from urllib.parse import urlsplit

from diamond.cli import render
from diamond.cli.session import connect, emit, say
from diamond.core.endpoints import Endpoint
from diamond.core.errors import InvalidInput
from diamond.core.rundir import write_atomic


def create(name: str, *, token_file: Path | None, as_json: bool) -> None:
    if token_file and token_file.exists():
        raise InvalidInput(
            f"{token_file} exists", hint="give another file, so that no token is lost", field="--token-file"
        )
    if token_file and not token_file.absolute().parent.is_dir():
        # Before the endpoint is made: its token can be had only once.
        raise InvalidInput(f"there is no folder {token_file.absolute().parent}", field="--token-file")
    with connect() as client:
        from diamond.sdk.transport import is_loopback

        endpoint, token = client.endpoints.create(name)
        url = client.url
    if token_file:
        write_atomic(token_file, token.encode())
    if as_json:
        emit(
            {"endpoint": endpoint, "token": None if token_file else token, "token_file": token_file and str(token_file)}
        )
        return
    # The file's name alone: that is how it is called there, wherever it lies here.
    there = shlex.quote(token_file.name if token_file else f"{name}.token")
    say(f"Endpoint {render.clean(name)} is registered. On the machine that shall run the tasks:")
    if token_file:
        say(f"  1. copy the token file {token_file} there (it is secret)")
    else:
        say(f"  1. put the token below into a file {there} that only you can read (it is secret, and shown once)")
    say(
        f"  2. run:  diamond agent run --server {url} --token-file {there} --home ~/.diamond/agents/{shlex.quote(name)}"
    )
    if is_loopback(url):
        port = urlsplit(url).port or 80
        say(f"Another machine cannot reach {url}. For one of those, either")
        say(f"  - open a tunnel and keep it open:  ssh -R {port}:127.0.0.1:{port} machine")
        say("  - or put a TLS proxy in front of the server (DIAMOND_ALLOW_REMOTE=1 lets it")
        say("    listen beyond this machine) and give the proxy's address as --server")
    if not token_file:
        print(token)


def ls(*, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.list()
    if as_json:
        emit({"endpoints": found})
        return
    if not found:
        say("No endpoints. `diamond up` makes this machine one; `diamond endpoint create NAME` registers a cluster.")
        return
    rows = []
    for each in found:
        facts, usage = each.facts, each.usage
        cpus = facts.nodes * facts.cpus_per_node if facts else 0
        rows.append(
            (
                render.clean(each.name),
                "online" if each.online else "offline",
                render.clean(facts.scheduler if facts else ""),
                f"{usage.cpus_used if usage else 0}/{cpus}" if facts else "",
                _gpu_text(each),
                str(usage.jobs_running if usage else ""),
                str(usage.jobs_queued if usage else ""),
                render.ago(each.last_seen_at),
            )
        )
    render.print_table(
        ("NAME", "STATE", "SCHEDULER", ">CPUS", "GPUS", ">RUNNING", ">QUEUED", "SEEN"),
        rows,
        flexible={"GPUS": 10},
        droppable=("SEEN", "SCHEDULER", "QUEUED", "RUNNING", "GPUS"),
    )


def _gpu_text(endpoint: Endpoint) -> str:
    if not endpoint.facts:
        return ""
    used = endpoint.usage.gpus_used if endpoint.usage else {}
    return ", ".join(
        f"{used.get(gpu.model, 0)}/{gpu.count * endpoint.facts.nodes} {render.clean(gpu.model)}"
        for gpu in endpoint.facts.gpus_per_node
    )


def show(name: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.get(name)
    if as_json:
        emit(found)
        return
    state = render.state_word("online" if found.online else "offline")
    print(f"{render.paint(render.clean(found.name), '1')}  {state}  {found.id}")
    if not found.online:
        seen = (
            f"its agent was last heard of {render.ago(found.last_seen_at)}"
            if found.last_seen_at
            else "no agent has ever connected"
        )
        print(f"  {seen}")
    rows: list[tuple[str, str]] = []
    if facts := found.facts:
        nodes = f"{render.count(facts.nodes, 'node')} with {render.count(facts.cpus_per_node, 'core')}"
        # The scheduler inside the agent has the agent's version.
        version = "" if facts.scheduler == "local" else facts.scheduler_version
        memory = f" and {render.size(facts.mem_bytes_per_node)}" if facts.mem_bytes_per_node else ""
        rows += [
            ("scheduler", f"{facts.scheduler} {version}".strip()),
            ("host", f"{facts.os_user}@{facts.hostname}"),
            ("size", nodes + memory),
            (
                "gpus",
                ", ".join(
                    f"{g.count} × {g.model}" + (f" {render.size(g.mem_bytes)}" if g.mem_bytes else "")
                    for g in facts.gpus_per_node
                )
                or "none",
            ),
            ("containers", ", ".join(facts.runtimes) or "none"),
            ("agent", f"{facts.agent_version}, Python {facts.python}"),
            ("jobs in", facts.run_root),
        ]
        rows += [(f"policy {key}", _policy_text(value)) for key, value in facts.policy.items()]
    if usage := found.usage:
        if usage.at:
            rows.append(("as of", render.ago(usage.at)))
        rows += [
            ("cores used", f"{usage.cpus_used}; machine busy {usage.cpu_percent:.0f} %"),
            ("jobs", f"{usage.jobs_running} running, {usage.jobs_queued} queued"),
            ("disk free", f"{render.size(usage.disk_free_bytes)} of {render.size(usage.disk_total_bytes)}"),
        ]
        rows += [("warning", warning) for warning in usage.warnings]
    rows = [(key, value) for key, value in rows if value]
    width = max((len(key) for key, _ in rows), default=0)
    for key, value in rows:
        print(f"  {render.clean(key):<{width}}  {render.clean(value)}")


def _policy_text(value: str) -> str:
    """A rule for people; small amounts, which agents give in GiB, in a unit that suits them."""
    found = re.fullmatch(r"([0-9.]+(?:e[-+]?[0-9]+)?) GiB", value)
    return render.amount(float(found[1]) * 1024**3) if found and float(found[1]) < 1 else value


def gpus(*, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.list()
    entries = []
    for each in found:
        used = each.usage.gpus_used if each.usage else {}
        for gpu in each.facts.gpus_per_node if each.facts else ():
            total = gpu.count * (each.facts.nodes if each.facts else 1)
            busy = used.get(gpu.model, 0)
            entries.append(
                {
                    "endpoint": each.name,
                    "online": each.online,
                    "model": gpu.model,
                    "per_node": gpu.count,
                    "total": total,
                    "free": max(0, total - busy),
                    "mem_bytes": gpu.mem_bytes,
                }
            )
    if as_json:
        emit({"gpus": entries})
        return
    if not entries:
        say("No endpoint has GPUs." if found else "No endpoints yet; start with: diamond up")
        return
    rows = [
        (
            render.clean(e["endpoint"]),
            "online" if e["online"] else "offline",
            render.clean(e["model"]),
            str(e["free"]),
            str(e["total"]),
            str(e["per_node"]),
            render.size(float(str(e["mem_bytes"]))) if e["mem_bytes"] else "",
        )
        for e in entries
    ]
    render.print_table(
        ("ENDPOINT", "STATE", "GPU", ">FREE", ">TOTAL", ">PER NODE", ">MEMORY"), rows, flexible={"GPU": 10}
    )


def queue(endpoint: str | None, *, as_json: bool) -> None:
    with connect() as client:
        found = client.endpoints.queue(endpoint)
    if as_json:
        emit({"queue": found})
        return
    if not found:
        say("Nothing runs or waits.")
        return
    now = time.time()
    rows = [
        (
            str(place),
            entry.task_id,
            render.clean(entry.task_name),
            render.clean(entry.endpoint),
            render.clean(entry.state),
            str(entry.priority),
            str(entry.cpus),
            str(entry.gpus or ""),
            render.duration(entry.started_at or entry.created_at, None, now),
            render.clean(entry.pending_reason),
        )
        for place, entry in enumerate(found, 1)
    ]
    heads = (">#", "TASK", "NAME", "ENDPOINT", "STATE", ">PRIO", ">CPUS", ">GPUS", ">SINCE", "WHY")
    droppable = ("PRIO", "CPUS", "GPUS", "ENDPOINT", "SINCE", "#", "WHY")
    render.print_table(heads, rows, flexible={"NAME": 10, "WHY": 24}, droppable=droppable)
