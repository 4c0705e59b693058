"""The configuration of a site's Slurm: what nodes and partitions it has, and the files that say so.

Timers are short, so that tests see in seconds what takes minutes elsewhere. Nodes are declared, not measured: there
may be more CPUs, memory and GPUs in the configuration than in the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FIRST_NODE_PORT = 17001

# For tests that wait for a dead node to be noticed; too impatient for a busy site.
QUICK_NODE_FAIL = {"SlurmdTimeout": "3", "MessageTimeout": "3"}


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    cpus: int = 2
    memory_mib: int = 8192
    gpu_type: str = ""
    num_gpus: int = 0
    features: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A partition; `options` are Slurm's own words, such as {"MaxTime": "1-00:00:00"}."""

    name: str
    nodes: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)


def default_nodes() -> tuple[Node, ...]:
    """Four nodes of three kinds, so that asking for the wrong kind fails as it does in life."""
    a100 = [Node(name=f"c{n}", gpu_type="a100", num_gpus=2, features=("a100", "nvlink", "rome")) for n in (1, 2)]
    v100 = Node(name="c3", gpu_type="v100", num_gpus=2, features=("v100", "skylake"))
    return (*a100, v100, Node(name="c4", features=("bigmem", "skylake"), memory_mib=32768))


def many_cpus(num_nodes: int = 4, cpus: int = 256) -> tuple[Node, ...]:
    """Nodes for hundreds of live jobs at once."""
    return tuple(Node(name=f"c{n}", cpus=cpus, memory_mib=1 << 20) for n in range(1, num_nodes + 1))


def default_partitions(nodes: Sequence[Node]) -> tuple[Partition, ...]:
    """Partitions as centres have them: short, long, by kind of node, preemptible, closed and out of order."""
    every = tuple(node.name for node in nodes)
    # Whoever may be thrown out is in the lowest tier; everyone above may do it.
    low = {"PriorityTier": "1", "MaxTime": "7-00:00:00", "DefaultTime": "01:00:00"}
    day = {"PriorityTier": "10", "MaxTime": "1-00:00:00", "DefaultTime": "01:00:00", "PreemptMode": "OFF"}

    def kind(gpu_type: str) -> tuple[str, ...]:
        return tuple(node.name for node in nodes if node.gpu_type == gpu_type)

    partitions = [
        Partition(
            name="debug", nodes=every,
            options={"Default": "YES", "MaxTime": "00:02:00", "PriorityTier": "20", "PreemptMode": "OFF"},
        ),
        Partition(name="gpu", nodes=kind("a100"), options=day),
        Partition(name="v100", nodes=kind("v100"), options=day),
        Partition(name="cpu", nodes=kind(""), options={**day, "MaxTime": "2-00:00:00", "MaxNodes": "2"}),
        Partition(name="long", nodes=every, options={**day, "MaxTime": "7-00:00:00", "PriorityTier": "5"}),
        Partition(name="scavenger", nodes=every, options={**low, "PreemptMode": "REQUEUE"}),
        Partition(name="spot", nodes=every, options={**low, "PreemptMode": "CANCEL"}),
        Partition(name="restricted", nodes=every, options={**day, "AllowGroups": "privileged"}),
        Partition(name="admin", nodes=every, options={**day, "Hidden": "YES"}),
        Partition(name="maintenance", nodes=every, options={**day, "State": "DOWN"}),
    ]  # fmt: skip
    return tuple(partition for partition in partitions if partition.nodes)


def slurm_conf(
    *, cluster: str, address: str, nodes: Sequence[Node], partitions: Iterable[Partition], overrides: Mapping[str, str]
) -> str:
    """slurm.conf as text; `overrides` replace or add global parameters, an empty value takes one away."""
    settings = {
        "ClusterName": cluster,
        "SlurmctldHost": f"{cluster}({address})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "MailProg": "/bin/true",
        "MpiDefault": "none",
        "GresTypes": "gpu",
        # Several nodes on one machine, no cgroups, no accounting storage: a small site with no slurmdbd.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "PropagateResourceLimits": "NONE",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": "500",
        "JobRequeue": "1",
        "MaxJobCount": "20000",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": (
            "bf_interval=3,bf_continue,bf_max_job_test=1000,bf_resolution=30,bf_window=11520,"
            "sched_interval=5,default_queue_depth=1000,batch_sched_delay=1"
        ),
        "MinJobAge": "300",
        "KillWait": "5",
        "CompleteWait": "0",
        "InactiveLimit": "0",
        "MessageTimeout": "10",
        "SlurmctldTimeout": "30",
        # How long a silent node is believed in, on top of unanswered messages.
        "SlurmdTimeout": "12",
        "StateSaveLocation": "/var/spool/slurmctld",
        "SlurmdSpoolDir": "/var/spool/slurmd.%n",
        "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
        "SlurmdPidFile": "/run/slurm/slurmd.%n.pid",
        "SlurmctldLogFile": "/var/log/slurm/slurmctld.log",
        "SlurmdLogFile": "/var/log/slurm/slurmd.%n.log",
    } | dict(overrides)
    lines = [f"{key}={value}" for key, value in settings.items() if value]
    for number, node in enumerate(nodes):
        words = [f"NodeName={node.name}", f"NodeHostname={node.name}", f"NodeAddr={address}"]
        words += [f"Port={FIRST_NODE_PORT + number}", f"CPUs={node.cpus}", f"RealMemory={node.memory_mib}"]
        words += [f"Gres=gpu:{node.gpu_type}:{node.num_gpus}"] if node.num_gpus else []
        words += [f"Feature={','.join(node.features)}"] if node.features else []
        lines.append(" ".join([*words, "State=UNKNOWN"]))
    for partition in partitions:
        options = {"State": "UP"} | dict(partition.options)
        words = [f"PartitionName={partition.name}", f"Nodes={','.join(partition.nodes)}"]
        lines.append(" ".join([*words, *(f"{key}={value}" for key, value in options.items())]))
    return "\n".join(lines) + "\n"


def gres_conf(nodes: Iterable[Node]) -> str:
    """Fake GPUs need a device file each: with a count alone Slurm calls the node invalid."""
    lines = [
        f"NodeName={node.name} Name=gpu Type={node.gpu_type} File=/dev/fakegpu[0-{node.num_gpus - 1}]"
        for node in nodes
        if node.num_gpus
    ]
    return "\n".join(lines) + "\n"
