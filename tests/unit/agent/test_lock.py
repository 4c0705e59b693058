"""One agent per home, on one machine and on several that share it."""

from __future__ import annotations

import os
import platform
import threading
import time
from pathlib import Path

import pytest

from diamond.agent import lock
from diamond.core.errors import Conflict


def test_who_holds_it_is_known_and_it_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "agent.lock"
    assert lock.holder(path) is None
    with lock.held(path):
        found = lock.holder(path)
        assert found is not None
        assert (found.pid, found.host, found.is_here) == (os.getpid(), platform.node(), True)
        with pytest.raises(Conflict, match=str(os.getpid())), lock.held(path):
            pass
    assert lock.holder(path) is None
    assert path.read_bytes() == b""


def test_another_machine_is_believed_while_its_beat_is_fresh(tmp_path: Path) -> None:
    """As on a file system that does not pass locks on: only the file's words and its time are seen."""
    path = tmp_path / "agent.lock"
    path.write_text("4711 on login2\n")
    found = lock.holder(path)
    assert found is not None
    assert (found.host, found.is_here) == ("login2", False)
    with pytest.raises(Conflict, match="login2") as caught, lock.held(path):
        pass
    assert "stop it on login2" in caught.value.hint
    assert path.read_text() == "4711 on login2\n"
    long_ago = time.time() - lock.FRESH_S - 1
    os.utime(path, (long_ago, long_ago))
    assert lock.holder(path) is None
    with lock.held(path):
        assert str(os.getpid()) in path.read_text()


def test_whoever_is_overwritten_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    path = tmp_path / "agent.lock"
    lost = threading.Event()
    with lock.held(path, lambda _who: lost.set()):
        before = path.stat().st_mtime_ns
        time.sleep(0.1)
        assert path.stat().st_mtime_ns > before, "the beat"
        path.write_text("1 on login2\n")
        assert lost.wait(5)
    assert path.read_text() == "1 on login2\n", "what is another's is left alone"


def test_looking_does_not_keep_anybody_out(tmp_path: Path) -> None:
    path = tmp_path / "agent.lock"
    path.touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            lock.holder(path)

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for thread in lookers:
        thread.start()
    try:
        for _ in range(20):
            with lock.held(path):
                pass
    finally:
        stop.set()
        for thread in lookers:
            thread.join()
