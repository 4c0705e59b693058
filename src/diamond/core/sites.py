"""The site catalogue: what is documented of well-known computing centres, so that an endpoint there is recognised.

The facts are data, one file a site in `sites/`, each group with the documents it was found in and the day somebody
looked. They help people (names, modules, rules of the house) and never overrule what an agent sees for itself. A fact
that could not be verified is left out: an empty field means "not known", not "no".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from functools import lru_cache
from importlib.resources import files

from diamond.core.codec import decode
from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput

SCHEDULERS = ("slurm", "pbs", "none")
INTERNET = ("", "direct", "proxy", "none")
ROLES = ("home", "scratch", "project", "local")
_KEY = re.compile(r"[a-z][a-z0-9-]{1,30}")
_DOMAIN = re.compile(
    r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.){2,}[a-z]{2,}"
)  # two dots at least: a whole university is no site


@dataclass(frozen=True, kw_only=True)
class Source:
    """A document, and the day it was looked up (YYYY-MM-DD)."""

    title: str
    url: str
    date: str

    def __post_init__(self) -> None:
        date.fromisoformat(self.date)
        if not self.title or not self.url.startswith("https://"):
            raise ValueError("a source needs a title and an https address")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Facts that were found together. `sources` are keys of the site's `sources`."""

    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Match(Group):
    """How a machine of the site is told. One rule that holds is enough; see `match` for their order.

    Attributes:
        domains: DNS domains; the machine's full name is one of them or lies below it.
        hosts: regular expressions for the whole of the machine's name.
        environ: regular expressions for the whole value of a variable.
        clusters: names of the scheduler's cluster.
    """

    domains: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    clusters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (self.domains or self.hosts or self.environ or self.clusters):
            raise ValueError("needs at least one rule")
        for domain in self.domains:
            if not _DOMAIN.fullmatch(domain):
                raise ValueError(f"{domain!r} is not a domain of one site")
        for pattern in (*self.hosts, *self.environ.values()):
            try:
                found = re.compile(pattern).fullmatch("")
            except re.error as error:
                raise ValueError(f"{pattern!r}: {error}") from error
            if found:
                raise ValueError(f"{pattern!r} matches nothing in particular")


@dataclass(frozen=True, kw_only=True)
class Batch(Group):
    """The batch scheduler and what it insists on.

    Attributes:
        requires: options that every job must give.
        refuses: options for which the site turns a job away.
    """

    scheduler: str
    requires: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler is one of {', '.join(SCHEDULERS)}")


@dataclass(frozen=True, kw_only=True)
class SiteGpu:
    """GPUs of one kind of node, as documented; 0 where nobody says. `constraint` picks these nodes in a partition."""

    model: str
    mem_gb: int = 0
    per_node: int = 0
    nodes: int = 0
    partitions: tuple[str, ...] = ()
    constraint: str = ""


@dataclass(frozen=True, kw_only=True)
class Hardware(Group):
    gpus: tuple[SiteGpu, ...]
    fabric: str = ""
    arch: str = ""  # of the GPU nodes' processors, as `uname -m` has it
    note: str = ""


def _parse_limit(raw: object) -> int:
    if not isinstance(raw, str):
        raise ValueError(f'{str(raw)[:40]} of what? Write "48h" or "7d"')
    return parse_duration(raw)


@dataclass(frozen=True, kw_only=True)
class QueueLimit:
    """A documented limit; the scheduler's own word counts where the agent can ask it."""

    name: str
    max_walltime: int = field(metadata={"parse": _parse_limit})  # seconds
    max_nodes: int | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Queues(Group):
    limits: tuple[QueueLimit, ...] = ()
    default: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Containers(Group):
    """`modules` are loaded, in this order, to have the first of `runtimes`; `binds` is what containers need to see."""

    runtimes: tuple[str, ...]
    modules: tuple[str, ...] = ()
    module_paths: tuple[str, ...] = ()  # for `module use`, before
    only_in_jobs: bool = False
    binds: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Python(Group):
    modules: tuple[str, ...]
    module_paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Place:
    """A file system for users: a path, or the variable that names it."""

    role: str
    path: str = ""
    variable: str = ""
    kind: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES or not (self.path or self.variable):
            raise ValueError(f"a place has a path or a variable, and a role of {', '.join(ROLES)}")


