"""The runner of a recipe's commands: the user's file runs as it is, and a failure names its line."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from diamond.agent.builders.runner import FAILED_LINE, RUNNER, RUNNER_FILE

SHELLS = ["bash", *(["busybox"] if shutil.which("busybox") else [])]


def _run(folder: Path, text: str, shell: str = "bash", **env: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / RUNNER_FILE).write_text(RUNNER)
    (folder / "commands.sh").write_bytes(text.encode())
    program, path = ["/bin/sh"], os.environ["PATH"]
    if shell == "busybox":  # an image without bash: its programs are all there is
        busybox = shutil.which("busybox")
        assert busybox
        (folder / "bin").mkdir(exist_ok=True)
        if not (folder / "bin/cat").exists():
            os.symlink(busybox, folder / "bin/cat")
        program, path = [busybox, "sh"], str(folder / "bin")
    return subprocess.run(
        [*program, str(folder / RUNNER_FILE), str(folder / "commands.sh"), "build"],
        capture_output=True, text=True, check=False, env={"PATH": path, "HOME": "/", **env},
    )  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("text", "number", "code"),
    [
        ("false", "1", 1),
        ("true\n\n# comment\ncat <<X\nhe\nX\nfalse\necho no\n", "7", 1),
        ("if true; then\n  false || true\n  (exit 4)\nfi\n", "3", 4),
        ("true\nset -u\n\necho $nope\n", "4", None),
    ],
)
def test_the_failing_line_is_named(tmp_path: Path, shell: str, text: str, number: str, code: int | None) -> None:
    done = _run(tmp_path, text, shell)
    found = FAILED_LINE.search(done.stderr)
    assert found is not None
    assert done.returncode == (int(found["code"]) if code is None else code)
    assert found["label"] == "build"
    if "nope" not in text or shell == "busybox":
        assert found["number"] == number
    else:
        assert f"line {number}: nope: unbound" in done.stderr  # bash says it itself
    assert "no\n" not in done.stdout


def test_bash_names_the_line_inside_a_function_and_the_command(tmp_path: Path) -> None:
    done = _run(tmp_path, "f() {\n  true\n  ls /no/such\n}\nf\n")
    assert FAILED_LINE.search(done.stderr)
    assert done.stderr.splitlines()[-1] == "diamond: build line 3 ended with 2: ls /no/such"


def test_exit_passes_its_code_on_and_is_shown(tmp_path: Path) -> None:
    done = _run(tmp_path, "echo out\nexit 7\n")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr == "diamond: build line ? ended with 7: exit 7\n"


@pytest.mark.parametrize("text", ["", "exit 0", "false || true\n", "set +e\nfalse\ntrue"])
def test_success_says_nothing(tmp_path: Path, text: str) -> None:
    done = _run(tmp_path, text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_commands_see_nothing_of_it(tmp_path: Path) -> None:
    text = "echo \"$0 $# ${BASH_ENV-unset}\"\nbash -c 'trap -p; env' | grep -i -e diamond -e bash_env || echo nothing\n"
    done = _run(tmp_path, text)
    assert done.stdout == f"{tmp_path / 'commands.sh'} 0 unset\nnothing\n"


def test_a_users_own_traps_and_heredocs_are_his(tmp_path: Path) -> None:
    text = "trap 'echo mine' EXIT\ncat <<'EOF'\n$HOME `id` it's\nEOF\nfalse\n"
    done = _run(tmp_path, text)
    assert done.returncode == 1
    assert done.stdout == "$HOME `id` it's\nmine\n"


def test_a_path_full_of_tricks_is_only_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "a $(touch pwned) `touch pwned` 'b\" $HOME"
    done = _run(folder, "echo fine\nfalse\n")
    assert done.stdout == "fine\n"
    assert "build line 2 ended with 1: false" in done.stderr
    assert not list(tmp_path.rglob("pwned"))
    assert not Path("pwned").exists()
