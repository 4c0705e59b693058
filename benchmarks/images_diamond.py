"""Diamond's way: the server on the user's machine, an agent of each user at the centres, and what they type.

A mistake that can be made with Diamond too is made: whoever forgets a package by hand forgets it here. The other two
cannot be: the partition is chosen, and what lies on scratch is seen inside. Setting up the server and the agents is
not counted, as setting up Slurm and Apptainer is not.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images_site import BASE, Centre
from benchmarks.images_steps import Diary, Step, WayLost
from benchmarks.images_workloads import SOLVED, Workload
from diamond.core.home import ClientConfig, Home
from diamond.sdk.client import Client
from testing import people
from testing.cluster import SOURCE_INSIDE
from testing.minihpc.inside import SiteProcess
from testing.service import Service
from testing.waiting import eventually

COMMAND_WITHIN_S = 1800


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody with an account at the server, and with one at the centres."""

    name: str
    home: Home
    env: dict[str, str]

    def run(self, argv: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "diamond.cli", *argv],
            env=self.env, cwd=cwd, capture_output=True, text=True, timeout=COMMAND_WITHIN_S, check=False,
        )  # fmt: skip

    def client(self) -> Client:
        config = ClientConfig.load(self.home)
        assert config is not None
        return Client(url=config.url, token=config.token)


class Installation:
    """A server, user1's agents at both centres and user2's at the first. Use as a context manager.

    Endpoints are called after their centres; user2's is `alpha2`. Images lie on scratch, where large files belong
    at most centres and where a colleague can read them.
    """

    def __init__(self, alpha: Centre, beta: Centre, folder: Path) -> None:
        self.alpha = alpha
        self.beta = beta
        self._folder = folder
        self._agents: list[SiteProcess] = []
        self.service = Service(folder / "user1", host="0.0.0.0", allow_remote="1", multi_user="1", user="user1")

    def __enter__(self) -> Installation:
        self.service.start_server()
        self.user1 = Person(name="user1", home=self.service.home, env=self.service.env)
        self.user2 = self._make_user2()
        try:
            self._start_agent(self.user1, self.alpha, "alpha")
            self._start_agent(self.user1, self.beta, "beta")
            self._start_agent(self.user2, self.alpha, "alpha2")
            self._wait_online()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(20)
        self.service.stop()

    def _make_user2(self) -> Person:
        admin = ClientConfig.load(self.service.home)
        assert admin is not None
        home = Home(self._folder / "user2")
        people.save(home, self.service.url, people.invite(admin, "user2"))
        return Person(name="user2", home=home, env={**self.service.env, "DIAMOND_HOME": str(home.path)})

    def _start_agent(self, person: Person, centre: Centre, endpoint: str) -> None:
        token = person.home.path / f"{endpoint}.token"
        made = person.run(["endpoint", "create", endpoint, "--token-file", str(token)])
        if made.returncode != 0:
            raise WayLost(made.stderr)
        home = f"/home/{person.name}/.diamond/agents/{endpoint}"
        centre.site.run(["mkdir", "-p", home, self.image_root(person)], user=person.name)
        centre.site.write(f"{home}/token", token.read_text(), user=person.name, mode=0o600)
        centre.site.write(f"{home}/policy.toml", f'image_root = "{self.image_root(person)}"\n', user=person.name)
        argv = ["python3", "-m", "diamond.agent", "--scheduler", "slurm", "--home", home]
        argv += ["--server", f"http://{centre.site.server_address}:{self.service.port}"]
        argv += ["--token-file", f"{home}/token"]
        env = {"PYTHONPATH": SOURCE_INSIDE, "PYTHONDONTWRITEBYTECODE": "1", **centre.agent_env}
        with (self._folder / f"{endpoint}.log").open("w") as log:
            self._agents.append(centre.site.popen(argv, user=person.name, env=env, stdout=log, stderr=log))

    def _wait_online(self) -> None:
        def online() -> bool:
            with self.user1.client() as one, self.user2.client() as two:
                found = {each.name: each for each in (*one.endpoints.list(), *two.endpoints.list())}
            wanted = [found[name] for name in ("alpha", "beta", "alpha2") if name in found]
            return len(wanted) == 3 and all(each.online and each.facts and each.facts.partitions for each in wanted)

        logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in self._folder.glob("*.log"))
        eventually(online, within_s=90, what=f"the agents are online\n{logs}")

    def image_root(self, person: Person) -> str:
        return f"/scratch/images-{person.name}"

    def forget_images(self) -> None:
        """Nothing of any image is left at any endpoint: what is built next is built from nothing."""
        for person in (self.user2, self.user1):
            with person.client() as client:
                mine = [image for image in client.images.list(everything=True) if image.is_mine]
            for image in mine:
                done = person.run(["image", "rm", image.id, "--yes", "--force"])
                if done.returncode != 0:
                    raise WayLost(f"image rm {image.id}: {done.stderr}")
        for centre, person in ((self.alpha, self.user1), (self.beta, self.user1), (self.alpha, self.user2)):
            self.forget_layers(centre, person)

    def forget_layers(self, centre: Centre, person: Person) -> None:
        """Kept steps of builds, which `image prune` keeps as long as an image needs them."""
        centre.site.run(["rm", "-rf", f"{self.image_root(person)}/layers"], user="root")


