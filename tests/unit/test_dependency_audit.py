"""`make audit`: a hole fails it, a missing network does not, and nothing passes for checked that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "audit_dependencies.py"
HOLE = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"]}


def judge(dependencies: list[dict[str, Any]], exceptions: dict[str, str]) -> Any:
    return run_path(str(SCRIPT))["judge"]({"dependencies": dependencies}, exceptions)


def test_without_a_network_it_says_what_it_could_not_ask() -> None:
    nowhere = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1", "NO_PROXY": ""}
    nowhere["no_proxy"] = ""
    done = subprocess.run([sys.executable, SCRIPT], env=nowhere, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "NOT checked" in done.stdout
    assert "pypi (URLError" in done.stdout
    assert "osv (URLError" in done.stdout


@pytest.mark.parametrize(
    ("vulns", "exceptions", "wrong"),
    [
        ([], {}, []),
        ([HOLE], {}, ["lib 1.0: PYSEC-1, mended in 2.0"]),
        ([HOLE], {"CVE-1": "we never call it"}, []),
        ([], {"CVE-1": "we never call it"}, ["exception CVE-1 is out of date: remove it"]),
    ],
)
def test_what_is_wrong(vulns: list[Any], exceptions: dict[str, str], wrong: list[str]) -> None:
    assert judge([{"name": "lib", "version": "1.0", "vulns": vulns}], exceptions) == (wrong, [], 1)


def test_a_package_the_database_does_not_know_is_named() -> None:
    found = judge(
        [{"name": "lib", "skip_reason": "not found"}, {"name": "us", "skip_reason": "distribution marked as editable"}],
        {},
    )
    assert found == ([], ["lib"], 0)
