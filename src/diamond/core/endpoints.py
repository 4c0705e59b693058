"""An endpoint: a cluster, or this machine, that an agent speaks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from diamond.core import bounds

MAX_SECONDS = 2**31 - 1
MAX_COUNT = 10_000_000  # of nodes, cores or GPUs: products of two still are numbers of a database


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPUs of one model on one node."""

    model: str
    count: int = field(metadata=bounds.number(MAX_COUNT))
    mem_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind in a partition. `count` includes `unusable` ones (down, drained)."""

    count: int = field(metadata=bounds.number(MAX_COUNT))
    cpus: int = field(metadata=bounds.number(MAX_COUNT))
    mem_bytes: int = 0
    gpus: tuple[Gpu, ...] = field(default=(), metadata=bounds.items(16))
    features: tuple[str, ...] = field(default=(), metadata=bounds.items(100))
    unusable: int = 0
    nodes: str = field(default="", metadata=bounds.text(20_000))  # as the scheduler writes it: c[1-2]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A queue of a batch scheduler and what it allows. None means no limit of its own."""

    name: str
    is_default: bool = False
    is_up: bool = True
    is_hidden: bool = False
    is_preemptible: bool = False
    max_walltime_s: int | None = field(default=None, metadata=bounds.number(MAX_SECONDS))
    default_walltime_s: int | None = field(default=None, metadata=bounds.number(MAX_SECONDS))
    min_nodes: int = field(default=1, metadata=bounds.number(MAX_COUNT))
    max_nodes: int | None = field(default=None, metadata=bounds.number(MAX_COUNT))
    allow_accounts: tuple[str, ...] = field(default=(), metadata=bounds.items(2000))  # empty: all
    allow_groups: tuple[str, ...] = field(default=(), metadata=bounds.items(2000))
    allow_qos: tuple[str, ...] = field(default=(), metadata=bounds.items(1000))
    groups: tuple[NodeGroup, ...] = field(default=(), metadata=bounds.items(200))

    @property
    def nodes(self) -> int:
        return sum(group.count for group in self.groups)


@dataclass(frozen=True, kw_only=True)
class FileSystem:
    """A place for files at an endpoint. A quota of 0 means none is known."""

    path: str = field(metadata=bounds.text(4096))
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
    nodes: int = field(default=1, metadata=bounds.number(MAX_COUNT))
    cpus_per_node: int = field(default=1, metadata=bounds.number(MAX_COUNT))
    mem_bytes_per_node: int = 0
    gpus_per_node: tuple[Gpu, ...] = field(default=(), metadata=bounds.items(16))
    runtimes: tuple[str, ...] = field(default=(), metadata=bounds.items(20))  # container runtimes; empty: none
    run_root: str = field(default="", metadata=bounds.text(4096))  # where job directories live
    max_walltime_s: int | None = field(default=None, metadata=bounds.number(MAX_SECONDS))
    # The rules in force, for people.
    policy: dict[str, str] = field(default_factory=dict, metadata=bounds.items(100, chars=4000))
    # The files that they were read from: the centre's, its owner's.
    policy_files: tuple[str, ...] = field(default=(), metadata=bounds.items(2, chars=4096))
    policy_changed_at: float = 0.0  # when other rules came into force; 0: its agent does not say
    # Why a rule that lets others in is not in force.
    others_problem: str = field(default="", metadata=bounds.text(4000))
    # Only those the policy file allows; empty for schedulers without.
    partitions: tuple[Partition, ...] = field(default=(), metadata=bounds.items(1000))
    # That the user may charge; empty: not known (no accounting there).
    accounts: tuple[str, ...] = field(default=(), metadata=bounds.items(2000))
    default_account: str = ""
    qos: tuple[str, ...] = field(default=(), metadata=bounds.items(1000))
    filesystems: tuple[FileSystem, ...] = field(default=(), metadata=bounds.items(100))
    site: str = ""  # key in the site catalogue; empty for a place it does not know
    site_name: str = ""
    queues_ahead: bool = False  # whether the next job of a chain may wait in the queue behind the running one
    allows_shells: bool = True
    allows_shells_of_others: bool = False  # also in tasks of others than the endpoint's owner
    holds_pools: bool = False  # whether its agent knows pilots (older ones do not), and its policy file lets it
    takes_secrets: bool = False  # whether its agent can (older ones cannot), and its policy file lets it
    allows_others: bool = False  # whether the policy file lets others than its owner run tasks here
    # Whom alone it names, as patterns; None: it names nobody.
    allowed_users: tuple[str, ...] | None = field(default=None, metadata=bounds.items(2000))
    architecture: str = ""  # as uname -m says
    # Ways to make images that work here and that the policy file allows, best first; why each of the others does not.
    builders: tuple[str, ...] = field(default=(), metadata=bounds.items(20))
    builder_problems: dict[str, str] = field(default_factory=dict, metadata=bounds.items(20, chars=2000))
    builds: str = ""  # where they may run: "login", "batch", "any"; "off" or empty: nowhere
    image_root: str = field(default="", metadata=bounds.text(4096))  # where images lie
    image_bytes: int = 0
    layer_bytes: int = 0  # kept steps of builds, which can be pruned
    cut: tuple[str, ...] = field(default=(), metadata=bounds.items(20, chars=300))  # what the server left out, and why


@dataclass(frozen=True, kw_only=True)
class NodeUse:
    """How nodes of one kind, in the same partitions, stand now. What is neither free nor down is busy, or kept."""

    gpus: tuple[str, ...] = field(default=(), metadata=bounds.items(16))  # models; empty: nodes without GPUs
    partitions: tuple[str, ...] = field(default=(), metadata=bounds.items(1000))
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
    gpus_used: dict[str, int] = field(default_factory=dict, metadata=bounds.items(100))  # by model
    jobs_running: int = 0
    jobs_queued: int = 0
    cpu_percent: float = field(default=0.0, metadata=bounds.number(1e9))  # the node's own load, by anyone
    mem_bytes_used: int = 0
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0
    # For instance "run directory: disk full".
    warnings: tuple[str, ...] = field(default=(), metadata=bounds.items(50, chars=1000))
    nodes: tuple[NodeUse, ...] = field(default=(), metadata=bounds.items(1000))  # of a cluster
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
