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

from diamond.agent.image_jobs import Surroundings, entrance, make_view
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

    def stage(
        self,
        name: str,
        run: str,
        *,
        envs: Mapping[str, str] | None = None,
        library: str = "",
        is_guest: bool = False,
        around: Surroundings | None = None,
        continues: str = "",
    ) -> RunDir:
        inside = RunDir(Path(self.folder) / "jobs" / f"job_{self.kind}_{name}")
        made = RunDir(self.outside(inside.path))
        made.path.mkdir(parents=True)
        if continues:
            os.symlink(f"../job_{self.kind}_{continues}/work", made.work)
        else:
            made.work.mkdir()
        made.shield.mkdir()
        way_in = entrance(self.use, inside, envs or {}, around or Surroundings(), library, is_guest=is_guest)
        for path, data in way_in.items():
            self.outside(path).write_bytes(data)
        for program in made.shield.iterdir():
            program.chmod(0o700)
        made.run.write_text(run)
        made.env.write_bytes(env_file(envs or {}))
        made.exit_room.write_bytes(b" " * EXIT_ROOM_BYTES)
        plan = ScriptPlan(
            job_id="job_x", run_dir=str(inside.path), ranks_per_node=1, has_setup=False, scheduler="slurm", image=True,
            is_guest=is_guest, chained=bool(continues),
        )  # fmt: skip
        made.script.write_text(job_script(plan))
        if is_guest:
            for stream in ("metrics", "train"):
                made.stream(stream).touch()
            make_view(made, str(self.outside(Path(library))) if library else "")
        for path in (made.path, *made.path.rglob("*")):
            os.chown(path, self.uid, self.uid, follow_symlinks=False)
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
    _is_warned_and_saves(place, inside, how)


def _is_warned_and_saves(place: Place, inside: RunDir, how: str, **env: str) -> None:
    place.outside(inside.work / "program.py").write_text(PROGRAM)
    process = place.start(["bash", str(inside.script)], env)
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


# What of the account is seen in there


TOKEN = "t0ken-of-the-agent"
# Every way that leads from a program to the folders of the account, as far as one knows them; each line that says
# TOKEN or STOLEN is a hole. The folder of the agent is $1, the home $2.
ATTACK = """\
agent=$1 home=$2
cat "$agent/token" "$agent/policy.toml" "$agent/jobs/job_other/secrets.sh"
cat ../../../token "$DIAMOND_RUN_DIR/../../token"
ln -s "$agent/token" link; cat link
ln -s "$agent" folder; cat folder/token
for process in /proc/[0-9]*; do cat "$process/root$agent/token" "$process/cwd/token"; done
for open in /proc/[0-9]*/fd/*; do cat "$open$agent/token" "$open/token" "$open/../token" "$open/../../token"; done
ls "$agent/jobs" | grep -qx job_other && echo STOLEN: other jobs
umount "$agent"; umount -l "$DIAMOND_RUN_DIR"; cat "$agent/token"
unshare --user --map-root-user --mount sh -c 'umount "$0"; cat "$0/token"' "$agent"
if [ "$3" = guest ]; then
  cat "$home/.ssh/id" "$home/.bashrc" ../../../../../../.ssh/id /tmp/of-the-node /var/tmp/of-the-node
  for process in /proc/[0-9]*; do grep -az "TAKEN=" "$process/environ"; done
  kill -9 "$4"
  ls -A "$home/.ssh" | grep -q . && echo STOLEN: keys
  for socket in /run/munge/* /run/docker.sock /run/podman/* /run/user/* /run/dbus/*; do
    if [ -e "$socket" ]; then echo "STOLEN: $socket"; fi
  done
fi
echo 'allow_others = true' > "$agent/policy.toml"
mkdir -p "$agent" && echo 'allow_others = true' > "$agent/policy.toml"
if [ "$3" = guest ]; then
  for name in job.sh inside.sh launch.py order.json env exit.tmp exit.json over setup.done; do
    echo 'echo HOSTED' > "$DIAMOND_RUN_DIR/$name"
  done
  mv "$DIAMOND_RUN_DIR/work" "$DIAMOND_RUN_DIR/work.old"
  mv "$DIAMOND_RUN_DIR/enter.sh" "$DIAMOND_RUN_DIR/gone"; ln -sf "$agent/policy.toml" "$DIAMOND_RUN_DIR/over"
fi
echo attacked
exit 0
"""


