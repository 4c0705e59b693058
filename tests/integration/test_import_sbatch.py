"""Imported batch scripts on a real Slurm: they do what they did under sbatch, srun lines included."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.slurm.sbatch import sbatch_argv
from diamond.core.rundir import EXIT_ROOM_BYTES
from diamond.core.sbatch.importing import import_sbatch
from diamond.core.sbatch.options import OPTIONS, Takes
from diamond.core.scripts import ScriptPlan, env_file, job_script
from testing.cluster import BINDS, Cluster
from testing.minihpc import Node, Site
from testing.minihpc.fixtures import require

LAUNCHER = Path(__file__).parents[2] / "src/diamond/train/launch.py"
# What programs look at.
SHOWN = "NTASKS NPROCS NTASKS_PER_NODE TASKS_PER_NODE CPUS_PER_TASK JOB_NUM_NODES GPUS GPUS_PER_NODE"
REPORT = f"""
for name in {SHOWN}; do name=SLURM_$name; echo "batch $name=${{!name-unset}}"; done
echo "batch RANK=${{RANK-unset}} WORLD_SIZE=${{WORLD_SIZE-unset}} MASTER_ADDR=${{MASTER_ADDR-unset}}"
here=$PWD; cd "$SLURM_SUBMIT_DIR" && [ "$PWD" = "$here" ] && echo "batch is where it was submitted"
cat > task.sh <<'EOF'
echo "task $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME: gpus $CUDA_VISIBLE_DEVICES rank ${{RANK-unset}}"
EOF
"""
# Options that one of the two versions does not have yet or no longer has, and one whose form differs.
OLDER = {"power", "share", "workdir"}
NEWER = {
    "autocomplete", "consolidate-segments", "container-id", "external", "extra", "mem-update", "oom-kill-step",
    "resources", "resv-ports", "runtime", "segment", "spread-segments", "stepmgr", "tres-bind", "tres-per-task",
}  # fmt: skip
CHANGED_SINCE = {"get-user-env", "requeue"}
SCRIPTS = {
    "tasks on two nodes": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=3 -c 2
#SBATCH -p long --time=5 --mem-per-cpu=50M
""",
    "uneven tasks": """#!/bin/bash
#SBATCH --nodes=2 --ntasks=5
#SBATCH -p long -t 5
""",
    "one node": """#!/bin/bash
#SBATCH --ntasks=4 -N 1
#SBATCH -p long -t 5 --mem-per-cpu=100M
""",
    "nothing asked": """#!/bin/bash
#SBATCH -t 2
""",
    "a node to itself": """#!/bin/bash
#SBATCH -t 5 --exclusive -p long
""",
    "a GPU for each task": """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=2 --gpus-per-task=1
#SBATCH -p gpu -t 5
""",
    "GPUs of a node": """#!/bin/bash
#SBATCH -N2 --gpus-per-node=a100:2
#SBATCH -p gpu -t 5
""",
    "GPUs of the job": """#!/bin/bash
#SBATCH -N 2 -G4 --ntasks-per-gpu=1
#SBATCH -p gpu -t 5
""",
    "a login shell": """#!/bin/bash -l
#SBATCH -N2 -n 4 -p long -t 5
""",
}


