"""The way into images of every container runtime, for real: variables, arguments, exit codes and signals.

Job scripts run as schedulers run them, in a session of their own, without a scheduler: what is tried is what lies
between the script and the program. Tasks from end to end: test_image_tasks.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from diamond.agent.image_jobs import Surroundings, entrance
from diamond.core import onefile
from diamond.core.images import ImageUse
from diamond.core.rundir import EXIT_ROOM_BYTES, RunDir, read_exit
from diamond.core.scripts import ScriptPlan, env_file, job_script
from testing.images import BASE_INSIDE, base_folder, image_binds
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.podman import PodmanBench
from testing.waiting import eventually

ODD = 'it\'s "x"\n$(touch pwned) `id` \\ \\n 1\t é 名\n\n'
WORDS = ["", " ", "$(touch pwned)", "a\nb", "'\"\\", "-n", "*", "%s", "; exit 1"]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"

DEFINITION = f"""\
Bootstrap: localimage
From: {BASE_INSIDE}
%post
  mkdir -p /opt/diamond
  printf "export BOTH='recipe'\\nexport OF_RECIPE='r'\\n" > /opt/diamond/env.sh
%environment
  export BOTH=image OF_IMAGE=i
"""

# Says which signals come, and how often; at the end it needs files of its image that it has not read before.
PROGRAM = """\
import os, signal, sys, time
def say(word):  # not print: a signal may come in the middle of one
    os.write(1, (word + "\\n").encode())
def on_warning(number, frame):
    say("warned")
def on_stop(number, frame):
    say("told to stop")
    time.sleep(1)
    import xml.dom.minidom, sqlite3, email.mime.text
    say("saved")
    os._exit(7)
if sys.argv[1] == "catches":
    signal.signal(signal.SIGUSR1, on_warning)
signal.signal(signal.SIGTERM, on_stop)
say("up")
while True:
    time.sleep(0.1)
