"""A job that outlives its ranks: real launchers, real gloo ranks, killed and stopped as fate would do it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from diamond.train import cohort, regroup
from diamond.train import launch as launcher
from diamond.train.lines import HUNG, Sign, blamed
from testing.waiting import eventually
from tests.train.test_launch import LAUNCH, clean_env

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("regrouped.py")
PACED = Path(__file__).with_name("paced.py")  # where the launcher is the matter, and not what trains


class Step(NamedTuple):
    at: float
    number: int
    world: int
    pid: int
    generation: int
    loss: float
    samples: list[int]


def steps(folder: Path, rank: int) -> list[Step]:
    path = folder / f"rank{rank}"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        at, number, world, pid, generation, loss, rest = line.split(" ", 6)
        found.append(Step(float(at), int(number), int(world), int(pid), int(generation), float(loss), json.loads(rest)))
    return found


Begin = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    running: list[subprocess.Popen[bytes]] = []

    def start(
        *flags: object, script: Path = SCRIPT, until: int = 200, mischief: str = "", **env: str
    ) -> subprocess.Popen[bytes]:
        argv = [sys.executable, str(LAUNCH), *map(str, flags), "--", sys.executable, str(script), str(tmp_path)]
        given = clean_env(PYTHONPATH=f"{ROOT}/src:{ROOT}", DIAMOND_RUN_DIR=str(tmp_path), **env)
        whole = [*argv, str(until), mischief]
        with (tmp_path / f"log{len(running)}").open("wb") as log:
            running.append(subprocess.Popen(whole, cwd=ROOT, env=given, stdout=log, stderr=subprocess.STDOUT))
        return running[-1]

    yield start
    for proc in running:
        proc.terminate()
        try:
            proc.wait(20)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.wait()


def log(folder: Path, node: int = 0) -> str:
    return (folder / f"log{node}").read_text()


def reached(folder: Path, rank: int, number: int, generation: int = 0) -> Callable[[], Step | None]:
    def look() -> Step | None:
        fitting = [one for one in steps(folder, rank) if one.generation >= generation and one.number >= number]
        return fitting[-1] if fitting else None

    return look


def whole_epochs(folder: Path, ranks: int) -> bool:
    """Whether what the surviving steps saw is every sample once an epoch: later generations replace earlier ones."""
    last: dict[tuple[int, int], list[int]] = {}
    for rank in range(ranks):
        for one in steps(folder, rank):
            key = (one.number, rank)
            last[key] = one.samples
    seen: dict[int, list[int]] = {}
    per_epoch = 512 // (8 * ranks)
    for (number, _), samples in last.items():
        seen.setdefault((number - 1) // per_epoch, []).extend(samples)
    done = max(number for number, _ in last)
    return all(sorted(seen[epoch]) == list(range(512)) for epoch in range(done // per_epoch))


def test_ranks_that_hang_or_are_killed_come_back_and_nothing_changes(begin: Begin, tmp_path: Path) -> None:
    """Losses and samples are those of a run that nobody disturbed."""
    proc = begin("--ranks", 2, until=160, mischief="hang-once")
    step = eventually(reached(tmp_path, 0, 80, 1), what="it trains again", within_s=90)
    assert step.generation == 1
    os.kill(step.pid, signal.SIGKILL)
    assert proc.wait(90) == 0, log(tmp_path)
    assert "rank 1 gave no sign of life for" in log(tmp_path) and ", in the training loop" in log(tmp_path)
    assert "regrouped.py" in log(tmp_path), "its stack"
    assert json.loads((tmp_path / "hung.node0.json").read_text())["final"] is False
    assert log(tmp_path).count("rank 0 was killed by SIGKILL; going on with 2 ranks on 1 node") == 1
    assert whole_epochs(tmp_path, 2)
    record = json.loads((tmp_path / "exit.node0.json").read_text())
    assert (record["restarts"], record["exit_code"], len(record["ranks"])) == (2, 0, 2)
    calm = tmp_path / "calm"
    calm.mkdir()
    argv = [sys.executable, str(LAUNCH), "--ranks", "2", "--", sys.executable, str(SCRIPT), str(calm), "160"]
    env = clean_env(PYTHONPATH=f"{ROOT}/src:{ROOT}", STEP_S="0", DIAMOND_STANDBYS="0")
    subprocess.run(argv, cwd=ROOT, env=env, check=True, timeout=90, capture_output=True)
    for rank in range(2):
        wanted = {one.number: one.loss for one in steps(calm, rank)}
        got = {one.number: one.loss for one in steps(tmp_path, rank)}
        assert got == wanted


def test_standbys_take_over_and_are_gone_at_the_end(begin: Begin, tmp_path: Path) -> None:
    proc = begin("--ranks", 2, script=PACED, until=100_000)
    step = eventually(reached(tmp_path, 0, 5), what="it trains", within_s=60)

    def waiting() -> set[int]:
        """Processes of this job beside the launcher and the ranks."""
        found = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
        known = {proc.pid, *(steps(tmp_path, rank)[-1].pid for rank in range(2))}
        return {int(pid) for pid in found.stdout.split()} - known

    standbys = eventually(lambda: len(found := waiting()) == 2 and found, what="two wait", within_s=60)
    time.sleep(2)  # they have come to where they wait
    os.kill(step.pid, signal.SIGKILL)
    again = eventually(reached(tmp_path, 0, 1, 1), what="it goes on", within_s=60)
    assert again.pid in standbys
    assert "Traceback" not in log(tmp_path)
    proc.terminate()
    proc.wait(30)
    assert not waiting() - {proc.pid}


def test_a_shell_around_the_program_hides_no_kill_and_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """As in a task, whose `run` is a script: bash makes 137 of SIGKILL."""
    script = tmp_path / "run.sh"
    script.write_text(f"{sys.executable} {PACED} {tmp_path} 100000\nexit $?\n")
    argv = [sys.executable, str(LAUNCH), "--ranks", "2", "--", "bash", str(script)]
    env = clean_env(PYTHONPATH=f"{ROOT}/src:{ROOT}")
    with (tmp_path / "log0").open("wb") as out:
        proc = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        first = eventually(reached(tmp_path, 1, 10), what="it trains", within_s=60)
        os.kill(first.pid, signal.SIGKILL)
        eventually(reached(tmp_path, 1, 1, 1), what="it goes on", within_s=60)
        assert "rank 1 was killed by SIGKILL; going on" in log(tmp_path)
        pids = [steps(tmp_path, rank)[-1].pid for rank in range(2)]
    finally:
        proc.kill()
        proc.wait()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="nobody trains on", within_s=30)


def test_a_standby_whose_launcher_is_gone_does_not_train(tmp_path: Path) -> None:
    env = clean_env(PYTHONPATH=f"{ROOT}/src:{ROOT}", DIAMOND_STANDBY="1", DIAMOND_LAUNCH_FDS="97,98,99")
    argv = [sys.executable, str(SCRIPT), str(tmp_path), "5"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, timeout=90, check=False)
    assert done.returncode == 0 and not steps(tmp_path, 0)
    del env["DIAMOND_STANDBY"]  # while a rank to whom nobody speaks is on its own
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, timeout=90, check=False)
    assert done.returncode == 0 and len(steps(tmp_path, 0)) == 5


SIGNS = """
import os, sys, time
from diamond.train import cohort
us = cohort.join()
open(os.environ["PIDS"] + "/" + os.environ["RANK"], "w").write(str(os.getpid()) + ".")
while True:
    us.pulse.steps += 1
    us.pulse.at(cohort.STEP, us.pulse.steps)
    time.sleep(0.05)
