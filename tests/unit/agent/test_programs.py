"""Programs with a deadline."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from diamond.agent import programs


def test_answers_come_back_in_order() -> None:
    said = programs.ask_all([["sh", "-c", "echo one; exit 3"], ["no-such-program"], ["sh", "-c", "echo two >&2"]])
    assert [(each.status, each.out, each.err) for each in said] == [(3, "one\n", ""), (127, "", ""), (0, "", "two\n")]


def test_what_hangs_is_let_go_and_does_not_hold_up_the_others() -> None:
    began = time.monotonic()
    said = programs.ask_all([["sleep", "60"], ["echo", "quick"], ["sh", "-c", "sleep 60 & wait"]], timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert [each.status for each in said] == [None, 0, None]
    assert programs.num_left() == 0  # these could be killed


def test_a_child_that_keeps_the_pipe_open_does_not_hang_us() -> None:
    began = time.monotonic()
    assert programs.ask(["sh", "-c", "setsid sleep 20 & echo gone"], timeout_s=0.5).status is None
    assert time.monotonic() - began < 5


def test_hostile_output_is_text(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\xfe ok')"
    assert programs.ask([sys.executable, "-c", code]).out == "\ufffd\ufffd ok"
    assert programs.ask(["echo", "nul\0"]).status == 127


def test_find() -> None:
    assert programs.find("sh")
    assert programs.find("no-such-program") is None
