"""The Slurm driver in a process of its own, on the login node of a test site, spoken to in JSON lines.

Inside: ``python -m testing.slurm_driver_host JOBS_DIR``; with LOGIN_CPUS, and so many cores of the login node beside
it. Outside: `RemoteScheduler`, which keeps the promises of
`Scheduler` by passing every call on, so that one suite can try every scheduler. Killing the process is killing the
driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from diamond.agent.schedulers.base import Observed, Submission
from diamond.core.codec import decode, encode
from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.errors import error_from_json

ROOT = Path(__file__).resolve().parents[1]
BINDS = {"/opt/diamond/src": ROOT / "src", "/opt/diamond/testing": ROOT / "testing"}  # for Site(binds=…)
PYTHONPATH = "/opt/diamond/src:/opt/diamond"
ANSWER_S = 60.0


class RemoteScheduler:
    """A `Scheduler` whose driver works inside a site."""

    def __init__(self, site: Any, jobs_dir: str, *, log: IO[str], env: Mapping[str, str] | None = None) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, Observed]] = {}
        self._process = site.popen(
            ["python3", "-m", "testing.slurm_driver_host", jobs_dir],
            user="user1",
            env={"PYTHONPATH": PYTHONPATH, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, **arguments: Any) -> Any:
        with self._lock:
            if self._process.poll() is not None:
                raise BrokenPipeError("the driver has ended")
            self._process.stdin.write(json.dumps({"method": method, **arguments}, default=str) + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=ANSWER_S)
        if "error" in answer:
            raise error_from_json(answer)
        if "died" in answer:
            raise BrokenPipeError("the driver ended")
        return answer["value"]

    def submit(self, submission: Submission) -> str:
        return str(self.call("submit", submission=encode(submission)))

    def observe(self) -> dict[str, Observed]:
        raw = self.call("observe", known={name: version for name, (version, _) in self._seen.items()})
        seen = {}
        for name, (version, observed) in raw.items():
            # An unchanged job is the same object again, on this side too.
            one = self._seen[name][1] if observed is None else decode(Observed, observed)
            seen[name] = (version, one)
        self._seen = seen
        return {name: one for name, (_, one) in seen.items()}

    def cancel(self, names: Iterable[str]) -> None:
        self.call("cancel", names=list(names))

    def forget(self, names: Iterable[str]) -> None:
        self.call("forget", names=list(names))

    def capacity(self) -> EndpointFacts:
        return decode(EndpointFacts, self.call("capacity"))

    def usage(self) -> EndpointUsage:
        return decode(EndpointUsage, self.call("usage"))

    def counts(self) -> dict[str, int]:
        """How often each program ran; also `queries` and `most_at_once`."""
        return dict(self.call("counts"))

    def close(self) -> None:
        if self._process.poll() is None:
            self.call("close")
            self._process.wait(30)
        self._tidy()

    def wait(self, within_s: float) -> int:
        """Until the driver ends by itself; its exit status as `subprocess` gives it."""
        return int(self._process.wait(within_s))

    def kill(self) -> None:
        """SIGKILL, as the power going off would feel."""
        self.end()

    def end(self) -> None:
        """See to it that nothing is left, whatever has become of it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
        self._tidy()

    def _tidy(self) -> None:
        self._reader.join(10)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            answer = json.loads(line)
            if "wake" in answer:
                self.wake()
            else:
                self._answers.put(answer)
        self._answers.put({"died": True})


class Host:
    """The inside."""

    def __init__(self, jobs_dir: Path) -> None:
        from diamond.agent.schedulers.slurm.commands import TIMEOUT_S, Commands
        from diamond.agent.schedulers.slurm.scheduler import SlurmScheduler

        self._out_lock = threading.Lock()
        self._versions: dict[str, tuple[int, Observed]] = {}
        commands = Commands(timeout_s=float(os.environ.get("COMMAND_TIMEOUT_S", TIMEOUT_S)))
        self._slurm = SlurmScheduler(jobs_dir, commands=commands)
        self.scheduler: Any = self._slurm
        if "LOGIN_CPUS" in os.environ:
            from diamond.agent.schedulers.beside import NICE, Beside
            from diamond.agent.schedulers.local.scheduler import LocalScheduler

            few = int(os.environ["LOGIN_CPUS"])
            self.scheduler = Beside(self._slurm, LocalScheduler(jobs_dir, cpus=few, gpus=(), nice=NICE, grace_s=1.0))
        self.scheduler.wake = lambda: self.say({"wake": True})

    def say(self, answer: dict[str, Any]) -> None:
        with self._out_lock:
            print(json.dumps(answer), flush=True)

    def submit(self, submission: dict[str, Any]) -> str:
        from diamond.core.slurm import SlurmOptions

        raw = dict(submission)
        options = {name: tuple(one) if isinstance(one, list) else one for name, one in raw.pop("slurm").items()}
        folder, script = Path(raw.pop("run_dir")), Path(raw.pop("script"))
        return self.scheduler.submit(Submission(run_dir=folder, script=script, slurm=SlurmOptions(**options), **raw))

    def observe(self, known: dict[str, int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, seen in self.scheduler.observe().items():
            version, before = self._versions.get(name, (0, None))
            if before is not seen:
                version += 1
                self._versions[name] = (version, seen)
            found[name] = (version, None if known.get(name) == version else encode(seen))
        return found

    def cancel(self, names: list[str]) -> None:
        self.scheduler.cancel(names)

    def forget(self, names: list[str]) -> None:
        self.scheduler.forget(names)

    def capacity(self) -> Any:
        return encode(self.scheduler.capacity())

    def usage(self) -> Any:
        return encode(self.scheduler.usage())

    def counts(self) -> dict[str, int]:
        commands = self._slurm.commands
        looks = self._slurm.num_looks
        return {**commands.counts, "queries": commands.queries, "most_at_once": commands.most_at_once, "looks": looks}

    def close(self) -> None:
        self.scheduler.close()


def main() -> None:
    import logging

    from diamond.core.errors import DiamondError

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s driver: %(message)s")
    host = Host(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        method = request.pop("method")
        try:
            answer = {"value": getattr(host, method)(**request)}
        except DiamondError as error:
            answer = error.to_json()
        except Exception as error:
            answer = DiamondError(f"{type(error).__name__}: {error}").to_json()
        host.say(answer)
        if method == "close":
            return
    host.close()


if __name__ == "__main__":
    main()
