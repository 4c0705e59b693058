"""What runs inside the site for every contender that is not Diamond: it does as it is told on standard input.

    python3 slurm_inside.py raw|submitit|psij|parsl|parsl-blocks

A request is one JSON object a line, {"do": "launch"}; so is an answer. The contender stays loaded between requests:
starting Python and importing a library is nobody's figure. Standard library and the contender's own package only.

Times are Unix seconds: the site and the machine it runs on have one clock.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path.home() / "bench"
STAMP = "echo $EPOCHREALTIME"
LATER = "now+1hour"  # jobs that are only submitted; they are cancelled before they could start
LOOK_S = 0.005
QUERY_S = 1.5  # between two looks at the queue: the 40 a minute that Diamond may use
SLEEPER = """
exec 9<> <(:)
until (( ${EPOCHREALTIME/./} >= $1 * 1000000 )); do read -rt 1 -u 9 || true; done
echo $EPOCHREALTIME > "$2.part"; mv "$2.part" "$2"
"""  # waits without a process of its own, and leaves the time of its end


def first_line(path: Path, within_s: float = 120) -> tuple[float, float]:
    """(the time a job wrote as its first line, the time it was seen here)."""
    deadline = time.time() + within_s
    while time.time() < deadline:
        try:
            text = path.read_text()
        except OSError:
            text = ""
        for line in text.splitlines(keepends=True):
            word = line.strip()
            if line.endswith("\n") and word.replace(".", "", 1).isdigit():
                return float(word), time.time()
        time.sleep(LOOK_S)
    raise TimeoutError(f"nothing in {path} after {within_s:g} s")


class Contender:
    """What can be asked. Every answer is a dictionary of times; a contender that cannot do something has no method."""

    package = ""

    def version(self) -> str:
        return metadata.version(self.package) if self.package else ""

    def fresh(self, what: str) -> Path:
        folder = ROOT / type(self).__name__.lower() / f"{what}-{time.time_ns()}"
        folder.mkdir(parents=True)
        return folder


class Raw(Contender):
    """sbatch as a person or a shell script uses it: one call a job, then looking at the queue."""

    def launch(self) -> dict[str, float]:
        folder = self.fresh("launch")
        script = self._script(folder, STAMP)
        began = time.time()
        self._sbatch(script, "-o", str(folder / "out"))
        submitted = time.time()
        written, seen = first_line(folder / "out")
        return {"began": began, "submitted": submitted, "written": written, "seen": seen}

    def held(self, count: int) -> dict[str, float]:
        script = self._script(self.fresh("held"), "true")
        return _timed(lambda: [self._sbatch(script, "-o", "/dev/null", f"--begin={LATER}") for _ in range(count)])

    def burst(self, count: int) -> dict[str, float]:
        script = self._script(self.fresh("burst"), "true")
        jobs: set[str] = set()
        times = _timed(lambda: jobs.update(self._sbatch(script, "-o", "/dev/null") for _ in range(count)))
        while jobs & self._queued():
            time.sleep(QUERY_S)
        return times | {"known": time.time()}

    def live(self, count: int, ends: Sequence[float], lasts_until: float) -> dict[str, Any]:
        folder = self.fresh("live")
        script = self._script(folder, SLEEPER)
        jobs = {}
        for number in range(count):
            ends_at = ends[number] if number < len(ends) else lasts_until
            jobs[self._sbatch(script, "-o", "/dev/null", args=[f"{ends_at:.0f}", f"{folder}/end-{number}"])] = number
        began, known = time.time(), dict[int, float]()
        while time.time() < lasts_until:
            left = self._queued()
            now = time.time()
            known |= {number: now for job, number in jobs.items() if job not in left and number not in known}
            time.sleep(QUERY_S)
        return {"began": began, "ended": lasts_until, "lags": _lags(folder, known, len(ends), lasts_until)}

    @staticmethod
    def _script(folder: Path, text: str) -> Path:
        script = folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{text}\n")
        return script

    @staticmethod
    def _sbatch(script: Path, *options: str, args: Sequence[str] = ()) -> str:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script), *args], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    @staticmethod
    def _queued() -> set[str]:
        done = subprocess.run(["squeue", "--me", "-h", "-o", "%i"], check=True, capture_output=True, text=True)
        return set(done.stdout.split())


class Submitit(Contender):
    """One executor.submit a job (its own throttle of 0.2 s included), results as they come."""

    package = "submitit"

    def __init__(self) -> None:
        self._submitit = importlib.import_module("submitit")

    def launch(self) -> dict[str, float]:
        executor = self._executor(self.fresh("launch"))
        began = time.time()
        job = executor.submit(_print_time)
        submitted = time.time()
        written, seen = first_line(job.paths.stdout)
        return {"began": began, "submitted": submitted, "written": written, "seen": seen}

    def held(self, count: int) -> dict[str, float]:
        executor = self._executor(self.fresh("held"), begin=LATER)
        return _timed(lambda: [executor.submit(_nothing) for _ in range(count)])

    def burst(self, count: int) -> dict[str, float]:
        executor = self._executor(self.fresh("burst"))
        jobs: list[Any] = []
        times = _timed(lambda: jobs.extend(executor.submit(_nothing) for _ in range(count)))
        for job in jobs:
            job.result()
        return times | {"known": time.time()}

    def array(self, count: int) -> dict[str, float]:
        """All in one job array, which is what `executor.batch` is for."""
        executor = self._executor(self.fresh("array"))
        jobs: list[Any] = []

        def submit() -> None:
            with executor.batch():
                jobs.extend(executor.submit(_nothing) for _ in range(count))

        times = _timed(submit)
        for job in jobs:
            job.result()
        return times | {"known": time.time()}

    def live(self, count: int, ends: Sequence[float], lasts_until: float) -> dict[str, Any]:
        folder = self.fresh("live")
        executor = self._executor(folder)
        jobs = []
        with executor.batch():  # the figure is about the time after the submission
            for number in range(count):
                ends_at = ends[number] if number < len(ends) else lasts_until
                jobs.append(executor.submit(_sleep_until, ends_at, f"{folder}/end-{number}"))
        began, known = time.time(), dict[int, float]()
        while time.time() < lasts_until:
            for number, job in enumerate(jobs):
                if number not in known and job.done():
                    known[number] = time.time()
            time.sleep(0.25)
        return {"began": began, "ended": lasts_until, "lags": _lags(folder, known, len(ends), lasts_until)}

    def _executor(self, folder: Path, **extra: str) -> Any:
        executor = self._submitit.SlurmExecutor(folder=folder / "log")
        executor.update_parameters(time=60, additional_parameters=extra or None)
        return executor


class PsiJ(Contender):
    """The Slurm executor of psij-python, told to look at the queue as often as Diamond may (its default is 30 s)."""

    package = "psij-python"

    def __init__(self) -> None:
        self._psij = importlib.import_module("psij")
        slurm = importlib.import_module("psij.executors.batch.slurm")
        config = slurm.SlurmExecutorConfig(queue_polling_interval=QUERY_S, initial_queue_polling_delay=0)
        self._executor = self._psij.JobExecutor.get_instance("slurm", config=config)

    def launch(self) -> dict[str, float]:
        folder = self.fresh("launch")
        job = self._job("-c", STAMP, out=folder / "out")
        began = time.time()
        self._executor.submit(job)
        submitted = time.time()
        written, seen = first_line(folder / "out")
        return {"began": began, "submitted": submitted, "written": written, "seen": seen}

    def held(self, count: int) -> dict[str, float]:
        jobs = [self._job("-c", "true", begin=LATER) for _ in range(count)]
        return _timed(lambda: [self._executor.submit(job) for job in jobs])

    def burst(self, count: int) -> dict[str, float]:
        jobs = [self._job("-c", "true") for _ in range(count)]
        times = _timed(lambda: [self._executor.submit(job) for job in jobs])
        for job in jobs:
            job.wait()
        return times | {"known": time.time()}

    def live(self, count: int, ends: Sequence[float], lasts_until: float) -> dict[str, Any]:
        folder = self.fresh("live")
        script = Raw._script(folder, SLEEPER)
        jobs, known = [], dict[int, float]()
        lock = threading.Lock()
        for number in range(count):
            ends_at = ends[number] if number < len(ends) else lasts_until
            job = self._job(str(script), f"{ends_at:.0f}", f"{folder}/end-{number}")

            def note(_: Any, status: Any, number: int = number) -> None:
                with lock:
                    if status.final:
                        known.setdefault(number, time.time())

            job.set_job_status_callback(note)
            self._executor.submit(job)
            jobs.append(job)
        began = time.time()
        time.sleep(max(0.0, lasts_until - began))
        with lock:
            return {"began": began, "ended": lasts_until, "lags": _lags(folder, dict(known), len(ends), lasts_until)}

    def _job(self, *arguments: str, out: Path | None = None, **extra: str) -> Any:
        attributes = self._psij.JobAttributes()
        for key, value in extra.items():
            attributes.set_custom_attribute(f"slurm.{key}", value)
        return self._psij.Job(
            self._psij.JobSpec(
                executable="/bin/bash", arguments=list(arguments), stdout_path=out, attributes=attributes
            )
        )


class Parsl(Contender):
    """HighThroughputExecutor over one block that is up already: a task is no Slurm job at all."""

    package = "parsl"
    num_workers = 2
    init_blocks, max_blocks = 1, 1

    def __init__(self) -> None:
        self._parsl = importlib.import_module("parsl")
        self._app: Any = None

    def launch(self) -> dict[str, float]:
        self._load()
        folder = self.fresh("launch")
        began = time.time()
        future = self._app(STAMP, stdout=str(folder / "out"))
        submitted = time.time()
        written, seen = first_line(folder / "out")
        future.result()
        return {"began": began, "submitted": submitted, "written": written, "seen": seen}

    def burst(self, count: int) -> dict[str, float]:
        self._load()
        futures: list[Any] = []
        times = _timed(lambda: futures.extend(self._app("true") for _ in range(count)))
        for future in futures:
            future.result()
        return times | {"known": time.time()}

    def close(self) -> dict[str, float]:
        if self._app is not None:
            self._app = None
            self._parsl.dfk().cleanup()
            self._parsl.clear()
        return {}

    def _load(self) -> None:
        if self._app is not None:
            return
        config = importlib.import_module("parsl.config")
        executors = importlib.import_module("parsl.executors")
        providers = importlib.import_module("parsl.providers")
        template = importlib.import_module("parsl.executors.high_throughput.executor").DEFAULT_LAUNCH_CMD
        folder = self.fresh("run")
        # The installed scripts name an interpreter of another machine; as modules they run under any.
        worker, arguments = template.split(" ", 1)
        here = "python3 -m parsl.executors.high_throughput."
        provider = providers.SlurmProvider(
            exclusive=False, cores_per_node=1, walltime="01:00:00", parallelism=1,
            init_blocks=self.init_blocks, min_blocks=self.init_blocks, max_blocks=self.max_blocks,
            worker_init=f"export PYTHONPATH={os.environ['PYTHONPATH']}",
        )  # fmt: skip
        executor = executors.HighThroughputExecutor(
            label="slurm", provider=provider, address=_address(), encrypted=False,
            max_workers_per_node=self.num_workers, cores_per_worker=1 / self.num_workers,
            launch_cmd=f"{here}{worker.removesuffix('.py')} {arguments}",
            interchange_launch_cmd=[*f"{here}interchange".split()],
        )  # fmt: skip
        self._parsl.load(
            config.Config(executors=[executor], run_dir=str(folder), usage_tracking=0, strategy_period=0.5)
        )
        self._app = self._parsl.bash_app(_command)
        if self.init_blocks:
            self._app("true").result(timeout=120)
        else:
            time.sleep(2.0)  # until the interchange listens


class ParslBlocks(Parsl):
    """The same from nothing: every block is asked of Slurm when a task needs it (looked at every 0.5 s, not 5)."""

    num_workers = 1
    init_blocks, max_blocks = 0, 20

    def launch(self) -> dict[str, float]:
        times = super().launch()
        self.close()
        return times

    def burst(self, count: int) -> dict[str, float]:
        times = super().burst(count)
        self.close()
        return times


def _command(text: str, stdout: str | None = None) -> str:
    return text


def _address() -> str:
    """Where blocks find the interchange: the site's own address."""
    import socket

    return socket.gethostbyname(socket.gethostname())


