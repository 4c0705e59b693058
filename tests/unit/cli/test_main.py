"""The command as a whole: what it imports, how it answers errors, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diamond.cli import launch, live, main, serve
from diamond.core.errors import InvalidInput
from diamond.core.home import Home
from diamond.core.reasons import Reason
from diamond.core.states import Desired, TaskState
from diamond.core.tasks import Task

HEAVY = ("httpx", "rich", "yaml", "pathspec", "diamond.sdk", "diamond.server", "torch", "asyncio")


def loaded_after(code: str, tmp_path: Path, **env: str) -> set[str]:
    """Which heavy modules a fresh interpreter has loaded after running `code`."""
    script = f"import sys\ntry:\n  {code}\nexcept SystemExit: pass\n"
    script += "print('LOADED', *[m for m in sys.modules if m in " + repr(HEAVY) + "], file=sys.stderr)"
    environ = {**os.environ, "DIAMOND_HOME": str(tmp_path / "home"), **env}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=False)
    line = next(line for line in done.stderr.splitlines() if line.startswith("LOADED"))
    return set(line.split()[1:])


def run_main(arguments: str) -> str:
    return f"from diamond.cli.main import main; main({arguments.split()!r})"


@pytest.mark.parametrize("arguments", ["--help", "--version", "launch --help", "endpoint --help", "psx"])
def test_help_loads_nothing_heavy(arguments: str, tmp_path: Path) -> None:
    assert loaded_after(run_main(arguments), tmp_path) == set()


def test_a_command_without_server_loads_only_the_client(tmp_path: Path) -> None:
    closed = "http://127.0.0.1:1"
    found = loaded_after(run_main("ps --limit 3"), tmp_path, DIAMOND_URL=closed, DIAMOND_TOKEN="t")
    assert found <= {"httpx", "diamond.sdk"}
    assert loaded_after(run_main("ps"), tmp_path, DIAMOND_URL=closed, DIAMOND_TOKEN="t") <= {"httpx", "diamond.sdk"}
    assert loaded_after(run_main("ps"), tmp_path) <= {"httpx", "diamond.sdk"}


def test_every_command_has_a_section_and_help() -> None:
    import typer

    commands = typer.main.get_command(main.build()).commands  # type: ignore[attr-defined]
    listed = [name for names in main.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(commands)
    assert all(command.help for command in commands.values())


@pytest.fixture
def no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path / "home"))
    for name in ("DIAMOND_URL", "DIAMOND_TOKEN", "DIAMOND_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(arguments)
    return int(caught.value.code or 0)


def test_errors_are_two_lines_on_stderr(no_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["ps"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: no Diamond server is known here\nhint: ")


def test_errors_as_json(no_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["ps", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "installation_problem"
    assert call(["ps", "--json", "--nonsense"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "invalid_input"


def test_wrong_use_is_2(no_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["psx"]) == 2
    assert "Did you mean 'ps'" in capsys.readouterr().err
    assert call(["launch"]) == 2
    assert call(["ps", "--limit", "0"]) == 2


def test_unknown_exceptions_are_one_line(
    no_server: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**options: object) -> None:
        raise RuntimeError("odd \x1b[2J thing")

    monkeypatch.setattr("diamond.cli.tasks.ps", broken)
    assert call(["ps"]) == 1
    err = capsys.readouterr().err
    assert err.splitlines() == ["error: RuntimeError: odd  thing", "hint: run with --debug for the traceback"]
    with pytest.raises(RuntimeError):
        main.main(["ps", "--debug"])


def test_launch_names_place_in_the_file(no_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (no_server / "t.yaml").write_text("run: x\nresources:\n  cpus: lots\n")
    assert call(["launch", "t.yaml"]) == 1
    err = capsys.readouterr().err
    assert "resources.cpus" in err
    assert "t.yaml, line 3, column 3" in err


def test_command_line_wins_over_the_file(no_server: Path) -> None:
    (no_server / "exp.yaml").write_text("run: x\nresources: {cpus: 1, memory: 4}\nenvs: {A: null}\n")
    changes = launch.Changes(cpus="8", gpus="2", infra="hpc", num_nodes=3, max_duration="2h")
    spec = launch.read("exp.yaml", ["A=b=c"], changes)
    assert spec.name == "exp"
    assert (spec.num_nodes, spec.max_duration) == (3, 7200)
    assert spec.resources.cpus == "8"
    assert spec.resources.memory == "4"
    assert spec.resources.accelerators == "gpu:2"
    assert spec.envs == {"A": "b=c"}
    with pytest.raises(InvalidInput) as caught:
        launch.read("exp.yaml", [], launch.Changes(num_nodes=0))
    assert caught.value.field == "num_nodes"
    with pytest.raises(InvalidInput, match=r"exp\.yaml, line 3"):  # A has no value
        launch.read("exp.yaml", [], launch.Changes())


def test_status_text_and_reasons() -> None:
    task = Task(id="tsk_1", name="a\x1b[2J", state=TaskState.RUNNING, endpoint="hpc", attempt=2, started_at=100.0)
    assert live.status_text(task, 165.0) == "RUNNING a · on hpc · attempt 2 · 1m 05s"
    waiting = Task(id="tsk_1", name="a", state=TaskState.PENDING, pending_reason="no endpoint is online")
    assert live.status_text(waiting, 1.0) == "PENDING a · no endpoint is online"
    stopping = Task(id="tsk_1", name="a", state=TaskState.RUNNING, desired=Desired.CANCEL)
    assert live.status_text(stopping, 1.0).startswith("STOPPING")
    failed = Task(id="t", name="a", state=TaskState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=3, detail="it said 3")
    assert live.reason_lines(failed) == [failed.sentence, "it said 3"]


def test_metric_line_puts_loss_first_and_fits() -> None:
    series = {"lr": [0.1], "val/acc": [0.5, 0.6], "loss": [1.0, 0.5], "loss@rank1": [9.0]}
    line = live.metric_line(series, 7, 80)
    assert line.startswith("step 7   loss 0.5 █▁   val/acc 0.6 ▁█   lr 0.1")
    assert len(live.metric_line(series, 7, 30)) <= 30


def test_running_server_believes_the_lock_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.server.mkdir()
    home.server_file.write_text(json.dumps({"pid": os.getpid(), "url": "http://x"}))
    assert serve.running_server(home) is None  # a stale server.json is no server
    lock = home.server / "server.lock"
    held = "import fcntl,os,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,2); f.write(str(os.getpid())); f.flush();"
    child = subprocess.Popen(
        [sys.executable, "-c", held + "print('held',flush=True); sys.stdin.read()", str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout and child.stdout.readline() == b"held\n"
        assert serve.running_server(home) == {"pid": child.pid, "url": ""}
        child.communicate()
    assert serve.running_server(home) is None
