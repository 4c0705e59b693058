"""`diamond agent policy`: the rules of policy.toml for its owner, and whether a new file would be accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diamond.agent.policy import PolicyFile
from diamond.core.errors import InstallationProblem, InvalidInput


def read(file: Path) -> dict[str, Any]:
    """What an agent would make of a file. `ok`: it would accept it."""
    said: dict[str, Any] = {"file": str(file), "exists": file.exists(), "ok": True, "rules": {}, "problem": None}
    try:
        said["rules"] = PolicyFile(file).policy.describe()
    except InstallationProblem as error:
        said |= {"ok": False, "problem": error.message}
    return said


def show(home: Path, *, check: Path | None = None, as_json: bool = False) -> int:
    """Print the rules; the exit status is 1 when the file would not be accepted.

    Raises:
        InvalidInput: there is no such file to check.
    """
    if check is not None and not check.is_file():
        raise InvalidInput(f"{check}: there is no such file", field="--check")
    said = read(home / "policy.toml" if check is None else check)
    if as_json:
        print(json.dumps(said, indent=2), flush=True)
        return 0 if said["ok"] else 1
    if not said["ok"]:
        print(f"not accepted: {said['problem']}")
        print("An agent that runs keeps the rules it had; one that starts would refuse to.", flush=True)
        return 1
    print(said["file"] if said["exists"] else f"{said['file']} is not there; these hold without it:")
    width = max(map(len, said["rules"]))
    for name, value in said["rules"].items():
        print(f"  {name.ljust(width)}  {value}")
    print(end="", flush=True)
    return 0
