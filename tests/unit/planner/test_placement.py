"""Where tasks go: feasibility first, then online, free and the shortest queue; always with reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diamond.core.endpoints import EndpointFacts, EndpointUsage, Gpu
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Obstacle, is_gpu_model
from diamond.planner.placement import Candidate, place


def candidate(name: str, *, online: bool = True, queued: int = 0, used: int = 0, **facts: Any) -> Candidate:
    return Candidate(
        name=name,
        online=online,
        facts=EndpointFacts(scheduler="local", cpus_per_node=facts.pop("cpus", 8), **facts),
        usage=EndpointUsage(jobs_queued=queued, cpus_used=used),
    )


def spec(**fields: Any) -> TaskSpec:
    return TaskSpec.parse({"run": "x", **fields})


def test_online_beats_offline_beats_busy_beats_name() -> None:
    assert place(spec(), [candidate("a", online=False), candidate("b")]).endpoint == "b"
    assert place(spec(), [candidate("a", used=8), candidate("b")]).endpoint == "b"
    assert place(spec(), [candidate("a", queued=5, used=8), candidate("b", queued=2, used=8)]).endpoint == "b"
    assert place(spec(), [candidate("b"), candidate("a")]).endpoint == "a"


def test_gpu_type_decides_and_others_say_why_not() -> None:
    gpu = candidate("gpu", gpus_per_node=(Gpu(model="NVIDIA H100 80GB HBM3", count=4),))
    found = place(spec(resources={"accelerators": "H100:2"}), [candidate("cpu"), gpu])
    assert found.endpoint == "gpu"
    assert "no GPUs" in found.obstacles["cpu"].text
    none = place(spec(resources={"accelerators": "A100:1"}), [gpu])
    assert none.endpoint is None
    assert none.obstacles["gpu"].field == "resources.accelerators"
    assert "H100" in none.obstacles["gpu"].text


def test_naming_an_endpoint_is_obeyed() -> None:
    found = place(spec(resources={"infra": "b"}), [candidate("a"), candidate("b", online=False)])
    assert found.endpoint == "b"
    assert any("offline" in reason for reason in found.why)


def test_what_is_borne_out_beats_all_that_is_claimed_but_being_there() -> None:
    boast, steady = replace(candidate("a", cpus=512), doubt=1), replace(candidate("b", used=8, queued=9), rank=4)
    assert place(spec(), [boast, steady]).endpoint == "b"
    assert place(spec(), [boast, replace(steady, online=False)]).endpoint == "a"
    assert place(spec(resources={"cpus": 64}), [boast, steady]).endpoint == "a", "where else it would not fit"


def test_what_stands_in_the_way_is_said_before_its_agent_has_spoken() -> None:
    shut = Candidate(name="new", online=False, facts=None, obstacle=Obstacle(field="resources.infra", text="no"))
    found = place(spec(), [shut])
    assert (found.endpoint, found.undecided, found.obstacles["new"].text) == (None, (), "no")


def test_an_agent_that_never_spoke_decides_nothing() -> None:
    found = place(spec(), [Candidate(name="new", online=False, facts=None)])
    assert (found.endpoint, found.undecided) == (None, ("new",))
    assert place(spec(), []).endpoint is None


@pytest.mark.parametrize(
    ("model", "wanted", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", True),
        ("NVIDIA A100-SXM4-40GB", "A100-80GB", False),
        ("NVIDIA A10", "A100", False),
        ("a100", "A100", True),
    ],
)
def test_gpu_names(model: str, wanted: str, same: bool) -> None:
    assert is_gpu_model(model, wanted) is same


def test_longer_than_the_endpoint_allows_is_a_chain() -> None:
    found = place(spec(max_duration="2h"), [candidate("a", max_walltime_s=3600)])
    assert found.endpoint == "a"
    assert found.choice.walltime_s == 3600
    refused = place(spec(slurm={"time": "2h"}), [candidate("a", max_walltime_s=3600)])
    assert refused.obstacles["a"].field == "slurm.time"