"""
PTRACE_SEIZE = 0x4206


HURRIED = """
import sys
from diamond.train import launch, regroup
launch.GIVE_UP_S = regroup.UNKILLABLE_S = 1.5
sys.exit(launch.main())
"""


def test_a_rank_that_cannot_be_killed_does_not_hold_the_job(tmp_path: Path) -> None:
    """As one in a dead file system: here this process traces it, so that the launcher does not see its end."""
    argv = [sys.executable, "-c", HURRIED, "--ranks", "2", "--no-standby", "--grace-s", "1", "--"]
    env = clean_env(PYTHONPATH=f"{ROOT}/src", PIDS=str(tmp_path))
    with subprocess.Popen([*argv, sys.executable, "-c", SIGNS], env=env, stderr=subprocess.PIPE, text=True) as proc:

        def pid(rank: int) -> int:
            path = tmp_path / str(rank)
            said = eventually(lambda: path.exists() and path.read_text(), what="it is there")
            return int(said.removesuffix("."))

        first, second = pid(0), pid(1)
        time.sleep(1)
        assert ctypes.CDLL(None).ptrace(PTRACE_SEIZE, second, 0, 0) == 0
        os.kill(first, signal.SIGKILL)
        said = proc.communicate(timeout=90)[1]
    assert proc.returncode == 128 + signal.SIGKILL
    assert "some ranks did not end after SIGKILL; the job ends" in said


def test_a_mistake_of_the_user_is_not_tried_again(begin: Begin, tmp_path: Path) -> None:
    proc = begin("--ranks", 2, "--no-standby", mischief="fail")
    assert proc.wait(90) == 1
    assert "the user's own mistake" in log(tmp_path) and "going on with" not in log(tmp_path)
    record = json.loads((tmp_path / "exit.node0.json").read_text())
    assert (record["first_failed_rank"], record["restarts"]) == (1, 0)


def test_an_error_that_the_script_itself_catches_is_its_own_affair(tmp_path: Path) -> None:
    code = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import diamond.train as dt
class Enough(Exception): pass
try:
    with dt.run(checkpoints="checkpoints") as run:
        model = torch.nn.Linear(2, 1)
        model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1),
                                               DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=4))
        for (given,) in run.steps(loader, until=100):
            run.backward(model(given).mean()); run.step()
            if run.step_number == 5: raise Enough
except Enough:
    time.sleep(8)
    print("evaluated", run.rank)
"""
    argv = [sys.executable, str(LAUNCH), "--ranks", "2", "--settle-s", "1", "--", sys.executable, "-c", code]
    env = clean_env(PYTHONPATH=f"{ROOT}/src")
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"[0] evaluated 0", "[1] evaluated 1"} <= set(done.stdout.splitlines())


