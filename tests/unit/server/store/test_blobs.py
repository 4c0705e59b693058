from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diamond.core.errors import DigestMismatch, StorageFull
from diamond.server.store.blobs import BlobStore, PutResult
from testing.disks import fill_up_to
from testing.dying import in_child, killed_at

DATA = random.Random(11).randbytes(10_000)
SIZE = len(DATA)
EMPTY = "sha256:" + hashlib.sha256(b"").hexdigest()

# numpy, where another test loaded it, brings threads of its own; the children here use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


DIGEST = digest_of(DATA)


def pieces(data: bytes, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def content(store: BlobStore, digest: str) -> bytes:
    with store.open(digest) as file:
        return file.read()


def blob_file(digest: str) -> str:
    return f"{digest[7:9]}/{digest[7:]}"


def test_a_blob_in_one_call(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert not store.has(DIGEST)
    assert store.put_chunk(DIGEST, SIZE, 0, pieces(DATA)) == PutResult(SIZE, True)
    assert store.has(DIGEST)
    assert content(store, DIGEST) == DATA
    assert store.path(DIGEST) == tmp_path / DIGEST[7:9] / DIGEST[7:]
    assert files(tmp_path) == [blob_file(DIGEST)], "no partial file, no lock file stays behind"
    assert store.total_bytes() == SIZE


def test_an_upload_resumes_where_it_stopped(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)

    def breaks_off() -> Iterator[bytes]:
        yield from pieces(DATA[:4000])
        raise ConnectionError("the client is gone")

    with pytest.raises(ConnectionError):
        store.put_chunk(DIGEST, SIZE, 0, breaks_off())
    assert store.partial_size(DIGEST) == 4000
    assert store.put_chunk(DIGEST, SIZE, 4001, [DATA[4001:]]) == PutResult(4000, False), "a gap stores nothing"
    assert store.put_chunk(DIGEST, SIZE, 3500, pieces(DATA[3500:6000])) == PutResult(6000, False)
    assert not store.has(DIGEST)
    assert store.total_bytes() == 0
    assert store.put_chunk(DIGEST, SIZE, 6000, pieces(DATA[6000:])) == PutResult(SIZE, True)
    assert content(store, DIGEST) == DATA
    assert store.partial_size(DIGEST) == 0


def test_a_complete_blob_is_not_uploaded_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put_bytes(DIGEST, DATA)

    def untouched() -> Iterator[bytes]:
        raise AssertionError("nobody needs these bytes")
        yield b""

    assert store.put_chunk(DIGEST, SIZE, 0, untouched()) == PutResult(SIZE, True)
    store.put_bytes(DIGEST, DATA)
    assert files(tmp_path) == [blob_file(DIGEST)]


def test_wrong_bytes_are_removed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    wrong = DATA[:-1] + bytes([DATA[-1] ^ 1])
    with pytest.raises(DigestMismatch, match=DIGEST) as caught:
        store.put_chunk(DIGEST, SIZE, 0, pieces(wrong))
    assert "again from its first byte" in caught.value.hint
    assert files(tmp_path) == []
    assert store.put_chunk(DIGEST, SIZE, 0, pieces(DATA)).complete
    with pytest.raises(DigestMismatch):
        store.put_bytes(EMPTY, b"not empty")
    assert not store.has(EMPTY)


def test_more_bytes_than_announced_are_refused(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(DigestMismatch, match="more than the 2500 bytes"):
        store.put_chunk(DIGEST, 2500, 0, pieces(DATA))
    assert store.partial_size(DIGEST) == 2000
    with pytest.raises(DigestMismatch):
        store.put_chunk(DIGEST, 1500, 0, [])
    assert store.partial_size(DIGEST) == 0, "longer than the blob can be: it was someone's mistake"


def test_the_empty_blob(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "one")
    assert store.put_chunk(EMPTY, 0, 0, []) == PutResult(0, True)
    assert content(store, EMPTY) == b""
    other = BlobStore(tmp_path / "two")
    other.put_bytes(EMPTY, b"")
    assert content(other, EMPTY) == b""


def test_missing_keeps_order_and_names_each_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    a, b, c = (digest_of(name) for name in (b"a", b"b", b"c"))
    store.put_bytes(b, b"b")
    assert store.missing([c, b, a, c]) == [c, a]
    assert store.missing([]) == []


def test_delete_and_total(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert store.total_bytes() == 0
    store.delete(DIGEST)
    for data in (b"a", b"bb", DATA):
        store.put_bytes(digest_of(data), data)
    assert store.total_bytes() == SIZE + 3
    with store.open(DIGEST) as file:
        store.delete(DIGEST)
        assert file.read() == DATA
    store.delete(DIGEST)
    assert store.total_bytes() == 3
    with pytest.raises(FileNotFoundError):
        store.open(DIGEST)


def test_set_aside_unless_claimed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert store.claim([DIGEST]) == [DIGEST] and store.set_aside(DIGEST, time.time()) is None
    store.put_bytes(DIGEST, DATA)
    long_ago = time.time() - 100_000
    assert store.set_aside(DIGEST, long_ago) is None and store.has(DIGEST), "it came later"
    os.utime(store.path(DIGEST), (long_ago, long_ago))
    claims: list[Callable[[], object]] = [
        lambda: store.claim([DIGEST]),
        lambda: store.put_bytes(DIGEST, DATA),
        lambda: store.put_chunk(DIGEST, SIZE, 0, [DATA]),
        lambda: store.put_chunk(DIGEST, SIZE, 0, [DATA], "other", to_prove=True),
    ]
    for claim in claims:
        claim()
        assert store.set_aside(DIGEST, time.time() - 60) is None and store.has(DIGEST)
        os.utime(store.path(DIGEST), (long_ago, long_ago))
    assert store.set_aside(DIGEST, time.time() - 60) == SIZE
    assert not store.has(DIGEST)
    assert store.set_aside(DIGEST, time.time() - 60) == SIZE, "again, by one that was killed before it went on"
    store.put_bytes(DIGEST, DATA)  # sent again meanwhile
    store.discard(DIGEST)
    store.discard(DIGEST)
    assert content(store, DIGEST) == DATA
    assert files(tmp_path) == [blob_file(DIGEST)]


def test_what_was_set_aside_and_forgotten_is_swept(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put_bytes(DIGEST, DATA)
    os.utime(store.path(DIGEST), (1000, 1000))
    assert store.set_aside(DIGEST, 2000) == SIZE
    assert store.sweep_partials(60) == 1
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "digest", ["", DIGEST[7:], DIGEST + "\n", "sha256:../../" + "a" * 58, DIGEST.upper(), "sha512:" + "a" * 64]
)
def test_no_digest_leaves_the_root(tmp_path: Path, digest: str) -> None:
    store = BlobStore(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: store.has(digest),
        lambda: store.missing([digest]),
        lambda: store.partial_size(digest),
        lambda: store.put_chunk(digest, 1, 0, [b"x"]),
        lambda: store.put_bytes(digest, b"x"),
        lambda: store.path(digest),
        lambda: store.open(digest),
        lambda: store.delete(digest),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not a digest"):
            call()
    with pytest.raises(ValueError, match="negative"):
        store.put_chunk(DIGEST, 1, -1, [b"x"])
    assert files(tmp_path) == []


def test_only_abandoned_uploads_are_swept(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert store.sweep_partials(0) == 0
    old, fresh = digest_of(b"old"), digest_of(b"fresh")
    for digest, data in ((old, b"ol"), (fresh, b"fres")):
        store.put_chunk(digest, len(data) + 1, 0, [data])
    store.put_bytes(DIGEST, DATA)
    os.utime(tmp_path / "partial" / old[7:], (1000, 1000))
    assert store.sweep_partials(3600) == 1
    assert files(tmp_path) == sorted([blob_file(DIGEST), f"partial/{fresh[7:]}", f"partial/{fresh[7:]}.lock"])
    assert store.put_chunk(old, 3, 2, [b"d"]) == PutResult(0, False), "its sender starts over"
    assert store.sweep_partials(-1) == 1
    assert files(tmp_path) == [blob_file(DIGEST)]


def test_an_upload_in_use_is_not_swept(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put_chunk(DIGEST, SIZE, 0, [DATA[:10]])
    with store._held(store._partial_path(DIGEST, "")):
        assert store.sweep_partials(-1) == 0
    assert store.partial_size(DIGEST) == 10


def test_put_bytes_overtakes_an_upload(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)

    def overtaken() -> Iterator[bytes]:
        yield DATA[:5000]
        store.put_bytes(DIGEST, DATA)
        yield DATA[5000:]

    assert store.put_chunk(DIGEST, SIZE, 0, overtaken()) == PutResult(SIZE, True)
    assert files(tmp_path) == [blob_file(DIGEST)]


def test_a_stalled_upload_keeps_nobody_waiting(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)

    def stalled() -> Iterator[bytes]:
        yield DATA[:5000]
        assert store.put_chunk(DIGEST, SIZE, 5000, pieces(DATA[5000:])).complete
        yield DATA[5000:]

    assert store.put_chunk(DIGEST, SIZE, 0, stalled()) == PutResult(SIZE, True)
    assert content(store, DIGEST) == DATA


def test_an_upload_someone_else_spoilt_starts_over(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)

    def spoilt() -> Iterator[bytes]:
        yield DATA[:5000]
        with pytest.raises(DigestMismatch):
            store.put_chunk(DIGEST, SIZE, 5000, [b"?" * 5000])
        yield DATA[5000:]

    assert store.put_chunk(DIGEST, SIZE, 0, spoilt()) == PutResult(0, False)
    assert store.put_chunk(DIGEST, SIZE, 0, pieces(DATA)).complete


def upload(store: BlobStore, seed: int) -> None:
    """A client as they are: sends pieces of any size, resumes from what it is told."""
    chance = random.Random(seed)
    result = PutResult(0, False)
    while not result.complete:
        end = min(SIZE, result.received + chance.randint(1, 700))
        start = max(0, result.received - chance.randint(0, 100))
        result = store.put_chunk(DIGEST, SIZE, start, pieces(DATA[start:end], chance.randint(1, 300)))


def test_processes_that_send_the_same_blob_finish_it_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    for _ in range(5):
        children = [in_child(lambda seed=seed: upload(store, seed)) for seed in range(3)]
        children.append(in_child(lambda: store.put_bytes(DIGEST, DATA)))
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
        assert content(store, DIGEST) == DATA
        store.sweep_partials(-1)
        assert files(tmp_path) == [blob_file(DIGEST)]
        store.delete(DIGEST)


def test_threads_that_send_the_same_blob_finish_it_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: upload(store, seed), range(4)))
    assert content(store, DIGEST) == DATA


def test_sweeps_beside_uploads_only_cost_time(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)

    def sweep_often() -> None:
        for _ in range(200):
            store.sweep_partials(-1)
            store.put_bytes(EMPTY, b"")

    children = [in_child(lambda: upload(store, 3)), in_child(sweep_often), in_child(sweep_often)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 3
    assert content(store, DIGEST) == DATA


def test_killed_at_every_call_an_upload_can_be_resumed(tmp_path: Path) -> None:
    for nth in itertools.count(1):
        root = tmp_path / str(nth)
        store = BlobStore(root)
        killed = killed_at(nth, lambda store=store: store.put_chunk(DIGEST, SIZE, 0, pieces(DATA, 4000)))
        held = store.partial_size(DIGEST)
        if store.has(DIGEST):
            assert content(store, DIGEST) == DATA
        elif held:
            assert (root / "partial" / DIGEST[7:]).read_bytes() == DATA[:held]
        assert store.put_chunk(DIGEST, SIZE, held, pieces(DATA[held:])) == PutResult(SIZE, True)
        assert content(store, DIGEST) == DATA
        store.sweep_partials(-1)
        assert files(root) == [blob_file(DIGEST)]
        if not killed:
            break
    assert nth > 12


def test_killed_at_every_call_put_bytes_shows_all_or_nothing(tmp_path: Path) -> None:
    for nth in itertools.count(1):
        root = tmp_path / str(nth)
        store = BlobStore(root)
        killed = killed_at(nth, lambda store=store: store.put_bytes(DIGEST, DATA))
        assert not store.has(DIGEST) or content(store, DIGEST) == DATA
        store.put_bytes(DIGEST, DATA)
        assert content(store, DIGEST) == DATA
        store.sweep_partials(-1)
        assert files(root) == [blob_file(DIGEST)]
        if not killed:
            break
    assert nth > 8


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_what_came_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = BlobStore(tmp_path)
    room = [4500]
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        if room[0] == 0:
            raise OSError(code, os.strerror(code))
        written = real(fd, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(StorageFull, match=DIGEST):
            store.put_chunk(DIGEST, SIZE, 0, pieces(DATA))
        assert store.partial_size(DIGEST) == 4000
        with pytest.raises(StorageFull, match=digest_of(b"a")):
            store.put_bytes(digest_of(b"a"), b"a")
    store.put_bytes(digest_of(b"a"), b"a")
    assert store.put_chunk(DIGEST, SIZE, 0, pieces(DATA)).complete
    assert content(store, DIGEST) == DATA


def test_a_failed_sync_is_not_trusted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, "found out late")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageFull):
            store.put_chunk(DIGEST, SIZE, 0, pieces(DATA))
    assert files(tmp_path) == []
    assert store.put_chunk(DIGEST, SIZE, 0, pieces(DATA)).complete


@pytest.mark.root
def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    data = random.Random(5).randbytes(400_000)
    digest = digest_of(data)
    store = BlobStore(small_disk / "blobs")
    store.put_bytes(DIGEST, DATA)
    filler = fill_up_to(small_disk, leave=200_000)
    with pytest.raises(StorageFull):
        store.put_bytes(digest, data)
    assert store.partial_size(digest) == 0
    for _ in range(3):
        with pytest.raises(StorageFull):
            store.put_chunk(digest, len(data), 0, pieces(data, 50_000))
        assert not store.has(digest)
        assert 0 < store.partial_size(digest) < 200_000
    assert content(store, DIGEST) == DATA
    filler.unlink()
    assert store.put_chunk(digest, len(data), 0, pieces(data, 50_000)) == PutResult(len(data), True)
    assert content(store, digest) == data


def test_senders_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    """Nobody finishes, spoils, or learns the length of what another began."""
    store = BlobStore(tmp_path)
    assert store.put_chunk(DIGEST, SIZE, 0, [DATA[:-1]], "usr_1") == PutResult(SIZE - 1, False)
    assert store.partial_size(DIGEST, "usr_2") == store.unfinished_bytes("usr_2") == 0
    assert store.put_chunk(DIGEST, SIZE, SIZE - 1, [DATA[-1:]], "usr_2", to_prove=True) == PutResult(0, False)
    with pytest.raises(DigestMismatch):
        store.put_chunk(DIGEST, SIZE, 0, [b"?" * SIZE], "usr_2", to_prove=True)
    assert store.unfinished_bytes("usr_1") == SIZE - 1
    assert store.put_chunk(DIGEST, SIZE, SIZE - 1, [DATA[-1:]], "usr_1").complete
    with pytest.raises(ValueError, match="not a sender"):
        store.put_chunk(DIGEST, SIZE, 0, [DATA], "../x")


def test_what_is_here_has_to_be_sent_whole_to_prove_it(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put_bytes(DIGEST, DATA)
    before = store.path(DIGEST).stat()
    assert store.put_chunk(DIGEST, SIZE, 0, [], "usr_1") == PutResult(SIZE, True), "who need not prove it"
    assert store.put_chunk(DIGEST, SIZE, 0, [DATA[:10]], "usr_1", to_prove=True) == PutResult(10, False)
    with pytest.raises(DigestMismatch):
        store.put_chunk(DIGEST, 10, 0, [], "usr_1", to_prove=True)  # a shorter one is another
    assert store.put_chunk(DIGEST, SIZE, 0, [DATA[:10]], "usr_1", to_prove=True) == PutResult(10, False)
    assert store.put_chunk(DIGEST, SIZE, 10, [DATA[10:]], "usr_1", to_prove=True) == PutResult(SIZE, True)
    after = store.path(DIGEST).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "kept once, untouched"
    assert files(tmp_path) == [blob_file(DIGEST)]
