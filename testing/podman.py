"""Podman for tests: with a store of its own that vanishes, and settings under which it runs on this machine.

Where containers may not raise their limits, or the machine mixes versions of cgroups, Podman as it comes does not start
one; with runc and modest limits it does. Which is needed is found out by trying.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from testing.builders import HostBench
from testing.images import base_folder

_PROBE = """
import sys
from diamond.agent.builders.containers import PodmanBuilder
sys.stdout.write(PodmanBuilder().problem())
"""


def _limits() -> str:
    """What this process has is what a container can have."""
    wanted = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    hard = {name: resource.getrlimit(number)[1] for name, number in wanted.items()}
    return ", ".join(f'"{name}={max(limit, 0) or 1024}:{max(limit, 0) or 1024}"' for name, limit in hard.items())


class PodmanBench(HostBench):
    """Podman on this machine. `why_not` is what keeps it from working; None when nothing does."""

    def __init__(self) -> None:
        # A short path: where the name of a container's socket does not fit, Podman waits 15 s for each one to end.
        self._place = tempfile.TemporaryDirectory(prefix="podman-", ignore_cleanup_errors=True)
        folder = Path(self._place.name)
        super().__init__(folder / "bench", "podman", "image.ref", str(base_folder()))
        self.make_folder(self.folder)
        self._settings = folder / "settings"
        self._settings.mkdir()
        store = f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        (self._settings / "storage.conf").write_text(store)
        (self._settings / "as-it-is.conf").write_text("")
        (self._settings / "modest.conf").write_text(
            f'[containers]\ndefault_ulimits = [{_limits()}]\n[engine]\nruntime = "runc"\n'
        )
        # Where what started this process may not give as much as it has itself.
        (self._settings / "small.conf").write_text(
            '[containers]\ndefault_ulimits = ["nofile=1000:1000", "nproc=1000:1000"]\n[engine]\nruntime = "runc"\n'
        )
        self.envs: dict[str, str] = {}
        self.why_not = self._find_settings()

    def _find_settings(self) -> str | None:
        if shutil.which("podman") is None:
            return "Podman is not installed (Debian: podman, runc)"
        said = ""
        for name in ("as-it-is.conf", "modest.conf", "small.conf"):
            self.envs = {
                "CONTAINERS_STORAGE_CONF": str(self._settings / "storage.conf"),
                "CONTAINERS_CONF": str(self._settings / name),
            }
            log = self._settings / f"{name}.log"
            code = super().start([self.python, "-c", _PROBE], log=log, env=self.envs).wait(120)
            said = log.read_text()
            if code == 0 and not said:
                return None
        return said

    def start(self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return super().start(argv, log=log, env={**self.envs, **(env or {})})

    def podman(self, *argv: str, check: bool = True) -> str:
        """Podman itself, on the store of this bench."""
        done = subprocess.run(
            ["podman", *argv], env={**os.environ, **self.envs}, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        if self.why_not is None:
            self.podman("rm", "--all", "--force", check=False)
            self.podman("rmi", "--all", "--force", check=False)
        super().close()
        self._place.cleanup()