def _nothing() -> None:
    return None


def _print_time() -> None:
    print(f"{time.time():.6f}", flush=True)


def _sleep_until(ends_at: float, path: str) -> None:
    while time.time() < ends_at:
        time.sleep(max(0.01, min(1.0, ends_at - time.time())))
    Path(path).write_text(f"{time.time():.6f}\n")


def _timed(act: Callable[[], object]) -> dict[str, float]:
    began = time.time()
    act()
    return {"began": began, "submitted": time.time()}


def _lags(folder: Path, known: dict[int, float], count: int, until: float) -> list[float]:
    """Seconds from a job's own last word until it was known to be over; one never known counts until the end."""
    found = []
    for number in range(count):
        path = folder / f"end-{number}"
        if path.exists():
            ended = float(path.read_text())
            found.append(round(known.get(number, until) - ended, 4))
    return found


CONTENDERS: dict[str, type[Contender]] = {
    "raw": Raw, "submitit": Submitit, "psij": PsiJ, "parsl": Parsl, "parsl-blocks": ParslBlocks
}  # fmt: skip


def main() -> None:
    # What libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(raw: dict[str, Any]) -> None:
        answers.write(json.dumps(raw) + "\n")
        answers.flush()

    try:
        contender = CONTENDERS[sys.argv[1]]()
        answer({"version": contender.version()})
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(getattr(contender, request.pop("do"))(**request))
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    if isinstance(contender, Parsl):
        contender.close()


if __name__ == "__main__":
    main()
