"""Full disks, for real: a clear reason, nothing corrupted, and everything goes on when space returns."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diamond.core.errors import StorageFull
from diamond.core.reasons import Reason
from diamond.core.states import TaskState
from diamond.sdk.client import Client
from testing import disks
from testing.service import Service
from testing.waiting import eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(disks.why_not() is not None, reason=str(disks.why_not())),
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def agent_disk(home: Path) -> Iterator[Path]:
    with disks.small_disk(home / "agents" / "local", mib=16) as path:
        yield path


@pytest.fixture
def server_disk(home: Path) -> Iterator[Path]:
    with disks.small_disk(home / "server", mib=24) as path:
        yield path


@pytest.fixture
def larger_disk(home: Path) -> Iterator[Path]:
    with disks.small_disk(home / "server", mib=200) as path:
        yield path


def test_run_directory_full(home: Path, agent_disk: Path) -> None:
    with Service(home) as service, service.client() as client:
        greedy = client.tasks.create({"name": "greedy", "run": "echo before; head -c 100M /dev/zero > big"})
        done = client.tasks.wait(greedy.id, timeout_s=60)
        assert (done.state, done.reason) == (TaskState.FAILED, Reason.DISK_FULL)
        assert "before" in b"".join(client.tasks.logs(greedy.id)).decode()

        for big in agent_disk.glob("jobs/*/work/big"):
            big.unlink()
        filler = disks.fill(agent_disk)
        while_full = client.tasks.create({"name": "while full", "run": "echo hello"})
        # Either it is refused for want of space, or it waits; it must not be lost or called something else.
        task = client.tasks.get(while_full.id)
        assert task.state in (TaskState.QUEUED, TaskState.FAILED)
        filler.unlink()
        task = client.tasks.wait(while_full.id, timeout_s=60)
        assert task.state is TaskState.SUCCEEDED or task.reason is Reason.DISK_FULL

        after = client.tasks.create({"name": "after", "run": "echo well again"})
        assert client.tasks.wait(after.id, timeout_s=60).state is TaskState.SUCCEEDED
        assert b"".join(client.tasks.logs(after.id)) == b"well again\n"


def first_refusal(client: Client) -> StorageFull:
    for _ in range(100):  # SQLite's log may still have room for a few
        try:
            client.tasks.create({"run": "true"})
        except StorageFull as error:
            return error
    raise AssertionError("a full disk took a hundred tasks")


def test_below_the_reserve_everything_small_goes_on(home: Path, larger_disk: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "data.bin").write_bytes(os.urandom(100_000))
    with Service(home) as service, service.client() as client:
        go = tmp_path / "go"
        waits = f"echo begun; until [ -e {go} ]; do sleep 0.05; done; for n in $(seq 1 2000); do echo line $n; done"
        chatty = client.tasks.create({"name": "chatty", "run": waits})
        eventually(lambda: b"begun" in b"".join(client.tasks.logs(chatty.id)), what="its first line")
        filler = disks.fill_up_to(larger_disk, leave=8 * 1024 * 1024)  # a twentieth of the disk is more
        time.sleep(1.1)  # how long the server believes what it saw of the disk
        go.touch()
        with pytest.raises(StorageFull, match="nearly full"):
            client.bundles.upload(files)
        for number in range(5):
            small = client.tasks.create({"name": f"small {number}", "run": "true"})
            client.tasks.cancel(small.id)
        client.tokens.create("while it is nearly full")
        assert b"line 1\n" not in b"".join(client.tasks.logs(chatty.id))
        filler.unlink()
        assert client.tasks.wait(chatty.id, timeout_s=90).state is TaskState.SUCCEEDED
        expected = b"begun\n" + b"".join(f"line {n}\n".encode() for n in range(1, 2001))
        assert b"".join(client.tasks.logs(chatty.id)) == expected


def test_server_data_directory_full(home: Path, server_disk: Path) -> None:
    with Service(home) as service, service.client() as client:
        chatty = client.tasks.create(
            {"name": "chatty", "run": "for n in $(seq 1 3000); do echo line $n; sleep 0.002; done"}
        )
        eventually(lambda: client.tasks.get(chatty.id).state is TaskState.RUNNING, what="chatty runs")
        filler = disks.fill(server_disk)
        refusal = first_refusal(client)
        assert "disk" in refusal.message
        assert refusal.hint
        filler.unlink()

        again = client.tasks.create({"run": "echo again"})
        assert client.tasks.wait(again.id, timeout_s=60).state is TaskState.SUCCEEDED
        assert client.tasks.wait(chatty.id, timeout_s=60).state is TaskState.SUCCEEDED
        expected = b"".join(f"line {n}\n".encode() for n in range(1, 3001))
        assert b"".join(client.tasks.logs(chatty.id)) == expected
    with sqlite3.connect(home / "server" / "diamond.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
