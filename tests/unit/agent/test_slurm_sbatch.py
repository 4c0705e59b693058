"""The sbatch command line, byte for byte, and the meaning of every refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diamond.agent.schedulers.base import Submission
from diamond.agent.schedulers.slurm.sbatch import Kind, literal, parse_job_id, refusal, sbatch_argv, sbatch_env
from diamond.core.reasons import Reason
from diamond.core.slurm import SlurmOptions

MIB = 1024**2


def job(folder: str = "/home/u/jobs/job_1", **asked: Any) -> Submission:
    return Submission(name="job_1", run_dir=Path(folder), script=Path(folder) / "job.sh", **asked)


def test_the_plainest_job() -> None:
    assert sbatch_argv(job()) == [
        "sbatch",
        "--parsable",
        "--job-name=job_1",
        "--chdir=/home/u/jobs/job_1",
        "--output=/home/u/jobs/job_1/log",
        "--open-mode=append",
        "--no-requeue",
        "--export=ALL",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=1",
        "/home/u/jobs/job_1/job.sh",
    ]


def test_what_a_site_refuses_is_left_unsaid() -> None:
    asked = job(gpus=4, mem_bytes=3 * MIB, slurm=SlurmOptions(gres="nvme:1"))
    said = sbatch_argv(asked, refuses=("--mem", "--gres"))
    assert not any(word.startswith("--mem") for word in said)
    assert "--gres=nvme:1" in said, "what the author wrote is not taken away"
    assert "--gres=gpu:4" not in sbatch_argv(job(gpus=4), refuses=("--gres",))


def test_everything_at_once() -> None:
    options = SlurmOptions(
        partition="ignored",
        account="acc",
        qos="high",
        constraint="a100&nvlink",
        reservation="res",
        gres="nvme:1",
        nodelist="c[1-2]",
        exclude="c3",
        exclusive=True,
        warning=600,
        extra=("--licenses=matlab:1", "--hint=nomultithread"),
    )
    asked = job(
        cpus=8,
        gpus=4,
        gpu_type="a100",
        mem_bytes=3 * MIB + 1,
        time_limit_s=3601.0,
        warn_s=600.0,
        priority=-3,
        num_nodes=2,
        partition="gpu,long",
        slurm=options,
    )
    assert sbatch_argv(asked, after_id="4711")[8:] == [
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--mem=4M",
        "--gres=gpu:a100:4,nvme:1",
        "--time=61",
        "--signal=B:USR1@600",
        "--nice=300",
        "--partition=gpu,long",
        "--account=acc",
        "--qos=high",
        "--constraint=a100&nvlink",
        "--reservation=res",
        "--nodelist=c[1-2]",
        "--exclude=c3",
        "--dependency=afterany:4711",
        "--exclusive",
        "--licenses=matlab:1",
        "--hint=nomultithread",
        "/home/u/jobs/job_1/job.sh",
    ]


@pytest.mark.parametrize(
    ("asked", "there", "absent"),
    [
        ({"gpus": 2}, "--gres=gpu:2", "--mem"),
        ({"slurm": SlurmOptions(gres="shard:4")}, "--gres=shard:4", "--exclusive"),
        ({"slurm": SlurmOptions(partition="long")}, "--partition=long", "--time"),
        ({"time_limit_s": 1.0}, "--time=1", "--signal"),
        ({"time_limit_s": 60.0}, "--signal=B:USR1@6", "--nice"),
        ({"time_limit_s": 86400.0 * 30, "warn_s": 86400.0 * 20}, "--signal=B:USR1@65535", "--nice"),
        ({"priority": 7}, "--nodes=1", "--nice"),
        ({"mem_bytes": 1}, "--mem=1M", "--gres"),
    ],
)
def test_single_wishes(asked: dict[str, Any], there: str, absent: str) -> None:
    argv = sbatch_argv(job(**asked))
    assert there in argv
    assert not [word for word in argv if word.startswith(absent)]


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [
        ('/a b/it\'s "q" ünï;$HOME', '/a b/it\'s "q" ünï;$HOME/log'),
        ("/jobs/%j/100%", "/jobs/%%j/100%%/log"),
        ("/jobs/a\\t%j", "/jobs/a\\\\t%j/log"),  # seen on 22.05 and 24.11: a backslash turns patterns off
    ],
)
def test_hostile_paths_are_one_argument_each(folder: str, pattern: str) -> None:
    argv = sbatch_argv(job(folder))
    assert argv[3:5] == [f"--chdir={folder}", f"--output={pattern}"]
    assert argv[-1] == f"{folder}/job.sh"
    assert literal(Path(folder) / "log") == pattern


def test_environment() -> None:
    outer = {
        "PATH": "/usr/bin",
        "HOME": "/home/u",
        "LANG": "de_DE.UTF-8",
        "DIAMOND_TOKEN": "secret",
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "/etc/slurm/other.conf",
        "SBATCH_ARRAY_INX": "1-9",
        "SBATCH_ACCOUNT": "acc",
        "SQUEUE_PARTITION": "x",
        "SLURM_CLUSTERS": "beta",
    }
    env = sbatch_env(job(cpus=3, envs={"VALUE": "two\nlines"}), outer, python_dir="/opt/agent/bin")
    assert env == {
        "PATH": "/usr/bin:/opt/agent/bin",
        "HOME": "/home/u",
        "LANG": "de_DE.UTF-8",
        "SLURM_CONF": "/etc/slurm/other.conf",
        "SLURM_CLUSTERS": "beta",
        "SBATCH_ACCOUNT": "acc",
        "VALUE": "two\nlines",
        "DIAMOND_CPUS": "3",
        "DIAMOND_RUN_DIR": "/home/u/jobs/job_1",
    }
    assert sbatch_env(job(), {"PATH": "/a:/b"}, python_dir="/b")["PATH"] == "/a:/b"


def test_job_numbers() -> None:
    assert [parse_job_id(text) for text in ("4711\n", "4711;beta\n", "Welcome!\n4711", "", "soon", "47 11")] == [
        "4711",
        "4711",
        "4711",
        "",
        "",
        "",
    ]


SUBMIT = "sbatch: error: Batch job submission failed: "
POLICY = f"{SUBMIT}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n"


@pytest.mark.parametrize(
    ("status", "err", "kind", "words"),
    [
        # As recorded
        (
            1,
            f"sbatch: error: invalid partition specified: nope\n{SUBMIT}Invalid partition name specified\n",
            "refused",
            "invalid partition specified: nope; Invalid partition name specified. Choose a partition",
        ),
        (1, f"{SUBMIT}User's group not permitted to use this partition\n", "refused", "You may not use this partition"),
        (
            1,
            f"sbatch: error: CPU count per node can not be satisfied\n{SUBMIT}Requested node configuration is not "
            "available\n",
            "refused",
            "CPU count per node can not be satisfied; Requested node configuration",
        ),
        (1, f"{SUBMIT}Invalid feature specification\n", "refused", "slurm.constraint"),
        (1, f"{SUBMIT}Requested reservation is invalid\n", "refused", "slurm.reservation"),
        (1, f"{SUBMIT}Invalid node name specified\n", "refused", "slurm.nodelist"),
        (
            255,
            "sbatch: unrecognized option '--foo'\nTry \"sbatch --help\" for more information\n",
            "refused",
            "unrecognized option '--foo'. slurm.extra",
        ),
        (255, "sbatch: error: Invalid --time specification\n", "refused", "slurm.time"),
        (
            1,
            f"{SUBMIT}Requested time limit is invalid (missing or exceeds some limit)\n",
            "refused",
            "Lower slurm.time",
        ),
        (1, f"{SUBMIT}Invalid license specification\n", "refused", "licence"),
        (1, "sbatch: error: Invalid generic resource (gres) specification\n", "refused", "slurm.gres"),
        (
            1,
            f"{SUBMIT}Unable to contact slurm controller (connect failure)\n",
            "busy",
            "Unable to contact slurm controller",
        ),
        # As Slurm's sources have them
        (1, f"{SUBMIT}Invalid account or account/partition combination specified\n", "refused", "slurm.account"),
        (1, f"{SUBMIT}Invalid qos specification\n", "refused", "slurm.qos"),
        (1, f"{SUBMIT}Socket timed out on send/recv operation\n", "unknown", "Socket timed out"),
        (1, f"{SUBMIT}Zero Bytes were transmitted or received\n", "unknown", "Zero Bytes"),
        (1, f"{SUBMIT}Resource temporarily unavailable\n", "busy", "temporarily unavailable"),
        (1, f"{SUBMIT}Slurm backup controller in standby mode\n", "busy", "standby"),
        (1, 'sbatch: error: Munge encode failed: Failed to connect to "/run/munge/munge.socket.2"\n', "busy", "Munge"),
        (
            1,
            f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}",
            "limit",
            "as many jobs in Slurm's queue as you may (AssocMaxSubmitJobLimit",
        ),
        (
            1,
            f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}",
            "refused",
            "larger or longer than your QoS or account allows",
        ),
        (None, "", "unknown", "did not answer in time"),
        (-9, "", "unknown", "signal 9"),
        (1, "", "refused", "status 1"),
        (127, "sbatch: not found on PATH", "busy", "not found"),
    ],
)
def test_refusals(status: int | None, err: str, kind: str, words: str) -> None:
    found = refusal(status, err)
    assert (found.kind, found.dependency) == (Kind(kind), False)
    assert words in found.text
    assert "sbatch: error" not in found.text


def test_refusals_with_a_meaning_of_their_own() -> None:
    missing = refusal(1, "sbatch: error: Unable to open file /x/job.sh\n")
    assert (missing.kind, missing.reason) == (Kind.REFUSED, Reason.LAUNCH_FAILED)
    gone = refusal(1, f"{SUBMIT}Job dependency problem\n")
    assert (gone.kind, gone.dependency) == (Kind.REFUSED, True)
