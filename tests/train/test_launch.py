"""The launcher, run for real as a subprocess, the way a job script runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import diamond
import diamond.train
from diamond.train.launch import free_port
from testing.waiting import eventually

PACKAGE = Path(diamond.train.__file__).parent
LAUNCH = PACKAGE / "launch.py"
PRELUDE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(text):
    os.write(1, (text + "\\n").encode())
def wait_for(ready):
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
"""


def rank_program(code: str) -> list[str]:
    """Argv of a rank that runs `code`, with `rank`, `say` and `wait_for` at hand."""
    return [sys.executable, "-S", "-c", PRELUDE + code]


def clean_env(**extra: str) -> dict[str, str]:
    ours = re.compile(r"DIAMOND_|SLURM_|MASTER_|.*RANK$|.*WORLD_SIZE$|OMP_NUM_THREADS$|PYTHONUNBUFFERED$")
    return {name: value for name, value in os.environ.items() if not ours.match(name)} | extra


def launcher(*flags: object, argv: list[str]) -> list[str]:
    return [sys.executable, str(LAUNCH), *map(str, flags), "--", *argv]


def launch(*flags: object, argv: list[str], **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(launcher(*flags, argv=argv), capture_output=True, env=clean_env(**env), timeout=100)


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a launcher that the test will signal; none outlives the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(*flags: object, argv: list[str], **env: str) -> subprocess.Popen[bytes]:
        command = launcher(*flags, argv=argv)
        running.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean_env(**env))
        )
        return running[-1]

    yield begin
    for proc in running:
        with proc:  # closes the pipe, then waits
            proc.kill()


def read_until(proc: subprocess.Popen[bytes], *wanted: bytes) -> None:
    """Read whole lines until each of `wanted` has been one."""
    assert proc.stdout is not None
    missing, seen = set(wanted), b""
    while missing:
        line = proc.stdout.readline()
        seen += line
        assert line, f"ended before {missing}, after {seen!r}"
        missing.discard(line.rstrip(b"\n"))


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


# What a rank is given


def test_ranks_know_their_place() -> None:
    code = "import json; say(json.dumps(dict(os.environ)))"
    done = launch("--ranks", 3, argv=rank_program(code), SLURM_PROCID="7", DIAMOND_CPUS="7", MASTER_ADDR="elsewhere")
    assert done.returncode == 0, done.stderr
    envs = sorted((json.loads(line[4:]) for line in done.stdout.splitlines()), key=lambda env: int(env["RANK"]))
    assert len({env["MASTER_PORT"] for env in envs}) == 1
    for number, env in enumerate(envs):
        expected = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": 3,
            "LOCAL_WORLD_SIZE": 3,
            "NODE_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "DIAMOND_RANK": number,
            "DIAMOND_LOCAL_RANK": number,
            "DIAMOND_WORLD_SIZE": 3,
            "DIAMOND_NODE_RANK": 0,
            "DIAMOND_NUM_NODES": 1,
            "SLURM_PROCID": 7,
            "OMP_NUM_THREADS": 2,
            "PYTHONUNBUFFERED": 1,
        }
        assert {name: env[name] for name in expected} == {name: str(value) for name, value in expected.items()}


def test_threads_and_address_given_by_the_user_stay() -> None:
    code = 'say(os.environ["OMP_NUM_THREADS"] + " " + os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])'
    flags = ("--ranks", 1, "--master-addr", "here", "--master-port", 1234)
    assert launch(*flags, argv=rank_program(code), OMP_NUM_THREADS="5").stdout == b"5 here 1234\n"


def test_each_rank_leads_its_own_group_in_the_same_session() -> None:
    code = "say(f'{os.getpgid(0) == os.getpid()} {os.getsid(0)}')"
    done = launch("--ranks", 2, argv=rank_program(code))
    assert sorted(done.stdout.splitlines()) == [f"[{n}] True {os.getsid(0)}".encode() for n in range(2)]


