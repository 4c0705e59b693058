"""The job script: golden text, and what bash really does with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from diamond.core import onefile
from diamond.core.rundir import EXIT_ROOM_BYTES, RunDir, read_exit, read_process_mark
from diamond.core.scripts import ALREADY_STARTED, NOT_NEEDED, ScriptPlan, env_file, job_script

GOLDEN = Path(__file__).parent / "golden"
PLANS = {
    "one_rank.sh": ScriptPlan(job_id="job_01", run_dir="/scratch/me/jobs/job_01", ranks_per_node=1, has_setup=False),
    "ranks_and_setup.sh": ScriptPlan(
        job_id="job_02",
        run_dir="/a b/it's $(here)/job_02",
        ranks_per_node=4,
        has_setup=True,
        launcher_python="/opt/my env/bin/python",
    ),
    "chain_link.sh": ScriptPlan(
        job_id="job_03",
        run_dir="/scratch/me/jobs/job_03",
        ranks_per_node=1,
        has_setup=True,
        chained=True,
        previous="/scratch/me/jobs/job_02 '$(x)",
    ),
    "slurm_one_node.sh": ScriptPlan(
        job_id="job_04",
        run_dir="/scratch/me/jobs/job_04",
        ranks_per_node=1,
        has_setup=True,
        scheduler="slurm",
        chained=True,
        modules=("cuda/12.4", "it's"),
        library="/home/me/it's/diamond-agent.pyz",
        measure=True,
        time_limit_s=3600,
    ),
    "slurm_two_nodes.sh": ScriptPlan(
        job_id="job_05",
        run_dir="/scratch/me/jobs/job_05",
        ranks_per_node=4,
        has_setup=False,
        scheduler="slurm",
        num_nodes=2,
        measure=True,
    ),
    "slurm_fewer_nodes.sh": ScriptPlan(
        job_id="job_11",
        run_dir="/scratch/me/jobs/job_11",
        ranks_per_node=4,
        has_setup=False,
        scheduler="slurm",
        num_nodes=3,
        min_nodes=2,
        chained=True,
    ),
    "slurm_own_ranks.sh": ScriptPlan(
        job_id="job_06",
        run_dir="/scratch/me/jobs/job_06",
        ranks_per_node=0,
        has_setup=False,
        scheduler="slurm",
        num_nodes=2,
    ),
    "image_one_rank.sh": ScriptPlan(
        job_id="job_07",
        run_dir="/scratch/me/jobs/job_07",
        ranks_per_node=1,
        has_setup=True,
        image=True,
        library="/x.pyz",
    ),
    "image_two_nodes.sh": ScriptPlan(
        job_id="job_08",
        run_dir="/scratch/me/jobs/job_08",
        ranks_per_node=4,
        has_setup=False,
        scheduler="slurm",
        num_nodes=2,
        image=True,
    ),
    "image_guest.sh": ScriptPlan(
        job_id="job_02",
        run_dir="/scratch/me/jobs/job_02",
        ranks_per_node=1,
        has_setup=True,
        scheduler="slurm",
        chained=True,
        previous="/scratch/me/jobs/job_01",
        image=True,
        is_guest=True,
        secrets=True,
    ),
    "secrets.sh": ScriptPlan(
        job_id="job_09",
        run_dir="/scratch/me/jobs/job_09",
        ranks_per_node=1,
        has_setup=True,
        chained=True,
        secrets=True,
        library="/x.pyz",
    ),
    "image_secrets.sh": ScriptPlan(
        job_id="job_10", run_dir="/scratch/me/jobs/job_10", ranks_per_node=1, has_setup=False, image=True, secrets=True
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_text_is_the_golden_one(name: str) -> None:
    # After a wanted change: python tests/unit/core/test_scripts.py
    assert job_script(PLANS[name]) == (GOLDEN / name).read_text()


def prepare(folder: Path, run: str, *, setup: str | None = None, envs: dict[str, str] | None = None) -> RunDir:
    run_dir = RunDir(folder)
    run_dir.work.mkdir(parents=True)
    run_dir.run.write_text(run)
    if setup is not None:
        run_dir.setup.write_text(setup)
    run_dir.env.write_bytes(env_file(envs or {}))
    run_dir.exit_room.write_bytes(b" " * EXIT_ROOM_BYTES)
    plan = ScriptPlan(job_id="job_x", run_dir=str(folder), ranks_per_node=1, has_setup=setup is not None)
    run_dir.script.write_text(job_script(plan))
    return run_dir


def test_secrets_win_over_variables_and_are_gone_at_the_end(tmp_path: Path) -> None:
    value = 'it\'s "x"\n$(touch pwned) \\ é=\n'
    run_dir = prepare(
        tmp_path / "job", 'printf %s "$TOKEN"; cat $KEY; ls -l $DIAMOND_RUN_DIR/secrets >&2', envs={"TOKEN": "no"}
    )
    run_dir.secret_files.mkdir(mode=0o700)
    (run_dir.secret_files / "KEY").write_text("|file")
    run_dir.secrets.write_bytes(env_file({"TOKEN": value, "KEY": str(run_dir.secret_files / "KEY")}))
    plan = ScriptPlan(job_id="job_x", run_dir=str(run_dir.path), ranks_per_node=1, has_setup=False, secrets=True)
    run_dir.script.write_text(job_script(plan))
    done = start(run_dir)
    assert done.stdout.decode() == f"{value}|file"
    assert not run_dir.secrets.exists() and not run_dir.secret_files.exists()
    assert not list(tmp_path.rglob("pwned"))
    # A scheduler that starts it once more must not run it without them.
    run_dir.started.unlink()
    run_dir.exit_room.write_bytes(b" " * EXIT_ROOM_BYTES)
    again = start(run_dir)
    assert again.returncode == 73
    assert again.stderr == b"diamond: the secrets of this job are gone; launch its task again\n"


def start(run_dir: RunDir) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["bash", str(run_dir.script)], capture_output=True, timeout=30)


@pytest.mark.parametrize("told", [None, "1900000000"])
def test_a_job_of_slurm_knows_when_it_ends_and_where_to_write(tmp_path: Path, told: str | None) -> None:
    run_dir = prepare(tmp_path / "job", 'echo "$DIAMOND_ENDS_AT $DIAMOND_TRAIN_FILE"')
    plan = ScriptPlan(
        job_id="job_x",
        run_dir=str(run_dir.path),
        ranks_per_node=1,
        has_setup=False,
        scheduler="slurm",
        time_limit_s=100,
    )
    run_dir.script.write_text(job_script(plan))
    env = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_END_TIME"}
    env |= {"SLURM_JOB_END_TIME": told} if told else {}
    done = subprocess.run(["bash", str(run_dir.script)], capture_output=True, timeout=30, env=env)
    ends_at, train_file = done.stdout.decode().split()
    assert train_file == str(run_dir.stream("train"))
    if told:
        assert ends_at == told, "Slurm knows best"
    else:
        assert abs(int(ends_at) - time.time() - 100) < 10


def test_environment_arrives_byte_for_byte(tmp_path: Path) -> None:
    envs = {"A": 'it\'s "x"\n$(touch pwned) `id` \\ \t é 名\n\n', "EMPTY": "", "SPACE": " "}
    program = 'python3 -c \'import os; print(*(os.environ[k] for k in ["A", "EMPTY", "SPACE"]), sep="|", end="")\''
    run_dir = prepare(tmp_path / "dir with 'quotes' $(x)\n", program, envs=envs)
    done = start(run_dir)
    assert done.stdout == "|".join(envs.values()).encode()
    assert not list(tmp_path.rglob("pwned"))


def test_no_variable_of_the_user_harms_the_script(tmp_path: Path) -> None:
    names = ["PATH", "began", "ended", "stat", "boot", "fields", "pair", "BASH", "IFS", "HOSTNAME", "LC_ALL", "mv"]
    run_dir = prepare(tmp_path / "r", "exit 4", envs=dict.fromkeys(names, "/nowhere $(x)"))
    assert start(run_dir).returncode == 4
    record = read_exit(run_dir)
    assert record is not None
    assert (record.phase, record.exit_code) == ("run", 4)


def test_setup_stops_at_its_first_error_and_run_does_not(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "a", "echo ran", setup="false\necho went on")
    done = start(run_dir)
    assert (done.returncode, done.stdout) == (1, b"")
    run_dir = prepare(tmp_path / "b", "false\necho went on", setup="echo ready")
    done = start(run_dir)
    assert (done.returncode, done.stdout) == (0, b"ready\nwent on\n")


def test_a_killed_program_leaves_no_noise_of_ours(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "r", "echo mine >&2; kill -KILL $$")
    done = start(run_dir)
    assert (done.returncode, done.stdout, done.stderr) == (137, b"", b"mine\n")


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_exit_code_is_recorded(tmp_path: Path, code: int) -> None:
    run_dir = prepare(tmp_path / "r", f"exit {code}")
    assert start(run_dir).returncode == code
    record = read_exit(run_dir)
    assert record is not None
    assert (record.phase, record.exit_code, record.signal) == ("run", code, None)
    assert record.ended_at >= record.started_at > 1_700_000_000
    mark = read_process_mark(run_dir)
    assert mark is not None
    assert mark.pid > 0
    assert mark.start_ticks > 0


def test_a_signal_is_recorded_as_one(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "r", "kill -SEGV $$")
    start(run_dir)
    record = read_exit(run_dir)
    assert record is not None
    assert record.signal == 11


def test_failing_setup_keeps_run_from_starting(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "r", "touch ran", setup="exit 9")
    assert start(run_dir).returncode == 9
    record = read_exit(run_dir)
    assert record is not None
    assert (record.phase, record.exit_code) == ("setup", 9)
    assert not (run_dir.work / "ran").exists()


def test_a_run_directory_starts_once(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "r", "echo ran >> ledger; sleep 0.2")
    first = [subprocess.Popen(["bash", str(run_dir.script)]) for _ in range(8)]
    codes = sorted(process.wait(timeout=30) for process in first)
    assert codes == [0] + [ALREADY_STARTED] * 7
    assert (run_dir.work / "ledger").read_text() == "ran\n"


def test_the_shell_outlives_a_terminated_program(tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "r", "echo up; exec sleep 60")
    process = subprocess.Popen(["bash", str(run_dir.script)], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    os.killpg(process.pid, 15)
    process.wait(timeout=10)
    process.stdout.close()
    record = read_exit(run_dir)
    assert record is not None
    assert record.signal == 15


# Chains


def prepare_link(folder: Path, run: str, *, previous: RunDir | None = None, scheduler: str = "local") -> RunDir:
    run_dir = prepare(folder, run, setup="echo set up")
    if previous is not None:
        run_dir.work.rmdir()
        run_dir.link_work(previous.work_root)
    launcher = Path(__file__).parents[3] / "src/diamond/train/launch.py"
    run_dir.launcher.write_bytes(launcher.read_bytes())
    plan = ScriptPlan(
        job_id="job_x",
        run_dir=str(folder),
        ranks_per_node=1,
        has_setup=True,
        chained=True,
        previous=str(previous.path) if previous is not None else "",
        scheduler=scheduler,
    )
    run_dir.script.write_text(job_script(plan))
    return run_dir


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
@pytest.mark.parametrize(
    ("run", "more"),
    [
        ("exit 0", False),
        ("exit 1", False),
        ("exit 85", True),
        ('touch "$DIAMOND_CONTINUE_FILE"', True),
        ("kill -TERM $$", False),
    ],
)
def test_a_program_says_whether_it_wants_to_go_on(tmp_path: Path, run: str, more: bool, scheduler: str) -> None:
    run_dir = prepare_link(tmp_path / "a b", run, scheduler=scheduler)
    start(run_dir)
    record = read_exit(run_dir)
    assert record is not None
    assert record.more is more
    assert (run_dir.path / "over").exists() is not more


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_a_link_goes_on_in_the_work_directory_of_the_first(tmp_path: Path, scheduler: str) -> None:
    program = 'echo "$DIAMOND_RESUMED" >> ledger; cat ledger; [[ $(wc -l < ledger) -ge 3 ]] || exit 85'
    first = prepare_link(tmp_path / "job_1", program, scheduler=scheduler)
    second = prepare_link(tmp_path / "job_2", program, previous=first, scheduler=scheduler)
    third = prepare_link(tmp_path / "job_3", program, previous=second, scheduler=scheduler)
    assert start(first).stdout == b"set up\n0\n"
    assert start(second).stdout == b"0\n1\n", "no second setup"
    assert (start(third).stdout, third.work_root) == (b"0\n1\n1\n", first.work)
    unneeded = prepare_link(tmp_path / "job_4", program, previous=third, scheduler=scheduler)
    assert start(unneeded).returncode == NOT_NEEDED
    assert unneeded.not_needed.exists()
    assert (first.work / "ledger").read_text() == "0\n1\n1\n"


@pytest.mark.parametrize(
    ("handler", "code", "more"), [("exit 3", 3, True), ("exit 0", 0, False), ("exit 85", 85, True)]
)
def test_slurm_warns_the_script_and_the_program_hears_of_it(
    tmp_path: Path, handler: str, code: int, more: bool
) -> None:
    program = f"trap 'echo warned; {handler}' USR1; echo up; while :; do sleep 0.05; done"
    run_dir = prepare_link(tmp_path / "r", program, scheduler="slurm")
    process = subprocess.Popen(["bash", str(run_dir.script)], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"set up\n", b"up\n"]
    process.send_signal(signal.SIGUSR1)  # to the shell alone, as sbatch --signal=B: does
    assert process.stdout.read() == b"warned\n"
    assert process.wait(timeout=10) == code
    process.stdout.close()
    record = read_exit(run_dir)
    assert record is not None
    assert (record.exit_code, record.more) == (code, more)


def test_a_warning_before_the_program_began_reaches_it(tmp_path: Path) -> None:
    program = "trap 'echo warned; exit 85' USR1; echo up; while :; do sleep 0.05; done"
    run_dir = prepare_link(tmp_path / "r", program, scheduler="slurm")
    run_dir.setup.write_text("echo set up; sleep 1")
    process = subprocess.Popen(["bash", str(run_dir.script)], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"set up\n"
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.read() == b"up\nwarned\n"
    assert process.wait(timeout=10) == 85
    process.stdout.close()


def test_the_one_file_agent_lends_its_library(tmp_path: Path) -> None:
    pyz = tmp_path / "it's.pyz"
    pyz.write_bytes(onefile.build())
    program = 'python3 -c "import diamond.train as t; t.log(step=1, loss=2.0); print(t.__file__)"'
    run_dir = prepare(tmp_path / "r", program, envs={"PYTHONPATH": "/nowhere"})
    plan = ScriptPlan(job_id="job_x", run_dir=str(run_dir.path), ranks_per_node=1, has_setup=False, library=str(pyz))
    run_dir.script.write_text(job_script(plan))
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(run_dir.script)], capture_output=True, timeout=30, env=env)
    assert done.stdout.decode().startswith(str(pyz)), done.stderr
    assert b'"loss"' in run_dir.stream("metrics").read_bytes()


def test_slurm_may_start_a_requeued_job_again(tmp_path: Path) -> None:
    run_dir = prepare_link(tmp_path / "r", "echo ran >> ledger", scheduler="slurm")
    assert start(run_dir).returncode == 0
    assert start(run_dir).returncode == ALREADY_STARTED
    env = {**os.environ, "SLURM_RESTART_COUNT": "1"}
    assert subprocess.run(["bash", str(run_dir.script)], env=env, timeout=30).returncode == 0
    assert (run_dir.work / "ledger").read_text() == "ran\nran\n"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, plan in PLANS.items():
        (GOLDEN / name).write_text(job_script(plan))
