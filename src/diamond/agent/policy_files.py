"""Where the rules in force come from: a centre's /etc/diamond/policy.toml and the owner's policy.toml, which may only
narrow it.

Files are read at the start, where a mistake stops the agent, and again whenever they change, where a mistake leaves the
old rules in force and shows as a warning: an editor's slip must not open the endpoint, nor stop its jobs. A centre's
file that others than root could have written says nothing that can be relied on: no order is taken up while it is so.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diamond.agent import image_policy
from diamond.agent.asked import Asked
from diamond.agent.centre import CENTRE
from diamond.agent.policy import Policy, narrowed, parse_policy
from diamond.agent.policy_record import PolicyRecord
from diamond.agent.schedulers.base import Submission
from diamond.agent.table import Tracked
from diamond.core.compat import tomllib
from diamond.core.errors import InstallationProblem, InvalidInput
from diamond.core.wire import JobOrder

log = logging.getLogger(__name__)

POLICY_FILE = "policy.toml"
_MAX_BYTES = 1024 * 1024
_Stamp = tuple[int, ...]


class Untrusted(Exception):
    """Others than root can change the centre's file."""


class PolicyFile:
    """The policy in force. Used by the loop's thread alone."""

    def __init__(self, path: Path, *, centre: Path = CENTRE, root: int = 0, records: bool = True) -> None:
        """`centre` is a folder that only the account `root` can write to. No setting names another: whoever runs an
        agent must not choose whose rules it obeys. With `records`, changes are noted in the folder of `path`.

        Raises:
            InstallationProblem: a file is there and not right.
        """
        self._path = path
        self._centre = centre / POLICY_FILE
        self._root = root
        self.asked = Asked(path.parent)
        self._stamps = self._look()
        self._warnings: dict[Path, str] = {}
        self.closed = ""  # why no order may be taken up
        self._own, self._said = Policy(), dict[str, Any]()
        for file, read in ((self._centre, self._read_centre), (self._path, self._read_own)):
            try:
                read()
            except FileNotFoundError:
                pass
            except (InvalidInput, OSError, ValueError, Untrusted) as error:
                hint = "mend the file and start the agent again"
                if file == self._centre:
                    hint = "ask the administrators of this machine, whose file it is"
                raise InstallationProblem(f"{file}: {error}", hint=hint) from error
        self.policy = self._combined()
        self._record = PolicyRecord(path.parent)
        if records:
            self._note()

    @property
    def image_root(self) -> Path:
        """Where images lie."""
        return Path(self.policy.image_root) if self.policy.image_root else self._path.parent / image_policy.IMAGES

    @property
    def files(self) -> tuple[str, ...]:
        """Those that the rules in force were read from."""
        there = ((self._centre, bool(self._said)), (self._path, self._path.exists()))
        return tuple(str(file) for file, is_there in there if is_there)

    @property
    def changed_at(self) -> float:
        """When other rules came into force, in Unix seconds."""
        return self._record.changed_at

    @property
    def warning(self) -> str:
        return "; ".join(text for text in (self.closed, *self._warnings.values(), self._record.warning) if text)

    @property
    def others_problem(self) -> str:
        """Why others are let in by a rule, and yet refused."""
        return self.policy.others_problem(self.asked.owner)

    def refusal(self, order: JobOrder, pilots: Sequence[JobOrder] = ()) -> str:
        """See `Policy.refusal`."""
        if self.closed:
            return self.closed
        return self.policy.refusal(order, str(self.image_root), self.asked.owner, pilots, self._path.parent)

    def submission(self, job: Tracked) -> Submission:
        """What the scheduler is handed; see `Asked.submission`."""
        return self.asked.submission(job, self.policy.time_limit_s(job.order))

    def refresh(self) -> bool:
        """Read files again that changed; True when something else holds now, or is to be said."""
        stamps = self._look()
        if stamps == self._stamps:
            return False
        before, closed = self.policy, self.closed
        centre_changed, own_changed = (new != old for new, old in zip(stamps, self._stamps, strict=True))
        self._stamps = stamps
        if centre_changed:
            self.closed = ""
            self._try_centre()
        if own_changed:
            self._try_own()
        self.policy = self._combined()
        if self.policy != before:
            self._note()
        return self.policy != before or self.closed != closed

    def _try_centre(self) -> None:
        self._warnings.pop(self._centre, None)
        try:
            self._read_centre()
        except FileNotFoundError:
            if self._said:
                self._say(self._centre, f"{self._centre} is gone, its rules hold until the agent is started again")
        except Untrusted as error:
            self.closed = f"{self._centre}: {error}; nothing is taken up until that is mended"
            log.error("%s", self.closed)
        except (InvalidInput, OSError, ValueError) as error:
            text = f"{self._centre} was changed but not accepted"
            if self._said:
                self._say(self._centre, f"{text}, the old rules hold: {str(error).splitlines()[0]}")
            else:  # there are no old ones of the centre's
                self.closed = f"{text}; nothing is taken up until it is mended: {str(error).splitlines()[0]}"
                log.error("%s", self.closed)

    def _try_own(self) -> None:
        self._warnings.pop(self._path, None)
        try:
            self._read_own()
        except FileNotFoundError:
            # Some editors take the file away before they put the new one there; that must not open the endpoint.
            text = "policy.toml is gone, the old rules hold; to go without, restart the agent or leave it empty"
            self._say(self._path, text)
        except (InvalidInput, OSError, ValueError) as error:
            why = str(error).splitlines()[0]
            self._say(self._path, f"policy.toml was changed but not accepted, the old rules hold: {why}")

    def _say(self, file: Path, text: str) -> None:
        self._warnings[file] = text
        log.warning("%s", text)

    def _read_own(self) -> None:
        self._own = parse_policy(tomllib.loads(self._path.read_text(encoding="utf-8")))

    def _read_centre(self) -> None:
        raw = tomllib.loads(_trusted(self._centre, self._root))
        parse_policy(raw)
        self._said = raw

    def _combined(self) -> Policy:
        return narrowed(parse_policy(self._said), self._said, self._own) if self._said else self._own

    def _note(self) -> None:
        self._record.note(self.policy.describe(), self.files)
        if self.others_problem:
            log.warning("policy.toml: %s", self.others_problem)

    def _look(self) -> tuple[_Stamp, _Stamp]:
        folder = _stamp(self._centre.parent)
        return (*_stamp(self._centre), *folder[:3]), _stamp(self._path)


def look_at(path: Path, centre: Path = CENTRE) -> PolicyFile:
    """What an agent would make of a file; nothing is noted. Raises InstallationProblem as it would."""
    return PolicyFile(path, centre=centre, records=False)


def _stamp(path: Path) -> _Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return (0,)
    return found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_size, found.st_ino


def _trusted(path: Path, root: int) -> str:
    """What a file says that nobody but root can have written.

    Raises:
        Untrusted: somebody else can change it, or put another in its place.
        OSError, ValueError: it is not there, cannot be read, or is no text.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        for what, state in (("the file", found), ("its folder", os.stat(path.parent))):
            if state.st_uid != root or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise Untrusted(f"{what} must be root's, and writable by nobody else")
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            raise ValueError("it is no plain file of a reasonable size")
        return os.read(fd, _MAX_BYTES).decode()
    finally:
        os.close(fd)
