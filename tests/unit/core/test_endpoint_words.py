"""An endpoint in words: what is not known is left out, and free nodes are those of partitions one may use."""

from __future__ import annotations

from diamond.core.endpoint_words import FreeNodes, about, free_nodes
from diamond.core.endpoints import Endpoint, EndpointFacts, EndpointUsage, Gpu, NodeUse, Partition


def endpoint(facts: EndpointFacts | None = None, *nodes: NodeUse) -> Endpoint:
    return Endpoint(id="ep_1", name="here", facts=facts, usage=EndpointUsage(nodes=nodes) if nodes else None)


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert about(endpoint()) == [] and free_nodes(endpoint()) == []
    facts = EndpointFacts(
        scheduler="local", takes_secrets=True, gpus_per_node=(Gpu(model="T4", count=2, mem_bytes=2**34),)
    )
    assert about(endpoint(facts)) == [
        ("Scheduler", "Local"),
        ("Size", "1 node with 1 core"),
        ("GPUs", "2 × T4 16 GiB"),
        ("Containers", "none found"),
    ]
    assert free_nodes(endpoint(facts)) == []


def test_free_nodes_are_summed_by_kind_of_gpu() -> None:
    facts = EndpointFacts(scheduler="slurm", partitions=(Partition(name="a"), Partition(name="b")))
    found = free_nodes(
        endpoint(
            facts,
            NodeUse(partitions=("a",), nodes=1),
            NodeUse(gpus=("h100",), partitions=("a", "secret"), nodes=3, free=1, down=1, gpus_total=12, gpus_free=5),
            NodeUse(gpus=("h100",), partitions=("b",), nodes=2, free=2, gpus_total=8, gpus_free=8),
            NodeUse(gpus=("a100", "h100"), partitions=("b",), nodes=1, gpus_total=1),
            NodeUse(gpus=("h200",), partitions=("secret",), nodes=9, free=9),
        )
    )
    assert found == [
        FreeNodes("a100 and h100", 1, 0, 0, 1, 0),
        FreeNodes("h100", 5, 3, 1, 20, 13),
        FreeNodes("", 1, 0, 0, 0, 0),
    ]
    assert [one.words for one in found] == [
        "0 of 1 node free; 0 of 1 GPU free",
        "3 of 5 nodes free, 1 down; 13 of 20 GPUs free",
        "0 of 1 node free",
    ]
    assert [one.busy for one in found] == [1, 1, 1]