@pytest.fixture(scope="module", params=["trixie", "bookworm"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Site]:
    require(request.param)
    nodes = [Node(name=f"c{n}", cpus=8, gpu_type="a100", num_gpus=2) for n in (1, 2, 3)]
    with Site("importer", release=request.param, nodes=nodes, binds=BINDS) as site:
        yield site


def finished(site: Site, argv: list[str], cwd: str, log: str) -> str:
    """Submit, wait for the end, and return what was written."""
    job = site.run(argv, cwd=cwd).stdout.split(";")[0].strip()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        state = site.run(["squeue", "-h", "-j", job, "-o", "%T"], check=False).stdout.strip()
        if state in ("", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"):
            return site.path(f"{cwd}/{log}").read_text()
        time.sleep(0.1)
    site.run(["scancel", job])
    raise AssertionError(f"job {job} did not end in time; it wrote {site.path(f'{cwd}/{log}').read_text()!r}")


def by_sbatch(site: Site, script: str, folder: str) -> str:
    site.run(["mkdir", "-p", folder])
    site.write(f"{folder}/job.sbatch", script)
    return finished(site, ["sbatch", "--parsable", "-o", "log", "job.sbatch"], folder, "log")


def by_diamond(site: Site, script: str, folder: str) -> str:
    """What an agent does with the imported task, without the agent."""
    spec = import_sbatch(script.encode(), name="job").spec
    site.run(["mkdir", "-p", f"{folder}/work"])
    plan = ScriptPlan(
        job_id="job_01",
        run_dir=folder,
        ranks_per_node=spec.ranks_per_node,
        num_nodes=spec.num_nodes,
        has_setup=False,
        scheduler="slurm",
        launcher_python="python3",
    )
    site.write(f"{folder}/job.sh", job_script(plan))
    site.write(f"{folder}/run.sh", spec.run)
    site.write(f"{folder}/env", env_file(spec.envs).decode())
    site.write(f"{folder}/launch.py", LAUNCHER.read_text())
    site.write(f"{folder}/exit.tmp", " " * EXIT_ROOM_BYTES)
    needs = spec.resources
    submission = Submission(
        name="job_01",
        run_dir=Path(folder),
        script=Path(folder, "job.sh"),
        cpus=needs.cpus_min,
        gpus=needs.gpus,
        gpu_type=needs.gpu_type,
        mem_bytes=needs.mem_bytes_min,
        time_limit_s=spec.max_duration,
        num_nodes=spec.num_nodes,
        slurm=spec.slurm,
    )
    return finished(site, sbatch_argv(submission), folder, "log")


def lines(text: str, *, placed: bool) -> list[str]:
    """What was written, in no order; without what the launcher puts in front and, unless `placed`, without nodes."""
    found = [re.sub(r"^\[\d+\] ?", "", line) for line in text.splitlines() if line.strip()]
    if not placed:
        found = [re.sub(r" on c\d+", "", line) for line in found if "SLURM_TASKS_PER_NODE" not in line]
    return sorted(found)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_did(cluster: Site, name: str) -> None:
    script = f"{SCRIPTS[name]}{REPORT}\nsrun bash task.sh\n"
    home = f"/home/user1/{name.replace(' ', '-')}"
    # Where a script gives tasks and nodes but not how many go where, Slurm fills up nodes by what is free.
    placed = " -n" not in SCRIPTS[name] and "--ntasks=" not in SCRIPTS[name]
    expected = lines(by_sbatch(cluster, script, f"{home}/sbatch"), placed=placed)
    assert any(line.startswith("task 0 of") for line in expected), expected
    assert lines(by_diamond(cluster, script, f"{home}/diamond"), placed=placed) == expected


def test_an_interpreter_other_than_bash_gets_the_whole_script(cluster: Site) -> None:
    script = """#!/usr/bin/env python3
#SBATCH -N2 -n 2 -t 2
import os, subprocess
print("batch", os.environ["SLURM_NTASKS"], open(__file__).read().count("#SBATCH"), flush=True)
subprocess.run(["srun", "bash", "-c", "echo task $SLURM_PROCID"], check=True)
"""
    expected = lines(by_sbatch(cluster, script, "/home/user1/python/sbatch"), placed=False)
    assert expected == ["batch 2 2", "task 0", "task 1"]
    assert lines(by_diamond(cluster, script, "/home/user1/python/diamond"), placed=False) == expected


def test_the_exit_status_and_the_folder_of_a_script_are_its_own(cluster: Site) -> None:
    script = """#!/bin/bash
#SBATCH -N2 -t 2 --chdir=/tmp --input=/etc/hostname
pwd; cat; exit 7
"""
    folder = "/home/user1/ending"
    written = by_diamond(cluster, script, folder)
    assert "/tmp" in written
    assert "importer" in written
    assert '"exit_code":7' in cluster.path(f"{folder}/exit.json").read_text()


def test_from_the_script_to_the_log_of_the_task(cluster: Site, tmp_path: Path) -> None:
    """`diamond import`, `diamond launch`: the files beside the script come along, and srun starts what it did."""
    script = """#!/bin/bash
#SBATCH --job-name=both-ways
#SBATCH -N2 --ntasks-per-node=2 --gpus-per-task=1
#SBATCH -p gpu --time=2 --output=%x.out --mail-type=END
cd $SLURM_SUBMIT_DIR
echo "batch $SLURM_JOB_NAME $SLURM_NTASKS ${RANK-unset}"
srun bash task.sh | sort > result.txt
cat result.txt
"""
    task = 'echo "task $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME: gpu $CUDA_VISIBLE_DEVICES"\n'
    folder = "/home/user1/both"
    cluster.run(["mkdir", "-p", folder])
    cluster.write(f"{folder}/job.sbatch", script)
    cluster.write(f"{folder}/task.sh", task)
    expected = finished(cluster, ["sbatch", "--parsable", "job.sbatch"], folder, "both-ways.out")
    assert expected.count("task") == 4
    local = tmp_path / "project"
    local.mkdir()
    (local / "job.sbatch").write_text(script)
    (local / "task.sh").write_text(task)
    with Cluster(cluster, tmp_path / "home") as running:
        done = running.service.diamond("import", str(local / "job.sbatch"), "-o", str(local / "task.yaml"))
        assert done.returncode == 0, done.stderr
        done = running.service.diamond("launch", str(local / "task.yaml"), "--infra", "cluster")
        written = running.service.diamond("logs").stdout
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert lines(written, placed=True) == lines(expected, placed=True)


def test_sbatch_has_the_options_that_the_importer_knows_of(cluster: Site) -> None:
    """Asked one by one: whether it knows the option, and whether the option has a value."""
    named = set(
        re.findall(r"^ {2,6}(?:-\w,? +)?--([a-z][a-z-]+)", cluster.run(["sbatch", "--help"]).stdout, re.MULTILINE)
    )
    assert len(named) > 70
    assert named <= set(OPTIONS)
    asked = "\n".join(f"sbatch --{name} 2>&1; echo {name}; sbatch --{name}= 2>&1; echo {name}" for name in OPTIONS)
    said = cluster.run(["sh", "-c", asked + "\ntrue"], input="").stdout
    unknown = set(re.findall(r"unrecognized option '--([a-z-]+)", said))
    assert unknown <= OLDER | NEWER
    without_value = set(re.findall(r"option '--([a-z-]+)' doesn't allow an argument", said))
    with_value = set(re.findall(r"option '--([a-z-]+)' requires an argument", said))
    for name, takes in OPTIONS.items():
        # The old sbatch takes --extra for the beginning of --extra-node-info.
        if name not in unknown | CHANGED_SINCE and not (cluster.release == "bookworm" and name in NEWER):
            assert (name in without_value) == (takes is Takes.NOTHING), name
            assert (name in with_value) == (takes is Takes.VALUE), name
