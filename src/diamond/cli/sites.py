"""The site catalogue in the terminal: the list, and one entry with its sources."""

from __future__ import annotations

import difflib

from diamond.cli import render
from diamond.cli.session import emit, say
from diamond.core import sites
from diamond.core.errors import NotFound
from diamond.core.sites import Site, SiteGpu

_SCHEDULERS = {"slurm": "Slurm", "pbs": "PBS", "none": "none"}


def ls(*, as_json: bool) -> None:
    found = sites.catalogue()
    if as_json:
        emit({"sites": found})
        return
    rows = [
        (
            site.key,
            site.name,
            _SCHEDULERS[site.batch.scheduler],
            ", ".join(dict.fromkeys(_gpu(gpu) for gpu in site.hardware.gpus)),
            ", ".join(site.containers.runtimes) if site.containers else "",
            ", ".join(site.programmes),
            site.organisation,
        )
        for site in found
    ]
    render.print_table(
        ("KEY", "NAME", "SCHEDULER", "GPUS A NODE", "CONTAINERS", "TIME THROUGH", "ORGANISATION"),
        rows,
        flexible={"GPUS A NODE": 14, "ORGANISATION": 16, "CONTAINERS": 9},
        droppable=("ORGANISATION", "TIME THROUGH", "CONTAINERS"),
    )
    if any(site.batch.scheduler == "pbs" for site in found):
        say("PBS cannot be driven yet: an agent there would run tasks on the login node itself.")


def show(key: str, *, as_json: bool) -> None:
    site = sites.find(key)
    if site is None:
        near = difflib.get_close_matches(key, [each.key for each in sites.catalogue()], n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise NotFound(f"the catalogue has no site {key[:60]!r}", hint=f"{guess}`diamond endpoint sites` lists them")
    if as_json:
        emit(site)
        return
    print(f"{render.paint(site.name, '1')}  {site.organisation}")
    width = max(len(name) for name, _ in _rows(site))
    for name, value in _rows(site):
        print(f"  {name:<{width}}  {value}")
    if site.queues and site.queues.limits:
        print(render.paint("queues, as documented", "1"))
        rows = [
            (
                limit.name + ("*" if limit.name == site.queues.default else ""),
                render.written_duration(limit.max_walltime),
                str(limit.max_nodes or ""),
                limit.note,
            )
            for limit in site.queues.limits
        ]
        render.print_table(("NAME", ">MAX TIME", ">MAX NODES", "NOTE"), rows, flexible={"NOTE": 20}, indent=2)
    print(render.paint("sources", "1"))
    for source in site.sources.values():
        print(f"  {source.title} ({source.date})\n    {source.url}")


def _rows(site: Site) -> list[tuple[str, str]]:
    batch, containers, accounts, network = site.batch, site.containers, site.accounts, site.network
    rows = [
        ("time through", ", ".join(site.programmes)),
        ("login", site.login),
        ("scheduler", _SCHEDULERS[batch.scheduler]),
        ("", batch.note),
        ("jobs must give", ", ".join(batch.requires)),
        ("refused", ", ".join(batch.refuses)),
    ]
    rows += [("gpus", _gpu_in_full(gpu)) for gpu in site.hardware.gpus]
    rows += [("", site.hardware.note), ("processors", site.hardware.arch), ("fabric", site.hardware.fabric)]
    if containers:
        where = " (in jobs only)" if containers.only_in_jobs else ""
        rows.append(("containers", ", ".join(containers.runtimes) + where))
        rows.append(("", _load(containers.module_paths, containers.modules)))
        rows += [("binds", ", ".join(containers.binds)), ("", containers.note)]
    if site.python:
        rows.append(("python", _load(site.python.module_paths, site.python.modules)))
    for place in site.storage.places if site.storage else ():
        named = f"${place.variable}" if place.variable else ""
        rows.append((place.role, ", ".join(each for each in (named, place.path, place.kind, place.note) if each)))
    if accounts:
        needed = "every job names one" if accounts.required else ""
        suffix = f"GPU jobs charge one that ends in {accounts.gpu_suffix}" if accounts.gpu_suffix else ""
        rows.append(("accounts", "; ".join(each for each in (needed, suffix, accounts.note) if each)))
    if network:
        reach = {"none": "none", "direct": "direct", "proxy": "through a proxy"}.get(network.internet, "")
        rows.append(("internet in jobs", "; ".join(each for each in (reach, network.proxy, network.note) if each)))
    return [(name, value) for name, value in rows if value]


def _load(paths: tuple[str, ...], modules: tuple[str, ...]) -> str:
    steps = [f"module use {path}" for path in paths]
    return "; ".join([*steps, f"module load {' '.join(modules)}"]) if modules else ""


def _gpu(gpu: SiteGpu) -> str:
    number = f"{gpu.per_node} × " if gpu.per_node else ""
    return f"{number}{gpu.model}" + (f" {gpu.mem_gb} GB" if gpu.mem_gb else "")


def _gpu_in_full(gpu: SiteGpu) -> str:
    nodes = f" on {render.count(gpu.nodes, 'node')}" if gpu.nodes else ""
    where = f" in {', '.join(gpu.partitions)}" if gpu.partitions else ""
    return f"{_gpu(gpu)}{nodes}{where}" + (f" with --constraint={gpu.constraint}" if gpu.constraint else "")
