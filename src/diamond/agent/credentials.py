"""The agent's token: in a file only its user can read, and how it is replaced without ever being lost.

A new token is made and kept here before the server hears of it, and used before the old one dies. Whatever the agent
is killed in the middle of, the file holds a token that works.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diamond.core.enrolment import new_token, token_hash
from diamond.core.errors import Conflict, InstallationProblem
from diamond.core.faults import fault_point
from diamond.core.rundir import write_atomic

log = logging.getLogger(__name__)


class Credentials:
    """Thread-safe. Without a file the token cannot change."""

    def __init__(self, token: str, path: Path | None = None) -> None:
        self._token = token
        self._path = path
        self._lock = threading.Lock()

    @staticmethod
    def load(path: Path) -> Credentials:
        """Raises InstallationProblem when there is no token in the file."""
        try:
            token = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InstallationProblem(
                f"the agent's token cannot be read: {error}",
                hint="enrol it with the line that `diamond endpoint enroll NAME` prints",
            ) from error
        if not token:
            raise InstallationProblem(f"{path} is empty", hint="put the endpoint's token into it, or enrol the agent")
        return Credentials(token, path)

    @property
    def token(self) -> str:
        return self._token

    @property
    def can_rotate(self) -> bool:
        return self._path is not None and os.access(self._path.parent, os.W_OK)

    def newer_than(self, refused: str) -> str:
        """The token to use after one was refused; empty when there is no other.

        It may have been replaced since it was sent, and the agent may have been enrolled anew: the file says.
        """
        with self._lock:
            if self._path is not None:
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    self._token = self._path.read_text().strip() or self._token
            return self._token if self._token != refused else ""

    def rotate(self, call: Callable[[str, str, Any], Any]) -> None:
        """Replace the token; `call(method, path, body)` speaks to the server with the present one. May be repeated.

        Raises:
            DiamondError: the server could not be told; the present token stays.
        """
        assert self._path is not None
        waiting = self._path.with_name(f"{self._path.name}.next")
        following = pending_token(waiting)
        fault_point("agent.token_made")
        try:
            call("PUT", "/agent/token", {"sha256": token_hash(following)})
        except Conflict:
            # Left by an attempt that was interrupted, and dead since: tokens were revoked, the agent enrolled anew.
            waiting.unlink(missing_ok=True)
            following = pending_token(waiting)
            call("PUT", "/agent/token", {"sha256": token_hash(following)})
        fault_point("agent.token_told")
        with self._lock:
            os.replace(waiting, self._path)
            self._token = following
        fault_point("agent.token_taken")
        call("POST", "/agent/token/confirm", None)
        log.info("the agent's token was replaced")


def pending_token(path: Path) -> str:
    """A token made but not yet in use: what an interrupted attempt left, else a fresh one, kept before it is told."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if found := path.read_text().strip():
            return found
    token = new_token()
    write_atomic(path, token.encode())
    return token
