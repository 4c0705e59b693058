"""The command line as a user types it, against a real service."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import DiamondError
from diamond.core.states import TaskState
from testing import postgres
from testing.postgres import free_port
from testing.service import Service
from testing.waiting import eventually


def run(service: Service, *argv: str, code: int = 0) -> str:
    done = service.diamond(*argv)
    assert done.returncode == code, f"{argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if code == 0 else done.stdout + done.stderr


def run_json(service: Service, *argv: str) -> Any:
    return json.loads(run(service, *argv, "--json"))


YAML_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n"
for before, after in zip("abcdefgh", "bcdefghi", strict=True):
    YAML_BOMB += f"{after}: &{after} [{','.join([f'*{before}'] * 9)}]\n"
YAML_BOMB += "run: x\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A work directory with something to upload and something to leave behind."""
    (tmp_path / "program.sh").write_text('echo "x=$X"; mkdir -p out; echo result > out/model.txt; cat data/d.txt\n')
    (tmp_path / "big.bin").write_bytes(b"\0" * 2_000_000)
    (tmp_path / "secret.env").write_text("no")
    (tmp_path / ".diamondignore").write_text("secret.env\n")
    (tmp_path / "elsewhere.txt").write_text("mounted\n")
    (tmp_path / "task.yaml").write_text(
        "name: tour\n"
        "workdir: .\n"
        "file_mounts: {data/d.txt: elsewhere.txt}\n"
        "envs: {X: }\n"
        "run: ls; bash program.sh\n"
        "outputs: [out]\n"
    )
    return tmp_path


def test_the_tour(service: Service, folder: Path) -> None:
    task_file = str(folder / "task.yaml")
    refused = run(service, "launch", task_file, code=1)
    assert "envs.X" in refused
    assert "--env X=VALUE" in refused

    out = run(service, "launch", task_file, "--env", "X=a=b 'c'")
    assert "x=a=b 'c'" in out
    assert "mounted" in out
    assert "secret.env" not in out
    assert run_json(service, "show", "tour")["state"] == "SUCCEEDED"

    shown = run_json(service, "show", "tour")
    assert shown["state"] == "SUCCEEDED"
    assert shown["spec"]["envs"] == {"X": "a=b 'c'"}
    assert run_json(service, "show", shown["id"][:14])["id"] == shown["id"]
    assert "x=a=b 'c'" in run(service, "logs", "tour")
    listed = run_json(service, "ps", "-a")
    assert shown["id"] in json.dumps(listed)

    run(service, "outputs", "tour", "--to", str(folder / "fetched"))
    assert (folder / "fetched" / "out" / "model.txt").read_text() == "result\n"
    run(service, "cp", "tour:out/model.txt", str(folder / "copy.txt"))
    assert (folder / "copy.txt").read_text() == "result\n"


def test_unchanged_files_are_not_sent_again(service: Service, folder: Path) -> None:
    task_file = str(folder / "task.yaml")
    run(service, "launch", task_file, "--env", "X=1", "-d")
    blobs = service.home.server / "blobs"
    before = {path: path.stat().st_mtime_ns for path in blobs.rglob("*") if path.is_file()}
    run(service, "launch", task_file, "--env", "X=2", "-d")
    after = {path: path.stat().st_mtime_ns for path in blobs.rglob("*") if path.is_file()}
    assert before == after


def test_dry_run_shows_and_does_nothing(service: Service, folder: Path) -> None:
    before = run_json(service, "ps", "-a")
    text = run(service, "launch", str(folder / "task.yaml"), "--env", "X=1", "--dry-run")
    assert "bash program.sh" in text
    assert "local" in text
    plan = run_json(service, "launch", str(folder / "task.yaml"), "--env", "X=1", "--dry-run")
    assert plan["endpoint"] == "local"
    assert plan["why"]
    assert "#!/usr/bin/env bash" in plan["script"]
    assert run_json(service, "ps", "-a") == before


