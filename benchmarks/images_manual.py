"""The way by hand, by somebody who knows Apptainer and Slurm: every command is really run, every mistake really fails.

Three mistakes are made at the first time, in the order in which they show: a job in a partition that cannot take it,
a package that was forgotten, a folder that is not bound into the container. What was learnt is in the files
afterwards, so the second centre and the collaborator meet only what is new to them: other names of partitions, and a
home directory that is closed to others.

In favour of this way: no logins, no documentation and no thinking are counted, a file is looked at the moment the job
is over, copies between machines run at the speed of a pipe, and of two ways to get at an image both are taken and
told apart.
"""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.images_site import BASE, Centre, JobTimes
from benchmarks.images_steps import Diary, Step, WayLost
from benchmarks.images_workloads import SOLVED, Workload

# What each centre calls the place for a job of one node, of one with a GPU, and of several nodes.
_PARTITIONS = {
    "alpha": {"plain": "cpu", "gpu": "gpu", "several": "long"},
    "beta": {"plain": "batch", "gpu": "accel", "several": "batch"},
}
_PIP = "pip install --break-system-packages"
BUILD_WITHIN_S = 1800


@dataclass(frozen=True, kw_only=True)
class Job:
    """How a submission went: `text` is what sbatch refused it with, what squeue says of it or what it printed."""

    outcome: str  # "refused", "stuck" or "ended"
    text: str
    number: int = 0

    @property
    def is_solved(self) -> bool:
        return self.outcome == "ended" and SOLVED in self.text


class Terminal:
    """A person logged in at a centre. Every line typed goes into the diary with the time it took."""

    def __init__(self, centre: Centre, diary: Diary, user: str = "user1") -> None:
        self.centre = centre
        self.diary = diary
        self.user = user
        self.cwd = f"/home/{user}"

    @property
    def who(self) -> str:
        return f"{self.user}@{self.centre.name}"

    def type(self, line: str, *, fails_with: str = "", mistake: bool = False) -> str:
        """Run a line in the shell; what it said. It must succeed, or fail with the given words."""
        began = time.monotonic()
        done = self.centre.site.run(
            ["bash", "-c", line], user=self.user, cwd=self.cwd, env=self.centre.login_env,
            check=False, timeout=BUILD_WITHIN_S,
        )  # fmt: skip
        took = time.monotonic() - began
        said = done.stdout + done.stderr
        if (done.returncode != 0) != bool(fails_with) or fails_with not in said:
            raise WayLost(f"{self.who}: {line!r} ended with {done.returncode}:\n{said[-2000:]}")
        self.diary.add(Step(who=self.who, typed=line, seconds=took, mistake=mistake))
        return said

    def cd(self, folder: str) -> None:
        self.type(f"cd {folder}")
        self.cwd = f"{self.cwd}/{folder}"

    def write(self, name: str, text: str) -> None:
        """A new file, typed into an editor."""
        self.diary.add(Step(who=self.who, typed=f"nano {name}"))
        self.diary.add(Step(who=self.who, typed=text, is_command=False))
        self.centre.site.write(f"{self.cwd}/{name}", text, user=self.user)

    def edit(self, name: str, before: str, after: str, inserted: str, *, mistake: bool = True) -> None:
        """Change a file in an editor; only what is put in counts as typed, moving and deleting are free."""
        path = self.centre.site.path(f"{self.cwd}/{name}")
        text = path.read_text()
        if text.count(before) != 1:
            raise WayLost(f"{self.who}: {before!r} is not in {name} exactly once:\n{text}")
        self.diary.add(Step(who=self.who, typed=f"nano {name}", mistake=mistake))
        self.diary.add(Step(who=self.who, typed=inserted, is_command=False, mistake=mistake))
        path.write_text(text.replace(before, after))

    def submit(self, script: str) -> Job:
        """sbatch, a look at the queue, a look at the output."""
        mark = self.centre.mark()
        began = time.monotonic()
        done = self.centre.site.run(
            ["sbatch", script], user=self.user, cwd=self.cwd, env=self.centre.login_env, check=False
        )
        took = time.monotonic() - began
        line = f"sbatch {script}"
        if done.returncode != 0:
            self.diary.add(Step(who=self.who, typed=line, seconds=took, mistake=True))
            return Job(outcome="refused", text=done.stderr)
        number = int(done.stdout.split()[-1])
        job = self._until_over_or_stuck(mark, number)
        output = self.centre.site.path(f"{self.cwd}/slurm-{number}.out")
        text = output.read_text() if output.exists() else ""
        mistake = job is None or SOLVED not in text
        ran = job.run_s if job else 0.0
        waited = job.queue_s if job else 0.0
        self.diary.add(Step(who=self.who, typed=line, seconds=took + ran, queue_s=waited, mistake=mistake))
        queue = self.type("squeue --me", mistake=mistake)
        if job is None:
            return Job(outcome="stuck", text=queue, number=number)
        return Job(outcome="ended", text=self.type(f"cat slurm-{number}.out", mistake=mistake), number=number)

    def _until_over_or_stuck(self, mark: int, number: int) -> JobTimes | None:
        """None when Slurm says of the waiting job that it will never start."""
        for _ in range(3000):
            job = self.centre.jobs(mark).get(number)
            if job is not None and job.ended is not None:
                return job
            if job is None or job.started is None:
                said = self.centre.site.run(["squeue", "-h", "-j", str(number), "-o", "%r"], check=False).stdout
                if "PartitionTimeLimit" in said:
                    return None
            time.sleep(0.1)
        raise WayLost(f"{self.who}: job {number} neither ended nor was called stuck")