"""


class Place:
    """Where jobs with one kind of image run: `outside` is a path of theirs as this process sees it."""

    kind = ""
    folder = "/home/user1/entering"

    def __init__(self, kind: str, image: str) -> None:
        self.kind = kind
        self.use = ImageUse(kind=kind, path=image, image_id="img_00000001")

    def outside(self, path: Path) -> Path:
        raise NotImplementedError

    def start(self, argv: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        raise NotImplementedError

    def stage(self, name: str, run: str, *, envs: Mapping[str, str] | None = None, library: str = "") -> RunDir:
        inside = RunDir(Path(self.folder) / "jobs" / f"job_{self.kind}_{name}")
        made = RunDir(self.outside(inside.path))
        made.work.mkdir(parents=True)
        made.shield.mkdir()
        for path, data in entrance(self.use, inside, envs or {}, Surroundings(), library).items():
            self.outside(path).write_bytes(data)
        for program in made.shield.iterdir():
            program.chmod(0o700)
        made.run.write_text(run)
        made.env.write_bytes(env_file(envs or {}))
        made.exit_room.write_bytes(b" " * EXIT_ROOM_BYTES)
        plan = ScriptPlan(
            job_id="job_x", run_dir=str(inside.path), ranks_per_node=1, has_setup=False, scheduler="slurm", image=True
        )
        made.script.write_text(job_script(plan))
        for path in (made.path, *made.path.rglob("*")):
            os.chown(path, self.uid, self.uid)
        return inside

    uid = 1000

    def run(self, inside: RunDir, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(["bash", str(inside.inside), *argv], {"DIAMOND_RUN_DIR": str(inside.path), **env})
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)


class SitePlace(Place):
    def __init__(self, kind: str, image: str, site: Site) -> None:
        super().__init__(kind, image)
        self.site = site

    def outside(self, path: Path) -> Path:
        return self.site.path(str(path))

    def start(self, argv: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        # A session of the site's own: that of the test has no number there.
        whole = ["setsid", "--wait", *argv]
        return self.site.popen(whole, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


class HostPlace(Place):
    uid = os.getuid()

    def __init__(self, image: str, bench: PodmanBench) -> None:
        super().__init__("podman", image)
        self.bench = bench
        self.folder = str(bench.folder)

    def outside(self, path: Path) -> Path:
        return path

    def start(self, argv: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        whole = {"PATH": os.environ["PATH"], "HOME": self.folder, **self.bench.envs, **env}
        return subprocess.Popen(
            argv, env=whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    require("trixie")
    with Site("entering", binds=image_binds()) as running:
        running.write("/home/user1/image.def", DEFINITION, user="user1")
        running.run(["apptainer", "--quiet", "build", "--fix-perms", "--sandbox", "folder", "image.def"], timeout=200)
        running.run(["apptainer", "--quiet", "build", "image.sif", "folder"], timeout=300)
        yield running


def _podman_image(bench: PodmanBench) -> None:
    recipe = Path(bench.folder) / "recipe"
    recipe.mkdir()
    (recipe / "env.sh").write_text("export BOTH='recipe'\nexport OF_RECIPE='r'\n")
    owner = ["--numeric-owner", "--owner=0", "--group=0"]
    subprocess.run(["tar", "-C", str(base_folder()), *owner, "-cf", f"{recipe}/base.tar", "."], check=True)
    envs = ["--change=ENV BOTH=image", "--change=ENV OF_IMAGE=i"]
    bench.podman("import", "--quiet", *envs, f"{recipe}/base.tar", "plain")
    put = ["sh", "-c", "mkdir -p /opt/diamond && cp /mnt/env.sh /opt/diamond/"]
    bench.podman("run", "--name=made", "--network=host", f"--volume={recipe}:/mnt", "plain", *put)
    bench.podman("commit", "--quiet", "made", "localhost/entering")
    bench.podman("rm", "made")


@pytest.fixture(scope="module", params=["apptainer", "apptainer-folder", "charliecloud", "podman"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "podman":
        bench = PodmanBench()
        if bench.why_not:
            pytest.skip(bench.why_not)
        _podman_image(bench)
        yield HostPlace("localhost/entering", bench)
        bench.close()
        return
    running = request.getfixturevalue("site")
    image = {"apptainer": "/home/user1/image.sif"}.get(request.param, "/home/user1/folder")
    place = SitePlace(request.param.partition("-")[0], image, running)
    place.folder = f"/home/user1/{request.param}"
    yield place


def test_variables_arguments_and_exit_codes(place: Place) -> None:
    inside = place.stage("env", "exit 3", envs={"ODD": ODD, "BOTH": "task", "OMP_NUM_THREADS": "7", "run_dir": "x"})
    env = {
        "NCCL_ODD": ODD,
        "OMP_NUM_THREADS": "1",
        "RANK": "3",
        "http_proxy": "http://me:passw0rd@proxy",
        "LEFT": "out",
        "LC_TIME": "xx_XX",
        "OF_RECIPE": "host",
    }
    done = place.run(inside, "--", "python3", "-c", SHOW, *WORDS, **env)
    assert done.returncode == 0, done.stderr
    argv, where, found = json.loads(done.stdout)
    assert (argv, where, done.stderr) == (WORDS, str(inside.work), "")
    expected = {**env, "ODD": ODD, "BOTH": "task", "OMP_NUM_THREADS": "7", "OF_RECIPE": "r", "run_dir": "x"}
    expected |= {"DIAMOND_IMAGE": "img_00000001", "DIAMOND_RUN_DIR": str(inside.path), "PYTHONNOUSERSITE": "1"}
    del expected["LEFT"], expected["LC_TIME"]
    assert {name: found.get(name) for name in expected} == expected
    assert "LEFT" not in found and found["LANG"] == "C.UTF-8"
    if place.kind != "charliecloud":  # its images' own variables are the builder's to write down
        assert found["OF_IMAGE"] == "i"
    assert not list(place.outside(inside.path).rglob("pwned"))
    assert place.run(inside, "run").returncode == 3
    assert place.run(inside, "--", "sh", "-c", "kill -9 $$").returncode in (137, -9)
    done = place.run(inside, "--", "no-such-program")
    assert done.returncode == 127 and "no-such-program" in done.stderr


def test_files_belong_to_who_runs_it(place: Place) -> None:
    inside = place.stage("files", 'echo made > here; mktemp -p /tmp > there; echo "$HOME"; id -u')
    done = place.run(inside, "run")
    assert done.stdout.split() == [place.folder if place.kind == "podman" else "/home/user1", str(place.uid)]
    made = place.outside(inside.work / "here")
    assert (made.read_text(), made.stat().st_uid) == ("made\n", place.uid)


def test_the_one_file_agent_lends_its_library_inside_too(site: Site) -> None:
    site.run(["mkdir", "-p", "/scratch/agent"])
    site.path("/scratch/agent/it's.pyz").write_bytes(onefile.build())
    place = SitePlace("apptainer", "/home/user1/image.sif", site)
    program = "import diamond.train as t; t.log(step=1, loss=2.0); print(t.__file__)"
    inside = place.stage("library", "true", library="/scratch/agent/it's.pyz")
    done = place.run(inside, "--", "python3", "-c", program, DIAMOND_METRICS_FILE=str(inside.stream("metrics")))
    assert done.stdout.startswith("/scratch/agent/it's.pyz/"), done.stderr
    assert b'"loss"' in place.outside(inside.stream("metrics")).read_bytes()


def read_until(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"it never said {word!r}")


def processes_of(place: Place, inside: RunDir) -> list[int]:
    """By the number this process knows them by: the job script, and everybody in its session."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found[int(entry.name)] = (int(fields[3]), line)
    leaders = [sid for sid, line in found.values() if str(inside.script) in line and "setsid" not in line]
    assert leaders, "the job script runs"
    return [pid for pid, (sid, _) in found.items() if sid == leaders[-1]]


def job_script_of(place: Place, inside: RunDir) -> int:
    for pid in processes_of(place, inside):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if line[:2] == [b"bash", str(inside.script).encode()]:
            return pid
    raise AssertionError("the job script runs")


@pytest.mark.parametrize("how", ["catches", "does not"])
def test_a_warning_comes_once_and_only_to_those_who_expect_it(place: Place, how: str) -> None:
    name = f"warned_{how.replace(' ', '_')}"
    inside = place.stage(name, f"exec python3 program.py '{how}'")
    place.outside(inside.work / "program.py").write_text(PROGRAM)
    process = place.start(["bash", str(inside.script)], {})
    read_until(process, "up")
    os.kill(job_script_of(place, inside), signal.SIGUSR1)  # to the script alone, as Slurm does
    time.sleep(1.5)
    assert process.poll() is None, process.communicate()
    for pid in processes_of(place, inside):  # to everybody, as a scheduler that cancels
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert out.split("\n")[:-1] == [*(["warned"] if how == "catches" else []), "told to stop", "saved"], err
    eventually(lambda: read_exit(RunDir(place.outside(inside.path))), what="the end is recorded")
    record = read_exit(RunDir(place.outside(inside.path)))
    assert record is not None and record.exit_code == 7
