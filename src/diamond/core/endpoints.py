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
class NodeGroup:
    """Nodes of one kind in a partition. `count` includes `unusable` ones (down, drained)."""

    count: int
    cpus: int
    mem_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    features: tuple[str, ...] = ()
    unusable: int = 0
    nodes: str = ""  # as the scheduler writes it: c[1-2]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A queue of a batch scheduler and what it allows. None means no limit of its own."""

    name: str
    is_default: bool = False
    is_up: bool = True
    is_hidden: bool = False
    is_preemptible: bool = False
    max_walltime_s: int | None = None
    default_walltime_s: int | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    allow_accounts: tuple[str, ...] = ()  # empty: all
    allow_groups: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    groups: tuple[NodeGroup, ...] = ()

    @property
    def nodes(self) -> int:
        return sum(group.count for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """A place for files at an endpoint. A quota of 0 means none is known."""

    path: str
    role: str = ""  # "home", "scratch", "project", "runs"
    kind: str = ""  # ext4, nfs4, lustre, gpfs …
    total_bytes: int = 0
    free_bytes: int = 0
    quota_bytes: int = 0
    quota_used_bytes: int = 0


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
    policy: dict[str, str] = field(default_factory=dict)  # the rules in force, for people
    policy_files: tuple[str, ...] = ()  # that they were read from: the centre's, its owner's
    policy_changed_at: float = 0.0  # when other rules came into force; 0: its agent does not say
    others_problem: str = ""  # why a rule that lets others in is not in force
    partitions: tuple[Partition, ...] = ()  # only those the policy file allows; empty for schedulers without
    accounts: tuple[str, ...] = ()  # that the user may charge; empty: not known (no accounting there)
    default_account: str = ""
    qos: tuple[str, ...] = ()
    filesystems: tuple[FileSystem, ...] = ()
    site: str = ""  # key in the site catalogue; empty for a place it does not know
    site_name: str = ""
    queues_ahead: bool = False  # whether the next job of a chain may wait in the queue behind the running one
    allows_shells: bool = True
    allows_shells_of_others: bool = False  # also in tasks of others than the endpoint's owner
    holds_pools: bool = False  # whether its agent knows pilots (older ones do not), and its policy file lets it
    takes_secrets: bool = False  # whether its agent can (older ones cannot), and its policy file lets it
    allows_others: bool = False  # whether the policy file lets others than its owner run tasks here
    allowed_users: tuple[str, ...] | None = None  # whom alone it names, as patterns; None: it names nobody
    architecture: str = ""  # as uname -m says
    builders: tuple[str, ...] = ()  # ways to make images that work here and that the policy file allows, best first
    builder_problems: dict[str, str] = field(default_factory=dict)  # why each of the other ways does not work here
    builds: str = ""  # where they may run: "login", "batch", "any"; "off" or empty: nowhere
    image_root: str = ""  # where images lie
    image_bytes: int = 0
    layer_bytes: int = 0  # kept steps of builds, which can be pruned


@dataclass(frozen=True, kw_only=True)
class NodeUse:
    """How nodes of one kind, in the same partitions, stand now. What is neither free nor down is busy, or kept."""

    gpus: tuple[str, ...] = ()  # models; empty: nodes without GPUs
    partitions: tuple[str, ...] = ()
    nodes: int = 0
    free: int = 0  # nothing of them is handed out
    down: int = 0
    gpus_total: int = 0
    gpus_free: int = 0  # also those of nodes of which another part is in use


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
    nodes: tuple[NodeUse, ...] = ()  # of a cluster
    nodes_at: float = 0.0  # when its scheduler was asked for them, which is not for every heartbeat


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
    scheduler_id: str | None = None
    partition: str = ""
    expected_start_at: float | None = None  # as the scheduler estimates; None when it does not
    owner: str = ""  # a user's name; empty, as the task's id and name are, for what one may not see


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
    access: str = (
        ""  # "enrolled"; "expired"; "revoked"; "code": a code waits to be used; "none": neither token nor code
    )
    token_expires_at: float | None = None  # of its agent's token, which is renewed while the agent talks
    owner: str = ""  # a user's name
    is_mine: bool = True
    shared_with: tuple[str, ...] = ()  # projects whose members may run tasks here; only those the user is in
    waits_for: tuple[str, ...] = ()  # projects whose owners have not approved yet; told to its owner alone
    # Since when a task has succeeded here; None: others' tasks come only if they name it.
    proven_at: float | None = None


ONLINE_WITHIN_S = 60.0
