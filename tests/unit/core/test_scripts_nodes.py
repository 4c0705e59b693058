"""The job script of a task that goes on with fewer nodes: each has a step of its own, and the first one decides."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from diamond.core.rundir import EXIT_ROOM_BYTES, RunDir, read_exit
from diamond.core.scripts import ScriptPlan, env_file, job_script


@pytest.mark.parametrize(
    ("min_nodes", "num_nodes", "ranks", "scheduler", "asks"),
    [
        (1, 2, 1, "slurm", True),
        (0, 2, 1, "slurm", False),
        (2, 2, 1, "slurm", False),
        (1, 1, 4, "slurm", False),
        (1, 2, 0, "slurm", False),
        (1, 2, 4, "local", False),
    ],
)
def test_only_a_job_that_can_do_without_nodes_asks_to_outlive_them(
    min_nodes: int, num_nodes: int, ranks: int, scheduler: str, asks: bool
) -> None:
    text = job_script(
        ScriptPlan(
            job_id="job_x",
            run_dir="/r",
            ranks_per_node=ranks,
            has_setup=False,
            scheduler=scheduler,
            num_nodes=num_nodes,
            min_nodes=min_nodes,
        )
    )
    assert ("#SBATCH --no-kill\n" in text) is ("--nodelist" in text) is ("--min-nodes" in text) is asks
    directives = text[: text.index("\nwarned=")].splitlines()
    assert all(not line or line.startswith("#") for line in directives), (
        "sbatch reads no further than the first command"
    )


SRUN = """#!/usr/bin/env bash
# Stands in for srun: runs what it is to start on each node, but for that of a lost one, which it waits for in vain.
for word; do
  case $word in
    --nodelist=n2) exec sleep 1000;;
    --nodelist=*) node=${word#*=};;
  esac
  shift
  if [[ $word == --export=ALL ]]; then break; fi
done
"$@" || code=$?
echo "$node ended with ${code:-0}"
exit "${code:-0}"
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_first_node_says_how_a_job_ended_that_lost_another(tmp_path: Path, code: int) -> None:
    run_dir = RunDir(tmp_path / "r")
    run_dir.work.mkdir(parents=True)
    run_dir.run.write_text("exit 0")
    run_dir.env.write_bytes(env_file({}))
    run_dir.exit_room.write_bytes(b" " * EXIT_ROOM_BYTES)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'n%s\\n' 1 2 3\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    # In place of the launcher: who is last to end is not who decides.
    launcher = "import sys, time; node = int(sys.argv[sys.argv.index('--node-rank') + 1]); time.sleep(node / 2)"
    run_dir.launcher.write_text(f"{launcher}; sys.exit(0 if node else {code})")
    plan = ScriptPlan(
        job_id="job_x", run_dir=str(run_dir.path), ranks_per_node=1, has_setup=False, scheduler="slurm", num_nodes=3,
        min_nodes=1,
    )  # fmt: skip
    run_dir.script.write_text(job_script(plan).replace("waited < 150", "waited < 10"))
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(run_dir.script)], capture_output=True, timeout=30, env=env)
    assert done.returncode == code, done.stderr
    assert sorted(done.stdout.decode().splitlines()) == [f"n1 ended with {code}", "n3 ended with 0"]
    record = read_exit(run_dir)
    assert record is not None
    assert record.exit_code == code