def test_exit_codes_follow_the_task(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("run: echo oops; exit 7\n")
    out = run(service, "launch", str(path), code=1)
    assert "oops" in out
    assert "7" in out
    path.write_text("name: sleeper\nrun: sleep 600\n")
    run(service, "launch", str(path), "-d")
    service.wait_for_task("sleeper", TaskState.RUNNING)
    assert "sleeper" in run(service, "ps")
    assert "sleeper" in run(service, "queue")
    run(service, "stop", "sleeper", "-y")
    service.wait_for_task("sleeper", TaskState.CANCELLED)
    run(service, "gpus")
    run(service, "check")
    run(service, "events")
    run(service, "endpoint", "ls")
    run(service, "endpoint", "show", "local")


def test_attempts_are_told_apart_in_a_pipe(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("run: echo try $DIAMOND_ATTEMPT; exit 7\nretry: {max_retries: 1, backoff: 2s}\n")
    done = service.diamond("launch", str(path))
    assert done.returncode == 1
    assert done.stdout == "try 1\ntry 2\n"  # nothing but the log
    announced, begun = (done.stderr.find(part) for part in ("attempt 1 failed: EXIT_NONZERO: ", "── attempt 2 ──"))
    assert 0 < announced < begun
    assert "exit code 7" in done.stderr[announced:begun]
    assert "next attempt in 2s" in done.stderr[announced:begun]
    assert "attempt 2 failed" not in done.stderr  # the summary says that
    again = service.diamond("logs", "-f")
    assert again.stdout == done.stdout
    assert "attempt 1 failed" in again.stderr
    assert "next attempt" not in again.stderr


def test_notes_of_a_success_are_shown(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "noted.yaml"
    path.write_text("run: echo x > made.txt\noutputs: [made.txt, 'nope*']\n")
    done = service.diamond("launch", str(path))
    assert done.returncode == 0
    assert "note: output 'nope*' matches no file" in done.stderr
    assert "note: output 'nope*' matches no file" in run(service, "show", "noted")
    path.write_text("run: 'true'\noutputs: ['nope*']\n")
    run(service, "launch", str(path))
    assert "no file matched: nope*" in run(service, "outputs", "noted", "--to", str(tmp_path / "d"), code=1)


def test_why_a_task_waits_is_said_while_following(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("name: blocker\nrun: sleep 600\n")
    cpus = str(run_json(service, "endpoint", "show", "local")["facts"]["cpus_per_node"])
    run(service, "launch", str(path), "-d", "--cpus", cpus)
    service.wait_for_task("blocker", TaskState.RUNNING)
    process = subprocess.Popen(
        [sys.executable, "-m", "diamond.cli", "launch", str(path), "--cpus", cpus, "--name", "waiter"],
        env=service.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        while "CPU cores" not in (line := process.stderr.readline()):  # the agent first says: a free slot
            assert line
        assert "QUEUED waiter · on local · waiting for" in line
        assert "CPU cores" in run(service, "ps")
        assert "CPU cores" in run(service, "queue")
        assert "CPU cores" in run(service, "show", "waiter")
    finally:
        run(service, "stop", "waiter", "blocker")
        process.communicate(timeout=30)
    assert process.returncode == 3


def test_unknown_metric_and_ambiguous_id(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "measured.yaml"
    path.write_text('run: |\n  echo \'{"step":1,"t":1.0,"loss":0.5}\' >> "$DIAMOND_METRICS_FILE"\n')
    run(service, "launch", str(path))
    run(service, "launch", str(path))
    refused = run(service, "metrics", "measured", "lost", code=1)
    assert "did you mean 'loss'? `diamond metrics tsk_" in refused
    assert "/api/" not in refused
    assert "attempt" in run(service, "metrics", "measured", "loss", "--attempt", "9", code=1)
    assert "is ambiguous" in run(service, "show", "tsk_", code=1)


def test_output_to_nowhere(service: Service) -> None:
    for command in ("ps -a", "endpoint ls", "logs", "version"):
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m diamond.cli {command} >&-"],
            env=service.env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Error" not in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: [1, 2]\n", "one command per line"),
        ("runn: x\n", "did you mean 'run'"),
        ("run: x\nrun: y\n", "line 2"),
        (YAML_BOMB, "error"),
        ("run: !!python/object/apply:os.system ['touch /tmp/diamond-pwned']\n", "error"),
        ("run: x\nworkdir: /does/not/exist\n", "workdir"),
        ("run: x\nfile_mounts: {../x: y}\n", "file_mounts"),
        ("\x00", "error"),
        ("- a\n- b\n", "mapping"),
        ("", "error"),
    ],
    ids=range(10),
)
def test_bad_files_are_explained(service: Service, tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    out = run(service, "launch", str(path), "-d", code=1)
    assert expected in out
    assert len(out) < 3000
    assert "Traceback" not in out


def test_links_out_of_the_workdir_are_refused(service: Service, tmp_path: Path) -> None:
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    (tmp_path / "t.yaml").write_text("workdir: .\nrun: cat passwd\n")
    out = run(service, "launch", str(tmp_path / "t.yaml"), code=1)
    assert "passwd" in out
    assert "workdir" in out


def test_ctrl_c_detaches_and_the_task_goes_on(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        f"name: keeps going\nrun: echo begun; until [ -e {tmp_path}/go ]; do sleep 0.1; done; echo finished\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "diamond.cli", "launch", str(path)],
        env=service.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while "begun" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "diamond logs" in rest
    assert run_json(service, "show", "keeps going")["state"] == "RUNNING"
    (tmp_path / "go").touch()
    service.wait_for_task("keeps going", TaskState.SUCCEEDED)
    assert "finished" in run(service, "logs", "keeps going")


def test_control_characters_do_not_reach_a_terminal(service: Service, tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text('run: printf "\\033]0;title\\007\\033[2Jred \\033[31mx\\033[0m\\n"\n')
    run(service, "launch", str(path))
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "diamond.cli", "logs"], env=service.env, stdout=follower, stderr=follower
    ) as process:
        process.wait(timeout=20)
    os.close(follower)
    seen = os.read(leader, 65536)
    os.close(leader)
    assert b"red" in seen
    assert b"\x1b]0;" not in seen
    assert b"\x1b[2J" not in seen


def test_follow_survives_a_restart_of_everything(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text("run: for n in $(seq 1 100); do echo line $n; sleep 0.04; done\n")
    with Service(tmp_path / "home") as service:
        process = subprocess.Popen(
            [sys.executable, "-m", "diamond.cli", "launch", str(path), "--json"],
            env=service.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with service.client() as client:
            eventually(lambda: client.tasks.page()[0], what="it was launched")
        time.sleep(1)
        service.kill(service.server)
        service.kill(service.agent)
        service.start_server()
        service.start_agent()
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "".join(f"line {n}\n" for n in range(1, 101)) == run(service, "logs")
        text = "".join(item.get("text", "") for item in map(json.loads, out.splitlines()))
        assert [line for line in text.splitlines() if line.startswith("line ")] == [f"line {n}" for n in range(1, 101)]


def test_up_and_down(tmp_path: Path) -> None:
    """`diamond up -d` on an empty home, used, restarted with a job running, and taken down."""
    service = Service(tmp_path / "home")
    try:
        started = run(service, "up", "-d", "--port", str(service.port))
        assert service.url in started
        assert "already" in run(service, "up", "-d", "--port", str(service.port))
        other = service.diamond("up", "-d", "--port", str(free_port()))
        assert other.returncode == 0
        assert f"port was not changed; it is {service.port}" in other.stderr
        path = tmp_path / "t.yaml"
        path.write_text("name: long\nrun: echo one; sleep 4; echo two\n")
        run(service, "launch", str(path), "-d")
        service.wait_for_task("long", TaskState.RUNNING)
        run(service, "down")
        assert run(service, "ps", code=1).count("diamond up") == 1
        run(service, "up", "-d", "--port", str(service.port))
        service.wait_for_task("long", TaskState.SUCCEEDED)
        assert run(service, "logs", "long") == "one\ntwo\n"
        target = tmp_path / "backup.tar.gz"
        run(service, "backup", str(target))
        run(service, "down")
        restored = Service(tmp_path / "other home")
        run(restored, "restore", str(target))
        run(restored, "up", "-d", "--port", str(restored.port))
        try:
            assert run(restored, "logs", "long") == "one\ntwo\n"
        finally:
            run(restored, "down")
    finally:
        service.diamond("down")
        service.stop()


@pytest.mark.postgres
@pytest.mark.skipif(postgres.why_not() is not None, reason=str(postgres.why_not()))
def test_backup_and_restore_with_postgres(tmp_path: Path) -> None:
    """Saved from PostgreSQL and restored into it, named on the command line."""
    with postgres.running_server() as database:
        service = Service(tmp_path / "home")
        option = ("--database-url", database)
        try:
            run(service, "up", "-d", "--port", str(service.port), *option)
            (tmp_path / "t.yaml").write_text("name: kept\nrun: echo one\n")
            run(service, "launch", str(tmp_path / "t.yaml"))
            assert "is no" in run(service, "backup", str(tmp_path / "wrong.tar"), code=1)  # not in SQLite
            assert "Saved 1 task " in run(service, "backup", str(tmp_path / "b.tar"), *option)
            run(service, "down")
            run(service, "restore", str(tmp_path / "b.tar"), "-y", *option)
            run(service, "up", "-d", "--port", str(service.port), *option)
            assert run(service, "logs", "kept") == "one\n"
            assert not (service.home.server / "diamond.db").exists()
        finally:
            service.diamond("down")
            service.stop()


def is_running(service: Service, name: str) -> bool:
    """Of a service that may not be up yet, or not have heard of it."""
    if not service.home.client_file.exists():
        return False
    try:
        with service.client() as client:
            return client.tasks.resolve(name).state is TaskState.RUNNING
    except DiamondError:
        return False


def test_quickstart_left_by_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    service = Service(tmp_path / "home")
    script = Path(__file__).parents[2] / "scripts" / "quickstart.py"
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**service.env, "DIAMOND_PORT": str(service.port)}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        eventually(lambda: is_running(service, "burgers-fno"), within_s=60, every_s=0.2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody in front
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0, out
        assert f"web page: {service.url}" in out
        assert out.count("the task goes on") == 1
        assert "diamond logs -f tsk_" in out
        assert "next:" not in out
        assert run_json(service, "show")["state"] == "RUNNING"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if service.diamond("stop", "--all", "-y").returncode == 0:
            with service.client() as client:
                live = [state for state in TaskState if not state.is_final]
                eventually(lambda: not client.tasks.page(states=live)[0], what="it has stopped")
        service.diamond("down")
        service.stop()
