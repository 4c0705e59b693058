from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diamond.core.errors import StorageFull
from diamond.server.store.files import locked
from diamond.server.store.streams import Slice, StreamStore
from testing.dying import finish, in_child, killed_at

JOB = "job_01kbx3v9qz8m2c4d6"
OTHER = "job_01kbx3v9qz8m2c4d7"
TRUTH = random.Random(7).randbytes(40_000)

# numpy, where another test loaded it, brings threads of its own; the children here use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def follow(store: StreamStore, stream: str = "log", *, start: int = 0, limit: int = 700) -> list[Slice]:
    """Every slice a reader gets that goes on from `next_offset` until nothing comes."""
    slices = []
    while True:
        piece = store.read(JOB, stream, start, limit)
        if piece.next_offset == start:
            return slices
        assert piece.offset == start
        slices.append(piece)
        start = piece.next_offset


def check_slice(piece: Slice, truth: bytes = TRUTH) -> None:
    """What a slice holds besides its marker is what the sender's file has there."""
    data = piece.data
    if piece.dropped:
        assert data.startswith(b"\n[diamond: ")
        assert data.count(b"[diamond: ") == 1
        data = data[data.index(b"]\n") + 2 :]
    else:
        assert b"[diamond: " not in data
    assert piece.next_offset - piece.offset == len(data) + piece.dropped
    assert data == truth[piece.offset + piece.dropped : piece.next_offset]


def capped(root: Path) -> StreamStore:
    return StreamStore(root, segment_bytes=1000, cap_bytes=5000)


def held_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("log/*.seg"))


def test_appends_and_reads_back(tmp_path: Path) -> None:
    store = StreamStore(tmp_path)
    assert store.append(JOB, "log", 0, b"hello ") == 6
    assert store.append(JOB, "log", 6, b"world\n") == 12
    assert store.read(JOB, "log", 0, 100) == Slice(b"hello world\n", 12, 0, 0)
    assert store.read(JOB, "log", 3, 4) == Slice(b"lo w", 7, 0, 3)
    assert store.read(JOB, "log", 12, 100) == Slice(b"", 12, 0, 12)
    assert store.read(JOB, "log", 99, 100) == Slice(b"", 99, 0, 99)
    assert store.read(JOB, "log", 0, 0) == Slice(b"", 0, 0, 0)
    assert [path.name for path in tmp_path.rglob("*.seg")] == ["0000000000000000.seg"]
    assert (tmp_path / JOB[-2:] / JOB / "log" / "0000000000000000.seg").read_bytes() == b"hello world\n"


def test_repeats_are_ignored_and_overlaps_trimmed(tmp_path: Path) -> None:
    store = StreamStore(tmp_path)
    store.append(JOB, "metrics", 0, b"abcdef")
    assert store.append(JOB, "metrics", 0, b"abcdef") == 6
    assert store.append(JOB, "metrics", 2, b"cd") == 6
    assert store.append(JOB, "metrics", 4, b"efgh") == 8
    assert store.read(JOB, "metrics", 0, 99).data == b"abcdefgh"


def test_a_gap_stores_nothing_and_says_where_to_resume(tmp_path: Path) -> None:
    store = StreamStore(tmp_path)
    assert store.append(JOB, "log", 5, b"late") == 0
    assert list(tmp_path.iterdir()) == [], "a deleted job must not come back as an empty folder"
    store.append(JOB, "log", 0, b"abc")
    assert store.append(JOB, "log", 4, b"late") == 3
    assert store.append(JOB, "log", 3, b"") == 3
    assert store.append(OTHER, "log", 0, b"") == 0
    assert store.read(JOB, "log", 0, 99).data == b"abc"


def test_streams_and_jobs_are_apart(tmp_path: Path) -> None:
    store = StreamStore(tmp_path)
    store.append(JOB, "log", 0, b"1")
    store.append(JOB, "util", 0, b"22")
    store.append(OTHER, "metrics", 0, b"333")
    nothing = "job_00000000never"
    assert store.sizes([JOB, OTHER, nothing]) == {
        JOB: {"log": 1, "metrics": 0, "util": 2, "train": 0},
        OTHER: {"log": 0, "metrics": 3, "util": 0, "train": 0},
        nothing: {"log": 0, "metrics": 0, "util": 0, "train": 0},
    }
    store.delete(JOB)
    store.delete(JOB)
    assert not (tmp_path / JOB[-2:] / JOB).exists()
    assert store.size(JOB, "log") == 0
    assert store.size(OTHER, "metrics") == 3
    assert store.append(JOB, "log", 0, b"again") == 5


