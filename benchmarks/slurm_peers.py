"""The others, on the same Slurm in the same run: raw sbatch, submitit, PSI/J and Parsl, as user1 inside the site.

Their packages are no dependency of Diamond: `install` puts them into a folder of their own, which the site sees
read-only. What is measured runs in `slurm/inside.py`; here it is only told what to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.slurm_site import BENCH_INSIDE, PEERS_INSIDE, BenchSite, Ledger

PACKAGES = ("submitit", "psij-python", "parsl")

# As figures name them, and as slurm_inside.py does.
KINDS = {
    "raw sbatch": "raw",
    "submitit": "submitit",
    "PSI/J": "psij",
    "Parsl (a block for the task)": "parsl-blocks",
    "Parsl (block already up)": "parsl",
}


def folder() -> Path:
    """Where the packages are kept: $DIAMOND_BENCH_PEERS, else beside other things that can be made again."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DIAMOND_BENCH_PEERS") or cache / "diamond-bench" / "slurm-peers")


def install(python: str) -> Path:
    """The folder with the packages for this Python version ("3.13"), installed when it is not there yet.

    Raises:
        RuntimeError: pip could not; carries what it said.
    """
    target = folder()
    if not (target / "parsl").exists():
        target.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        argv += ["--target", str(target), "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        for platform in ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "any"):
            argv += ["--platform", platform]
        for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
            argv += ["--abi", abi]
        done = subprocess.run([*argv, *PACKAGES], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the peers cannot be installed: {done.stderr.strip()[-1500:]}")
    return target


def package(name: str) -> str:
    """The package behind a contender."""
    return {"submitit": "submitit", "psij": "psij-python"}.get(KINDS[name], "parsl")


class PeerFailed(Exception):
    """A peer could not do what it was asked; the text is its own."""


class Peer:
    """One contender, loaded and waiting inside the site. Use as a context manager.

    Attributes:
        name: as the figures call it.
        ledger: the queries it makes of Slurm.
        version: of its package; empty for sbatch itself.
    """

    def __init__(self, site: BenchSite, name: str, logs: Path) -> None:
        self.name = name
        self.version = ""
        self.ledger = Ledger(site.site, KINDS[name])
        self._site = site
        self._log: IO[str] = (logs / f"{KINDS[name]}.log").open("w")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Peer:
        env = {"PATH": self.ledger.path, "PYTHONPATH": PEERS_INSIDE, "PYTHONDONTWRITEBYTECODE": "1"}
        argv = ["python3", f"{BENCH_INSIDE}/slurm_inside.py", KINDS[self.name]]
        self._process = self._site.site.popen(
            argv, user="user1", env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        try:
            self.version = str(self._answer(60).get("version", ""))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def do(self, what: str, *, within_s: float = 600, **request: Any) -> dict[str, Any]:
        """Have something done; the answer is its times.

        Raises:
            PeerFailed: it could not, or not in time.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **request}) + "\n")
        self._process.stdin.flush()
        return self._answer(within_s)

    def close(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()  # its sign to tidy up and leave
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
            self._process = None
        self._log.close()

    def _answer(self, within_s: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            deadline = time.monotonic() + within_s
            # An answer is one short line, written at once.
            if not waiting.select(max(0.0, deadline - time.monotonic())):
                raise PeerFailed(f"no answer within {within_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed("it ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return answer
