"""What reaches a terminal: safe text, sparklines, amounts."""

from __future__ import annotations

import math

import pytest

from diamond.cli import render


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain ünïcode 数", "plain ünïcode 数"),
        ("a\x1b[2Jb", "ab"),
        ("a\x1b]0;title\x07b", "ab"),
        ("a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\b", "alinkb"),
        ("a\x1bPq#0\x1b\\b", "ab"),
        ("a\x1b(Bb\x1bcc", "abc"),
        ("a\x9b2Jb\x85c", "abc"),
        ("two\nlines\tand\rmore", "two lines andmore"),
        ("\u202egnp.exe\u2066", "gnp.exe"),
        ("\x1b", ""),
        ("\x1b[", ""),
        ("x\x1b]unfinished", "x"),
        ("[red]not markup[/red]", "[red]not markup[/red]"),
        ("bad \udcff end", "bad  end"),
    ],
)
def test_clean(raw: str, shown: str) -> None:
    assert render.clean(raw) == shown
    assert all(c.isprintable() for c in render.clean(raw))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain\ttab\r\n", "plain\ttab"),
        ("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m\x1b[0m"),
        ("\x1b[31mopen", "\x1b[31mopen\x1b[0m"),
        ("\x1b[2J\x1b[H\x1b[32mok", "\x1b[32mok\x1b[0m"),
        ("\x1b]52;c;ZXZpbA==\x07text", "text"),
        (" 10%\r 50%\r100%", "100%"),
        ("done\r", "done"),
        ("bell\x07 back\x08space", "bell backspace"),
        ("\x1b[38:2:1:2:3mtrue", "\x1b[38:2:1:2:3mtrue\x1b[0m"),
        ("\x1b[6n\x1b[?1049h", ""),
    ],
)
def test_clean_log(raw: str, shown: str) -> None:
    assert render.clean_log(raw) == shown


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▄"),
        ([0, 1], "▁█"),
        ([5, 5, 5], "▄▄▄"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
        ([0, math.nan, 1, math.inf], "▁ █ "),
        ([math.nan, math.inf], "  "),
        ([-1.7e308, 1.7e308], "▁█"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert render.sparkline(values) == line


def test_sparkline_fits_its_width() -> None:
    for count in (17, 31, 1000):
        assert len(render.sparkline([float(i % 7) for i in range(count)], 16)) == 16
    assert render.sparkline([float(i) for i in range(1000)], 8) == "▁▂▃▄▅▆▇█"


def test_plot_has_axes_and_fits() -> None:
    lines = render.plot([0, 1, 2, 3], [1.0, 0.5, 0.25, 0.125], width=40, height=6)
    assert len(lines) == 8
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("    1 ┤")
    assert lines[-1].strip().startswith("0")
    assert render.plot([1], [2.0], width=40)  # one point, no span
    assert render.plot([1, 2], [0.0, 0.0], width=40)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.0, "3"),
        (0.123456, "0.1235"),
        (1e-9, "1e-09"),
        (math.nan, "NaN"),
        (-math.inf, "-∞"),
        (1e12, "1e+12"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert render.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (500 * 1024**2, "500 MiB"), (5 * 1024**5, "5.0 PiB")],
)
def test_size(value: int, text: str) -> None:
    assert render.size(value) == text


def test_ago() -> None:
    assert render.ago(None) == "never"
    assert render.ago(100.0, 101.0) == "just now"
    assert render.ago(100.0, 100.0 + 3700) == "1h ago"


@pytest.mark.parametrize(
    ("seconds", "text"), [(600, "10m"), (5400, "1h30m"), (90, "1m30s"), (86400, "1d"), (45, "45s"), (90061, "1d1h1m1s")]
)
def test_written_duration(seconds: int, text: str) -> None:
    from diamond.core.durations import parse_duration

    assert render.written_duration(seconds) == text
    assert parse_duration(text) == seconds


def test_amounts_counts_and_measures() -> None:
    assert [render.amount(n * 1024**2) for n in (1, 500, 1024, 1536)] == ["1 MiB", "500 MiB", "1 GiB", "1.5 GiB"]
    assert [render.count(n, "task") for n in (0, 1, 2)] == ["0 tasks", "1 task", "2 tasks"]
    assert render.measured("sys/mem_bytes", 2048.0) == "2.0 KiB"
    assert render.measured("mem_bytes@rank1", 3 * 1024**3) == "3.0 GiB"
    assert render.measured("mem_bytes", math.nan) == "NaN"
    assert render.measured("loss", 2048.0) == "2048"


def test_plot_of_one_point_has_it_in_the_middle() -> None:
    lines = render.plot([1000.0], [2.0 * 1024], width=50, height=6, text=lambda value: f"{value:.0f}B")
    assert lines[-1].strip() == "1000"  # once, not at both ends
    assert 20 <= lines[-1].index("1000") <= 30
    (row,) = (line for line in lines if any("\u2800" < c <= "\u28ff" for c in line))
    assert 20 <= next(i for i, c in enumerate(row) if "\u2800" < c <= "\u28ff") <= 32
    assert lines[0].startswith("3072B")


def test_narrow_terminals_keep_the_reason() -> None:
    rows = [
        (
            "tsk_0123456789012345",
            "a name that is long",
            "QUEUED",
            "endpoint-1",
            "3m",
            "waiting for eight cores and more",
        )
    ]
    heads = ("ID", "NAME", "STATE", "ENDPOINT", ">TIME", "WHY")
    widths = render._fitting(heads, rows, {"NAME": 10, "WHY": 24}, ("TIME", "ENDPOINT"), 70)
    assert list(widths) == [0, 1, 2, 5]
    assert sum(widths.values()) + 2 * 3 <= 70
    assert widths[5] >= 24
    assert widths[0] == 20
    full = render._fitting(heads, rows, {"NAME": 10, "WHY": 24}, ("TIME", "ENDPOINT"), 200)
    assert full[5] == len(rows[0][5])


def test_table_in_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    render.print_table(("NAME", ">N"), [(long, "1"), ("[bold]b", "22")], flexible={"NAME": 10})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{long}   1"
    assert lines[2].startswith("[bold]b ")
    assert all(line == line.rstrip() for line in lines)