def test_what_dies_again_and_again_without_getting_on_is_given_up(begin: Begin, tmp_path: Path) -> None:
    proc = begin("--ranks", 2, "--no-standby", script=PACED, until=10_000, STEP_S="2")
    eventually(reached(tmp_path, 1, 1), what="it trains", within_s=60)
    killed: set[int] = set()

    def kill_new() -> bool:
        """As soon as they are there, which is before they do a step."""
        for pid in set(children(proc.pid)) - killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        return proc.poll() is not None

    eventually(kill_new, what="it is given up", within_s=90)
    assert proc.returncode == 128 + signal.SIGKILL, log(tmp_path)
    assert 1 <= log(tmp_path).count("going on with") <= 5


def children(pid: int) -> list[int]:
    """Those that have their own group already, and so can be told from a launcher in the middle of starting one."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(each) for each in found.stdout.split()]


def test_what_stands_still_twice_ends_the_job(begin: Begin, tmp_path: Path) -> None:
    proc = begin("--ranks", 2, script=PACED, until=100_000, mischief="hang")
    assert proc.wait(120) == HUNG, log(tmp_path)
    record = json.loads((tmp_path / "hung.node0.json").read_text())
    assert record["rank"] == 1 and record["final"] is True and "paced.py" in record["stack"]


def test_a_stopped_process_has_no_stack_but_a_name(begin: Begin, tmp_path: Path) -> None:
    proc = begin("--ranks", 2, script=PACED, until=100_000, mischief="hang-never")
    step = eventually(reached(tmp_path, 0, 10), what="it trains", within_s=60)
    os.kill(step.pid, signal.SIGSTOP)
    eventually(lambda: "it was stopped by a signal" in log(tmp_path), what="it is noticed", within_s=60)
    assert "rank 0 gave no sign" in log(tmp_path)
    eventually(reached(tmp_path, 0, 1, 1), what="it goes on", within_s=60)
    assert proc.poll() is None


def test_a_lone_process_ends_by_itself_when_it_stands_still(tmp_path: Path) -> None:
    env = clean_env(PYTHONPATH=f"{ROOT}/src:{ROOT}", DIAMOND_RUN_DIR=str(tmp_path))
    argv = [sys.executable, str(SCRIPT), str(tmp_path), "80", "hang"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == HUNG, done.stderr
    record = json.loads((tmp_path / "hung.node0.json").read_text())
    assert record["final"] is True and "regrouped.py" in record["stack"] and "in the training loop" in record["text"]


JOINED_AT = 60  # three seconds of steps: by then the launchers have found each other


def node(
    begin: Begin, number: int, port: int, nodes: int = 2, *more: object, script: Path = PACED, **env: str
) -> subprocess.Popen[bytes]:
    place = ("--nodes", nodes, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port)
    given = {"DIAMOND_LAUNCH_KEY": "of this job", "STEP_S": "0.05", **env}
    return begin("--ranks", 1, *place, *more, script=script, until=100_000, **given)


def test_a_rank_lost_on_another_node(begin: Begin, tmp_path: Path) -> None:
    port = launcher.free_port()
    both = [node(begin, number, port) for number in range(2)]
    for kill in range(2):
        eventually(reached(tmp_path, 1, JOINED_AT, kill), what="it trains", within_s=60)
        os.kill(steps(tmp_path, 1 - kill)[-1].pid, signal.SIGKILL)
        again = eventually(reached(tmp_path, 1, 1, kill + 1), what="it goes on", within_s=60)
        assert again.world == 2
    assert all(one.poll() is None for one in both)


def test_a_lost_node_is_done_without_and_a_new_one_is_taken_in(begin: Begin, tmp_path: Path) -> None:
    port = launcher.free_port()
    first, second = (node(begin, number, port, script=SCRIPT) for number in range(2))
    eventually(reached(tmp_path, 1, 10), what="both train", within_s=60)
    os.kill(second.pid, signal.SIGKILL)  # as when a node goes: launcher and ranks
    os.kill(steps(tmp_path, 1)[-1].pid, signal.SIGKILL)
    alone = eventually(reached(tmp_path, 0, 1, 1), what="the other goes on alone", within_s=60)
    assert alone.world == 1
    before = steps(tmp_path, 0)[-1].number
    node(begin, 2, port, 2, "--join", script=SCRIPT)
    together = eventually(reached(tmp_path, 1, 1, 2), what="they train together", within_s=90)
    assert together.world == 2 and first.poll() is None
    assert together.number >= before, "what was done is saved before a node is taken in"
    strangers = begin(
        "--ranks", 1, "--nodes", 2, "--node-rank", 3, "--master-addr", "127.0.0.1", "--master-port", port, "--join",
        script=PACED, DIAMOND_LAUNCH_KEY="of another job",
    )  # fmt: skip
    time.sleep(3)
    assert steps(tmp_path, 0)[-1].generation == 2, "a stranger is not let in"
    strangers.terminate()


@pytest.mark.parametrize("chained", [True, False])
def test_too_few_nodes_end_the_job_and_the_next_of_a_chain_goes_on(begin: Begin, tmp_path: Path, chained: bool) -> None:
    port = launcher.free_port()
    env = {"DIAMOND_CONTINUE_FILE": str(tmp_path / "continue")} if chained else {}
    first, second = (node(begin, number, port, 2, "--min-nodes", 2, **env) for number in range(2))
    eventually(reached(tmp_path, 1, JOINED_AT), what="both train", within_s=60)
    second.kill()  # as when a node goes: launcher and ranks
    os.kill(steps(tmp_path, 1)[-1].pid, signal.SIGKILL)
    code = first.wait(60)
    assert code != 0 and (code == 85) is chained, log(tmp_path)
    assert "fewer than 2 nodes are left; the job ends" in log(tmp_path)
    assert steps(tmp_path, 0)[-1].generation == 0


@pytest.mark.parametrize("late", [0, 1])
def test_programs_that_know_nothing_of_it_end_as_they_like(late: int, tmp_path: Path) -> None:
    """A node whose ranks are done early is not a lost one."""
    port = launcher.free_port()
    code = f"import os, time; time.sleep(3 * (os.environ['RANK'] == '{late}')); print('bye', os.environ['RANK'])"
    both = []
    for number in range(2):
        place = ("--nodes", 2, "--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port)
        argv = [sys.executable, str(LAUNCH), "--ranks", "1", *map(str, place), "--", sys.executable, "-c", code]
        env = clean_env(DIAMOND_LAUNCH_KEY="k")
        both.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    told = [one.communicate(timeout=60)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0] and told == ["[0] bye 0\n", "[1] bye 1\n"]


def test_strangers_at_the_launchers_port_change_nothing(begin: Begin, tmp_path: Path) -> None:
    """Garbage, depth, silence and a wrong key, many at once; then a rank is lost, and comes back."""
    port = launcher.free_port()
    for number in range(2):
        node(begin, number, port)
    first = eventually(reached(tmp_path, 1, JOINED_AT), what="it trains", within_s=60)
    words = (
        b"\xff\xfe\n",
        b"[" * 5000 + b"\n",
        b'{"node": 1e999}\n',
        b'{"node": 1, "proof": "x"}\n',
        b"",
        b"x" * 10000,
    )
    held = []
    for at in range(150):
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", regroup._words_port(port)), timeout=1)
            held.append(one)
            one.sendall(words[at % len(words)])
    os.kill(first.pid, signal.SIGKILL)
    again = eventually(reached(tmp_path, 1, 1, 1), what="it goes on", within_s=60)
    assert again.world == 2 and "Traceback" not in log(tmp_path)
    for one in held:
        one.close()


def test_the_one_that_came_least_far_is_blamed() -> None:
    def sign(step: int, phase: int) -> Sign:
        return Sign(pid=1, step=step, phase=phase, since=0.0, limit_s=0.0, steps=1)

    assert blamed({0: sign(7, cohort.BACKWARD), 1: sign(7, cohort.DATA), 2: sign(7, cohort.BACKWARD)}) == [1]
    assert blamed({0: sign(7, cohort.LOOP), 1: sign(7, cohort.SAVING)}) == [1], "saving comes before the next batch"
    assert blamed({0: sign(7, cohort.SAVING), 1: sign(6, cohort.STEP)}) == [1]
    assert blamed({0: sign(7, cohort.BACKWARD), 1: sign(7, cohort.BACKWARD)}) == [0, 1]