class Desk:
    """A person at their own machine. Every line typed goes into the diary with the time it took."""

    def __init__(self, person: Person, diary: Diary, cwd: Path, centres: tuple[Centre, ...]) -> None:
        self.person = person
        self.diary = diary
        self.cwd = cwd
        self._centres = centres

    @property
    def who(self) -> str:
        return f"{self.person.name}@home"

    def type(self, line: str, *, says: str = "", fails_with: str = "", mistake: bool = False) -> str:
        """A `diamond` command; its output. Time its jobs spent in Slurm's queues is taken off."""
        marks = [(centre, centre.mark()) for centre in self._centres]
        began = time.monotonic()
        done = self.person.run(shlex.split(line)[1:], self.cwd)
        took = time.monotonic() - began
        said = done.stdout + done.stderr
        if (done.returncode != 0) != bool(fails_with) or fails_with not in said or says not in said:
            raise WayLost(f"{self.who}: {line!r} ended with {done.returncode}:\n{said[-3000:]}")
        waited = sum(job.queue_s for centre, mark in marks for job in centre.jobs(mark).values())
        self.diary.add(Step(who=self.who, typed=line, seconds=took - waited, queue_s=waited, mistake=mistake))
        return said

    def write(self, name: str, text: str) -> None:
        self.diary.add(Step(who=self.who, typed=f"nano {name}"))
        self.diary.add(Step(who=self.who, typed=text, is_command=False))
        (self.cwd / name).write_text(text)

    def edit(self, name: str, text: str, inserted: str, *, mistake: bool = False) -> None:
        """Make a file hold this text; only what is put in counts as typed, moving and deleting are free."""
        self.diary.add(Step(who=self.who, typed=f"nano {name}", mistake=mistake))
        self.diary.add(Step(who=self.who, typed=inserted, is_command=False, mistake=mistake))
        (self.cwd / name).write_text(text)


class WithDiamond:
    """The journeys of one workload, each from what the one before left behind."""

    def __init__(self, workload: Workload, installation: Installation, workstation: Path) -> None:
        self.workload = workload
        self.installation = installation
        self.workstation = workstation  # the folder that holds the folder of the program, of each person

    @property
    def _file(self) -> str:
        return f"{self.workload.name}.yaml"

    def first_time(self) -> Diary:
        diary = Diary()
        self.installation.forget_images()
        desk = self._desk(self.installation.user1, diary)
        desk.write(self._file, self._task_text())
        line = f"diamond launch {self._file} --infra alpha"
        desk.type(line, fails_with=self.workload.symptom, mistake=True)
        forgotten = self.workload.forgotten
        inserted = f", {forgotten}" if forgotten in self.workload.pip else f"  system: [{forgotten}]"
        desk.edit(self._file, self._task_text(complete=True), inserted, mistake=True)
        desk.type(line, says=SOLVED)
        return diary

    def second_site(self) -> Diary:
        diary = Diary()
        desk = self._desk(self.installation.user1, diary)
        desk.type(f"diamond launch {self._file} --infra beta", says=SOLVED)
        return diary

    def collaborator(self) -> Diary:
        """Somebody else at the first centre, with the folder of the program as the first user left it."""
        diary = Diary()
        name = self.workload.name
        mine = self._folder(self.installation.user2)
        shutil.rmtree(mine, ignore_errors=True)
        shutil.copytree(self._folder(self.installation.user1), mine)
        owner, desk = self._desk(self.installation.user1, diary), self._desk(self.installation.user2, diary)
        owner.type(f"diamond image share {name} --public")
        desk.type(f"diamond launch {self._file} --image user1/{name} --infra alpha2", says=SOLVED)
        return diary

    def _desk(self, person: Person, diary: Diary) -> Desk:
        return Desk(person, diary, self._folder(person), (self.installation.alpha, self.installation.beta))

    def _folder(self, person: Person) -> Path:
        return self.workstation / person.name / self.workload.name

    def _task_text(self, *, complete: bool = False) -> str:
        """What is needed and nothing more, without the forgotten package at first."""
        work = self.workload
        lines = ["workdir: ."]
        lines += [f"num_nodes: {work.num_nodes}"] if work.num_nodes > 1 else []
        lines += ["resources:", f"  accelerators: {work.gpu.upper()}:1"] if work.gpu else []
        system, pip = (list(each) if complete else work.first_try(each) for each in (work.system, work.pip))
        lines += ["image:", f"  name: {work.name}", f"  base: {BASE}"]
        lines += [f"  system: [{', '.join(system)}]"] if system else []
        lines += [f"  pip: [{', '.join(pip)}]", f"run: {work.command}"]
        return "\n".join(lines) + "\n"
