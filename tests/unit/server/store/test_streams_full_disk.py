"""Streams on a disk that has no room left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from diamond.core.errors import StorageFull
from diamond.server.store.streams import StreamStore
from testing.disks import fill_up_to

JOB = "job_01kbx3v9qz8m2c4d6"
OTHER = "job_01kbx3v9qz8m2c4d7"
TRUTH = random.Random(7).randbytes(40_000)


@pytest.mark.root
def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    truth = TRUTH * 20
    store = StreamStore(small_disk / "streams", segment_bytes=100_000, cap_bytes=10**9)
    assert store.append(JOB, "log", 0, truth[:150_001]) == 150_001
    filler = fill_up_to(small_disk, leave=128 * 1024)
    for _ in range(3):
        with pytest.raises(StorageFull):
            store.append(JOB, "log", 150_001, truth[150_001:500_000])
        assert store.size(JOB, "log") == 150_001
    with pytest.raises(StorageFull):
        store.append(OTHER, "metrics", 0, truth[:500_000])
    assert store.size(OTHER, "metrics") == 0
    assert store.append(JOB, "log", 150_001, truth[150_001:200_000]) == 200_000, "what fits is still stored"
    filler.unlink()
    assert store.append(JOB, "log", 150_001, truth[150_001:500_000]) == 500_000
    assert store.read(JOB, "log", 0, 10**6).data == truth[:500_000]


@pytest.mark.root
def test_deleting_makes_room_on_a_full_disk(small_disk: Path) -> None:
    store = StreamStore(small_disk / "streams", segment_bytes=100_000, cap_bytes=10**9)
    store.append(JOB, "log", 0, b"x" * 300_000)
    fill_up_to(small_disk, leave=0)
    with pytest.raises(StorageFull):
        store.append(OTHER, "log", 0, b"y" * 200_000)
    store.delete(JOB)
    assert store.append(OTHER, "log", 0, b"y" * 200_000) == 200_000
