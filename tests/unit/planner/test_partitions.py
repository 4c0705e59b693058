"""Which partition a task goes to, and what is said when none will do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, Partition
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Choice, Obstacle, choose

GIB = 1024**3
CPU_NODES = NodeGroup(count=4, cpus=64, mem_bytes=256 * GIB)
A100_NODES = NodeGroup(count=2, cpus=32, mem_bytes=512 * GIB, gpus=(Gpu(model="a100", count=4),), features=("nvlink",))
V100_NODES = NodeGroup(count=1, cpus=16, mem_bytes=128 * GIB, gpus=(Gpu(model="v100", count=2),))
PARTITIONS = (
    Partition(name="debug", is_default=True, max_walltime_s=120, default_walltime_s=60, groups=(CPU_NODES, A100_NODES)),
    Partition(name="cpu", max_walltime_s=86400, groups=(CPU_NODES,)),
    Partition(name="gpu", max_walltime_s=86400, max_nodes=2, groups=(A100_NODES,)),
    Partition(name="v100", max_walltime_s=7200, groups=(V100_NODES,)),
    Partition(name="spot", max_walltime_s=None, is_preemptible=True, groups=(A100_NODES, V100_NODES)),
    Partition(name="staff", allow_accounts=("ops",), groups=(A100_NODES,)),
    Partition(name="secret", is_hidden=True, groups=(CPU_NODES,)),
    Partition(name="shut", is_up=False, groups=(CPU_NODES,)),
)
FACTS = EndpointFacts(scheduler="slurm", nodes=7, cpus_per_node=64, partitions=PARTITIONS)


def chosen(**fields: Any) -> Choice:
    found = choose(TaskSpec.parse({"run": "x", **fields}), FACTS)
    assert isinstance(found, Choice), found
    return found


def refused(facts: EndpointFacts = FACTS, **fields: Any) -> Obstacle:
    found = choose(TaskSpec.parse({"run": "x", **fields}), facts)
    assert isinstance(found, Obstacle), found
    return found


@pytest.mark.parametrize(
    ("fields", "partition"),
    [
        ({"max_duration": "1h"}, "cpu"),  # the default one is too short and has GPUs
        ({"resources": {"accelerators": "A100:4"}}, "gpu"),  # not the two minutes of the default one
        ({"resources": {"accelerators": "A100:4"}, "max_duration": "1m"}, "debug"),
        ({"resources": {"accelerators": "A100:4"}, "max_duration": "1h"}, "gpu"),
        ({"resources": {"accelerators": "V100:1"}, "max_duration": "1h"}, "v100"),
        ({"resources": {"accelerators": "gpu:2"}, "max_duration": "2d", "slurm": {"partition": "v100"}}, "v100"),
        ({"slurm": {"partition": "secret"}}, "secret"),
        ({"slurm": {"partition": "staff", "account": "ops"}}, "staff"),
        ({"slurm": {"partition": "cpu,gpu"}}, "cpu,gpu"),
        ({"resources": {"accelerators": "a100:1"}, "slurm": {"partition": "cpu,gpu,spot"}}, "gpu,spot"),
        ({"slurm": {"constraint": "nvlink", "partition": "gpu"}}, "gpu"),
    ],
)
def test_a_partition_that_has_it(fields: dict[str, Any], partition: str) -> None:
    assert chosen(**fields).partition == partition


def test_the_clusters_own_name_of_the_gpu_is_used() -> None:
    assert chosen(resources={"accelerators": "A100:1"}).gpu_type == "a100"
    assert chosen(resources={"accelerators": "gpu:1"}).gpu_type == ""


def test_walltime_of_one_job() -> None:
    assert chosen(slurm={"partition": "debug"}).walltime_s == 60  # nothing said: the site's default
    assert chosen(slurm={"partition": "debug"}, max_duration="1h").walltime_s == 120
    assert chosen(slurm={"partition": "cpu", "time": "2h"}, max_duration="5h").walltime_s == 7200
    assert chosen(slurm={"partition": "spot"}, resources={"accelerators": "v100:1"}).walltime_s is None
    assert chosen(slurm={"partition": "cpu,v100"}, max_duration="3d").walltime_s == 7200  # either may be taken


def test_the_explanation_has_the_time_a_job_gets() -> None:
    short = chosen(resources={"accelerators": "A100:4"}, max_duration="1m")
    assert "jobs up to 2m 00s, of which this one gets 1m 00s;" in short.why
    assert "gpu has what it needs, jobs up to 1d 00h, of which this one gets 1h 00m" in (
        chosen(resources={"accelerators": "A100:4"}, max_duration="1h").why
    )


def test_too_long_for_every_partition() -> None:
    facts = replace(FACTS, partitions=tuple(one for one in PARTITIONS if one.name in ("debug", "gpu", "shut")))
    obstacle = refused(facts, slurm={"time": "30d"})
    assert obstacle.field == "slurm.time"
    assert obstacle.text.startswith("no open partition allows so long a job (debug 2m 00s, gpu 1d 00h); a longer")


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"resources": {"accelerators": "H100:8"}}, "resources.accelerators", "a100:4 in debug, gpu"),
        ({"resources": {"accelerators": "A100:8"}}, "resources.accelerators", "no partition has A100:8 a node"),
        ({"slurm": {"partition": "gqu"}}, "slurm.partition", "no partition gqu; there are debug, cpu, gpu"),
        ({"slurm": {"partition": "gpu", "time": "2d"}}, "slurm.time", "allows 1d 00h a job"),
        ({"slurm": {"partition": "gpu"}, "num_nodes": 3}, "num_nodes", "allows 2 nodes"),
        ({"slurm": {"partition": "v100"}, "num_nodes": 2}, "num_nodes", "has 1 such node"),
        ({"slurm": {"partition": "shut"}}, "slurm.partition", "closed"),
        ({"slurm": {"partition": "gpu", "constraint": "tpu"}}, "slurm.constraint", "feature tpu"),
        ({"slurm": {"partition": "gpu"}, "resources": {"memory": "900"}}, "resources.memory", "900 GiB"),
    ],
)
def test_what_is_in_the_way_is_named_with_its_field(fields: dict[str, Any], field: str, says: str) -> None:
    obstacle = refused(**fields)
    assert obstacle.field == field
    assert says in obstacle.text


def test_slurm_options_need_slurm_and_accounts_must_exist() -> None:
    local = EndpointFacts(scheduler="local")
    assert refused(local, slurm={"qos": "high"}).field == "slurm.qos"
    with_accounts = EndpointFacts(scheduler="slurm", accounts=("bio", "phys"), partitions=PARTITIONS)
    obstacle = refused(with_accounts, slurm={"account": "chem"})
    assert (obstacle.field, "bio, phys" in obstacle.text) == ("slurm.account", True)