class ByHand:
    """The journeys of one workload, each from what the one before left behind."""

    def __init__(self, workload: Workload, alpha: Centre, beta: Centre, workstation: Path) -> None:
        self.workload = workload
        self.alpha = alpha
        self.beta = beta
        self.workstation = workstation  # the folder that holds the folder of the program

    @property
    def name(self) -> str:
        return self.workload.name

    # Journeys

    def first_time(self) -> Diary:
        diary = Diary()
        self._forget(self.alpha, "user1")
        self._scp(diary, f"scp -r {self.name} alpha:", self._from_workstation(), self._into(self.alpha, "user1"))
        user = Terminal(self.alpha, diary)
        user.cd(self.name)
        user.write(self._definition, self._definition_text())
        user.type(f"apptainer build {self._sif} {self._definition}")
        user.write(self._script, self._script_text())
        kept = self._run_until_solved(user)
        if kept != ["partition", "folder", "package"] and kept != ["partition", "package", "folder"]:
            raise WayLost(f"{self.name}: the mistakes that showed were {kept}")
        return diary

    def second_site(self, *, rebuild: bool) -> Diary:
        diary = Diary()
        self._forget(self.beta, "user1")
        files = [self._definition, self._script, self.workload.program]
        what = f"{self.name}/{{{','.join(files)}}}" if rebuild else self.name
        user = Terminal(self.beta, diary)
        if rebuild:
            user.type(f"mkdir {self.name}")
        line = f"scp -3 alpha:{what} beta:{self.name}" if rebuild else f"scp -3r alpha:{what} beta:"
        members = [f"{self.name}/{file}" for file in files] if rebuild else [self.name]
        self._scp(diary, line, self._out_of(self.alpha, members), self._into(self.beta, "user1"))
        user.cd(self.name)
        if rebuild:
            user.type(f"apptainer build {self._sif} {self._definition}")
        if (kept := self._run_until_solved(user)) != ["partition"]:
            raise WayLost(f"{self.name} at the second site: the mistakes that showed were {kept}")
        return diary

    def collaborator(self, *, rebuild: bool) -> Diary:
        """Somebody else at the first centre. Homes are closed there, as is usual; scratch is open to all."""
        diary = Diary()
        self._forget(self.alpha, "user2")
        self.alpha.site.run(["rm", "-rf", f"/scratch/{self.name}"], user="root")
        owner, user = Terminal(self.alpha, diary), Terminal(self.alpha, diary, "user2")
        if rebuild:
            # The text goes the way of text: into the folder that both have, and from there to the centre.
            files = [f"{self.name}/{file}" for file in (self._definition, self._script)]
            line = f"scp alpha:{self.name}/{self.name}.{{def,sbatch}} {self.name}"
            self._scp(diary, line, self._out_of(self.alpha, files), self._into_workstation())
            line = f"scp -r {self.name} alpha:"
            self._scp(diary, line, self._from_workstation(), self._into(self.alpha, "user2"), user="user2")
            user.cd(self.name)
            user.type(f"apptainer build {self._sif} {self._definition}")
        else:
            user.type(f"cp -r /home/user1/{self.name} .", fails_with="Permission denied", mistake=True)
            owner.type(f"cp -r {self.name} /scratch")
            user.type(f"cp -r /scratch/{self.name} .")
            user.cd(self.name)
        if kept := self._run_until_solved(user):
            raise WayLost(f"{self.name} by the collaborator: the mistakes that showed were {kept}")
        for file in (self._definition, self._script):
            (self.workstation / self.name / file).unlink(missing_ok=True)
        return diary

    def _run_until_solved(self, user: Terminal) -> list[str]:
        """Submit, look, put right what was wrong, again; the mistakes that were met, in order."""
        met: list[str] = []
        while len(met) < 4:
            job = user.submit(self._script)
            if job.is_solved:
                return met
            met.append(self._put_right(user, job))
        raise WayLost(f"{user.who}: {self.name} does not run: {met}")

    def _put_right(self, user: Terminal, job: Job) -> str:
        partition = f"#SBATCH --partition={self._partition(user.centre)}"
        if job.outcome == "stuck":
            user.type(f"scancel {job.number}", mistake=True)
            user.type("sinfo", mistake=True)
            user.edit(self._script, "#!/bin/bash\n", f"#!/bin/bash\n{partition}\n", partition)
            return "partition"
        if job.outcome == "refused":
            user.type("sinfo", mistake=True)
            text = user.centre.site.path(f"{user.cwd}/{self._script}").read_text()
            old = re.search(r"^#SBATCH --partition=.*$", text, re.MULTILINE)
            if old is None:
                raise WayLost(f"{user.who}: refused for another reason: {job.text}")
            user.edit(self._script, old[0], partition, self._partition(user.centre))
            return "partition"
        if self.workload.symptom in job.text:
            self._add_package(user)
            user.type(f"apptainer build -F {self._sif} {self._definition}", mistake=True)
            return "package"
        if re.search(r"FileNotFoundError: .*/scratch/data/", job.text):
            user.edit(self._script, "apptainer exec ", "apptainer exec --bind /scratch ", "--bind /scratch ")
            return "folder"
        raise WayLost(f"{user.who}: {self.name} failed for a reason of its own:\n{job.text[-2000:]}")

    # What is written

    @property
    def _definition(self) -> str:
        return f"{self.name}.def"

    @property
    def _script(self) -> str:
        return f"{self.name}.sbatch"

    @property
    def _sif(self) -> str:
        return f"{self.name}.sif"

    def _definition_text(self) -> str:
        """What is needed and nothing more; the forgotten package is not in it."""
        system = self.workload.first_try(self.workload.system)
        lines = ["Bootstrap: localimage", f"From: {BASE}", "", "%post"]
        lines += [_apt(system)] if system else []
        lines += [f"    {_PIP} {' '.join(self.workload.first_try(self.workload.pip))}"]
        return "\n".join(lines) + "\n"

    def _add_package(self, user: Terminal) -> None:
        package = self.workload.forgotten
        if package in self.workload.pip:
            user.edit(self._definition, f"{_PIP} ", f"{_PIP} {package} ", f"{package} ")
        else:
            user.edit(self._definition, "%post\n", f"%post\n{_apt([package])}\n", _apt([package]))

    def _script_text(self) -> str:
        lines = ["#!/bin/bash", "#SBATCH --time=00:10:00"]
        if self.workload.num_nodes > 1:
            # One partition of the centre is for CPUs; that it has one node is found out later.
            lines += [f"#SBATCH --nodes={self.workload.num_nodes}", "#SBATCH --partition=cpu"]
        if self.workload.gpu:
            lines += [f"#SBATCH --gres=gpu:{self.workload.gpu}:1"]
        start = "srun apptainer exec" if self.workload.num_nodes > 1 else "apptainer exec"
        gpu = " --nv" if self.workload.gpu else ""
        return (
            "\n".join([*lines, "", f"{start} {self._sif} {self.workload.command}".replace("exec", f"exec{gpu}")]) + "\n"
        )

    def _partition(self, centre: Centre) -> str:
        kind = "several" if self.workload.num_nodes > 1 else "gpu" if self.workload.gpu else "plain"
        return _PARTITIONS[centre.name][kind]

    # Files on their way

    def _forget(self, centre: Centre, user: str) -> None:
        centre.site.run(["rm", "-rf", f"/home/{user}/{self.name}"], user="root")

    def _from_workstation(self) -> subprocess.Popen[bytes]:
        argv = ["tar", "-C", str(self.workstation), "-c", self.name]
        return subprocess.Popen(argv, stdout=subprocess.PIPE)

    def _into_workstation(self) -> list[str]:
        return ["tar", "-C", str(self.workstation), "-x"]

    def _out_of(self, centre: Centre, members: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(centre.site.argv(["tar", "-c", *members]), stdout=subprocess.PIPE)

    def _into(self, centre: Centre, user: str) -> list[str]:
        return centre.site.argv(["tar", "-x"], user=user)

    def _scp(
        self, diary: Diary, line: str, source: subprocess.Popen[bytes], target: list[str], user: str = "user1"
    ) -> None:
        """What scp would bring over a network goes through a pipe here, which is quicker."""
        began = time.monotonic()
        with source:
            done = subprocess.run(target, stdin=source.stdout, check=False)
        if done.returncode or source.returncode:
            raise WayLost(f"{line!r} ended with {source.returncode}, {done.returncode}")
        diary.add(Step(who=f"{user}@home", typed=line, seconds=time.monotonic() - began))


def _apt(packages: list[str]) -> str:
    return f"    apt-get update && apt-get install -y {' '.join(packages)}"
