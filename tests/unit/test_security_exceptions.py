"""Where a security rule of the linter is switched off, the line says why."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Codes, then a dash and the reason.
_SWITCHED_OFF = re.compile(r"#\s*noqa:\s*(?P<codes>[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)(?P<rest>.*)")


def test_every_exception_in_the_source_has_its_reason() -> None:
    silent = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found = _SWITCHED_OFF.search(line)
            if found and re.search(r"\bS\d", found["codes"]) and not re.match(r"\s+-\s+\w", found["rest"]):
                silent.append(f"{path.relative_to(ROOT)}:{number}")
    assert silent == [], "write a dash and the reason behind the codes"


def test_the_security_rules_are_on_and_nothing_escapes_them_wholesale() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    for pattern, rules in lint["per-file-ignores"].items():
        assert "S" not in rules, pattern
        assert not pattern.startswith("src"), pattern
    blanket = [path for path in (ROOT / "src").rglob("*.py") if re.search(r"#\s*noqa\s*$", path.read_text(), re.M)]
    assert blanket == []
