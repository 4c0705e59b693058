"""An endpoint in the terminal: what it is, what it has, what it allows, how full it is. Everything shown is cleaned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from diamond.cli import render
from diamond.cli.session import program
from diamond.core import clusters
from diamond.core.endpoints import Endpoint, EndpointFacts, EndpointUsage, FileSystem, Partition

_ACCESS = {
    "code": "its agent has not enrolled yet",
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
    rows = [("access", access and access + again)]
    rows += _about(endpoint, facts) if facts else []
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
        _print_rows([(key, policy_text(value)) for key, value in facts.policy.items()])
    if usage and usage.warnings:
        print()
    for warning in usage.warnings if usage else ():
        print(f"{render.paint('warning', '33')}: {render.clean(warning)}")


def _away(endpoint: Endpoint) -> str:
    if not endpoint.last_seen_at:
        return "no agent has ever connected"
    return f"its agent was last heard of {render.ago(endpoint.last_seen_at)}"


def _about(endpoint: Endpoint, facts: EndpointFacts) -> list[tuple[str, str]]:
    # The scheduler inside the agent has the agent's version.
    version = "" if facts.scheduler == "local" else facts.scheduler_version
    seen = f", heard of {render.ago(endpoint.last_seen_at)}" if endpoint.online and endpoint.last_seen_at else ""
    accounts = [f"{name} (default)" if name == facts.default_account else name for name in facts.accounts]
    return [
        ("scheduler", f"{facts.scheduler} {version}".strip()),
        ("host", f"{facts.os_user}@{facts.hostname}" if facts.hostname else facts.os_user),
        ("agent", f"{facts.agent_version}, Python {facts.python}{seen}" if facts.agent_version else ""),
        ("size", _size(facts)),
        ("gpus", _gpus(facts)),
        ("accounts", ", ".join(accounts)),
        ("qos", ", ".join(facts.qos)),
        ("containers", ", ".join(facts.runtimes) or "none found"),
        ("images", _images(facts)),
        *_not_used(facts),
        ("shells", "" if facts.allows_shells else "not allowed"),
        ("walltime", f"at most {render.written_duration(facts.max_walltime_s)}" if facts.max_walltime_s else ""),
        ("jobs in", facts.run_root),
    ]


def _images(facts: EndpointFacts) -> str:
    """How images are made there, and what they take."""
    if not facts.builders or facts.builds in ("", "off"):
        return "not built there" if facts.builds == "off" or facts.architecture else ""
    where = {"login": " on the login node", "batch": " as batch jobs"}.get(facts.builds, "")
    text = f"built with {', '.join(facts.builders)}{where}"
    if facts.image_bytes or facts.layer_bytes:
        text += f"; {render.size(facts.image_bytes)}, and {render.size(facts.layer_bytes)} of kept steps"
    return text + (f", in {facts.image_root}" if facts.image_root else "")


def _not_used(facts: EndpointFacts) -> list[tuple[str, str]]:
    """Why what is there makes no images. Of programs that are not there, only where nothing else makes any."""
    if facts.builds == "off":
        return []  # by a rule, which is shown
    present = {name.split(" ")[0] for name in facts.runtimes} | {"venv"}
    told = [
        f"{name}: {problem}"
        for name, problem in facts.builder_problems.items()
        if name in present or not facts.builders
    ]
    return [("" if number else "not with", text) for number, text in enumerate(told)]


def _size(facts: EndpointFacts) -> str:
    memory = f" and {render.amount(facts.mem_bytes_per_node)}" if facts.mem_bytes_per_node else ""
    if not facts.partitions:
        return f"{render.count(facts.nodes, 'node')} with {render.count(facts.cpus_per_node, 'core')}{memory}"
    found = clusters.of_endpoint(facts)
    down = f", {found.nodes - found.usable_nodes} down" if found.usable_nodes < found.nodes else ""
    most = f"the largest with {render.count(facts.cpus_per_node, 'core')}{memory}"
    return f"{render.count(found.nodes, 'node')}{down}; {render.count(found.cpus, 'core')}; {most}"


def _gpus(facts: EndpointFacts) -> str:
    if facts.partitions:
        return _models(clusters.of_endpoint(facts).gpus) or "none"
    texts = [
        f"{gpu.count} × {gpu.model}" + (f" {render.size(gpu.mem_bytes)}" if gpu.mem_bytes else "")
        for gpu in facts.gpus_per_node
    ]
    return ", ".join(texts) or "none"


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
        ("jobs", f"{usage.jobs_running} running, {usage.jobs_queued} queued"),
        ("disk free", disk if usage.disk_total_bytes else ""),
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
                render.clean(_models(found.gpus)),
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


def _models(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} × {model}" for model, number in sorted(counts.items()) if number)


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
