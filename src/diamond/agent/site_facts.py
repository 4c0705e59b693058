"""What an endpoint has beside its scheduler: container runtimes, file systems, and which known site it is.

`discover` looks once and takes seconds at worst; `SiteWatch` looks in a thread of its own, so that nobody waits for it.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diamond.agent import filesystems, programs
from diamond.agent.builders.choice import usable
from diamond.agent.builders.store import ImageStore
from diamond.agent.image_policy import IMAGES
from diamond.core import sites
from diamond.core.endpoints import FileSystem

log = logging.getLogger(__name__)

REFRESH_S = 600.0
_MOST_TOLD = 400  # characters of why a builder does not work: some programs explain themselves at length
_VERSION = re.compile(r"\d+(?:\.\d+)+[\w.+-]*")
# What each is asked for its version. Docker's client says nothing about whether one may use it, its server does.
_RUNTIMES: dict[str, tuple[str, ...]] = {
    "apptainer": ("apptainer", "--version"),
    "singularity": ("singularity", "--version"),
    "charliecloud": ("ch-run", "--version"),
    "podman": ("podman", "--version"),
    "podman-hpc": ("podman-hpc", "--version"),
    "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    "enroot": ("enroot", "version"),
    "shifter": ("shifter", "--version"),
}
_ALIASES = {"singularity": "apptainer", "docker": "podman"}  # programs that are often the other one under this name


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """As of one look.

    Attributes:
        runtimes: ``apptainer 1.4.5``; what only a module brings, ``apptainer (module load tacc-apptainer)``.
        site, site_name: key and name in the catalogue; empty for a place it does not know.
        modules: what the catalogue says to load for Python, then for containers.
        container_modules: for containers alone; binds: what the catalogue says containers need to see.
        builders: ways to make images that work here, best first; builder_problems: why the others do not.
        image_bytes, layer_bytes: of the images here and of kept steps of builds, as recorded when they were made.
        warnings: for people, e.g. that a file system does not answer.
    """

    runtimes: tuple[str, ...] = ()
    filesystems: tuple[FileSystem, ...] = ()
    site: str = ""
    site_name: str = ""
    modules: tuple[str, ...] = ()
    container_modules: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    builders: tuple[str, ...] = ()
    builder_problems: dict[str, str] = field(default_factory=dict)
    image_bytes: int = 0
    layer_bytes: int = 0
    warnings: tuple[str, ...] = ()


def discover(
    home: Path,
    scheduler_cluster_name: str = "",
    *,
    run_root: Path | None = None,
    image_root: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> SiteFacts:
    """Look at this machine. Raises nothing; what cannot be found out is left empty.

    Args:
        home: the agent's home.
        scheduler_cluster_name: what the batch scheduler calls its cluster, if it has a name.
        run_root: where job directories live; by default in the home.
        image_root: where images lie; by default in the home.
        environ: the variables to go by; by default this process's.
    """
    environ = os.environ if environ is None else environ
    site = recognise(environ, scheduler_cluster_name)
    found, warnings = filesystems.look(
        filesystems.places(
            home=os.path.expanduser("~"),
            run_root=str(run_root or home / "jobs"),
            environ=environ,
            user=_user(),
            more=_documented(site, environ) if site else (),
        )
    )
    image_bytes, layer_bytes = ImageStore(image_root or home / IMAGES).sizes()
    containers = site.containers if site else None
    problems = usable()
    return SiteFacts(
        runtimes=runtimes(site),
        filesystems=tuple(found),
        site=site.key if site else "",
        site_name=f"{site.name}, {site.organisation}" if site else "",
        modules=_modules(site),
        container_modules=containers.modules if containers else (),
        binds=containers.binds if containers else (),
        builders=tuple(name for name, problem in problems.items() if not problem),
        builder_problems={name: problem[:_MOST_TOLD] for name, problem in problems.items() if problem},
        image_bytes=image_bytes,
        layer_bytes=layer_bytes,
        warnings=tuple(warnings),
    )


def recognise(environ: Mapping[str, str], cluster_name: str = "") -> sites.Site | None:
    """The catalogue's site this machine belongs to. May ask the name service, so not for those in a hurry."""
    name = socket.gethostname()
    try:
        full = socket.getfqdn(name)
    except (OSError, UnicodeError):
        full = name
    # By either name first, and by weaker signs only then.
    return sites.match(full, {}) or sites.match(name, environ, cluster_name)


def runtimes(site: sites.Site | None = None) -> tuple[str, ...]:
    """The container runtimes there are, with versions, in the order we would choose."""
    present = {name: path for name, argv in _RUNTIMES.items() if (path := programs.find(argv[0]))}
    answers = programs.ask_all([[path, *_RUNTIMES[name][1:]] for name, path in present.items()])
    found: dict[str, str] = {}
    for name, said in zip(present, answers, strict=True):
        text = f"{said.out}\n{said.err}"
        version = _VERSION.search(text)
        is_alias = name in _ALIASES and _ALIASES[name] in text.lower()
        if said.status == 0 and version and not is_alias:
            found[name] = f"{name} {version[0][:40]}"
    if site and site.containers and site.containers.modules:
        name = site.containers.runtimes[0]
        how = f"module load {' '.join(site.containers.modules)}"
        found.setdefault(name, f"{name} ({how}{', in jobs only' if site.containers.only_in_jobs else ''})")
    return tuple(found.values())


def _documented(site: sites.Site, environ: Mapping[str, str]) -> list[filesystems.Candidate]:
    """The site's file systems, by the variable that names the user's part, else the user's folder, else the whole."""
    found = []
    for place in site.storage.places if site.storage else ():
        if place.role in ("home", "local"):
            continue
        named = environ.get(place.variable, "") if place.variable else ""
        paths = [named if os.path.isabs(named) else "", f"{place.path}/{_user()}" if place.path else "", place.path]
        found.append(filesystems.Candidate(place.role, tuple(path for path in paths if path)))
    return found


def _modules(site: sites.Site | None) -> tuple[str, ...]:
    if site is None:
        return ()
    python = site.python.modules if site.python else ()
    containers = site.containers.modules if site.containers else ()
    return tuple(dict.fromkeys([*python, *containers]))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


class SiteWatch:
    """Keeps `facts` up to date from a daemon thread, and calls `on_change`, in that thread, when they are others."""

    def __init__(
        self,
        home: Path,
        *,
        run_root: Path | None = None,
        image_root: Callable[[], Path | None] = lambda: None,
        cluster_name: Callable[[], str] = str,
        on_change: Callable[[], None] = lambda: None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self.facts = SiteFacts()
        self._home = home
        self._run_root = run_root
        self._image_root = image_root
        self._cluster_name = cluster_name
        self._on_change = on_change
        self._refresh_s = refresh_s
        self._stop = threading.Event()
        self._again = threading.Event()
        self._thread = threading.Thread(target=self._run, name="site", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Does not wait: a look that hangs ends by itself."""
        self._stop.set()
        self._again.set()

    def look_again(self) -> None:
        """Soon: something changed that the facts tell of. Thread-safe."""
        self._again.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                name = self._cluster_name()
                facts = discover(self._home, name, run_root=self._run_root, image_root=self._image_root())
            except Exception:  # whatever a strange machine does, its agent must go on
                log.exception("could not look at this machine")
                facts = self.facts
            if facts != self.facts and not self._stop.is_set():
                for warning in set(facts.warnings) - set(self.facts.warnings):
                    log.warning("%s", warning)
                self.facts = facts
                self._on_change()
            self._again.wait(self._refresh_s)
            self._again.clear()