@dataclass(frozen=True, kw_only=True)
class Storage(Group):
    places: tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class Accounts(Group):
    """What jobs are charged to. `gpu_suffix`: GPU jobs charge an account whose name ends so."""

    required: bool = False
    gpu_suffix: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Network(Group):
    """What compute nodes reach of the Internet: "direct", through a "proxy", or "none"."""

    internet: str = ""
    proxy: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.internet not in INTERNET:
            raise ValueError(f"internet is one of {', '.join(filter(None, INTERNET))}")


@dataclass(frozen=True, kw_only=True)
class Site:
    key: str
    name: str
    organisation: str
    sources: dict[str, Source]
    match: Match
    batch: Batch
    hardware: Hardware
    programmes: tuple[str, ...] = ()  # through which time is granted: ACCESS, NAIRR, DOE …
    login: str = ""  # what users ssh to
    queues: Queues | None = None
    containers: Containers | None = None
    python: Python | None = None
    storage: Storage | None = None
    accounts: Accounts | None = None
    network: Network | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"{self.key!r} is not a key: lower-case letters, digits and dashes")
        cited: set[str] = set()
        for name, group in self.groups().items():
            if not group.sources:
                raise ValueError(f"{name} has no source")
            if unknown := set(group.sources) - set(self.sources):
                raise ValueError(f"{name} cites {', '.join(sorted(unknown))}, which is not among the sources")
            cited |= set(group.sources)
        if unused := set(self.sources) - cited:
            raise ValueError(f"nothing cites {', '.join(sorted(unused))}")

    def groups(self) -> dict[str, Group]:
        """The groups of facts there are, by field name."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Group)}


def parse_site(raw: object) -> Site:
    """Raises: InvalidInput: with the dotted path of what does not fit."""
    return decode(Site, raw, strict=True)


@lru_cache(maxsize=1)
def catalogue() -> tuple[Site, ...]:
    """Every site, by key. Read through the import system, so that it works from inside a zip file as well."""
    folder = files("diamond.core").joinpath("sites")
    found = {
        entry.name: parse_site(json.loads(entry.read_text(encoding="utf-8")))
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    }
    for name, site in found.items():
        if name != f"{site.key}.json":
            raise InvalidInput(f"{name} describes {site.key}", field="key")
    return tuple(sorted(found.values(), key=lambda site: site.key))


def find(key: str) -> Site | None:
    return next((site for site in catalogue() if site.key == key), None)


def match(hostname: str, environ: Mapping[str, str], cluster_name: str = "") -> Site | None:
    """The site a machine belongs to; None when none is known, or the signs contradict each other.

    The machine's own name counts first, then its variables, which a shell may have brought along from elsewhere, then
    the name of the scheduler's cluster, which any administrator is free to choose.
    """
    host = hostname.strip().rstrip(".").lower()
    rules: tuple[Callable[[Match], bool], ...] = (
        lambda rule: bool(host) and _is_host(rule, host),
        lambda rule: any(re.fullmatch(pattern, environ.get(name, "")) for name, pattern in rule.environ.items()),
        lambda rule: bool(cluster_name) and cluster_name in rule.clusters,
    )
    for holds in rules:
        found = [site for site in catalogue() if holds(site.match)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _is_host(rule: Match, host: str) -> bool:
    inside = any(host == domain or host.endswith(f".{domain}") for domain in rule.domains)
    return inside or any(re.fullmatch(pattern, host) for pattern in rule.hosts)
