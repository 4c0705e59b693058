"""The miniature HPC centre the other suites rely on: is it a real one, and does it go away?"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from testing.minihpc import Partition, Site, many_cpus, memory, pythons, registry
from testing.minihpc.fixtures import require, require_apptainer
from testing.minihpc.slurm_conf import QUICK_NODE_FAIL
from testing.waiting import eventually


@pytest.fixture(params=["site", "old_site"])
def each(request: pytest.FixtureRequest) -> Site:
    """Both ends of the range of Slurm releases."""
    chosen: Site = request.getfixturevalue(request.param)
    return chosen


@contextlib.contextmanager
def serving(address: str, body: bytes = b"hello") -> Iterator[int]:
    """A small web server on the host's end of a site's line; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def fetch(site: Site, port: int, *, address: str = "", timeout_s: float = 5) -> subprocess.CompletedProcess[str]:
    """Fetch a page from inside; prints what came and how long the connection took."""
    program = (
        "import socket, sys, time, urllib.request as u; a, p, t = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])\n"
        "b = time.monotonic(); socket.create_connection((a, p), t).close(); took = time.monotonic() - b\n"
        "print(u.urlopen(f'http://{a}:{p}/', timeout=t).read().decode(), took)"
    )
    target = [address or site.server_address, str(port), str(timeout_s)]
    return site.run(["python3", "-c", program, *target], check=False)


def job_fields(site: Site, job: int) -> dict[str, str]:
    told = site.run(["scontrol", "show", "job", str(job)]).stdout
    return dict(re.findall(r"(\w+)=(\S*)", told))


def wait_state(site: Site, job: int, *states: str, within_s: float = 30) -> dict[str, str]:
    def reached() -> dict[str, str] | None:
        fields = job_fields(site, job)
        return fields if fields["JobState"] in states else None

    found = eventually(reached, within_s=within_s, every_s=0.2, what=f"job {job} is {'/'.join(states)}")
    assert found is not None
    return found


def test_the_versions_are_those_the_suites_are_about(site: Site, old_site: Site) -> None:
    assert site.run(["sinfo", "--version"]).stdout.split()[1].startswith("24.11")
    assert old_site.run(["sinfo", "--version"]).stdout.split()[1].startswith("22.05")
    assert site.facts.warnings == ()
    assert site.started_in_s < 15 and old_site.started_in_s < 15


def test_a_batch_job_of_a_plain_user_leaves_its_output(each: Site) -> None:
    job = each.sbatch("id -un; hostname; echo $SLURMD_NODENAME", "user1", "-o", "/home/user1/out.%j", "-w", "c3")
    wait_state(each, job, "COMPLETED")
    assert each.path(f"/home/user1/out.{job}").read_text().split() == ["user1", "c3", "c3"]


def test_two_nodes_and_their_gpus(each: Site) -> None:
    told = "echo $(hostname) $SLURMD_NODENAME $SLURM_PROCID gpus=$CUDA_VISIBLE_DEVICES"
    done = each.run(["srun", "-p", "gpu", "-N2", "--gres=gpu:a100:2", "sh", "-c", told])
    assert sorted(done.stdout.splitlines()) == ["c1 c1 0 gpus=0,1", "c2 c2 1 gpus=0,1"]
    # Asking for what a node has not got fails as it does in life.
    assert each.run(["sbatch", "-p", "v100", "--gres=gpu:a100:1", "--wrap=true"], check=False).returncode != 0


def test_partitions_differ(each: Site) -> None:
    listed = each.run(["sinfo", "-h", "-o", "%P %l %a"]).stdout.splitlines()
    assert {"debug* 2:00 up", "gpu 1-00:00:00 up", "long 7-00:00:00 up", "maintenance 1-00:00:00 down"} <= set(listed)
    assert not any(line.startswith(("restricted", "admin")) for line in listed)
    assert "restricted" in each.run(["sinfo"], user="user2").stdout


def test_users_are_kept_apart_and_commands_start_clean(each: Site) -> None:
    each.write("/home/user1/secret", "s3cret", mode=0o600)
    assert each.run(["cat", "/home/user1/secret"]).stdout == "s3cret"
    refused = each.run(["cat", "/home/user1/secret"], user="user2", check=False)
    assert refused.returncode != 0 and "s3cret" not in refused.stdout
    each.run(["sh", "-c", "echo mine > /scratch/of-user1"])
    assert each.run(["rm", "-f", "/scratch/of-user1"], user="user2", check=False).returncode != 0
    names = {line.split("=")[0] for line in each.run(["env"]).stdout.splitlines()}
    assert names == {"HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG"}
    assert each.run(["pwd"]).stdout == "/home/user1\n"
    assert each.run(["cat"], input="through\n", cwd="/scratch").stdout == "through\n"


def test_files_go_in_and_come_out(site: Site, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "sub/run.sh").chmod(0o755)
    site.put(tmp_path, "/home/user1/deep/down")
    assert site.run(["./deep/down/sub/run.sh"]).stdout == "ran\n"
    assert site.run(["find", "deep", "!", "-user", "user1"]).stdout == ""


