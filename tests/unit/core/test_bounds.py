"""Everything an agent may send is bounded, far above what real centres need."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field

import pytest

from diamond.core import bounds
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts, EndpointUsage, FileSystem, Gpu, NodeGroup, Partition
from diamond.core.errors import TooLarge
from diamond.core.wire import Hello, Report


@pytest.mark.parametrize("message", [Hello, Report])
def test_every_list_and_mapping_of_a_message_says_how_many_it_may_hold(message: type) -> None:
    assert bounds.unbounded(message) == []


def test_one_that_does_not_is_found() -> None:
    assert bounds.unbounded(_Outer) == ["_Inner.many", "_Outer.plain", "_Outer.optional"]


@dataclass(frozen=True, kw_only=True)
class _Inner:
    many: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Outer:
    bounded: tuple[_Inner, ...] = field(default=(), metadata=bounds.items(3))
    plain: tuple[str, ...] = ()
    optional: tuple[int, ...] | None = None
    text: str = ""


def large_centre() -> EndpointFacts:
    """A hundred partitions over ten thousand nodes of some twenty kinds, and five hundred QOS."""
    kinds = tuple(
        NodeGroup(
            count=500,
            cpus=128,
            mem_bytes=2**40,
            gpus=(Gpu(model=f"NVIDIA GPU-{kind}", count=8, mem_bytes=2**37),),
            features=tuple(f"feature{n}" for n in range(5)),
            nodes=f"node[{kind * 500}-{kind * 500 + 499}]",
        )
        for kind in range(20)
    )
    return EndpointFacts(
        scheduler="slurm",
        nodes=10_000,
        cpus_per_node=128,
        partitions=tuple(
            Partition(
                name=f"partition{n}",
                max_walltime_s=7 * 86_400,
                max_nodes=10_000,
                allow_accounts=tuple(f"account{k}" for k in range(20)),
                groups=kinds if n < 5 else kinds[n % 20 : n % 20 + 3],
            )
            for n in range(100)
        ),
        accounts=tuple(f"account{n}" for n in range(200)),
        qos=tuple(f"qos{n}" for n in range(500)),
        filesystems=tuple(FileSystem(path=f"/fs{n}", total_bytes=2**50) for n in range(20)),
        policy={f"rule{n}": "x" * 500 for n in range(30)},
        allowed_users=tuple(f"user{n}" for n in range(500)),
    )


def test_a_large_centre_fits() -> None:
    facts = large_centre()
    fitted, cut = bounds.fitted(facts)
    assert cut == ()
    assert fitted is facts


def test_what_is_too_much_is_cut_with_a_note() -> None:
    partitions = tuple(Partition(name=f"p{n}") for n in range(10_000))
    facts = EndpointFacts(scheduler="x" * 5000, partitions=partitions, policy={"k" * 5000: "v" * 9000})
    fitted, cut = bounds.fitted(facts)
    assert len(fitted.partitions) == 1000
    assert len(fitted.scheduler) == 255
    assert {len(key): len(value) for key, value in fitted.policy.items()} == {4000: 4000}
    assert "partitions: of 10000 entries the first 1000 were taken" in cut
    assert "scheduler: a text of 5000 characters was cut to 255" in cut
    assert bounds.fitted(fitted) == (fitted, ())


def test_lists_within_lists_are_bounded_together() -> None:
    group = NodeGroup(count=1, cpus=1, features=tuple(f"f{n}" for n in range(100)))
    partitions = tuple(Partition(name=f"p{n}", groups=(group,) * 200) for n in range(50))
    fitted, cut = bounds.fitted(EndpointFacts(scheduler="slurm", partitions=partitions))
    entries = sum(1 + len(p.groups) + sum(len(g.features) for g in p.groups) for p in fitted.partitions)
    assert entries <= bounds.MAX_ENTRIES
    assert 1 <= len(cut) <= bounds.MAX_NOTES


@pytest.mark.parametrize("number", [-1, -(2**70), 2**62, 10**300])
def test_numbers_that_cannot_be_are_brought_back_into_range(number: int) -> None:
    group = NodeGroup(count=number, cpus=number, mem_bytes=number, gpus=(Gpu(model="A", count=number),))
    part = Partition(name="p", max_walltime_s=number, min_nodes=number, max_nodes=number, groups=(group,))
    facts, cut = bounds.fitted(EndpointFacts(scheduler="s", nodes=number, cpus_per_node=number, partitions=(part,)))
    assert cut
    for value in numbers_in(facts):
        assert 0 <= value <= 2**53
    assert facts.nodes * facts.cpus_per_node < 2**63
    assert facts.partitions[0].max_walltime_s is not None
    assert facts.partitions[0].max_walltime_s < 2**31


def test_no_number_at_all_counts_as_nothing() -> None:
    usage, cut = bounds.fitted(EndpointUsage(cpu_percent=math.nan, at=math.inf, gpus_used={"A": -5}))
    assert (usage.cpu_percent, usage.at, usage.gpus_used) == (0.0, 2.0**53, {"A": 0})
    assert len(cut) == 3


def test_what_must_not_be_cut_is_refused_by_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Owed:
        jobs: tuple[str, ...] = field(default=(), metadata=bounds.items(2, refuses=True))

    with pytest.raises(TooLarge) as caught:
        bounds.fitted(Owed(jobs=("a", "b", "c")))
    assert caught.value.field == "jobs"


def test_fitted_facts_survive_the_wire() -> None:
    facts, _ = bounds.fitted(large_centre())
    assert decode(EndpointFacts, encode(facts)) == facts


def numbers_in(value: object) -> typing.Iterator[float]:
    if dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from numbers_in(getattr(value, each.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from numbers_in(item)
    elif type(value) in (int, float):
        yield value
