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
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (500 * 1024**2, "500 MiB"), (5 * 1024**5, "5120.0 TiB")],
)
def test_size(value: int, text: str) -> None:
    assert render.size(value) == text


def test_ago() -> None:
    assert render.ago(None) == "never"
    assert render.ago(100.0, 101.0) == "just now"
    assert render.ago(100.0, 100.0 + 3700) == "1h ago"


def test_table_in_a_pipe_is_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    render.print_table(("NAME", ">N"), [(long, "1"), ("[bold]b", "22")], flexible=("NAME",))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{long}   1"
    assert lines[2].startswith("[bold]b ")
    assert all(line == line.rstrip() for line in lines)
