"""Sizes of clusters whose partitions overlap."""

from __future__ import annotations

from diamond.core.clusters import Amounts, of_endpoint, of_partition
from diamond.core.endpoints import EndpointFacts, Gpu, NodeGroup, Partition

A100 = (Gpu(model="a100", count=4),)


def group(nodes: str, count: int, *, gpus: tuple[Gpu, ...] = A100, unusable: int = 0, cpus: int = 64) -> NodeGroup:
    return NodeGroup(count=count, cpus=cpus, gpus=gpus, unusable=unusable, nodes=nodes)


def test_one_machine() -> None:
    facts = EndpointFacts(scheduler="local", nodes=1, cpus_per_node=8, gpus_per_node=(Gpu(model="H100", count=2),))
    assert of_endpoint(facts) == Amounts(nodes=1, usable_nodes=1, cpus=8, gpus={"H100": 2}, usable_gpus={"H100": 2})


def test_nodes_of_several_partitions_count_once() -> None:
    partitions = (
        Partition(name="all", groups=(group("c[1-4]", 4, unusable=1), group("d1", 1, gpus=(), cpus=128))),
        Partition(name="gpu", groups=(group("c[1-2]", 2),)),
        Partition(name="big", groups=(group("c[3-6]", 4),)),
        Partition(name="empty"),
    )
    found = of_endpoint(EndpointFacts(scheduler="slurm", nodes=99, partitions=partitions))
    assert (found.nodes, found.usable_nodes, found.cpus) == (7, 6, 6 * 64 + 128)
    assert (found.gpus, found.usable_gpus) == ({"a100": 24}, {"a100": 20})
    assert of_partition(partitions[1]).gpus == {"a100": 8}
    assert of_partition(partitions[3]) == Amounts()


def test_models_apart_and_padded_names() -> None:
    groups = (group("gpu-[001-003]", 3), group("gpu-[004,006].x", 2, gpus=(Gpu(model="h200", count=8),)))
    assert of_partition(Partition(name="p", groups=groups)).gpus == {"a100": 12, "h200": 16}


def test_strange_lists_do_no_harm() -> None:
    for nodes in ("", "???", "r[1-2]c[1-4]", "c[1-99999999999]", "c[x]", "[", "c[3-1]"):
        found = of_partition(Partition(name="p", groups=(group(nodes, 3),)))
        assert (found.nodes, found.gpus) == (3, {"a100": 12}), nodes
