"""When a page is opened: for a person at a desktop, and for nobody else."""

from __future__ import annotations

import sys
import webbrowser

import pytest

from diamond.cli import browser


@pytest.mark.parametrize(
    ("environ", "platform", "seen"),
    [
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({}, "linux", False),
        ({}, "darwin", True),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "192.0.2.1 40000 192.0.2.2 22"}, "linux", False),
        ({"SSH_TTY": "/dev/pts/1"}, "darwin", False),
    ],
)
def test_a_desktop(environ: dict[str, str], platform: str, seen: bool) -> None:
    assert browser.has_desktop(environ, platform) is seen


def test_nothing_opens_without_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pipe, in a script, and in these tests."""
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    monkeypatch.delenv("SSH_TTY", raising=False)
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: asked.append(url) or True)
    assert not browser.open_page("http://127.0.0.1:7421/dashboard")
    assert not asked
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert browser.open_page("http://127.0.0.1:7421/dashboard")
    assert asked == ["http://127.0.0.1:7421/dashboard"]


def test_addresses() -> None:
    assert browser.dashboard("https://diamond.example.org/") == "https://diamond.example.org/dashboard"
    assert browser.task_page("http://127.0.0.1:7421", "tsk_1") == "http://127.0.0.1:7421/tasks/tsk_1"
