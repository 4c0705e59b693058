"""How fast agents may send, by buckets with a clock of their own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from diamond.core.errors import RateLimited, StorageFull
from diamond.server.services.allowances import Caps
from diamond.server.services.ingestion import BURST_S, RESERVE_FRACTION, Ingestion
from testing.context import Clock

CAPS = Caps(job_bytes_per_s=100, endpoint_bytes_per_s=1000, calls_per_s=5, reserve_bytes=0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ingestion(tmp_path: Path, clock: Clock) -> Ingestion:
    return Ingestion(CAPS, tmp_path, clock)


def test_who_calls_too_often_is_told_when_to_call_again(ingestion: Ingestion, clock: Clock) -> None:
    for _ in range(int(5 * BURST_S)):
        ingestion.call("end_a")
    with pytest.raises(RateLimited) as caught:
        ingestion.call("end_a")
    assert caught.value.retry_after_s is not None
    ingestion.call("end_b")
    clock.advance(caught.value.retry_after_s + 0.2)
    ingestion.call("end_a")


def test_an_endpoint_keeps_to_its_rate_over_time(ingestion: Ingestion, clock: Clock) -> None:
    taken = 0
    for _ in range(1000):
        try:
            ingestion.report("end_a", 500)
            taken += 500
        except RateLimited:
            pass
        clock.advance(0.1)
    assert 100_000 <= taken <= 100_000 + 1000 * BURST_S + 500


def test_a_report_of_any_size_is_taken_when_its_time_has_come(ingestion: Ingestion, clock: Clock) -> None:
    ingestion.report("end_a", 10**6)
    with pytest.raises(RateLimited) as caught:
        ingestion.report("end_a", 1)
    assert caught.value.retry_after_s == pytest.approx((10**6 - 1000 * BURST_S) / 1000)
    clock.advance(1001)
    ingestion.report("end_a", 1)


def test_one_job_does_not_use_up_what_others_may_send(ingestion: Ingestion, clock: Clock) -> None:
    assert ingestion.takes("job_a", 10_000)
    assert not ingestion.takes("job_a", 1)
    assert ingestion.takes("job_b", 1)
    clock.advance(100)
    assert ingestion.takes("job_a", 1)


def test_introductions_are_few(ingestion: Ingestion, clock: Clock) -> None:
    def introduced() -> int:
        for number in range(100):
            try:
                ingestion.hello("end_a")
            except RateLimited:
                return number
        return 100

    assert introduced() == 30
    clock.advance(60)
    assert 10 <= introduced() <= 13


def test_many_keys_are_forgotten_in_time(ingestion: Ingestion, clock: Clock) -> None:
    for number in range(30_000):
        ingestion.call(f"end_{number}")
        clock.advance(0.1)
    assert len(ingestion._left) <= 20_000


def test_below_the_reserve_nothing_large_is_taken(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_frsize=1, f_blocks=1_000_000, f_bavail=60_000)
    monkeypatch.setattr(os, "statvfs", lambda _root: disk)
    ingestion = Ingestion(Caps(reserve_bytes=10**9), tmp_path, clock)
    reserve = disk.f_blocks // RESERVE_FRACTION
    ingestion.report("end_a", 60_000 - reserve)
    with pytest.raises(StorageFull) as caught:
        ingestion.report("end_a", 60_001 - reserve)
    assert caught.value.transient and caught.value.retry_after_s
    ingestion.report("end_a", 0)  # states alone are small
    disk.f_bavail = 40_000
    clock.advance(2)
    with pytest.raises(StorageFull):
        ingestion.check_reserve()
    ingestion.call("end_a")
