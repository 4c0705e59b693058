"""An endpoint in the terminal: what it is, what it has, what it allows, how full it is. Everything shown is cleaned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from diamond.cli import render
from diamond.cli.session import program
from diamond.core import clusters, endpoint_words
from diamond.core.endpoints import Endpoint, EndpointUsage, FileSystem, Partition

_ACCESS = {
    "code": "its agent has not enrolled yet",
    "expired": "its agent's token has expired, so the agent is not let in",
    "revoked": "withdrawn: its agent is not let in",
    "none": "no agent can speak for it",
}


def print_page(endpoint: Endpoint) -> None:
    state = render.state_word("online" if endpoint.online else "offline")
    print(f"{render.paint(render.clean(endpoint.name), '1')}  {state}  {render.clean(endpoint.id)}")
    facts, usage = endpoint.facts, endpoint.usage
    if facts and facts.site_name:
        print(f"  {render.clean(facts.site_name)}")
    if not endpoint.online:
        print(f"  {_away(endpoint)}")
    access = _ACCESS.get(endpoint.access, "")
    again = f"; a line to paste there: {program()} endpoint enroll {render.clean(endpoint.name)}"
    rows = [("owner", "" if endpoint.is_mine else render.clean(endpoint.owner))]
    rows += [("shared with", ", ".join(render.clean(name) for name in endpoint.shared_with))]
    rows += [("waits for", _waits(endpoint))]
    unproven = "nothing has run here yet: others' tasks come only if they name it (--infra)"
    rows += [("unproven", unproven if endpoint.shared_with and endpoint.proven_at is None else "")]
    rows += [("access", access and access + again)]
    rows += _about(endpoint)
    rows += _in_use(endpoint, usage) if usage else []
    _print_rows(rows)
    if facts and facts.partitions:
        _heading("partitions")
        _partitions(facts.partitions)
    if facts and facts.filesystems:
        _heading("file systems")
        _file_systems(facts.filesystems)
    if facts and facts.policy:
        _heading("policy of the endpoint")
        _print_rows([(key, policy_text(render.clean(value))) for key, value in facts.policy.items()])
        _print_rows(endpoint_words.policy_origin(facts, render.ago))
    if usage and usage.warnings:
        print()
    for warning in usage.warnings if usage else ():
        print(f"{render.paint('warning', '33')}: {render.clean(warning)}")


def _waits(endpoint: Endpoint) -> str:
    names = ", ".join(render.clean(name) for name in endpoint.waits_for)
    return f"an owner of project {names}, who has to approve of sharing it" if names else ""


def _away(endpoint: Endpoint) -> str:
    if not endpoint.last_seen_at:
        return "no agent has ever connected"
    return f"its agent was last heard of {render.ago(endpoint.last_seen_at)}"


def _about(endpoint: Endpoint) -> list[tuple[str, str]]:
    """In the words pages have; the site stands above them."""
    seen = f", heard of {render.ago(endpoint.last_seen_at)}" if endpoint.online and endpoint.last_seen_at else ""
    return [
        (name.lower(), value + (seen if name == "Agent" else ""))
        for name, value in endpoint_words.about(endpoint)
        if name not in ("Site", "Organisation")
    ]


def _in_use(endpoint: Endpoint, usage: EndpointUsage) -> list[tuple[str, str]]:
    whole = clusters.of_endpoint(endpoint.facts) if endpoint.facts else clusters.Amounts()
    is_one_machine = not (endpoint.facts and endpoint.facts.partitions)
    busy = f"; machine busy {usage.cpu_percent:.0f} %" if is_one_machine else ""
    gpus = [f"{number} of {whole.gpus.get(model, number)} {model}" for model, number in sorted(usage.gpus_used.items())]
    disk = f"{render.size(usage.disk_free_bytes)} of {render.size(usage.disk_total_bytes)}"
    return [
        ("as of", render.ago(usage.at) if usage.at else ""),
        ("cores used", f"{usage.cpus_used} of {whole.cpus}{busy}"),
        ("gpus used", ", ".join(gpus)),
        *_free_nodes(endpoint, usage),
        ("jobs", f"{usage.jobs_running} running, {usage.jobs_queued} queued"),
        ("disk free", disk if usage.disk_total_bytes else ""),
    ]


def _free_nodes(endpoint: Endpoint, usage: EndpointUsage) -> list[tuple[str, str]]:
    """A row for each kind of GPU; the scheduler is not asked for every heartbeat, so the first says when it was."""
    found = endpoint_words.free_nodes(endpoint)
    asked = f" ({render.ago(usage.nodes_at)})" if usage.nodes_at else ""
    return [
        ("" if number else "free nodes", f"{one.kind or 'without GPUs'}: {one.words}{'' if number else asked}")
        for number, one in enumerate(found)
    ]


def policy_text(value: str) -> str:
    """A rule for people; small amounts, which agents give in GiB, in a unit that suits them."""
    found = re.fullmatch(r"([0-9.]+(?:e[-+]?[0-9]+)?) GiB", value)
    return render.amount(float(found[1]) * 1024**3) if found and float(found[1]) < 1 else value


def _partitions(partitions: Sequence[Partition]) -> None:
    heads = ("NAME", "STATE", ">NODES", "GPUS", ">CORES", ">MEMORY", ">MAX TIME", ">DEFAULT", "NOTES", "FEATURES")
    rows = []
    for one in partitions:
        found = clusters.of_partition(one)
        rows.append(
            (
                render.clean(one.name) + ("*" if one.is_default else ""),
                "up" if one.is_up else "down",
                f"{found.usable_nodes}/{found.nodes}",
                render.clean(endpoint_words.models(found.gpus)),
                _span([str(n) for n in sorted({group.cpus for group in one.groups} - {0})]),
                _span([render.amount(n) for n in sorted({group.mem_bytes for group in one.groups} - {0})]),
                _time(one.max_walltime_s) or "no limit",
                _time(one.default_walltime_s),
                render.clean("; ".join(_notes(one))),
                render.clean(",".join(dict.fromkeys(name for group in one.groups for name in group.features))),
            )
        )
    _table(
        heads,
        rows,
        flexible={"GPUS": 18, "NOTES": 12, "FEATURES": 8, "NAME": 12},
        droppable=("FEATURES", "DEFAULT", "MEMORY", "CORES", "NOTES"),
    )


def _notes(one: Partition) -> Iterable[str]:
    if one.is_preemptible:
        yield "preemptible"
    if one.is_hidden:
        yield "hidden"
    if one.min_nodes > 1:
        yield f"≥ {render.count(one.min_nodes, 'node')}"
    if one.max_nodes is not None:
        yield f"≤ {render.count(one.max_nodes, 'node')}"
    if one.allow_accounts:
        yield f"accounts {','.join(one.allow_accounts)}"
    if one.allow_groups:
        yield f"groups {','.join(one.allow_groups)}"
    if one.allow_qos:
        yield f"qos {','.join(one.allow_qos)}"


def _file_systems(found: Sequence[FileSystem]) -> None:
    heads = ("FOR", "PATH", "KIND", "USED", ">FREE", ">OF", ">FREE %", "QUOTA")
    rows = [
        (
            render.clean(each.role),
            render.clean(each.path),
            render.clean(each.kind),
            render.gauge(1 - each.free_bytes / each.total_bytes) if each.total_bytes > 0 else "",
            render.size(each.free_bytes) if each.total_bytes > 0 else "no answer",
            render.size(each.total_bytes) if each.total_bytes > 0 else "",
            f"{100 * each.free_bytes / each.total_bytes:.0f} %" if each.total_bytes > 0 else "",
            _quota(each),
        )
        for each in found
    ]
    _table(heads, rows, flexible={"PATH": 14, "KIND": 6}, droppable=("OF", "KIND", "FREE %", "USED"))


def _quota(each: FileSystem) -> str:
    if each.quota_bytes <= 0:
        return ""
    percent = 100 * each.quota_used_bytes / each.quota_bytes
    return f"{render.size(each.quota_used_bytes)} of {render.amount(each.quota_bytes)} ({percent:.0f} %)"


def _span(texts: Sequence[str]) -> str:
    """``64``, or ``8-32 GiB`` where nodes differ; from the least to the most."""
    if len(texts) < 2:
        return "".join(texts)
    low, _, unit = texts[0].partition(" ")
    return f"{low if texts[-1].endswith(unit) else texts[0]}-{texts[-1]}"


def _time(seconds: int | None) -> str:
    return render.written_duration(seconds) if seconds else ""


def _heading(text: str) -> None:
    print(f"\n{render.paint(text, '1')}")


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    shown = [(render.clean(key), render.clean(value)) for key, value in rows if value]
    width = max((len(key) for key, _ in shown), default=0)
    for key, value in shown:
        print(f"  {key:<{width}}  {value}")


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, flexible: dict[str, int], droppable: Sequence[str]
) -> None:
    """Without the columns that say nothing here."""
    kept = [index for index in range(len(heads)) if any(row[index] for row in rows)]
    missing = render.print_table(
        [heads[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
        flexible=flexible,
        droppable=droppable,
        indent=2,
    )
    if missing:
        print(render.paint(f"  (a wider terminal, a pipe and --json also have {', '.join(missing).lower()})", "2"))
