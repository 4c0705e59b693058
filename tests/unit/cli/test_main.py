"""The command as a whole: what it imports, how it answers errors, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diamond.cli import launch, main, serve, session
from diamond.core.accounts import SCOPE_FIELD
from diamond.core.errors import Forbidden, InvalidInput
from diamond.core.home import Home

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


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "launch --help", "endpoint --help", "image --help", "psx"]
)
def test_help_loads_nothing_heavy(arguments: str, tmp_path: Path) -> None:
    assert loaded_after(run_main(arguments), tmp_path) == set()


def test_a_command_without_server_loads_only_the_client(tmp_path: Path) -> None:
    closed = "http://127.0.0.1:1"
    found = loaded_after(run_main("ps --limit 3"), tmp_path, DIAMOND_URL=closed, DIAMOND_TOKEN="t")
    assert found <= {"httpx", "diamond.sdk"}
    assert loaded_after(run_main("ps"), tmp_path, DIAMOND_URL=closed, DIAMOND_TOKEN="t") <= {"httpx", "diamond.sdk"}
    assert loaded_after(run_main("ps"), tmp_path) <= {"httpx", "diamond.sdk"}
    found = loaded_after(run_main("image ls"), tmp_path, DIAMOND_URL=closed, DIAMOND_TOKEN="t")
    assert found <= {"httpx", "diamond.sdk"}


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["stop"],
        ["stop", "x", "--all"],
        ["ps", "--state", "NOPE"],
        ["cp", "no-colon", "."],
        ["logs", "-f", "--attempt", "1"],
        ["launch", "t.yaml", "--env", "NOT_SET_ANYWHERE"],
        ["launch", "t.yaml", "--env", "1X=2"],
        ["launch", "t.yaml", "--cpus", "lots"],
        ["endpoint", "create", "x", "--token-file", "no/such/folder/t"],
        ["backup", "no/such/folder/b.tar"],
    ],
    ids=" ".join,
)
def test_wrong_words_of_a_command_are_2(
    no_server: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (no_server / "t.yaml").write_text("run: x\n")
    assert call(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_wrong_files_are_1(no_server: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (no_server / "t.yaml").write_text("run: x\nresources: {cpus: lots}\n")
    assert call(["launch", "t.yaml"]) == 1
    assert call(["launch", "none.yaml"]) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    "group", [[], ["endpoint"], ["agent"], ["image"], ["token"], ["session"], ["user"], ["audit"], ["notify"]]
)
def test_help_lines_are_whole_at_80_columns(
    group: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call([*group, "--help"]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.replace("[ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_trouble(no_server: Path, closed: str) -> None:
    line = f"{sys.executable} -m diamond.cli version {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("command", [["up", "-d"], ["up"], ["serve"]])
def test_a_place_that_cannot_be_written_is_explained(
    command: list[str], no_server: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_server / "file").write_text("")
    monkeypatch.setenv("DIAMOND_HOME", str(no_server / "file" / "home"))
    assert call([*command, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "installation_problem"
    assert "DIAMOND_HOME" in error["hint"]


def test_postgres_without_its_driver_is_explained(
    no_server: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for arguments in (["backup", "b.tar"], ["serve", "--port", "0"]):
        assert call([*arguments, "--database-url", "postgresql://nobody@127.0.0.1:1/none"]) == 1
        err = capsys.readouterr().err
        assert "error: PostgreSQL needs psycopg\nhint: pip install 'diamond-hpc[postgres]'\n" in err


def test_up_leaves_a_running_server_as_it_is(
    no_server: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "running_server", lambda home: {"pid": 7, "url": "http://127.0.0.1:7421"})
    assert call(["up", "-d"]) == 0
    assert capsys.readouterr().err == ""
    assert call(["up", "-d", "--port", "7421"]) == 0
    assert capsys.readouterr().err == ""
    assert call(["up", "-d", "--port", "8000"]) == 0
    err = capsys.readouterr().err
    assert "port was not changed; it is 7421" in err
    assert "diamond down && diamond up -d --port 8000" in err
    assert call(["up", "-d", "--port", "8000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ignored"] == ["--port 8000"]


@pytest.mark.parametrize("command", ["backup", "restore", "up", "serve"])
def test_every_command_on_the_database_takes_its_address(
    command: str, no_server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--database-url" in text
    assert "DIAMOND_DATABASE_URL" in text


def test_commands_are_named_as_they_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/a b/.venv/bin/diamond"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert session.program() == "'/a b/.venv/bin/diamond'"
    monkeypatch.setattr(sys, "argv", ["/x/__main__.py"])
    assert session.program() == "diamond"


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
    assert caught.value.field == "--num-nodes"
    with pytest.raises(InvalidInput) as caught:
        launch.read("exp.yaml", ["A=1"], launch.Changes(gpus="many things"))
    assert caught.value.field == "--gpus"
    with pytest.raises(InvalidInput, match=r"exp\.yaml, line 3"):  # A has no value
        launch.read("exp.yaml", [], launch.Changes())


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


def test_whoever_lacks_a_scope_is_told_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = Forbidden(
        "it lacks the scope `admin`", hint="sign in for one that may: diamond login --scopes admin", field=SCOPE_FIELD
    )
    monkeypatch.setattr(sys, "argv", ["/opt/diamond here/bin/diamond", "user", "ls"])
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("DIAMOND_TOKEN", raising=False)
    session.show_error(lacking, as_json=False)
    said = capsys.readouterr().err
    assert "may: '/opt/diamond here/bin/diamond' login --scopes admin\n" in said, "as it can be typed"
    monkeypatch.setenv("DIAMOND_TOKEN", "dmdu_x")
    session.show_error(lacking, as_json=False)
    assert "DIAMOND_TOKEN: unset it, then sign in" in capsys.readouterr().err, "or nothing would change"
