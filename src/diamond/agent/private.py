"""What of the agent's account no task may see: the folders of agents and of the server, and whose home it is."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from diamond.core.home import Home
from diamond.core.views import outermost


def own_folders(agent_home: Path) -> tuple[str, ...]:
    """Folders with tokens, policies, journals, secrets and run directories: this agent's, those of others of the same
    account, and a server's. They need not exist yet."""
    diamond = Home.find()
    return outermost([str(path) for path in (agent_home.absolute(), diamond.path / "agents", diamond.server)])


def account_home() -> str:
    """As the system has it; HOME may say otherwise."""
    try:
        found = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        found = os.path.expanduser("~")
    return found if found.startswith("/") and found != "/" else ""


def leads_in(path: str, agent_home: Path) -> bool:
    """Whether a path is, holds or lies in the account's home or one of these folders, symbolic links followed."""
    real = os.path.realpath(path)
    homes = [home for home in (account_home(), os.environ.get("HOME", "")) if home.startswith("/")]
    for closed in map(os.path.realpath, (*own_folders(agent_home), *homes)):
        if os.path.commonpath((real, closed)) in (real, closed):
            return True
    return False
