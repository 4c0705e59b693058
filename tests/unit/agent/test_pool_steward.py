"""The steward of a pilot as a process of its own, with real steps, on a machine without Slurm."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import steward
from diamond.core.rundir import RunDir, read_exit, read_process_mark
from diamond.core.wire import JobOrder
from testing.pools import job_id, pilot_order, pooled_order, stage

Until = Callable[..., Any]
SAVES = "trap 'echo saved; exit 85' USR1; echo ready; while :; do sleep 0.05; done"
STAYS = "trap '' TERM; echo ready; exec sleep 60"


class Pilot:
    def __init__(self, jobs_dir: Path, devices: str = "") -> None:
        self._jobs_dir = jobs_dir
        jobs_dir.mkdir()
        stage(jobs_dir, pilot_order(1))
        self.run_dir = RunDir(jobs_dir / job_id(1))
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        env |= {"DIAMOND_RUN_DIR": str(self.run_dir.path), "DIAMOND_TASK_ID": "of the pilot", "LEFT_OUT": ""}
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = devices
        self.process = subprocess.Popen([sys.executable, self.run_dir.steward], env=env, start_new_session=True)

    def put(self, order: JobOrder, **more: Any) -> RunDir:
        """Have a step started."""
        asked = stage(self._jobs_dir, order)
        self.hand(asked.name, {"script": str(asked.script), "run_dir": str(asked.run_dir), **more})
        return RunDir(asked.run_dir)

    def hand(self, name: str, raw: dict[str, Any]) -> None:
        self.run_dir.step(name, "json").parent.mkdir(exist_ok=True)
        raw = {"log": f"{raw['run_dir']}/log", "cpus": 1, "gpus": 0, "envs": {"STEP": "own"}, **raw}
        (beside := self.run_dir.path / f"{name}.new").write_text(json.dumps(raw))
        beside.rename(self.run_dir.step(name, "json"))

    def say(self, number: int, kind: str) -> None:
        self.run_dir.step(job_id(number), kind).touch()

    def done(self, number: int) -> dict[str, Any] | None:
        path = self.run_dir.step(job_id(number), "done")
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def pilot(tmp_path: Path) -> Iterator[Pilot]:
    one = Pilot(tmp_path / "jobs", devices="4,GPU-5,6")
    yield one
    one.process.terminate()
    assert one.process.wait(20) in (0, 143)


def text(run_dir: RunDir) -> str:
    return run_dir.stream("log").read_text()


def test_steps_run_beside_each_other_and_are_warned_and_ended_alone(pilot: Pilot, until: Until) -> None:
    warned, stopped = pilot.put(pooled_order(2, SAVES, 1)), pilot.put(pooled_order(3, "echo ready; sleep 60", 1))
    until(lambda: "ready" in text(warned) and "ready" in text(stopped))
    said = json.loads(pilot.run_dir.pilot.read_text())
    assert (said["slots"], said["slurm_id"], said["pid"]) == (2, None, pilot.process.pid)
    pilot.say(2, "warn")
    assert until(lambda: pilot.done(2))["status"] == 85
    record = read_exit(warned)
    assert record is not None and record.more and record.warned and "saved" in text(warned)
    assert pilot.done(3) is None
    pilot.say(3, "stop")
    assert until(lambda: pilot.done(3))["status"] == 143
    assert not until(lambda: read_exit(stopped)).more
    pilot.run_dir.pilot_end.touch()
    assert pilot.process.wait(5) == 0


def test_a_step_gets_free_gpus_and_nothing_of_the_pilots_own(pilot: Pilot, until: Until) -> None:
    show = 'echo "$CUDA_VISIBLE_DEVICES $STEP $DIAMOND_TASK_ID $DIAMOND_RUN_DIR"; '
    first = pilot.put(pooled_order(2, show + SAVES, 1), gpus=2)
    until(lambda: "ready" in text(first))
    second = pilot.put(pooled_order(3, show, 1), gpus=1)
    assert until(lambda: pilot.done(3))["status"] == 0
    assert text(first).splitlines()[0] == f"4,GPU-5 own tsk_00000002 {first.path}"
    assert text(second).splitlines()[0] == f"6 own tsk_00000003 {second.path}"
    too_many = pilot.put(pooled_order(4, show, 1), gpus=2)
    told = until(lambda: pilot.done(4))
    assert told["status"] == 1 and "needs 2 GPUs, and 1 of the pilot's 3 are free" in told["text"]
    assert not too_many.started.exists()


def test_one_that_began_before_is_not_begun_again(pilot: Pilot, until: Until) -> None:
    run_dir = pilot.put(pooled_order(2, "echo once", 1))
    assert until(lambda: pilot.done(2))["status"] == 0
    # The agent, restarted, has lost sight of it: the same file again, and one of which no trace is left.
    pilot.hand(job_id(2), {"script": str(run_dir.script), "run_dir": str(run_dir.path)})
    pilot.hand(job_id(9), {"script": str(run_dir.script), "run_dir": str(run_dir.path)})
    assert until(lambda: pilot.done(9))["status"] == 75
    assert text(run_dir) == "once\n"


def test_a_file_that_is_none_is_answered(pilot: Pilot, until: Until) -> None:
    until(lambda: pilot.run_dir.pilot.exists())
    pilot.run_dir.step("odd", "json").write_text('{"run_dir": ')
    until(lambda: pilot.run_dir.step("odd", "done").exists())
    assert "cannot be read" in json.loads(pilot.run_dir.step("odd", "done").read_text())["text"]


def test_warned_itself_it_warns_its_steps_takes_no_more_and_ends(pilot: Pilot, until: Until) -> None:
    # One has no handler, and ends by itself; another is warned.
    first, second = pilot.put(pooled_order(2, SAVES, 1)), pilot.put(pooled_order(3, "echo ready; sleep 1.5", 1))
    until(lambda: "ready" in text(first) and "ready" in text(second))
    pilot.process.send_signal(signal.SIGUSR1)
    late = pilot.put(pooled_order(4, "echo never", 1))
    told = until(lambda: pilot.done(4))
    assert told["refused"] and "about to end" in told["text"] and not late.started.exists()
    assert pilot.process.wait(10) == 0
    assert (pilot.done(2) or {})["status"] == 85 and (pilot.done(3) or {})["status"] == 0
    assert not pilot.run_dir.pilot_ending.exists()


def test_told_to_stop_it_ends_its_steps_first(pilot: Pilot, until: Until) -> None:
    patient, runaway = "trap 'sleep 0.5; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done", "ready"
    first = pilot.put(pooled_order(2, patient, 1))
    second = pilot.put(pooled_order(3, f"setsid sleep 77 & echo {runaway} $!; wait", 1))
    until(lambda: "ready" in text(first) and "ready" in text(second))
    pilot.process.terminate()
    assert pilot.process.wait(15) == 143
    assert text(first).splitlines()[-1] == "saved"
    assert pilot.run_dir.pilot_ending.exists()
    left = int(text(second).split()[1])
    assert not Path(f"/proc/{left}").exists() or "sleep" not in Path(f"/proc/{left}/cmdline").read_text()


def test_limits_are_kept(pilot: Pilot, until: Until) -> None:
    slow = pilot.put(pooled_order(2, SAVES, 1), time_limit_s=1.5, warn_s=1.0, limit_text="the limit was 1.5 s")
    hungry = "import time; held = bytearray(200_000_000); print('held', flush=True); time.sleep(60)"
    large = pilot.put(pooled_order(3, f'exec {sys.executable} -c "{hungry}"', 1), mem_bytes=100_000_000)
    assert until(lambda: pilot.done(2))["status"] == 85
    assert not (slow.path / "kill.json").exists(), "it was warned and ended in time"
    until(lambda: pilot.done(3))
    cause = json.loads((large.path / "kill.json").read_text())
    assert cause["reason"] == "OUT_OF_MEMORY" and "its slots have 95 MiB" in cause["detail"]


def test_who_does_not_end_is_killed(tmp_path: Path, until: Until) -> None:
    jobs_dir = tmp_path / "jobs"
    jobs_dir.mkdir()
    stage(jobs_dir, pilot_order(1))
    asked = stage(jobs_dir, pooled_order(2, STAYS, 1))
    run_dir, pilot = RunDir(asked.run_dir), RunDir(jobs_dir / job_id(1))
    text_of = pilot.steward.read_text()
    pilot.steward.write_text(text_of.replace("GRACE_S = 20.0", "GRACE_S = 0.5"))
    env = {**os.environ, "DIAMOND_RUN_DIR": str(pilot.path)}
    process = subprocess.Popen([sys.executable, pilot.steward], env=env)
    until(lambda: pilot.pilot.exists())
    raw = {"script": str(asked.script), "run_dir": str(asked.run_dir), "log": str(run_dir.stream("log"))}
    pilot.step(asked.name, "json").write_text(json.dumps(raw))
    until(lambda: "ready" in text(run_dir))
    mark = read_process_mark(run_dir)
    assert mark is not None and Path(f"/proc/{mark.pid}").exists()
    pilot.step(asked.name, "stop").touch()
    began = time.monotonic()
    until(lambda: pilot.step(asked.name, "done").exists())
    assert time.monotonic() - began < 8
    record = read_exit(run_dir)
    assert record is not None and record.exit_code == 137, "its script outlived the program, and noted how it ended"
    pilot.pilot_end.touch()
    assert process.wait(5) == 0


def test_it_runs_with_any_python_from_3_8_on() -> None:
    tree = ast.parse(Path(steward.__file__).read_text(), feature_version=(3, 8))
    modules = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= sys.stdlib_module_names
