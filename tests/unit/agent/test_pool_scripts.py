"""What is put into the run directories of pilots and of jobs inside them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from diamond.core.measuring import MEASURE
from diamond.core.rundir import RunDir
from diamond.core.wire import JobOrder
from testing.pools import pilot_order, pooled_order, stage


def staged(tmp_path: Path, order: JobOrder, scheduler: str = "slurm") -> RunDir:
    (tmp_path / "jobs").mkdir(exist_ok=True)
    return RunDir(stage(tmp_path / "jobs", order, scheduler).run_dir)


def test_a_pilots_program_is_the_steward_and_it_measures_nothing(tmp_path: Path) -> None:
    run_dir = staged(tmp_path, pilot_order(1))
    assert "steward.py" in run_dir.run.read_text() and run_dir.steward.exists()
    assert not run_dir.measure.exists() and "measuring=" not in run_dir.script.read_text()
    assert b"tsk_00000001" in run_dir.env.read_bytes()


def test_a_node_without_python_says_so(tmp_path: Path) -> None:
    run_dir = staged(tmp_path, pilot_order(1))
    run_dir.run.write_text(run_dir.run.read_text().replace("command -v ", "command -v /none/"))
    bash = ["/bin/bash", str(run_dir.run)]
    done = subprocess.run(bash, env={"PATH": "/none"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "diamond: there is no Python 3 on this node\n")


def test_a_job_is_measured_by_its_step_not_by_its_pilot(tmp_path: Path) -> None:
    inside = staged(tmp_path, pooled_order(2, "true", 1)).measure.read_text()
    assert inside != MEASURE and "/step_[0-9]+)" in inside
    assert not staged(tmp_path, pooled_order(3, "true", 1), "local").measure.exists(), "the agent sees it there"


def test_each_node_of_several_has_a_step_in_its_own_pilot(tmp_path: Path) -> None:
    """With a program in place of srun: what it is asked for, and in which environment."""
    order = pooled_order(2, "true", 1, 3, slots=2, gpus=True, mem_bytes=3 * 2**20)
    run_dir = staged(tmp_path, order)
    (tmp_path / "bin").mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.write_text('#!/bin/sh\n{ echo "$@"; env; } > "$DIAMOND_RUN_DIR/asked.$1"; exit 3\n')
    srun.chmod(0o755)
    run_dir.pilots.write_text("41 c1 2\n42 c2 2\n")
    path = f"{srun.parent}:{os.environ['PATH']}"
    env = {"PATH": path, "SLURM_MEM_PER_NODE": "1", "SLURM_CONF": "/kept", "CUDA_VISIBLE_DEVICES": "7"}
    done = subprocess.run(["bash", run_dir.script], env=env, check=False)
    assert done.returncode == 3
    for node, (number, host) in enumerate((("41", "c1"), ("42", "c2"))):
        asked = (run_dir.path / f"asked.--jobid={number}").read_text()
        for word in (
            f"--nodelist={host}",
            "--exact",
            "--cpus-per-task=2",
            "--gres=gpu:2",
            "--mem=6M",
            "--ranks 2",
            "env -u SLURM_JOB_END_TIME",
        ):
            assert f" {word} " in asked, (word, asked)
        assert f" --node-rank {node} " in asked and " --nodes 2 " in asked and "SLURM_CONF=/kept" in asked
        assert "SLURM_MEM_PER_NODE" not in asked and "CUDA_VISIBLE_DEVICES" not in asked


@pytest.mark.parametrize("limit_s", [None, 100])
def test_a_training_goes_by_warnings_not_by_the_pilots_end(tmp_path: Path, limit_s: int | None) -> None:
    show = "echo ${DIAMOND_ENDS_AT-unset} ${SLURM_JOB_END_TIME-unset}"
    run_dir = staged(tmp_path, pooled_order(2, show, 1, time_limit_s=limit_s))
    env = {**os.environ, "SLURM_JOB_END_TIME": "1900000000", "DIAMOND_ENDS_AT": "1900000000"}
    done = subprocess.run(["bash", run_dir.script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "unset unset\n"
