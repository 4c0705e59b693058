"""What a job's record says of a warning, for whoever reads why the job ended."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from diamond.core.rundir import read_exit
from tests.unit.core.test_scripts import prepare_link, start


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_the_record_says_whether_the_job_was_warned(tmp_path: Path, scheduler: str) -> None:
    program = "trap 'exit 3' USR1; echo up; while :; do sleep 0.05; done"
    warned = prepare_link(tmp_path / "warned", program, scheduler=scheduler)
    process = subprocess.Popen(["bash", str(warned.script)], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"set up\n", b"up\n"]
    if scheduler == "slurm":
        process.send_signal(signal.SIGUSR1)
    else:
        os.killpg(process.pid, signal.SIGUSR1)  # whoever catches it, the script among them
    assert process.wait(timeout=10) == 3
    process.stdout.close()
    calm = prepare_link(tmp_path / "calm", "exit 3", scheduler=scheduler)
    start(calm)
    found = [read_exit(run_dir) for run_dir in (warned, calm)]
    assert [record is not None and (record.exit_code, record.warned) for record in found] == [(3, True), (3, False)]


def test_a_program_that_does_not_listen_yet_is_told_when_it_does(tmp_path: Path) -> None:
    program = "echo up; sleep 3; trap 'told=1' USR1; while [[ -z $told ]]; do sleep 0.05; done; sleep 2.5; echo told"
    run_dir = prepare_link(tmp_path / "late", program, scheduler="slurm")
    process = subprocess.Popen(["bash", str(run_dir.script)], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == [b"set up\n", b"up\n"]
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=20)[0] == b"told\n"
    assert process.returncode == 0
