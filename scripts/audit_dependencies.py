"""Looks for known holes in what is installed here, with pip-audit, where a database of them can be reached.

Exit status 1: there is one, or an exception is out of date. Never fails for want of a network: it says which databases
it could not ask, and that nothing was checked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from typing import Any

PATIENCE_S = 5.0
LONGEST_S = 300.0
# A question that each database answers, to find out quickly whether it can be asked, and the word in a good answer.
# A mirror of the package index often has the packages without what is known of them.
DATABASES = {
    "pypi": ("https://pypi.org/pypi/requests/2.30.0/json", None, "vulnerabilities"),
    "osv": (
        "https://api.osv.dev/v1/query",
        {"package": {"name": "requests", "ecosystem": "PyPI"}, "version": "2.30.0"},
        "vulns",
    ),
}
# Holes that do not concern us, by id, with the reason. One that is no longer found must go.
EXCEPTIONS: dict[str, str] = {}


def why_not(database: str) -> str:
    """What keeps us from asking this database; empty when nothing does."""
    url, question, word = DATABASES[database]
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310 - the https addresses above
            known = json.load(answer).get(word)
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if known else "it answers, and knows nothing"


def audit(database: str) -> dict[str, Any]:
    """pip-audit's report on this environment.

    Raises:
        OSError, ValueError, subprocess.TimeoutExpired: the database stopped answering meanwhile.
    """
    argv = [sys.executable, "-m", "pip_audit", "--local", "--skip-editable", "--progress-spinner", "off", "-f", "json"]
    argv += ["--vulnerability-service", database, "--timeout", str(int(PATIENCE_S))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONGEST_S)
    if not done.stdout.strip():
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise OSError(last[0])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def judge(report: dict[str, Any], exceptions: dict[str, str]) -> tuple[list[str], list[str], int]:
    """(what is wrong, what could not be checked, how many were)."""
    wrong, unchecked, checked, used = [], [], 0, set()
    for dependency in report["dependencies"]:
        if "skip_reason" in dependency:
            if "editable" not in dependency["skip_reason"]:  # that is us
                unchecked.append(dependency["name"])
            continue
        checked += 1
        for hole in dependency["vulns"]:
            names = {hole["id"], *hole.get("aliases", ())}
            used |= names & set(exceptions)
            if not names & set(exceptions):
                fixed = ", ".join(hole.get("fix_versions", ())) or "no version yet"
                wrong.append(f"{dependency['name']} {dependency['version']}: {hole['id']}, mended in {fixed}")
    if not unchecked:
        wrong += [f"exception {name} is out of date: remove it" for name in sorted(set(exceptions) - used)]
    return wrong, unchecked, checked


def main() -> int:
    reasons = []
    for database in DATABASES:
        reason = why_not(database)
        if not reason:
            try:
                wrong, unchecked, checked = judge(audit(database), EXCEPTIONS)
            except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                for line in wrong:
                    print(f"audit: {line}")
                if unchecked:
                    print(f"audit: {database} does not know {len(unchecked)} packages: {', '.join(sorted(unchecked))}")
                print(f"audit: {checked} packages looked up in {database}, {len(wrong)} problems")
                return 1 if wrong else 0
        reasons.append(f"{database} ({reason[:120]})")
    print(f"audit: dependencies NOT checked for known holes, no database can be asked: {'; '.join(reasons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
