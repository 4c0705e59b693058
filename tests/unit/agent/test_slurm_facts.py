"""What scontrol says of a cluster, recorded from Slurm 22.05 and 24.11, and the odd things sites write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.slurm.commands import Commands
from diamond.agent.schedulers.slurm.discovery import Discovery
from diamond.agent.schedulers.slurm.facts import (
    Associations,
    facts_of,
    has_accounting,
    parse_associations,
    parse_config,
    parse_fields,
    parse_gres,
    parse_nodes,
    parse_partitions,
    parse_walltime,
    use_of,
    why_never,
)
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts, Gpu, NodeUse

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = {"slurm-22.05": "22.05.8", "slurm-24.11": "24.11.5"}
GIB = 1024**3


def recorded(version: str) -> EndpointFacts:
    folder = GOLDEN / version
    config = parse_config((folder / "config.txt").read_text())
    nodes = parse_nodes((folder / "nodes.txt").read_text())
    partitions = parse_partitions((folder / "partitions.txt").read_text(), nodes, config)
    return facts_of(config=config, nodes=nodes, partitions=partitions, known=Associations())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_recorded_cluster(version: str) -> None:
    facts = recorded(version)
    assert (facts.scheduler, facts.scheduler_version, facts.nodes) == ("slurm", VERSIONS[version], 4)
    assert (facts.cpus_per_node, facts.mem_bytes_per_node) == (2, 32 * GIB)
    assert facts.gpus_per_node == (Gpu(model="a100", count=2), Gpu(model="v100", count=2))
    parts = {one.name: one for one in facts.partitions}
    assert list(parts) == [
        "debug",
        "gpu",
        "v100",
        "cpu",
        "long",
        "scavenger",
        "spot",
        "restricted",
        "admin",
        "maintenance",
    ]
    assert [one.name for one in facts.partitions if one.is_default] == ["debug"]
    assert [one.name for one in facts.partitions if not one.is_up] == ["maintenance"]
    assert [one.name for one in facts.partitions if one.is_hidden] == ["admin"]
    assert [one.name for one in facts.partitions if one.is_preemptible] == ["scavenger", "spot"]
    assert (parts["debug"].max_walltime_s, parts["debug"].default_walltime_s) == (120, None)
    assert (parts["long"].max_walltime_s, parts["long"].default_walltime_s) == (7 * 86400, 3600)
    assert (parts["cpu"].max_nodes, parts["gpu"].max_nodes, parts["gpu"].min_nodes) == (2, None, 1)
    assert (parts["restricted"].allow_groups, parts["gpu"].allow_groups) == (("privileged",), ())
    (a100,) = parts["gpu"].groups
    assert (a100.count, a100.nodes, a100.gpus, a100.features) == (
        2,
        "c[1-2]",
        (Gpu(model="a100", count=2),),
        ("a100", "nvlink", "rome"),
    )
    assert [(group.nodes, group.unusable) for group in parts["debug"].groups] == [("c[1-2]", 0), ("c3", 1), ("c4", 0)]
    assert decode(EndpointFacts, encode(facts)) == facts, "as it is kept on disk"


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_in_use(version: str) -> None:
    nodes = {node.name: node for node in parse_nodes((GOLDEN / version / "nodes.txt").read_text())}
    assert nodes["c1"].cpus_used == 1 and nodes["c1"].gpus_used == {"a100": 1}
    assert nodes["c3"].cpus_used == 2 and nodes["c3"].mem_bytes_used == 1000 * 1024**2
    assert not nodes["c3"].is_usable and nodes["c4"].is_usable


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("(null)", {}),
        ("", {}),
        ("gpu:2", {"gpu": 2}),
        ("gpu", {"gpu": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:a100:2(S:0-1)", {"a100": 2}),
        ("gpu:a100:4(S:0,1,3),gpu:v100:1(S:2)", {"a100": 4, "v100": 1}),
        ("gpu:1g.5gb:7(S:0),gpu:a100_3g.39gb:2", {"1g.5gb": 7, "a100_3g.39gb": 2}),
        ("gpu:tesla:2(IDX:0-1)", {"tesla": 2}),
        ("gpu:a100:0(IDX:N/A)", {"a100": 0}),
        ("nvme:1,craynetwork:4,bandwidth:lustre:no_consume:4G,gpu:no_consume:h100:8", {"h100": 8}),
        ("shard:a100:8,gpu:1K", {"gpu": 1024}),
        ("gres/gpu:a100=2", {"a100": 2}),
    ],
)
def test_generic_resources(text: str, gpus: dict[str, int]) -> None:
    assert parse_gres(text) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None),
        ("infinite", None),
        ("NONE", None),
        ("", None),
        ("soon", None),
        ("30", 1800),
        ("2:00", 120),
        ("1:00:00", 3600),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("365-00:00:00", 31536000),
    ],
)
def test_times(text: str, seconds: int | None) -> None:
    assert parse_walltime(text) == seconds


def test_fields_with_blanks_in_them() -> None:
    raw = parse_fields(
        "NodeName=n1 OS=Linux 6.1 #1 SMP x=y (2024) RealMemory=100 Reason=broken: a=b, see Ticket [root@2026] "
        "AvailableFeatures=a,b Gres=(null) CPUs/Task=1 ReqB:S:C:T=0:0:*:*"
    )
    assert raw["OS"] == "Linux 6.1 #1 SMP x=y (2024)" and raw["RealMemory"] == "100"
    assert raw["Reason"].startswith("broken: a=b") and raw["CPUs/Task"] == "1" and raw["ReqB:S:C:T"] == "0:0:*:*"


ODD_NODES = """\
NodeName=cloud1 CPUTot=64 RealMemory=1000 MemSpecLimit=200 State=IDLE+CLOUD+POWERED_DOWN Partitions=a,b Gres=gpu:h100:8
NodeName=sick1 CPUTot=64 RealMemory=1000 State=DOWN*+DRAIN Partitions=a Gres=(null)
NodeName=mute1 CPUTot=64 RealMemory=1000 State=IDLE* Partitions=a
NodeName=odd CPUTot=many RealMemory= State=MIXED-
garbage
NodeName=
"""


def test_odd_nodes() -> None:
    nodes = {node.name: node for node in parse_nodes(ODD_NODES)}
    assert {name: node.is_usable for name, node in nodes.items()} == {
        "cloud1": True,
        "sick1": False,
        "mute1": False,
        "odd": True,
    }
    assert nodes["cloud1"].mem_bytes == 800 * 1024**2 and nodes["odd"].cpus == 0


USED_NODES = """\
NodeName=g1 CPUTot=64 RealMemory=1000 State=IDLE Partitions=gpu,all Gres=gpu:h100:4 GresUsed=gpu:h100:0(IDX:N/A)
NodeName=g2 CPUTot=64 CPUAlloc=8 AllocMem=9 State=MIXED Partitions=gpu,all Gres=gpu:h100:4 GresUsed=gpu:h100:3(IDX:0-2)
NodeName=g3 CPUTot=64 State=IDLE+DRAIN Partitions=gpu,all Gres=gpu:h100:4
NodeName=g4 CPUTot=64 State=IDLE+RESERVED Partitions=gpu,all Gres=gpu:h100:4
NodeName=g5 CPUTot=64 State=IDLE+PLANNED Partitions=all Gres=gpu:a100:2,gpu:h100:2
NodeName=c1 CPUTot=64 State=IDLE+COMPLETING Partitions=all,hidden
NodeName=c2 CPUTot=64 State=IDLE Partitions=all,hidden
NodeName=x1 CPUTot=64 State=IDLE Partitions=hidden
NodeName=x2 CPUTot=64 State=IDLE
"""


def test_nodes_are_counted_by_kind_of_gpu_and_by_how_they_stand() -> None:
    assert use_of(parse_nodes(USED_NODES), {"gpu", "all"}) == (
        NodeUse(partitions=("all",), nodes=2, free=1),
        NodeUse(gpus=("a100", "h100"), partitions=("all",), nodes=1, free=1, gpus_total=4, gpus_free=4),
        NodeUse(gpus=("h100",), partitions=("all", "gpu"), nodes=4, free=1, down=1, gpus_total=16, gpus_free=5),
    )
    assert use_of(parse_nodes(ODD_NODES), set()) == ()


def test_odd_partitions() -> None:
    text = (
        "PartitionName=a RootOnly=NO MaxCPUsPerNode=48 MaxMemPerNode=500 MaxTime=UNLIMITED State=DRAIN "
        "AllowAccounts=x,y\n"
        "PartitionName=b RootOnly=YES State=UP\n"
        "PartitionName=c State=UP MaxNodes=0 MinNodes=4 AllowQos=high,low DefaultTime=NONE\nnonsense\n"
    )
    a, c = parse_partitions(text, parse_nodes(ODD_NODES), {})
    assert (a.name, a.is_up, a.allow_accounts, a.max_walltime_s) == ("a", False, ("x", "y"), None)
    assert {group.cpus for group in a.groups} == {48} and {group.mem_bytes for group in a.groups} == {500 * 1024**2}
    assert (c.min_nodes, c.allow_qos, c.groups) == (4, ("high", "low"), ())
    assert facts_of(config={}, nodes=[], partitions=(), known=Associations()).cpus_per_node == 0


def test_accounting() -> None:
    known = parse_associations("proj1|high,normal\nproj2|normal\nproj1|\n|x\n\n")
    assert (known.accounts, known.qos) == (("proj1", "proj2"), ("high", "normal"))
    assert has_accounting({"AccountingStorageType": "accounting_storage/slurmdbd"})
    assert not has_accounting({"AccountingStorageType": "(null)"}) and not has_accounting({})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, ""),
        ({"cpus": 3}, "3 CPUs per node are asked for; the largest node in partition debug has 2"),
        (
            {"mem_bytes": 33 * GIB},
            "33 GiB of memory per node are asked for; the largest node in partition debug has 32",
        ),
        ({"mem_bytes": 33 * GIB, "partition": "gpu"}, "has 8 GiB"),
        ({"gpus": 3}, "3 GPUs per node are asked for; no node in partition debug has more than 2"),
        ({"gpus": 1, "gpu_type": "v100", "partition": "gpu"}, "1 v100 GPUs per node are asked for; no node"),
        ({"gpus": 1, "gpu_type": "v100", "partition": "gpu,v100"}, ""),
        ({"num_nodes": 5}, "5 nodes are asked for; in partition debug there are 4"),
        ({"num_nodes": 3, "partition": "gpu"}, "3 nodes are asked for; in partition gpu there are 2"),
        ({"cpus": 99, "partition": "unheard-of"}, ""),
        ({"cpus": 99, "partition": "gpu,unheard-of"}, ""),
    ],
)
def test_what_can_never_run(asked: dict[str, Any], words: str) -> None:
    job = Submission(name="j", run_dir=Path("/j"), script=Path("/j/job.sh"), **asked)
    found = why_never(job, recorded("slurm-24.11"))
    assert words in found if words else not found


def test_a_known_site_says_which_options_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "login1.ls6.tacc.utexas.edu")
    known = Discovery(Commands(), tmp_path / "facts.json", run_root=tmp_path)
    assert "--mem" in known.found.refuses
    monkeypatch.setattr("socket.gethostname", lambda: "somewhere-else")
    assert Discovery(Commands(), tmp_path / "facts.json", run_root=tmp_path).found.refuses == ()