def test_second_node_counts_on() -> None:
    code = "say(' '.join(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'NODE_RANK', 'WORLD_SIZE')))"
    flags = ("--ranks", 2, "--nodes", 2, "--master-addr", "a", "--master-port", 1)
    done = launch(*flags, argv=rank_program(code), SLURM_NODEID="1")
    assert sorted(done.stdout.splitlines()) == [b"[2] 2 0 1 4", b"[3] 3 1 1 4"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "2"], "after --"),
        (["--ranks", "0", "--", "true"], "at least 1"),
        (["--ranks", "1", "--nodes", "2", "--", "true"], "--master-addr"),
        (["--ranks", "1", "--node-rank", "1", "--", "true"], "--node-rank must be"),
    ],
)
def test_wrong_usage_is_explained(flags: list[str], message: str) -> None:
    done = subprocess.run([sys.executable, str(LAUNCH), *flags], capture_output=True, text=True, env=clean_env())
    assert (done.returncode, message in done.stderr) == (2, True)


# Output


def test_lines_of_ranks_never_mix() -> None:
    code = "\nfor i in range(20_000): sys.stdout.write(f'{rank} line {i} {\"x\" * (i % 90)}\\n')"
    done = launch("--ranks", 4, argv=rank_program(code), PYTHONUNBUFFERED="")
    assert done.returncode == 0, done.stderr
    seen = [0] * 4
    for line in done.stdout.decode().splitlines():
        number = int(line[1])
        assert line == f"[{number}] {number} line {seen[number]} {'x' * (seen[number] % 90)}"
        seen[number] += 1
    assert seen == [20_000] * 4


def test_a_single_rank_is_passed_on_byte_for_byte() -> None:
    done = launch("--ranks", 1, argv=rank_program("os.write(1, bytes(range(256)) * 1000); os.write(2, b'end')"))
    assert done.stdout == bytes(range(256)) * 1000 + b"end"
    assert done.stderr == b""


def test_bytes_are_kept_behind_a_prefix() -> None:
    code = "rank == 1 and os.write(1, bytes(set(range(256)) - {10, 13}) * 100)"
    done = launch("--ranks", 2, argv=rank_program(code))
    assert done.stdout == b"[1] " + bytes(set(range(256)) - {10, 13}) * 100 + b"\n"


def test_carriage_returns_keep_the_prefix_in_front() -> None:
    code = r"rank == 1 and os.write(1, b'\r10%\r20%\nwindows\r\n\nlast\r')"
    done = launch("--ranks", 2, argv=rank_program(code))
    assert done.stdout == b"[1] \r[1] 10%\r[1] 20%\n[1] windows\r\n[1] \n[1] last\r\n"


def test_unfinished_line_is_shown_and_ended_for_the_next_rank(start: Start, tmp_path: Path) -> None:
    code = f"""
seen = {str(tmp_path / "seen")!r}
if rank == 0:
    os.write(1, b"50%")
    wait_for(lambda: os.path.exists(seen + "2"))
    os.write(1, b" 60%")
else:
    wait_for(lambda: os.path.exists(seen))
    say("other")
"""
    proc = start("--ranks", 2, argv=rank_program(code))
    assert proc.stdout is not None
    assert proc.stdout.read(7) == b"[0] 50%"
    (tmp_path / "seen").touch()
    assert proc.stdout.read(11) == b"\n[1] other\n"
    (tmp_path / "seen2").touch()
    assert proc.stdout.read() == b"[0]  60%\n"
    assert proc.wait() == 0


def test_a_line_longer_than_the_buffer_arrives_whole() -> None:
    done = launch("--ranks", 2, argv=rank_program("say('ab'[rank] * 1_000_000)"))
    for letter in b"ab":
        assert done.stdout.count(letter) == 1_000_000
    assert {bytes(set(line)) for line in re.sub(rb"\[\d\] ", b"", done.stdout).splitlines()} == {b"a", b"b"}


def test_ranks_go_on_when_nobody_reads_their_output(start: Start, tmp_path: Path) -> None:
    code = f"\nfor i in range(5000): say('x' * 100)\nopen({str(tmp_path)!r} + f'/{{rank}}', 'w').close()"
    proc = start("--ranks", 2, argv=rank_program(code))
    assert proc.stdout is not None
    proc.stdout.close()
    assert proc.wait() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


# Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stop_signals_reach_every_rank(start: Start, number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:  # the tests run under nohup, which the launcher would respect
        signal.signal(number, signal.SIG_DFL)
    code = f"""
def stop(number, frame):
    say(f"got {{number}}")
    sys.exit(rank * 5)
signal.signal({int(number)}, stop)
say("ready")
while True: signal.pause()
"""
    proc = start("--ranks", 2, argv=rank_program(code))
    read_until(proc, b"[0] ready", b"[1] ready")
    proc.send_signal(number)
    read_until(proc, b"[0] got %d" % number, b"[1] got %d" % number)
    assert proc.wait() == 5


def test_warning_reaches_only_programs_that_catch_it(start: Start, tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    code = f"""
if rank == 0:
    def save(number, frame):
        open({saved!r}, "w").close()
        say("warned")
    signal.signal(signal.SIGUSR1, save)
say("ready")
wait_for(lambda: os.path.exists({saved!r}))
say("done")
"""
    # The shell in front catches nothing: the default action of SIGUSR1 would end it, and the task with it.
    argv = ["sh", "-c", '"$@"; exit $?', "sh", *rank_program(code)]
    proc = start("--ranks", 2, argv=argv)
    read_until(proc, b"[0] ready", b"[1] ready")
    proc.send_signal(signal.SIGUSR1)
    assert sorted(proc.communicate()[0].splitlines()) == [b"[0] done", b"[0] warned", b"[1] done"]
    assert proc.wait() == 0


def test_program_behind_a_shell_has_time_to_save(start: Start) -> None:
    code = """
def save(number, frame):
    wait_for(lambda: os.getppid() != shell)
    say("saved after the shell was gone")
    sys.exit(0)
shell = os.getppid()
signal.signal(signal.SIGTERM, save)
say("ready")
while True: signal.pause()
"""
    proc = start("--ranks", 1, argv=["sh", "-c", '"$@"; exit $?', "sh", *rank_program(code)])
    read_until(proc, b"ready")
    proc.send_signal(signal.SIGTERM)
    read_until(proc, b"saved after the shell was gone")
    assert proc.wait() == 128 + signal.SIGTERM


# Failures and the end


def exit_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def test_status_is_that_of_the_first_rank_to_fail(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.mkdir()
    code = f"""
if rank == 1:
    wait_for(lambda: len(os.listdir({str(ready)!r})) == 2)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
os.mkdir({str(ready)!r} + f"/{{rank}}")
while True: signal.pause()
"""
    path = tmp_path / "run" / "exit.node0.json"
    path.parent.mkdir()
    before = time.time()
    done = launch("--ranks", 3, "--settle-s", 0.2, argv=rank_program(code), DIAMOND_RUN_DIR=str(path.parent))
    assert done.returncode == 3
    assert b"rank 1 exited with status 3" in done.stderr
    record = exit_record(path)
    ranks = record.pop("ranks")
    host = socket.gethostname()
    assert record.pop("restarts") == 0
    assert record == {"node_rank": 0, "host": host, "exit_code": 3, "signal": None, "first_failed_rank": 1}
    assert [(rank["rank"], rank["exit_code"], rank["signal"]) for rank in ranks] == [
        (0, 4, None),
        (1, 3, None),
        (2, 4, None),
    ]
    assert all(before <= rank["started_at"] <= rank["ended_at"] <= time.time() for rank in ranks)
    assert list(path.parent.iterdir()) == [path], "no temporary file stays"


def test_others_may_finish_after_a_failure(tmp_path: Path) -> None:
    code = f"""
failed = {str(tmp_path / "pid")!r}
if rank == 1:
    open(failed + ".tmp", "w").write(str(os.getpid()))
    os.rename(failed + ".tmp", failed)
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(lambda: os.path.exists(failed))
wait_for(lambda: open("/proc/" + open(failed).read() + "/stat").read().rpartition(")")[2].split()[0] == "Z")
say("finished")
"""
    path = tmp_path / "exit.json"
    done = launch("--ranks", 2, "--exit-file", path, argv=rank_program(code))
    assert done.returncode == 128 + signal.SIGKILL
    assert b"rank 1 was killed by SIGKILL" in done.stderr
    assert done.stdout == b"[0] finished\n"
    record = exit_record(path)
    assert (record["exit_code"], record["signal"], record["first_failed_rank"]) == (137, 9, 1)
    assert [(rank["exit_code"], rank["signal"]) for rank in record["ranks"]] == [(0, None), (137, 9)]


def test_a_stubborn_rank_is_killed(tmp_path: Path) -> None:
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready = {str(tmp_path / "ready")!r}
if rank == 0:
    open(ready, "w").close()
    while True: signal.pause()
wait_for(lambda: os.path.exists(ready))
sys.exit(9)
"""
    path = tmp_path / "exit.json"
    flags = ("--ranks", 2, "--settle-s", 0.1, "--grace-s", 0.3, "--exit-file", path)
    assert launch(*flags, argv=rank_program(code)).returncode == 9
    assert exit_record(path)["ranks"][0]["signal"] == signal.SIGKILL


@pytest.mark.parametrize("own_session", [False, True])
def test_orphans_do_not_hold_the_job(tmp_path: Path, own_session: bool) -> None:
    code = f"""
import subprocess
child = subprocess.Popen(["sleep", "60"], start_new_session={own_session})
say(str(child.pid))
os._exit(0)
"""
    before = time.monotonic()
    done = launch("--ranks", 1, argv=rank_program(code))
    assert done.returncode == 0
    assert time.monotonic() - before < 30
    orphan = int(done.stdout)
    if own_session:  # whoever leaves the session means to stay
        assert not gone(orphan)
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)
    eventually(lambda: gone(orphan))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_command_that_cannot_start_is_named(tmp_path: Path, ranks: int) -> None:
    done = launch("--ranks", ranks, "--exit-file", tmp_path / "exit.json", argv=["no-such-program"])
    assert (done.returncode, done.stderr) == (127, b"diamond: cannot start 'no-such-program': command not found\n")
    record = exit_record(tmp_path / "exit.json")
    assert (record["exit_code"], record["first_failed_rank"], len(record["ranks"])) == (127, 0, 1)

    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    done = launch("--ranks", ranks, argv=[str(script)])
    assert (done.returncode, b"Permission denied" in done.stderr, done.stderr.count(b"\n")) == (126, True, 1)
    script.chmod(0o755)
    done = launch("--ranks", ranks, argv=[str(script)])
    assert (done.returncode, b"interpreter" in done.stderr) == (127, True)


def test_an_exit_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    done = launch("--ranks", 1, "--exit-file", tmp_path / "no" / "exit.json", argv=rank_program("sys.exit(3)"))
    assert (done.returncode, b"cannot write" in done.stderr) == (3, True)


# Where it must run


def test_one_file_is_enough(tmp_path: Path) -> None:
    shutil.copy(LAUNCH, tmp_path / "launch.py")
    command = [sys.executable, "-I", "-S", "launch.py", "--ranks", "2", "--", "sh", "-c", "echo $RANK"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=clean_env(), check=True)
    assert sorted(done.stdout.splitlines()) == [b"[0] 0", b"[1] 1"]
    module = [sys.executable, "-W", "error", "-m", "diamond.train.launch", "--ranks", "1", "--", "echo", "hi"]
    assert subprocess.run(module, capture_output=True, env=clean_env(), check=True).stdout == b"hi\n"


def test_two_nodes_reduce_together(tmp_path: Path) -> None:
    program = tmp_path / "reduce.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([float(dist.get_rank() + 1)])\n"
        "dist.all_reduce(total)\n"
        "print(f'sum {total.item():g} of {dist.get_world_size()}')\n"
        "dist.destroy_process_group()\n"
    )
    common = ("--ranks", 1, "--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port())
    nodes = [
        subprocess.Popen(
            launcher(*common, "--node-rank", number, argv=[sys.executable, str(program)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=clean_env(DIAMOND_RUN_DIR=str(tmp_path)),
        )
        for number in range(2)
    ]
    outputs = [node.communicate(timeout=100)[0] for node in nodes]
    assert outputs == [b"[0] sum 3 of 2\n", b"[1] sum 3 of 2\n"]
    assert [exit_record(tmp_path / f"exit.node{number}.json")["exit_code"] for number in range(2)] == [0, 0]
