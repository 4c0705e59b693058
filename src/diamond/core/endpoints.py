"""An endpoint: a cluster, or this machine, that an agent speaks for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPUs of one model on one node."""

    model: str
    count: int
    mem_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EndpointFacts:
    """What the agent found out about its endpoint; capacity is what the scheduler may hand out."""

    scheduler: str  # "local", "slurm"
    scheduler_version: str = ""
    hostname: str = ""
    os_user: str = ""
    agent_version: str = ""
    python: str = ""
    nodes: int = 1
    cpus_per_node: int = 1
    mem_bytes_per_node: int = 0
    gpus_per_node: tuple[Gpu, ...] = ()
    runtimes: tuple[str, ...] = ()  # container runtimes; empty: none
    run_root: str = ""  # where job directories live
    max_walltime_s: int | None = None
    policy: dict[str, str] = field(default_factory=dict)  # the policy file's rules, for people


@dataclass(frozen=True, kw_only=True)
class EndpointUsage:
    """What is in use right now; sent with every heartbeat."""

    at: float = 0.0
    cpus_used: int = 0
    mem_bytes_reserved: int = 0
    gpus_used: dict[str, int] = field(default_factory=dict)  # by model
    jobs_running: int = 0
    jobs_queued: int = 0
    cpu_percent: float = 0.0  # the node's own load, by anyone
    mem_bytes_used: int = 0
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0
    warnings: tuple[str, ...] = ()  # e.g. "run directory: disk full"


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """A line of `diamond queue`, in the order the scheduler will take them."""

    job_id: str
    task_id: str
    task_name: str
    endpoint: str
    state: str
    priority: int = 0
    cpus: int = 0
    gpus: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    pending_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """How an endpoint stands. `online` means its agent spoke within the last `ONLINE_WITHIN_S` seconds."""

    id: str
    name: str
    online: bool = False
    created_at: float = 0.0
    last_seen_at: float | None = None
    facts: EndpointFacts | None = None
    usage: EndpointUsage | None = None


ONLINE_WITHIN_S = 60.0
