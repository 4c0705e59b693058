"""Pages of the service: their addresses, and opening one where somebody sits at a desktop."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def dashboard(url: str) -> str:
    return f"{url.rstrip('/')}/dashboard"


def task_page(url: str, task_id: str) -> str:
    return f"{url.rstrip('/')}/tasks/{task_id}"


def has_desktop(environ: Mapping[str, str], platform: str) -> bool:
    """Whether a browser window would be seen by who typed the command: not over SSH, and not without a screen."""
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"):
        return False
    return platform == "darwin" or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def open_page(url: str) -> bool:
    """Open a page where there is a desktop and a person at a terminal; whether that was done.

    BROWSER in the environment names another program, as elsewhere; ``BROWSER=true`` opens nothing.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or not has_desktop(os.environ, sys.platform):
        return False
    import webbrowser

    try:
        return webbrowser.open(url)
    except (webbrowser.Error, OSError):
        return False
