"""A job that is told to stop while lost ranks are coming back: what it ends with, and whether a chain goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diamond.train.ending import CONTINUE
from diamond.train.lines import process_state
from testing.waiting import eventually
from tests.train.test_launch import LAUNCH, clean_env
from tests.train.test_regroup import ROOT, SCRIPT, log, reached


@contextlib.contextmanager
def launched(folder: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Two ranks that train without end; without standbys, so that those that come back take seconds to."""
    argv = [sys.executable, str(LAUNCH), "--ranks", "2", "--no-standby", "--"]
    argv += [sys.executable, str(SCRIPT), str(folder), "100000"]
    given = clean_env(PYTHONPATH=f"{ROOT}/src:{ROOT}", DIAMOND_RUN_DIR=str(folder), **env)
    with (folder / "log0").open("wb") as out:
        proc = subprocess.Popen(argv, cwd=ROOT, env=given, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield proc
    finally:
        if proc.poll() is None:
            proc.kill()
            proc.wait()


def lose_a_rank(folder: Path, *, saved: bool) -> None:
    """After the second checkpoint, where one is to be `saved`: then the first is safe, and the launcher knows of it."""
    step = eventually(reached(folder, 1, 10), what="it trains", within_s=90)
    if saved:
        whole = lambda: {path.name for path in (folder / "checkpoints").glob("step-*[0-9]")}  # noqa: E731
        first = eventually(whole, what="it has saved", within_s=30)
        eventually(lambda: whole() - first, what="and again", within_s=30)
    os.kill(step.pid, signal.SIGKILL)
    eventually(lambda: process_state(step.pid) in ("Z", ""), what="it is dead", within_s=10)


def others_begin(folder: Path) -> None:
    eventually(lambda: "going on with 2 ranks" in log(folder), what="others begin", within_s=30)


@pytest.mark.parametrize(
    ("number", "anew"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGUSR1, True)],
    ids=["stopped at the loss", "stopped as others begin", "warned as others begin"],
)
def test_a_chain_goes_on(tmp_path: Path, number: int, anew: bool) -> None:
    wish = tmp_path / "continue"
    with launched(tmp_path, DIAMOND_CONTINUE_FILE=str(wish)) as proc:
        lose_a_rank(tmp_path, saved=True)
        if anew:
            others_begin(tmp_path)
        proc.send_signal(number)
        assert proc.wait(60) == CONTINUE, log(tmp_path)
    assert wish.exists()
    assert json.loads((tmp_path / "exit.node0.json").read_text())["exit_code"] == CONTINUE


@pytest.mark.parametrize(("chained", "saved"), [(False, True), (True, False)], ids=["no chain", "no checkpoint"])
def test_nothing_goes_on_where_it_cannot(tmp_path: Path, chained: bool, saved: bool) -> None:
    wish = tmp_path / "continue"
    env = {"DIAMOND_CONTINUE_FILE": str(wish)} if chained else {}
    with launched(tmp_path, SAVE_S="0.3" if saved else "1000", **env) as proc:
        lose_a_rank(tmp_path, saved=saved)
        others_begin(tmp_path)
        proc.terminate()
        assert proc.wait(60) in (128 + signal.SIGTERM, 128 + signal.SIGKILL), log(tmp_path)
    assert not wish.exists()


def test_ctrl_c_is_meant(tmp_path: Path) -> None:
    wish = tmp_path / "continue"
    with launched(tmp_path, DIAMOND_CONTINUE_FILE=str(wish)) as proc:
        lose_a_rank(tmp_path, saved=True)
        others_begin(tmp_path)
        proc.send_signal(signal.SIGINT)
        assert proc.wait(60) not in (0, CONTINUE), log(tmp_path)
    assert not wish.exists()