def test_a_program_gets_signals_and_reports_its_end(site: Site) -> None:
    program = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('on', flush=1); time.sleep(60)"
    )
    with site.popen(["python3", "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        process.terminate()
        assert process.wait(timeout=10) == 7
    with pytest.raises(subprocess.TimeoutExpired):
        site.run(["sh", "-c", "sleep 4242 & wait"], timeout=0.5)
    eventually(lambda: not any("4242" in found.argv for found in site.processes()), what="the command is gone")


def test_only_the_server_can_be_reached_and_nobody_gets_in(site: Site, old_site: Site) -> None:
    with serving("0.0.0.0") as port:
        assert fetch(site, port).stdout.startswith("hello")
        others = [old_site.server_address, old_site.address, "192.0.2.1"]
        others += re.findall(r"inet ([\d.]+)", subprocess.check_output(["ip", "-4", "addr", "show", "up"], text=True))
        for address in {*others} - {site.server_address, "127.0.0.1"}:
            assert fetch(site, port, address=address, timeout_s=2).returncode != 0, address
    with site.popen(["python3", "-u", "-m", "http.server", "8000"], stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None and "Serving" in listener.stdout.readline()
        assert fetch(site, 8000, address="127.0.0.1").returncode == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((site.address, 8000), timeout=3)
        listener.kill_all()


def test_the_line_can_be_slow_lossy_and_cut(site: Site) -> None:
    def took_s() -> float:
        return float(fetch(site, port).stdout.split()[1])

    with serving(site.server_address, b"x" * 100_000) as port:
        before = min(took_s() for _ in range(3))
        try:
            site.network.delay(100, jitter_ms=5)
            assert 0.18 < min(took_s() for _ in range(2)) - before < 0.5
            site.network.delay(0, loss_percent=100)
            assert fetch(site, port, timeout_s=0.5).returncode != 0
            site.network.clear()
            assert min(took_s() for _ in range(3)) < 0.1
            site.network.cut()
            assert "timed out" in fetch(site, port, timeout_s=0.5).stderr
        finally:
            site.network.mend()
        assert fetch(site, port).returncode == 0


def test_an_open_connection_survives_what_happens_to_the_line(site: Site) -> None:
    program = (
        "import socket, sys; line = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "for text in sys.stdin: line.sendall(text.encode())"
    )
    with socket.create_server((site.server_address, 0)) as server:
        target = [site.server_address, str(server.getsockname()[1])]
        process = site.popen(["python3", "-u", "-c", program, *target], stdin=subprocess.PIPE)
        server.settimeout(10)
        with process, server.accept()[0] as connection, connection.makefile("r") as lines:
            connection.settimeout(15)
            assert process.stdin is not None
            spoil = site.network
            for change in (spoil.mend, partial(spoil.delay, 20), spoil.cut, spoil.mend):
                change()
                process.stdin.write("still here\n")
                process.stdin.flush()
            assert [lines.readline() for _ in range(4)] == ["still here\n"] * 4
            process.kill_all()


def test_apptainer_runs_as_a_plain_user_under_slurm(site: Site) -> None:
    require_apptainer(site.facts)
    make = """
        mkdir -p image/bin image/etc image/proc image/sys image/dev image/tmp image/home image/root
        cp /usr/bin/busybox image/bin/ && for name in sh hostname id echo; do ln -sf busybox image/bin/$name; done
        apptainer --silent build --force image.sif image
    """
    site.run(["sh", "-ec", make])
    for image in ("image", "image.sif"):
        argv = ["srun", "-p", "gpu", "-N2", "--gres=gpu:1", "apptainer", "--silent", "exec", image]
        done = site.run([*argv, "/bin/sh", "-c", "echo $(id -u) $(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES"])
        assert sorted(done.stdout.splitlines()) == ["1000 c1 0 0", "1000 c2 1 0"], done.stderr


def test_preemption_cancels_here_and_requeues_there(each: Site) -> None:
    wide = ["-N1", "-n2"]
    spot = each.sbatch("sleep 300", "user1", "-p", "spot", "-w", "c3", *wide)
    scavenger = each.sbatch("sleep 300", "user1", "-p", "scavenger", "-w", "c4", *wide)
    for job in (spot, scavenger):
        wait_state(each, job, "RUNNING")
    takers = [each.sbatch("sleep 300", "user2", "-p", "long", "-w", node, *wide) for node in ("c3", "c4")]
    wait_state(each, spot, "PREEMPTED")
    assert wait_state(each, scavenger, "PENDING")["Restarts"] == "1"
    each.run(["scancel", str(scavenger)])
    each.run(["scancel", *map(str, takers)], user="user2")
    each.wait_for_nodes()


def test_the_controller_comes_back_with_its_jobs(each: Site) -> None:
    job = each.sbatch("sleep 300", "user1")
    wait_state(each, job, "RUNNING")
    # In this order: a controller in good health saves on its way out, a killed one loses its last seconds.
    each.restart_controller()
    assert job_fields(each, job)["JobState"] == "RUNNING"
    each.kill_controller()
    with pytest.raises(subprocess.TimeoutExpired):  # Slurm's commands ask again and again before they give up
        each.run(["squeue"], timeout=1)
    each.start_controller()
    assert job_fields(each, job)["JobState"] == "RUNNING"
    each.run(["scancel", str(job)])
    each.wait_for_nodes()


def test_two_sites_know_nothing_of_each_other_and_a_dead_node_is_noticed() -> None:
    require()
    lab = Partition(name="lab", nodes=("c1",), options={"MaxTime": "5"})
    with (
        Site("alpha") as one,
        Site("alpha", nodes=many_cpus(2, 64), extra_partitions=[lab], conf=QUICK_NODE_FAIL) as two,
    ):
        assert one.address != two.address
        job = two.sbatch("sleep 300", "user1", "-w", "c2", "--no-requeue")
        wait_state(two, job, "RUNNING")
        two.kill_node("c2")
        one.write("/home/user1/only-here", "")
        assert not two.path("/home/user1/only-here").exists()
        assert "lab" in two.run(["sinfo"]).stdout and "lab" not in one.run(["sinfo"]).stdout
        assert one.run(["squeue", "-h"]).stdout == ""
        assert not any("slurmd" in line and "-N c2" in line for line in two.run(["ps", "ax"]).stdout.splitlines())
        wait_state(two, job, "NODE_FAIL", within_s=40)
        two.start_node("c2")


def test_an_older_python_on_the_login_node() -> None:
    require()
    if pythons.find("3.10") is None:
        pytest.skip("this machine has no self-contained Python 3.10 to lend to a site")
    with Site("py", pythons=["3.10"], nodes=many_cpus(1, 2)) as site:
        told = site.run(["python3.10", "-c", "import ssl, sqlite3, sys; print(*sys.version_info[:2])"])
        assert told.stdout == "3 10\n"


@pytest.mark.parametrize("release", ["trixie", "bookworm"])
def test_too_much_memory_is_noticed(release: str) -> None:
    require(release)
    if reason := memory.available():
        pytest.skip(reason)
    with Site("tight", release=release, memory_limits=True) as site:
        greedy = site.sbatch("exec python3 -c 'bytearray(400 << 20)'", "user1", "--mem=100")
        modest = site.sbatch("exec python3 -c 'bytearray(10 << 20)'", "user1", "--mem=100")
        wait_state(site, greedy, "OUT_OF_MEMORY")
        wait_state(site, modest, "COMPLETED")
        record = registry.find("tight")
    assert record is not None and not (memory.HIERARCHY / f"diamond-{record.id}").exists()


def traces(site_id: str, folder: Path, interface: str) -> list[str]:
    mounts = Path("/proc/self/mounts").read_text()
    names = {path.name for path in Path("/sys/class/net").iterdir()}
    found = [str(folder)] if folder.exists() or str(folder) in mounts else []
    found += [interface] if interface in names else []
    return found + [record.id for record in registry.running() if record.id == site_id]


def test_stopping_leaves_nothing_behind() -> None:
    require()
    with Site("gone") as site:
        record = registry.find("gone")
        assert record is not None
        site.sbatch("setsid sleep 301 & sleep 302", "user1")
        process = site.popen(["sh", "-c", "setsid sleep 303 & sleep 304"], stdout=subprocess.PIPE)
        eventually(lambda: len([p for p in site.processes() if p.argv[0] == "sleep"]) >= 3, what="programs run")
        processes = [registry.mark(found.pid) for found in site.processes()]
        assert traces(record.id, Path(record.folder), record.interface)
    assert process.returncode is not None
    assert len(processes) > 8 and not [found for found in processes if registry.is_alive(found)]
    assert not traces(record.id, Path(record.folder), record.interface)


def test_a_killed_owner_takes_its_site_along() -> None:
    require()
    program = (
        "import time; from testing.minihpc import Site; site = Site('orphan'); site.start()\n"
        "print(site.init_pid, flush=True); time.sleep(300)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env)
    with owner:
        assert owner.stdout is not None
        init = int(owner.stdout.readline())
        record = registry.find("orphan")
        assert record is not None and record.init[0] == init
        owner.send_signal(signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{init}").exists(), what="process 1 of the site is gone")
    # What is left is a folder; the next site clears it away.
    with registry.locked():
        registry.sweep()
    eventually(lambda: not traces(record.id, Path(record.folder), record.interface), what="nothing is left")


def test_a_person_finds_the_site_from_another_terminal(site: Site) -> None:
    record = next(found for found in registry.running() if found.init[0] == site.init_pid)
    base = [sys.executable, "-m", "testing.minihpc"]
    done = subprocess.run(
        [*base, "run", record.id, "--user", "user2", "--", "id", "-un"], capture_output=True, text=True
    )
    assert done.stdout == "user2\n", done.stderr
    refused = subprocess.run([*base, "run", "nowhere", "--", "id"], capture_output=True, text=True)
    assert refused.returncode == 1 and "No site 'nowhere' runs here" in refused.stderr
