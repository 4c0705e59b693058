"""What runs in job directories and users' environments must suit Pythons older than ours."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import diamond
from tests.train.test_launch import PACKAGE


@pytest.mark.parametrize("path", [*PACKAGE.glob("*.py"), Path(diamond.__file__)], ids=lambda path: path.name)
def test_syntax_and_imports_suit_old_python(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    outside = {name for name in modules if name.split(".")[0] not in sys.stdlib_module_names}
    beside = {"regroup", "lines", "team"} if path.name in ("launch.py", "regroup.py") else set()
    assert path.name not in ("lines.py", "team.py") or not outside
    assert all(name.startswith("diamond.") for name in outside - beside)
