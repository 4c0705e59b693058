"""`diamond agent policy`: the rules in force for whoever runs the agent, and whether a new file would be accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diamond.agent.centre import CENTRE
from diamond.agent.policy_files import POLICY_FILE, look_at
from diamond.core.errors import InstallationProblem, InvalidInput


def read(file: Path, centre: Path = CENTRE) -> dict[str, Any]:
    """What an agent would make of a file, within its centre's. `ok`: it would accept it."""
    said: dict[str, Any] = {"file": str(file), "exists": file.exists(), "ok": True, "rules": {}, "problem": None}
    said |= {"files": [], "not_in_force": None}
    try:
        found = look_at(file, centre)
    except InstallationProblem as error:
        return said | {"ok": False, "problem": error.message}
    said |= {"rules": found.policy.describe(), "files": list(found.files)}
    if problem := found.others_problem:
        said |= {"ok": False, "not_in_force": problem}
    return said


def show(home: Path, *, check: Path | None = None, as_json: bool = False, centre: Path = CENTRE) -> int:
    """Print the rules; the exit status is 1 when the file would not be accepted as it is.

    Raises:
        InvalidInput: there is no such file to check.
    """
    if check is not None and not check.is_file():
        raise InvalidInput(f"{check}: there is no such file", field="--check")
    said = read(home / POLICY_FILE if check is None else check, centre)
    if as_json:
        print(json.dumps(said, indent=2), flush=True)
        return 0 if said["ok"] else 1
    if said["problem"]:
        print(f"not accepted: {said['problem']}")
        print("An agent that runs keeps the rules it had; one that starts would refuse to.", flush=True)
        return 1
    print(said["file"] if said["exists"] else f"{said['file']} is not there; these hold without it:")
    if said["files"] and said["files"][0] != said["file"]:
        print(f"Its centre's rules come first ({said['files'][0]}); these hold of both:")
    width = max(map(len, said["rules"]))
    for name, value in said["rules"].items():
        print(f"  {name.ljust(width)}  {value}")
    if said["not_in_force"]:
        print(f"not in force: {said['not_in_force']}")
    print(end="", flush=True)
    return 0 if said["ok"] else 1