@pytest.mark.parametrize(
    "job_id",
    ["", "..", "job_1", "../../etc", "job_0123456/..", "job_01kbx3v9qz\n", "JOB_01kbx3v9qz", "job_" + "a" * 41],
)
def test_no_id_leaves_the_root(tmp_path: Path, job_id: str) -> None:
    store = StreamStore(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: store.append(job_id, "log", 0, b"x"),
        lambda: store.read(job_id, "log", 0, 1),
        lambda: store.read_tail(job_id, "log", 1),
        lambda: store.size(job_id, "log"),
        lambda: store.sizes([job_id]),
        lambda: store.delete(job_id),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not a job id"):
            call()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    store = StreamStore(tmp_path)
    with pytest.raises(ValueError, match=r"not a stream.*log, metrics, util"):
        store.append(JOB, "../log", 0, b"x")
    with pytest.raises(ValueError, match="negative"):
        store.append(JOB, "log", -1, b"x")
    with pytest.raises(ValueError, match="negative"):
        store.read(JOB, "log", 0, -1)
    with pytest.raises(ValueError, match="negative"):
        store.read_tail(JOB, "log", -1)
    with pytest.raises(ValueError, match="two segments"):
        StreamStore(tmp_path, segment_bytes=10, cap_bytes=19)


def test_one_append_may_span_segments(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, segment_bytes=1000)
    assert store.append(JOB, "log", 0, TRUTH[:3500]) == 3500
    assert sorted(path.name for path in tmp_path.rglob("*.seg")) == [
        f"{start:016d}.seg" for start in (0, 1000, 2000, 3000)
    ]
    assert store.read(JOB, "log", 500, 2800) == Slice(TRUTH[500:3300], 3300, 0, 500)


def test_the_cap_keeps_the_first_and_the_newest_segments(tmp_path: Path) -> None:
    store = capped(tmp_path)
    for start in range(0, 12_300, 300):
        assert store.append(JOB, "log", start, TRUTH[start : start + 300]) == start + 300
        assert held_on_disk(tmp_path) <= 5000
    kept = sorted(int(path.stem) for path in tmp_path.rglob("*.seg"))
    assert kept == [0, 9000, 10_000, 11_000, 12_000]
    assert store.size(JOB, "log") == 12_300

    pieces = follow(store)
    for piece in pieces:
        check_slice(piece)
    assert [piece.dropped for piece in pieces if piece.dropped] == [8000]
    assert next(piece for piece in pieces if piece.dropped).data.startswith(
        b"\n[diamond: 7.8 KiB of log were dropped here: this log passed the 4.883 KiB cap. "
        b"The complete file is in the job's run directory on the endpoint.]\n" + TRUTH[9000:9100]
    )
    inside = store.read(JOB, "log", 4321, 10)
    assert (inside.dropped, inside.next_offset) == (9000 - 4321, 9010)
    check_slice(inside)
    assert store.append(JOB, "log", 4321, TRUTH[4321:4400]) == 12_300, "dropped bytes stay dropped"


def test_the_marker_names_sizes_as_people_do(tmp_path: Path) -> None:
    marker = StreamStore(tmp_path)._marker(412 * 1024 * 1024, 660 * 1024 * 1024)
    assert b"412.0 MiB of log were dropped here: this log passed the 256 MiB cap." in marker


def test_only_logs_are_capped(tmp_path: Path) -> None:
    store = capped(tmp_path)
    store.append(JOB, "metrics", 0, TRUTH)
    assert store.read(JOB, "metrics", 0, len(TRUTH)).data == TRUTH


def test_a_follower_that_the_cap_overtakes_learns_what_it_missed(tmp_path: Path) -> None:
    store = capped(tmp_path)
    store.append(JOB, "log", 0, TRUTH[:8000])
    first = store.read(JOB, "log", 1000, 500)
    assert (first.dropped, first.next_offset) == (3000, 4500)
    store.append(JOB, "log", 8000, TRUTH[8000:20_000])
    second = store.read(JOB, "log", first.next_offset, 500)
    assert second.dropped == 16_000 - 4500
    check_slice(second)
    assert store.read(JOB, "log", second.next_offset, 500).dropped == 0


def test_holes_of_other_streams_have_no_marker(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, segment_bytes=1000)
    for stream in ("metrics", "log"):
        store.append(JOB, stream, 0, TRUTH[:3000])
        (tmp_path / JOB[-2:] / JOB / stream / f"{1000:016d}.seg").unlink()
    assert store.read(JOB, "metrics", 1500, 100) == Slice(TRUTH[2000:2100], 2100, 500, 1500)
    assert b"the server's machine went down" in store.read(JOB, "log", 1500, 100).data


def test_a_segment_that_a_listing_missed_is_not_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StreamStore(tmp_path, segment_bytes=1000)
    store.append(JOB, "log", 0, TRUTH[:5000])
    real = os.listdir
    listings = itertools.count()

    def listdir(folder: str) -> list[str]:
        """What readdir may answer while segments are being added: the newest, but not all before it."""
        missed = (f"{1000:016d}.seg", f"{3000:016d}.seg") if next(listings) == 0 else ()
        return [name for name in real(folder) if name not in missed]

    monkeypatch.setattr(os, "listdir", listdir)
    assert store.read(JOB, "log", 1500, 9999) == Slice(TRUTH[1500:5000], 5000, 0, 1500)


def test_a_disk_that_takes_a_few_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StreamStore(tmp_path, segment_bytes=100)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    assert store.append(JOB, "log", 0, TRUTH[:250]) == 250
    assert store.read(JOB, "log", 0, 999).data == TRUTH[:250]


def test_the_tail_crosses_the_hole(tmp_path: Path) -> None:
    store = capped(tmp_path)
    assert store.read_tail(JOB, "log", 100) == Slice(b"", 0, 0, 0)
    store.append(JOB, "log", 0, TRUTH[:9500])
    assert store.read_tail(JOB, "log", 1234) == Slice(TRUTH[9500 - 1234 : 9500], 9500, 0, 9500 - 1234)
    assert store.read_tail(JOB, "log", 0) == Slice(b"", 9500, 0, 9500)
    whole = store.read_tail(JOB, "log", 10**9)
    assert (whole.offset, whole.next_offset, whole.dropped) == (0, 9500, 5000)
    assert whole.data.startswith(TRUTH[:1000] + b"\n[diamond: 4.9 KiB")
    assert whole.data.endswith(b"]\n" + TRUTH[6000:9500])


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_appends_and_reads_gives_the_senders_bytes(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    held = 0

    def fresh() -> StreamStore:
        return StreamStore(tmp_path, segment_bytes=1000, cap_bytes=5000 if seed % 2 else 10**9)

    kept = [fresh(), fresh()]  # as other processes are, which remember what was the newest segment once
    for number in range(600):
        store = chance.choice([*kept, fresh()])
        if number < 300 and chance.randrange(100) == 0:
            store.delete(JOB)
            held = 0
        match chance.randrange(4):
            case 0 | 1:
                offset = max(0, held + chance.randint(-400, 40))
                data = TRUTH[offset : offset + chance.choice((0, 1, 50, 400, 2500))]
                held = max(held, offset + len(data)) if offset <= held else held
                assert store.append(JOB, "log", offset, data) == held
            case 2:
                piece = store.read(JOB, "log", chance.randint(0, held + 100), chance.randint(0, 3000))
                check_slice(piece)
                assert piece.next_offset <= max(held, piece.offset)
            case 3:
                size = chance.randint(0, 6000)
                tail = store.read_tail(JOB, "log", size)
                assert (tail.offset, tail.next_offset) == (max(0, held - size), held)
        assert store.size(JOB, "log") == held
    rest = b"".join(piece.data for piece in follow(store))
    assert (rest == TRUTH[:held]) is not bool(seed % 2)


def test_killed_at_every_call_an_append_leaves_a_prefix_and_can_be_repeated(tmp_path: Path) -> None:
    base, total = 1500, 11_200
    for nth in itertools.count(1):
        store = capped(tmp_path / str(nth))
        store.append(JOB, "log", 0, TRUTH[:base])
        killed = killed_at(nth, lambda store=store: store.append(JOB, "log", base, TRUTH[base:total]))
        assert base <= store.size(JOB, "log") <= total
        for piece in follow(store):
            check_slice(piece)
        assert store.append(JOB, "log", base, TRUTH[base:total]) == total
        pieces = follow(store)
        for piece in pieces:
            check_slice(piece)
        assert pieces[0].data == TRUTH[:700]
        assert pieces[-1].next_offset == total
        # What was left in excess goes with the next append that finds it.
        store.append(JOB, "log", total, TRUTH[total : total + 1])
        assert held_on_disk(tmp_path / str(nth)) <= 5000
        if not killed:
            break
    assert nth > 20


def test_killed_at_every_call_a_first_append_can_be_repeated(tmp_path: Path) -> None:
    for nth in itertools.count(1):
        store = capped(tmp_path / str(nth))
        killed = killed_at(nth, lambda store=store: store.append(JOB, "log", 0, TRUTH[:1800]))
        assert store.append(JOB, "log", 0, TRUTH[:1800]) == 1800
        assert store.read(JOB, "log", 0, 9999).data == TRUTH[:1800]
        if not killed:
            break
    assert nth > 5


def test_killed_at_every_call_a_delete_can_be_repeated(tmp_path: Path) -> None:
    for nth in itertools.count(1):
        store = capped(tmp_path / str(nth))
        for stream in ("log", "metrics"):
            store.append(JOB, stream, 0, TRUTH[:3000])
        killed = killed_at(nth, lambda store=store: store.delete(JOB))
        for piece in follow(store):
            check_slice(piece)
            assert piece.dropped == 0
        store.delete(JOB)
        assert store.sizes([JOB])[JOB] == {"log": 0, "metrics": 0, "util": 0, "train": 0}
        assert list((tmp_path / str(nth) / JOB[-2:]).iterdir()) == []
        if not killed:
            break
    assert nth > 8


def send_everything(store: StreamStore, seed: int) -> None:
    """A sender as the agent is one: goes on from whatever the store answers."""
    chance = random.Random(seed)
    offset = 0
    while offset < len(TRUTH):
        start = max(0, offset - chance.randint(0, 200))
        offset = store.append(JOB, "log", start, TRUTH[start : start + chance.randint(1, 500)])


def test_processes_that_send_the_same_bytes_store_them_once(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, segment_bytes=1000)
    finish([in_child(lambda seed=seed: send_everything(store, seed)) for seed in range(4)])
    assert store.size(JOB, "log") == len(TRUTH)
    assert store.read(JOB, "log", 0, len(TRUTH)).data == TRUTH


def test_threads_that_send_the_same_bytes_store_them_once(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, segment_bytes=1000)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: send_everything(store, seed), range(4)))
    assert store.read(JOB, "log", 0, len(TRUTH)).data == TRUTH


