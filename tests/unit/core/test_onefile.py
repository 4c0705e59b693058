"""The one-file agent: the same bytes each time, and all that a bare interpreter needs. Run for real, isolated."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from diamond.core import onefile

# Everything the agent loads while it works, some of it late.
_EVERYTHING = """
import importlib, pkgutil, sys
import diamond.agent, diamond.core, diamond.planner, diamond.train
for package in (diamond.agent, diamond.core, diamond.planner, diamond.train):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        needs_torch = module.name.startswith(("diamond.train.loop", "diamond.train.adapters"))
        if not needs_torch and module.name.rpartition(".")[2] not in ("__main__", "launch"):
            importlib.import_module(module.name)
from importlib import resources
compile(resources.files("diamond").joinpath("train/launch.py").read_bytes(), "launch.py", "exec")
from diamond.core.compat import tomllib
from diamond.core.states import JobState
assert tomllib.loads("a = 1")["a"] == 1
assert f"{JobState.RUNNING} {JobState.RUNNING!s}" == "RUNNING RUNNING"
outside = [name for name in sys.modules if name.partition(".")[0] in ("httpx", "pydantic", "typer", "yaml", "rich")]
assert not outside, outside
print("loaded")
"""


def interpreters() -> list[str]:
    """Every Python from 3.10 on that is here, besides the one that runs the tests."""
    found = {sys.executable: ""}
    for minor in range(10, 16):
        name = f"python3.{minor}"
        places = [shutil.which(name), *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))]
        found.update({place: "" for place in places if place and "shims" not in place})
    return list(found)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("a b'$(x)") / "diamond-agent.pyz"
    file.write_bytes(onefile.build())
    return file


def run(python: str, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd)}
    return subprocess.run(
        [python, "-I", "-S", *argv], env=env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    before = onefile.build()
    onefile.build.cache_clear()
    assert onefile.build() == before
    assert len(onefile.digest()) == 64
    names = zipfile.ZipFile(io.BytesIO(before)).namelist()
    assert names == sorted(names)
    assert {"__main__.py", "diamond/train/launch.py", "diamond/core/_tomllib/__init__.py"} <= set(names)
    others = ("diamond/server", "diamond/sdk", "diamond/cli", "diamond/planner/pools")
    assert not [name for name in names if name.startswith(others)]


@pytest.mark.parametrize("python", interpreters())
def test_a_bare_interpreter_runs_all_of_it(agent: Path, python: str, tmp_path: Path) -> None:
    """-I -S: no site-packages, nothing of the user's; only the standard library and the file."""
    said = run(python, str(agent), "version", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    code = f"import sys; sys.path.insert(0, {str(agent)!r})\n{_EVERYTHING}"
    loaded = run(python, "-W", "error", "-c", code, cwd=tmp_path)
    assert loaded.stdout == "loaded\n", loaded.stderr


def test_python_3_10_was_among_them() -> None:
    if not any("3.10" in python for python in interpreters()):
        pytest.skip("no Python 3.10 on this machine: only its syntax and names are checked (test_compat.py)")


def test_an_old_python_says_what_is_missing(agent: Path, tmp_path: Path) -> None:
    old = sorted(Path.home().glob(".pyenv/versions/[23].[67]*/bin/python"))
    if not old:
        pytest.skip("no Python older than 3.10 on this machine")
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    for python in old:
        done = subprocess.run(
            [str(python), str(agent), "version"], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1
        assert "3.10 or newer is needed" in done.stderr
    (tmp_path / "python3.11").symlink_to(sys.executable)
    found = subprocess.run(
        [str(old[0]), str(agent), "version"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr  # a newer one on the path is used by itself
