from __future__ import annotations

import errno
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diamond.core.errors import StorageFull
from diamond.server.store import series
from diamond.server.store.series import Ingested, SeriesStore
from testing.disks import fill_up_to
from testing.dying import in_child, killed_at
from testing.stores import JOB, Stores, losses

# numpy brings threads of its own; the children here use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.mark.parametrize("damage", ["short records", "no records", "torn state", "no state"])
def test_what_a_power_failure_damaged_is_rebuilt_from_the_stream(stores: Stores, damage: str) -> None:
    stores.log({"t": 1.0, "sys/cpu": 5.0}, stream="util")
    stores.log(*losses(50))
    (records,) = stores.folder().glob("metrics-*.f64")
    match damage:
        case "short records":
            os.truncate(records, 24 * 20 + 7)
        case "no records":
            records.unlink()
        case "torn state":
            os.truncate(stores.folder() / "state.json", 30)
        case "no state":
            (stores.folder() / "state.json").unlink()
    if "records" in damage:
        assert len(stores.values("loss")) == 50, "looking at it is enough"
        os.truncate(records, 24)
    stores.log(*losses(3, start=50))
    assert stores.values("loss") == [(step, step / 8) for step in range(53)]
    stores.series.ingest(JOB, "util")
    assert stores.values("sys/cpu") == [(0, 5)]


def test_killed_at_every_call_no_point_is_lost_or_doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_BATCH_BYTES", 200)
    lines = [{"step": step, "t": step, "loss": step, "acc" if step % 2 else "lr": -step} for step in range(16)]
    for nth in itertools.count(1):
        stores = Stores(tmp_path / str(nth))
        stores.log(*lines[:3], "broken")
        stores.write(*lines[3:])
        killed = killed_at(nth, lambda stores=stores: stores.series.ingest(JOB, "metrics"))
        seen = stores.values("loss")
        assert seen == [(step, step) for step in range(len(seen))], "a reader never sees what does not count"
        assert len(seen) >= 3
        stores.series.ingest(JOB, "metrics")
        assert stores.values("loss") == [(step, step) for step in range(16)]
        assert stores.values("acc") == [(step, -step) for step in range(1, 16, 2)]
        assert stores.values("lr") == [(step, -step) for step in range(0, 16, 2)]
        assert {info.key: info.count for info in stores.series.keys(JOB)} == {"loss": 16, "acc": 8, "lr": 8}
        assert stores.series.dropped(JOB) == {"metrics": 1}
        assert {path.stat().st_size for path in stores.folder().glob("*.f64")} == {16 * 24, 8 * 24}
        if not killed:
            break
    assert nth > 20


def test_killed_at_every_call_a_delete_can_be_repeated(tmp_path: Path) -> None:
    for nth in itertools.count(1):
        stores = Stores(tmp_path / str(nth))
        stores.log(*losses(3), {"step": 3, "lr": 1})
        killed = killed_at(nth, lambda stores=stores: stores.series.delete(JOB))
        stores.series.delete(JOB)
        assert not stores.folder().exists()
        if not killed:
            break
    assert nth > 4


def test_processes_that_ingest_the_same_stream_store_each_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "_BATCH_BYTES", 500)
    stores = Stores(tmp_path)
    raw = b"".join(b'{"step": %d, "loss": %d, "lr": 1}\n' % (step, step) for step in range(1000))

    def send() -> None:
        for end in range(0, len(raw) + 777, 777):
            start = max(0, end - 1000)
            stores.streams.append(JOB, "metrics", start, raw[start:end])
            stores.series.ingest(JOB, "metrics")

    children = [in_child(send) for _ in range(4)]
    counts = [len(stores.values("loss")) for _ in range(20)]
    assert counts == sorted(counts)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert stores.values("loss") == [(step, step) for step in range(1000)]
    assert stores.series.dropped(JOB) == {"metrics": 0}


def test_threads_may_ingest_both_streams_at_once(stores: Stores) -> None:
    def send(name: str) -> None:
        for step in range(100):
            stores.log({"step": step, name: step}, stream=name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(send, ("metrics", "util")))
    for name in ("metrics", "util"):
        assert stores.values(name) == [(step, step) for step in range(100)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_shows_nothing_half(stores: Stores, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    stores.log(*losses(10))
    stores.write(*losses(90, start=10))
    real = os.write
    for fits in range(0, 2600, 100):
        room = [fits]

        def write(fd: int, data: memoryview, room: list[int] = room) -> int:
            if room[0] == 0:
                raise OSError(code, os.strerror(code))
            written = real(fd, data[: room[0]])
            room[0] -= written
            return written

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            try:
                stores.series.ingest(JOB, "metrics")
                break
            except StorageFull:
                pass
            assert len(stores.values("loss")) == 10
    assert fits > 1000
    assert stores.values("loss") == [(step, step / 8) for step in range(100)]


@pytest.mark.root
def test_a_disk_that_is_really_full(small_disk: Path, tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    stores.series = SeriesStore(small_disk / "series", stores.streams)
    stores.log(*losses(1000))
    stores.write(*losses(9000, start=1000))
    filler = fill_up_to(small_disk, leave=64 * 1024)
    for _ in range(3):
        with pytest.raises(StorageFull):
            stores.series.ingest(JOB, "metrics")
        assert stores.series.curve(JOB, "loss").count == 1000
    filler.unlink()
    assert stores.series.ingest(JOB, "metrics") == Ingested(9000, 9000, 0)
    assert stores.values("loss", max_points=10_000) == [(step, step / 8) for step in range(10_000)]
