"""A log by its lines: whatever the bytes are, lines are those that splitting the whole log would give."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from diamond.core.errors import NotFound
from diamond.core.states import JobState
from diamond.server.services import log_lines, tasks
from diamond.server.services.context import Context
from diamond.server.store.streams import StreamStore
from testing.image_agent import ImageAgent


class Log:
    """A task that runs, and its log."""

    def __init__(self, ctx: Context, user_id: str, agent: ImageAgent) -> None:
        self.ctx, self.user_id, self.agent = ctx, user_id, agent
        self.task_id = tasks.create(ctx, user_id, {"run": "true", "resources": {"infra": "alpha"}})[0].id
        self.job_id = next(order for order in agent.orders() if order.task_id == self.task_id).job_id
        agent.tell(self.job_id, JobState.RUNNING)

    def write(self, data: bytes) -> None:
        size = self.ctx.streams.size(self.job_id, "log")
        for start in range(0, len(data), 1 << 20):
            size = self.ctx.streams.append(self.job_id, "log", size, data[start : start + (1 << 20)])

    def read(self, first: int | None = None, count: int = 200) -> log_lines.Excerpt:
        return log_lines.read(self.ctx, self.user_id, self.task_id, first=first, count=count)

    def texts(self, first: int | None = None, count: int = 200) -> list[str]:
        return [line.text for line in self.read(first, count).lines]


@pytest.fixture
def log(ctx: Context, user_id: str, agent: ImageAgent) -> Log:
    return Log(ctx, user_id, agent)


def test_an_empty_log_and_one_that_grows(log: Log) -> None:
    assert (log.read().total, log.texts()) == (0, [])
    log.write(b"one\ntwo")
    assert (log.read().total, log.texts()) == (2, ["one", "two"])
    log.write(b" and a half\n")
    assert (log.read().total, log.texts()) == (2, ["one", "two and a half"])
    log.write(b"\n\nfive\n")
    assert (log.read().total, log.texts()) == (5, ["one", "two and a half", "", "", "five"])
    assert log.texts(first=5) == ["five"] and log.texts(first=6) == [] and log.texts(count=1) == ["five"]
    assert not log.read().is_over
    log.agent.tell(log.job_id, JobState.SUCCEEDED)
    assert log.read().is_over and log.read().attempt == 1


def test_any_window_of_a_large_log_is_right(log: Log) -> None:
    chance = random.Random(7)
    lines = [("x" * chance.choice((0, 3, 80, 80, 3000)))[:1500] + f" {number}" for number in range(1, 20_001)]
    data = "\n".join(lines).encode() + b"\n"
    for start in range(0, len(data), 1_700_001):  # cut anywhere, read in between
        log.write(data[start : start + 1_700_001])
        log.read()
    assert log.read().total == 20_000
    for first in (1, 2, 777, 9_999, 19_801, 20_000):
        found = log.read(first, 200).lines
        assert [line.number for line in found] == list(range(first, min(first + 200, 20_001)))
        assert [line.text for line in found] == lines[first - 1 : first + 199]
        for line in found:
            assert data[line.offset : line.offset + line.num_bytes].decode() == lines[line.number - 1]


def test_long_lines_are_cut_and_progress_bars_show_their_end(log: Log) -> None:
    log.write(b"a" * 3_000_000 + b"\nshort\r\n" + b"".join(b"step %d\r" % step for step in range(100_000)) + b"\n")
    log.write(b"\x1b[2K\x1b[1A\x1b]0;title\x07\x1b[31mred\x1b[0m\n")
    long, short, bar, red = log.read().lines
    assert (len(long.text), long.num_bytes, long.is_cut) == (log_lines.MAX_SHOWN, 3_000_000, True)
    assert (short.text, short.is_cut) == ("short", False)
    assert bar.text == "step 99999"
    assert red.text == "\x1b[31mred\x1b[0m"
    assert log_lines.plain_tail(log.read()).splitlines()[-1] == "red"


def test_bytes_that_are_no_text_are_shown_as_such(log: Log) -> None:
    log.write(b"\xff\xfe\x00 ok\n\xe2\x82")
    assert log.texts() == ["\ufffd\ufffd\x00 ok", "\ufffd"]


def test_searching(log: Log, ctx: Context, user_id: str) -> None:
    lines = [b"loss %d" % number for number in range(1, 100_001)]
    lines[70_000] = b"\x1b[31mNa\x1b[0mN loss"
    lines[70_001] = "Größe nan nan".encode()
    log.write(b"\n".join(lines))

    def found(text: str) -> list[int]:
        return log_lines.find(ctx, user_id, log.task_id, text).lines

    assert found("nan") == [70_001, 70_002]
    assert found("LOSS 99999") == [99_999] and found("loss 100000") == [100_000]
    assert found("größe") == [70_002] or found("Größe") == [70_002]
    assert found("nothing") == [] and found("") == [] and found("a\nb") == []
    many = log_lines.find(ctx, user_id, log.task_id, "loss")
    assert len(many.lines) == log_lines.MAX_FOUND and many.more and many.total == 100_000


def test_a_hole_is_a_line_of_its_own(
    ctx: Context, user_id: str, agent: ImageAgent, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A log beyond its cap loses its middle; what is known of its lines is begun anew."""
    store = StreamStore(tmp_path_factory.mktemp("small"), segment_bytes=1000, cap_bytes=3000)
    log = Log(replace(ctx, streams=store), user_id, agent)
    whole = b""
    for number in range(1, 1001):
        line = b"line %d\n" % number
        whole += line
        log.write(line)
        if number % 97 == 0:
            found = log.read(1, 1000)
            assert found.total == len(found.lines)
            assert found.lines[-1].text == f"line {number}"
    assert store.gap(log.job_id, "log") is not None
    found = log.read(1, 1000)
    marker = next(line for line in found.lines if "dropped here" in line.text)
    assert found.lines[0].text == "line 1" and found.total < 1000
    for line in found.lines:
        if line.number > marker.number + 1:
            assert whole[line.offset : line.offset + line.num_bytes].decode() == line.text
    assert log.texts(first=marker.number, count=1) == [marker.text]
    assert log.texts(first=found.total, count=1) == ["line 1000"]
    numbers = log_lines.find(log.ctx, user_id, log.task_id, "line 1000").lines
    assert numbers == [found.total]


def test_others_logs_are_not_there(log: Log, ctx: Context, other_id: str) -> None:
    log.write(b"secret\n")
    with pytest.raises(NotFound):
        log_lines.read(ctx, other_id, log.task_id)
    with pytest.raises(NotFound):
        log_lines.find(ctx, other_id, log.task_id, "secret")
    with pytest.raises(NotFound):
        log_lines.read(ctx, log.user_id, log.task_id, attempt=7)