class Account:
    """The home of an account with an agent in it, and what must not be seen of it, around jobs of a place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.home = "/home/user1" if place.kind != "podman" else f"{place.folder}/home"
        place.folder = self.agent = f"{self.home}/.diamond/agents/{Path(place.folder).name}"
        self.around = Surroundings(home=self.home, hidden=(self.agent,))
        for path, text in {
            f"{self.agent}/token": TOKEN,
            f"{self.agent}/policy.toml": f"# {TOKEN}\ncontainers_only = true\n",
            f"{self.agent}/jobs/job_other/secrets.sh": TOKEN,
            f"{self.home}/.ssh/id": TOKEN,
            f"{self.home}/.bashrc": "echo of the owner\n",
        }.items():
            file = place.outside(Path(path))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for folder in (".diamond", ".ssh"):
            made = place.outside(Path(self.home)) / folder
            for path in (made, *made.rglob("*")):
                os.chown(path, place.uid, place.uid, follow_symlinks=False)

    def policy(self) -> str:
        return self.place.outside(Path(f"{self.agent}/policy.toml")).read_text()

    def attack(self, inside: RunDir, who: str) -> str:
        """What a program learns that tries all of ATTACK; another process of the account runs beside it."""
        (self.place.outside(inside.work) / "attack.sh").write_text(ATTACK)
        other = self.place.start(["sh", "-c", "echo $$; exec sleep 100"], {"HOME": self.home, "TAKEN": TOKEN})
        assert other.stdout is not None
        number = other.stdout.readline().strip()
        try:
            done = self.place.run(inside, "--", "sh", "attack.sh", self.agent, self.home, who, number, HOME=self.home)
            assert other.poll() is None, "another process of the account was ended"
        finally:
            other.kill()
            other.communicate()
        assert "attacked" in done.stdout, done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def account(place: Place) -> Iterator[Account]:
    before = place.folder
    try:
        yield Account(place)
    finally:
        place.folder = before


def test_a_guest_sees_nothing_of_the_account(account: Account) -> None:
    place, policy = account.place, account.policy()
    inside = place.stage("guest_attacks", "true", is_guest=True, around=account.around)
    made = RunDir(place.outside(inside.path))
    before = {path.name: path.read_bytes() for path in made.path.iterdir() if path.is_file()}
    left = place.outside(Path("/tmp/of-the-node"))
    left.write_text(TOKEN)
    try:
        said = account.attack(inside, "guest")
    finally:
        left.unlink()
    assert TOKEN not in said and "STOLEN" not in said and "of the owner" not in said, said
    assert account.policy() == policy
    after = {path.name: path.read_bytes() for path in made.path.iterdir() if path.is_file()}
    assert after == before, "nothing that runs out here was changed or made"
    assert made.work.is_dir() and not made.work.is_symlink()


def test_an_owners_own_task_sees_the_home_and_not_the_agent(account: Account) -> None:
    policy = account.policy()
    inside = account.place.stage("owner_attacks", "true", around=account.around)
    (account.place.outside(inside.work) / "look.sh").write_text('cat "$HOME/.bashrc"; ls "$1"; ls "$1/jobs"\n')
    done = account.place.run(inside, "--", "sh", "look.sh", account.agent, HOME=account.home)
    assert done.stdout.split("\n")[:3] == ["echo of the owner", "jobs", inside.path.name], done.stderr
    said = account.attack(inside, "owner")
    assert TOKEN not in said and "STOLEN" not in said, said
    assert account.policy() == policy


WORK = """\
set -e
echo made > made; echo more >> "$DIAMOND_METRICS_FILE"; echo kept > "$HOME/.cached"
[ "$HOME" = "$DIAMOND_RUN_DIR/home" ]
[ "$(cat "$HOME/.cached")" = kept ]
mktemp > /dev/null; touch /var/tmp/too
: > "$DIAMOND_CONTINUE_FILE"
id -u; pwd
exit 7
"""


def test_a_guests_job_runs_as_any_other(account: Account) -> None:
    place = account.place
    first = place.stage("guest_first", "true", is_guest=True, around=account.around)
    inside = place.stage("guest_runs", "sh work.sh", is_guest=True, around=account.around, continues="guest_first")
    (place.outside(first.work) / "work.sh").write_text(WORK)
    process = place.start(["bash", str(inside.script)], {"HOME": account.home})
    out, err = process.communicate(timeout=60)
    made = RunDir(place.outside(inside.path))
    record = read_exit(made)
    assert record is not None and (record.exit_code, record.more) == (7, True), (out, err)
    assert out.split() == [str(place.uid), str(inside.work)]
    assert (place.outside(first.work) / "made").read_text() == "made\n", "in the work directory of the chain"
    assert made.stream("metrics").read_text() == "more\n"
    assert (made.view / "home/.cached").is_file() and not (made.path / "home").exists()
    assert not (made.path / "tmp").exists(), "what it left in /tmp is gone with it"


@pytest.mark.parametrize("how", ["catches", "does not"])
def test_a_guests_program_hears_the_same_signals(account: Account, how: str) -> None:
    place = account.place
    name, run = f"guest_{how.replace(' ', '_')}", f"exec python3 program.py '{how}'"
    inside = place.stage(name, run, is_guest=True, around=account.around)
    _is_warned_and_saves(place, inside, how, HOME=account.home)


def test_a_guest_is_lent_the_library(account: Account) -> None:
    place, library = account.place, f"{account.agent}/diamond.pyz"
    place.outside(Path(library)).write_bytes(onefile.build())
    program = "import os, diamond.train as t; t.log(step=1, loss=2.0); print(t.__file__)"
    program += "; open(os.environ['DIAMOND_RUN_DIR'] + '/diamond.pyz', 'w').write('spoilt')"
    inside = place.stage("guest_library", "true", library=library, is_guest=True, around=account.around)
    metrics = str(inside.stream("metrics"))
    done = place.run(inside, "--", "python3", "-c", program, DIAMOND_METRICS_FILE=metrics, HOME=account.home)
    assert done.stdout.startswith(f"{inside.path}/diamond.pyz/"), done.stderr
    assert b'"loss"' in place.outside(inside.stream("metrics")).read_bytes()
    assert place.outside(Path(library)).read_bytes() == onefile.build(), "the agent's own is not a guest's to change"


def test_an_owners_task_is_lent_the_library_to_read(account: Account) -> None:
    place, library = account.place, f"{account.agent}/diamond.pyz"
    place.outside(Path(library)).write_bytes(onefile.build())
    inside = place.stage("owner_library", "true", library=library, around=account.around)
    program = "import sys, diamond.train as t; print(t.__file__); open(sys.argv[1], 'a').write('spoilt')"
    done = place.run(inside, "--", "python3", "-c", program, library, HOME=account.home)
    assert done.stdout.startswith(f"{library}/"), done.stderr
    assert place.outside(Path(library)).read_bytes() == onefile.build()


@pytest.mark.parametrize("is_guest", [False, True], ids=["owner", "guest"])
@pytest.mark.parametrize("is_shown", [False, True], ids=["away", "shown"])
def test_an_agent_that_is_reached_by_a_link_is_hidden_too(account: Account, is_guest: bool, is_shown: bool) -> None:
    """Its home lies on another file system, which tasks may be shown, and is called by a link in the account's."""
    place, name = account.place, f"agent-{int(is_guest)}{int(is_shown)}-{Path(account.agent).name}"
    away, way = ("/scratch", "../../scratch") if place.kind != "podman" else (f"{Path(account.home).parent}", "..")
    made = place.outside(Path(f"{away}/{name}/jobs"))
    made.mkdir(parents=True)
    (made.parent / "token").write_text(TOKEN)
    os.symlink(f"{way}/{name}", link := place.outside(Path(f"{account.home}/{name}")))
    for path in (made.parent, made, made.parent / "token", link):
        os.chown(path, place.uid, place.uid, follow_symlinks=False)
    place.folder = linked = f"{account.home}/{name}"
    shown = (away,) if is_shown else ()
    around = Surroundings(home=account.home, hidden=(linked,), binds=shown, guest_binds=shown)
    inside = place.stage("linked", "true", is_guest=is_guest, around=around)
    text = f"cat {linked}/token {away}/{name}/token; ls {away}/{name}/jobs; echo made > made && echo well"
    done = place.run(inside, "--", "sh", "-c", text, HOME=account.home)
    assert done.stdout.endswith("well\n") and TOKEN not in done.stdout, (done.stdout, done.stderr)
    assert (place.outside(inside.work) / "made").is_file()
