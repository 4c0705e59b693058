"""What a build needs of any builder: the `Builder` protocol and the values that pass through it.

A build is a job like any other (`diamond.agent.builders.__main__` is its program): it survives the agent, writes to the
job's log and can be cancelled. The driver (`build.py`) owns order, kept layers and the final rename; a builder only
knows how to make one layer from the one before, and an image from the last.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from diamond.core.images import ImageWork, Lock
from diamond.core.recipes import Recipe, Stage

TAIL_LINES = 200
STOP_S = 10

# Settings of the endpoint that builds need to reach package indexes; passed on into every build.
NETWORK_ENVS = (
    *("http_proxy", "https_proxy", "no_proxy", "ftp_proxy", "all_proxy"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "FTP_PROXY", "ALL_PROXY"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CONDA_CHANNEL_ALIAS", "PIP_DEFAULT_TIMEOUT"),
)
# Of those, the ones whose value is a file of the endpoint that must be visible inside.
FILE_ENVS = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class BuildProblem(Exception):
    """The build cannot go on, for a reason that is already a sentence."""

    def __init__(self, message: str, *, hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message, self.hint, self.code = message, hint, code


class CommandFailed(Exception):
    """A program of the build ended with an error; `tail` are its last lines."""

    def __init__(self, argv: Sequence[str], returncode: int, tail: str) -> None:
        super().__init__(f"{argv[0]} ended with {returncode}")
        self.argv, self.returncode, self.tail = tuple(argv), returncode, tail


class Commands:
    """Runs programs one after the other, their output going to the job's log as it comes."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, quiet: bool = False
    ) -> str:
        """Run it, without standard input; its combined output, the last `TAIL_LINES` lines of it (all, when `quiet`).

        Raises:
            CommandFailed: it ended with an error, or could not be started (returncode 127).
        """
        lines: deque[str] = deque(maxlen=None if quiet else TAIL_LINES)
        try:
            self._child = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=None if env is None else dict(env), cwd=cwd, start_new_session=False,
            )  # fmt: skip
        except OSError as error:
            raise CommandFailed(argv, 127, f"{argv[0]}: {error.strerror}") from error
        try:
            assert self._child.stdout is not None
            for raw in self._child.stdout:
                if not quiet:
                    sys.stdout.buffer.write(raw)
                    sys.stdout.buffer.flush()
                lines.append(raw.decode(errors="replace").rstrip("\n"))
            code = self._child.wait()
        finally:
            self.stop()
        if code:
            raise CommandFailed(argv, code, "\n".join(lines))
        return "\n".join(lines)

    def stop(self) -> None:
        """End the program that runs now, if one does, and wait until it is gone: what it works on is removed next."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if child.stdout is not None:
            child.stdout.close()


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What a builder works with.

    Attributes:
        folder: private to this build, empty at its start, removed at its end; builders put anything there.
        inputs: folder with the recipe's text as files, written by the driver: `system.txt`, `conda.txt`,
            `channels.txt`, `requirements.txt`, `constraints.txt` (the recipe's, and the pins), `env.sh`, `commands.sh`,
            `test.sh`, `runner.sh` (runner.RUNNER: runs one of those two and names the line that failed), and `files/`,
            a tree that mirrors what goes to `/` of the image. Every file is there, if need be empty.
        network: variables that reach package indexes (see NETWORK_ENVS), for inside the build.
        tmp: for large temporary files of the tools.
    """

    work: ImageWork
    recipe: Recipe
    folder: Path
    inputs: Path
    tmp: Path
    commands: Commands
    network: Mapping[str, str] = field(default_factory=dict)
    pins: Lock | None = None


class Builder(Protocol):
    """One way to build images. Stateless: everything is in its arguments and on disk."""

    name: str
    suffix: str
    """Of the image in the store: "image.sif" for a file, "image" for a folder, "image.ref" for a name in a file."""

    def version(self) -> str:
        """Of the program it uses; empty when that is not here."""
        ...

    def problem(self) -> str:
        """What keeps it from working on this machine, as a sentence with the fix; empty when nothing is known to."""
        ...

    def check(self, recipe: Recipe) -> None:
        """Raises BuildProblem when it cannot build such a recipe anywhere (system packages without a container)."""
        ...

    def definition(self, recipe: Recipe, stage_names: Sequence[str]) -> str:
        """What these stages are in the builder's own language. Pure; shown to people, and golden-tested."""
        ...

    def base_key(self, ctx: BuildContext) -> str:
        """Tells one state of the recipe's base from another where its name does not; empty when its name does.

        Raises BuildProblem when there is no such base here.
        """
        ...

    def make(self, stage: Stage, previous: Path | None, target: Path, ctx: BuildContext) -> None:
        """Make the layer of `stage` at `target`, which does not exist yet, from the layer before (None for the base).

        `previous` must come out unchanged: other builds use it too. A builder that goes on in a folder of its own may
        leave `target` out where keeping the layer is not worth its time; it is still given as the next `previous`.

        Raises:
            CommandFailed, BuildProblem.
        """
        ...

    def pack(self, last: Path, target: Path, ctx: BuildContext) -> None:
        """Make the image at `target` (its name is `suffix`) from the last layer, with envs and labels in it."""
        ...

    def run(self, image: Path, argv: Sequence[str], ctx: BuildContext, *, quiet: bool = False) -> str:
        """Run a program in the finished image, with the image's variables set (the recipe's too), without network
        settings of the endpoint; `ctx.inputs` is visible inside at the same path. Its output."""
        ...

    def remove(self, image: Path) -> None:
        """Let go of whatever `image` stands for outside the file system (podman's own store); most do nothing."""
        ...

    def save(self, image: Path, target: Path, commands: Commands) -> None:
        """The image as one file that `load` takes: a .sif as it is, a folder as a tar, podman's as an OCI archive."""
        ...

    def load(self, payload: Path, target: Path, commands: Commands) -> None:
        """The image at `target` (its name is `suffix`) from what `save` made, here or elsewhere."""
        ...


def network_envs(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    found = os.environ if environ is None else environ
    return {name: found[name] for name in NETWORK_ENVS if name in found}


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began, 2)