def test_a_reader_beside_a_writer_never_sees_a_wrong_byte(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, segment_bytes=200, cap_bytes=1000)
    writer = in_child(lambda: send_everything(store, 1))
    position = 0
    while position < len(TRUTH):
        piece = store.read(JOB, "log", position, 150)
        check_slice(piece)
        position = piece.next_offset
    finish([writer])


def test_deletes_beside_appends_leave_whole_streams(tmp_path: Path) -> None:
    store = StreamStore(tmp_path, segment_bytes=200)

    def append_often() -> None:
        for _ in range(300):
            store.append(JOB, "log", 0, TRUTH[:500])

    def delete_often() -> None:
        for _ in range(300):
            store.delete(JOB)

    finish([in_child(append_often), in_child(delete_often), in_child(append_often), in_child(delete_often)])
    store.append(JOB, "log", 0, TRUTH[:500])
    assert store.read(JOB, "log", 0, 9999).data == TRUTH[:500]


def test_a_lock_is_exclusive_and_can_be_tried(tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b.lock")
    with locked(path, create=False) as held:
        assert not held
    with locked(path) as held:
        assert held
        with locked(path, wait=False) as second:
            assert not second
        os.unlink(path)
        with locked(path, wait=False) as renewed:
            assert renewed, "an unlinked lock file locks nobody out"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_nothing_of_the_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = StreamStore(tmp_path, segment_bytes=1000)
    store.append(JOB, "log", 0, TRUTH[:600])
    room = [1700]
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        if room[0] == 0:
            raise OSError(code, os.strerror(code))
        written = real(fd, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(StorageFull, match=f"the log of {JOB}") as caught:
            store.append(JOB, "log", 600, TRUTH[600:5000])
    assert caught.value.transient
    assert caught.value.hint
    assert [path.name for path in tmp_path.rglob("*.seg")] == ["0000000000000000.seg"]
    assert store.read(JOB, "log", 0, 9999).data == TRUTH[:600]
    assert store.append(JOB, "log", 600, TRUTH[600:5000]) == 5000
    assert store.read(JOB, "log", 0, 9999).data == TRUTH[:5000]


def test_other_errors_of_the_disk_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: memoryview) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(OSError, match="broken"):
        StreamStore(tmp_path).append(JOB, "log", 0, b"x")
    assert StreamStore(tmp_path).size(JOB, "log") == 0
