"""Finds out, in the background, what the cluster has and allows, and keeps it on disk for the next start.

Asked at the start, every ten minutes, when slurm.conf changes, and when the controller comes back after an absence.
A question that gets no answer leaves the old facts as they are.
"""

from __future__ import annotations

import contextlib
import getpass
import grp
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from diamond.agent.schedulers.slurm import facts as slurm_facts
from diamond.agent.schedulers.slurm.commands import Commands
from diamond.core import sites
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts, NodeUse
from diamond.core.errors import DiamondError
from diamond.core.rundir import read_json, write_atomic

log = logging.getLogger(__name__)

_REFRESH_S = 600.0
_RETRY_S = 30.0
_LOOK_EVERY_S = 30.0  # at slurm.conf
_USE_EVERY_S = 120.0
_NODES = ["scontrol", "-a", "-d", "-o", "show", "node"]
_FIRST_WAIT_S = 8.0
_CACHE_BYTES = 16 * 1024 * 1024
FRESH_S = 900.0  # facts older than this are not held against a job


@dataclass(frozen=True, kw_only=True)
class Found:
    """One look at the cluster. `at` and `used_at` are monotonic; 0 for what was read from disk."""

    facts: EndpointFacts
    at: float = 0.0
    used_at: float = 0.0
    cpus_used: int = 0
    mem_bytes_used: int = 0
    gpus_used: dict[str, int] = field(default_factory=dict)
    nodes: tuple[NodeUse, ...] = ()
    nodes_at: float = 0.0  # Unix seconds
    config: dict[str, str] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()  # options for which this site, if it is a known one, turns jobs away


def with_usage(found: Found, nodes: list[slurm_facts.Node]) -> Found:
    gpus_used: dict[str, int] = {}
    for node in nodes:
        for model, count in node.gpus_used.items():
            gpus_used[model] = gpus_used.get(model, 0) + count
    return replace(
        found,
        used_at=time.monotonic(),
        cpus_used=sum(node.cpus_used for node in nodes),
        mem_bytes_used=sum(node.mem_bytes_used for node in nodes),
        gpus_used={model: count for model, count in gpus_used.items() if count},
        nodes=slurm_facts.use_of(nodes, {partition.name for partition in found.facts.partitions}),
        nodes_at=time.time(),
    )


class Discovery:
    """Thread-safe. `on_change` is called, from its own thread, when the facts are others than before."""

    def __init__(self, commands: Commands, cache: Path, *, run_root: Path) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_found: Callable[[Found], None] = lambda found: None
        self.is_busy: Callable[[], bool] = lambda: False
        self._commands = commands
        self._cache = cache
        self._blank = EndpointFacts(
            scheduler="slurm",
            hostname=socket.gethostname(),
            run_root=str(run_root),
            nodes=0,
            cpus_per_node=0,
            queues_ahead=True,
        )
        self._found = Found(facts=self._load(), refuses=self._refused())
        self._first = threading.Event()
        self._wake = threading.Event()
        self._closing = False
        self._stamp: tuple[int, int] | None = None
        if self._found.facts.nodes:
            self._first.set()
        self._thread = threading.Thread(target=self._run, name="slurm-facts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def found(self) -> Found:
        return self._found

    def facts(self) -> EndpointFacts:
        """What is known; at a first start ever, after a moment's wait for the first answer."""
        self._first.wait(_FIRST_WAIT_S)
        return self._found.facts

    def refresh(self) -> None:
        """Look again soon."""
        self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._first.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            good = False
            try:
                good = self._look()
            except Exception:
                log.exception("the cluster's facts: unexpected error")
            self._first.set()
            self._pause(_REFRESH_S if good else _RETRY_S)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closing and (left := until - time.monotonic()) > 0:
            if self._wake.wait(min(left, _LOOK_EVERY_S)):
                self._wake.clear()
                return
            if self._conf_changed():
                return
            if self.is_busy() and time.monotonic() - self._found.used_at > _USE_EVERY_S:
                self._look_at_use()

    def _conf_changed(self) -> bool:
        """Whether slurm.conf is another than at the last look; clusters without such a file wait their ten minutes."""
        try:
            stat = os.stat(self._found.config.get("SLURM_CONF", ""))
        except OSError:
            return False
        stamp = (stat.st_mtime_ns, stat.st_size)
        before, self._stamp = self._stamp, stamp
        return before is not None and before != stamp

    def _look(self) -> bool:
        config_text = self._ask(["scontrol", "show", "config"])
        partitions_text = self._ask(["scontrol", "-a", "-o", "show", "partition"]) if config_text else None
        nodes_text = self._ask(_NODES) if partitions_text else None
        if config_text is None or partitions_text is None or nodes_text is None:
            return False
        config = slurm_facts.parse_config(config_text)
        nodes = slurm_facts.parse_nodes(nodes_text)
        partitions = slurm_facts.parse_partitions(partitions_text, nodes, config, _own_groups())
        known = self._associations() if slurm_facts.has_accounting(config) else slurm_facts.Associations()
        facts = slurm_facts.facts_of(config=config, nodes=nodes, partitions=partitions, known=known)
        facts = replace(facts, hostname=self._blank.hostname, run_root=self._blank.run_root)
        before = self._found.facts
        refuses = self._refused(config.get("ClusterName", ""))
        self._found = with_usage(Found(facts=facts, at=time.monotonic(), config=config, refuses=refuses), nodes)
        self.on_found(self._found)
        if facts != before:
            self._save(facts)
            self.on_change()
        return True

    def _refused(self, cluster_name: str = "") -> tuple[str, ...]:
        site = sites.match(self._blank.hostname, os.environ, cluster_name)
        return site.batch.refuses if site is not None else ()

    def _look_at_use(self) -> None:
        """How much of the cluster is in use, while somebody of ours is there to care. The facts stay."""
        if (nodes_text := self._ask(_NODES)) is not None:
            self._found = with_usage(self._found, slurm_facts.parse_nodes(nodes_text))

    def _associations(self) -> slurm_facts.Associations:
        user = getpass.getuser()
        rows = self._ask(["sacctmgr", "-nP", "show", "assoc", f"user={user}", "format=Account,QOS"])
        if rows is None:
            return slurm_facts.Associations()
        default = self._ask(["sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount"]) or ""
        return replace(slurm_facts.parse_associations(rows), default_account=default.strip().partition("|")[0])

    def _ask(self, argv: list[str]) -> str | None:
        if self._closing:
            return None
        answer = self._commands.query(argv)
        if not answer.is_good:
            log.info("%s: %s", " ".join(argv), answer.problem)
            return None
        return answer.out

    def _load(self) -> EndpointFacts:
        raw = read_json(self._cache, _CACHE_BYTES)
        try:
            facts = decode(EndpointFacts, raw)
        except DiamondError:
            return self._blank
        if facts.scheduler != "slurm":
            return self._blank
        return replace(facts, hostname=self._blank.hostname, run_root=self._blank.run_root)

    def _save(self, facts: EndpointFacts) -> None:
        with contextlib.suppress(OSError):
            write_atomic(self._cache, json.dumps(encode(facts)).encode())


def _own_groups() -> frozenset[str]:
    """Names of the groups this process belongs to."""
    names = []
    for number in {os.getegid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):
            names.append(grp.getgrgid(number).gr_name)
    return frozenset(names)
