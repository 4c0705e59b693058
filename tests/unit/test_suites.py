"""What failed in the crowd is looked at once more, alone, and told; nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testing.suites import FEW, deserve_a_second_look

ROOT = Path(__file__).resolve().parents[2]
SECOND_TIME = """
from pathlib import Path

def test_it():
    marker = Path(__file__).with_suffix(".seen")
    seen = marker.exists()
    marker.touch()
    assert seen
"""


def test_only_a_few_of_those_that_start_things() -> None:
    crowded = [f"tests/web/test_{n}.py::test_it" for n in range(FEW)]
    assert deserve_a_second_look(crowded)
    assert not deserve_a_second_look([])
    assert not deserve_a_second_look([*crowded, "tests/web/test_more.py::test_it"])
    assert not deserve_a_second_look(["tests/web/test_0.py::test_it", "tests/unit/core/test_ids.py::test_it"])


def test_it_is_told_which_way_they_went(tmp_path: Path) -> None:
    _write(tmp_path / "tests/web/test_slow.py", SECOND_TIME)
    done = _suites(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed  tests/web/test_slow.py::test_it" in done.stdout.splitlines()[-1]
    _write(tmp_path / "tests/web/test_broken.py", "def test_it():\n    assert False\n")
    (tmp_path / "tests/web/test_slow.seen").unlink()
    done = _suites(tmp_path)
    assert done.returncode == 1
    assert [line.split("  ")[1] for line in done.stdout.splitlines()[-2:]] == ["failed again", "passed"]


def test_what_computes_and_what_cannot_be_read_gets_no_second_look(tmp_path: Path) -> None:
    _write(tmp_path / "tests/unit/test_sum.py", SECOND_TIME)
    assert _suites(tmp_path).returncode == 1
    _write(tmp_path / "tests/unit/test_sum.py", "def test_it(:\n")
    assert _suites(tmp_path).returncode == 2


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _suites(folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\naddopts = --import-mode=importlib\n")
    argv = [sys.executable, "-m", "testing.suites", "-n", "0"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
