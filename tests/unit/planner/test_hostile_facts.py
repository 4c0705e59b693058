"""Endpoints that say absurd things of themselves: placing a task stays quick, and others' endpoints stay usable."""

from __future__ import annotations

import time

import pytest

from diamond.core import bounds
from diamond.core.codec import decode
from diamond.core.endpoints import EndpointFacts, EndpointUsage, Gpu, NodeGroup, Partition
from diamond.core.tasks import TaskSpec
from diamond.planner.placement import MOST_LOOKED_AT, Candidate, place

SPECS = (
    {"run": "true"},
    {"run": "true", "resources": {"accelerators": "H100:8", "cpus": 4, "memory": 10}},
    {"run": "true", "num_nodes": 3, "resources": {"accelerators": "H100:1"}, "max_duration": "2d"},
    {"run": "true", "slurm": {"constraint": "f1&f2"}},
)


def hostile(shift: int = 0) -> EndpointFacts:
    """As much as an agent may list; every model of GPU has a name of its own."""
    groups = tuple(
        NodeGroup(count=10**9, cpus=10**9, gpus=(Gpu(model=f"NVIDIA {shift}-{n}-H200", count=10**9),), features=("f1",))
        for n in range(200)
    )
    partitions = tuple(Partition(name=f"p{n}", max_walltime_s=10**18, groups=groups) for n in range(10_000))
    return bounds.fitted(EndpointFacts(scheduler="slurm", nodes=10**18, cpus_per_node=10**18, partitions=partitions))[0]


def honest() -> EndpointFacts:
    group = NodeGroup(count=8, cpus=64, mem_bytes=2**40, gpus=(Gpu(model="NVIDIA H100 80GB HBM3", count=8),))
    part = Partition(name="gpu", groups=(group,))
    return EndpointFacts(scheduler="slurm", nodes=8, cpus_per_node=64, gpus_per_node=group.gpus, partitions=(part,))


@pytest.mark.parametrize("spec", SPECS[1:3])
def test_fifty_endpoints_that_list_all_they_may_do_not_hold_up_a_task(spec: dict[str, object]) -> None:
    task = decode(TaskSpec, spec, strict=True)
    facts = hostile()
    usage = EndpointUsage()
    candidates = [Candidate(name=f"bad{n:02}", online=True, facts=facts, usage=usage) for n in range(50)]
    candidates.insert(25, Candidate(name="good", online=True, facts=honest(), usage=usage))
    began = time.process_time()
    found = place(task, candidates)
    assert time.process_time() - began < 5, "a fraction of a second, unless the machine is very busy"
    assert found.endpoint == "good"
    left_out = [text for text in found.obstacles.values() if "too many partitions to look through" in text.text]
    assert len(left_out) >= 50 - MOST_LOOKED_AT // 20_000
    assert all(len(obstacle.text) < 10_000 for obstacle in found.obstacles.values())


def test_one_that_is_named_is_looked_at_whatever_others_say() -> None:
    task = decode(TaskSpec, {"run": "true", "resources": {"infra": "bad40"}}, strict=True)
    facts = hostile()
    found = place(task, [Candidate(name=f"bad{n:02}", online=True, facts=facts) for n in range(50)])
    assert found.endpoint == "bad40"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("number", [0, -1, 2**63, 10**300])
def test_absurd_numbers_have_an_answer(spec: dict[str, object], number: int) -> None:
    task = decode(TaskSpec, spec, strict=True)
    group = NodeGroup(count=number, cpus=number, mem_bytes=number, gpus=(Gpu(model="H100", count=number),))
    part = Partition(name="p", max_walltime_s=number, min_nodes=number, max_nodes=number, groups=(group,))
    facts = EndpointFacts(
        scheduler="slurm", nodes=number, cpus_per_node=number, mem_bytes_per_node=number, partitions=(part,)
    )
    usage = EndpointUsage(cpus_used=number, jobs_queued=number, gpus_used={"H100": number})
    fitted, fitted_usage = bounds.fitted(facts)[0], bounds.fitted(usage)[0]
    found = place(task, [Candidate(name="odd", online=True, facts=fitted, usage=fitted_usage)])
    assert (found.endpoint is None) == ("odd" in found.obstacles)


def test_the_answer_is_the_same_whatever_the_order() -> None:
    task = decode(TaskSpec, SPECS[1], strict=True)
    facts = hostile()
    candidates = [Candidate(name=f"bad{n:02}", online=True, facts=facts) for n in range(12)]
    assert place(task, candidates).obstacles == place(task, candidates[::-1]).obstacles
