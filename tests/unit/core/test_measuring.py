"""What a job notes of its own use: of real processes, of Slurm's cgroups, of GPUs; and that nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from diamond.core.measuring import MEASURE, node_key, node_of
from testing.waiting import eventually

MIB = 1024**2
BUSY = f"x = bytearray({100 * MIB})\nwhile True: pass"


@contextmanager
def measured(folder: Path, *more: str, below: str = "sleep 600", **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that runs something, and the script as its child, with a line a second."""
    (folder / "measure.sh").write_text(MEASURE)
    (folder / "below.sh").write_text(below)
    argv = ["bash", "-c", 'bash below.sh & below=$!; "$@" & echo $! > pid; wait; kill $below', "-", "bash"]
    argv += ["measure.sh", "util.jsonl", "1", *more]
    shell = subprocess.Popen(argv, cwd=folder, env={**os.environ, **env}, start_new_session=True)
    try:
        yield shell
    finally:
        os.killpg(shell.pid, 9)
        shell.wait()


def lines(folder: Path, at_least: int = 1) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        path = folder / "util.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    eventually(lambda: len(found()) >= at_least, within_s=30, what="lines")
    return found()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def pid_of(folder: Path) -> int:
    eventually(lambda: (folder / "pid").exists() and (folder / "pid").read_text().strip(), what="its number")
    return int((folder / "pid").read_text())


def test_processes_below_the_caller_are_summed(tmp_path: Path) -> None:
    with measured(tmp_path, below=f"({sys.executable} -c '{BUSY}') & wait"):
        found = lines(tmp_path, 3)
        own = pid_of(tmp_path)
        fields = Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()
    assert abs(found[0]["t"] - time.time()) < 60
    assert 100 * MIB < found[-1]["sys/rss_bytes"] < 400 * MIB
    assert max(line["sys/cpu_percent"] for line in found) > 5, "two busy cores leave it at least that"
    assert max(line["sys/cpu_percent"] for line in found) < 120
    spent_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    assert spent_s <= 0.05, "some milliseconds for its start, and hardly any for a look"


def test_it_ends_with_its_caller_and_when_it_is_told(tmp_path: Path) -> None:
    with measured(tmp_path) as shell:
        own = pid_of(tmp_path)
        lines(tmp_path)
        os.kill(shell.pid, 9)
        eventually(lambda: is_gone(own), within_s=10, what="it notices that its caller is gone")
    (tmp_path / "pid").unlink()
    (tmp_path / "util.jsonl").unlink()
    with measured(tmp_path):
        own = pid_of(tmp_path)
        lines(tmp_path)
        os.kill(own, 15)
        eventually(lambda: is_gone(own), within_s=5, what="it ends at once")


@pytest.mark.parametrize("version", [1, 2])
def test_the_jobs_cgroup_is_preferred(tmp_path: Path, version: int) -> None:
    job = "slurm/uid_1000/job_77"
    proc, groups = tmp_path / "proc", tmp_path / "sys/fs/cgroup"
    (proc / "self").mkdir(parents=True)
    if version == 2:
        (proc / "self/cgroup").write_text(f"0::/{job}/step_0/user/task_0\n")
        cpu, memory = groups / job / "cpu.stat", groups / job / "memory.stat"
    else:
        text = f"4:freezer:/{job}/step_0\n3:cpu,cpuacct:/{job}/step_0/task_0\n2:memory:/{job}/step_0/task_0\n0::/x\n"
        (proc / "self/cgroup").write_text(text)
        cpu, memory = groups / "cpuacct" / job / "cpuacct.usage", groups / "memory" / job / "memory.stat"
    cpu.parent.mkdir(parents=True)
    memory.parent.mkdir(parents=True, exist_ok=True)
    v2, v1 = "anon 5000000\nfile 99999999\nshmem 1000000\n", "cache 7\nrss 1\ntotal_cache 9\ntotal_rss 6000000\n"
    memory.write_text(v2 if version == 2 else v1)
    cpu.write_text("usage_usec 1000000\nuser_usec 1\n" if version == 2 else "1000000000\n")
    with measured(tmp_path, str(proc), str(tmp_path / "sys")):
        before = lines(tmp_path)
        cpu.write_text("usage_usec 3500000\nuser_usec 1\n" if version == 2 else "3500000000\n")
        found = lines(tmp_path, len(before) + 2)
    assert found[-1]["sys/rss_bytes"] == 6000000
    # 2.5 s of processor time within one look, of a second or, on a busy machine, somewhat more.
    assert max(line["sys/cpu_percent"] for line in found) == pytest.approx(250, rel=0.5)


def test_the_jobs_own_gpus_are_asked_for_once(tmp_path: Path) -> None:
    """With a program that speaks as nvidia-smi does, hangs after a while, and counts how often it is started."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"""#!/bin/bash
echo "$$" >> {tmp_path}/started
for look in 1 2 3; do
  printf '0, GPU-aa, 11, 100\\n1, GPU-bb, 22, 200\\n2, GPU-cc, 33, 300\\n3, GPU-dd, [N/A], [N/A]\\n'
  sleep 1
done
exec sleep 600
"""
    )
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with measured(tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="GPU-bb,2,3"):
        found = lines(tmp_path, 6)
        os.kill(pid_of(tmp_path), 15)
        (started,) = (tmp_path / "started").read_text().split()
        eventually(lambda: is_gone(int(started)), within_s=5, what="nothing stays behind")
    gpus = {key: value for line in found for key, value in line.items() if "gpu" in key}
    assert gpus == {
        "sys/gpu0_percent": 22,
        "sys/gpu0_mem_bytes": 200 * MIB,
        "sys/gpu1_percent": 33,
        "sys/gpu1_mem_bytes": 300 * MIB,
    }
    assert "sys/rss_bytes" in found[-1], "the rest goes on while it hangs"


def test_gpus_of_the_other_make_are_read_from_files(tmp_path: Path) -> None:
    for number, (busy, used) in {0: ("5", "1000"), 1: ("97", "2000"), 2: ("what", "3000")}.items():
        device = tmp_path / f"sys/class/drm/card{number}/device"
        device.mkdir(parents=True)
        (device / "gpu_busy_percent").write_text(f"{busy}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
    with measured(tmp_path, "/proc", str(tmp_path / "sys"), ROCR_VISIBLE_DEVICES="1,2"):
        found = lines(tmp_path)[0]
    assert {key: value for key, value in found.items() if "gpu" in key} == {
        "sys/gpu0_percent": 97,
        "sys/gpu0_mem_bytes": 2000,
    }


def test_a_job_without_gpus_has_none(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/bash\nprintf '0, GPU-aa, 11, 100\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with measured(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES=""):
        assert not [key for key in lines(tmp_path, 2)[-1] if "gpu" in key]


def test_keys_of_several_nodes() -> None:
    assert node_key(3, "sys/cpu_percent") == "sys/node3/cpu_percent"
    assert node_of("sys/node3/cpu_percent") == 3
    assert [node_of(key) for key in ("sys/cpu_percent", "sys/node/x", "sys/node12345678/x")] == [None] * 3
