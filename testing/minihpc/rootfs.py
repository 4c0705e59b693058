"""The system a site runs: a Debian root file system with Slurm in it, built once and shared by every site.

It is kept outside the repository, named after what defines it, and never written to again: sites lay their own
changes over it. Where packages come from (mirror, proxy, certificates) is this machine's own apt configuration.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

# Raise it when the recipe below changes in a way its data does not show.
RECIPE = 1

# What every centre has: Slurm, Python for the agent, the tools its users and unprivileged containers need.
_BASE = (
    *("slurmctld", "slurmd", "slurm-client", "munge", "python3", "python3-venv", "iproute2", "procps", "less"),
    *("squashfs-tools", "squashfuse", "uidmap", "fakeroot", "busybox-static", "ca-certificates", "tmux", "cron"),
)


@dataclass(frozen=True, kw_only=True)
class Release:
    """One generation of HPC centre.

    Attributes:
        suite: the Debian suite, which decides Slurm and Python.
        packages: what is installed from it.
        variant: how much beside them, in mmdebstrap's words.
        extras: packages that only another suite has, and that suite: wanted, but a centre can do without.
    """

    suite: str
    packages: tuple[str, ...] = _BASE
    variant: str = "apt"
    extras: tuple[str, ...] = ()
    extras_suite: str = ""

    @property
    def key(self) -> str:
        contents = {key: value for key, value in asdict(self).items() if key != "variant" or value != "apt"}
        contents["packages"] = sorted(self.packages)
        defining = json.dumps([RECIPE, platform.machine(), contents], sort_keys=True)
        return f"{self.suite}-{hashlib.sha256(defining.encode()).hexdigest()[:12]}"


# Apptainer 1.4 is packaged in sid alone; it needs a libc of trixie's age, so the older centre has no containers.
RELEASES = {
    # Slurm 24.11, Python 3.13
    "trixie": Release(suite="trixie", packages=(*_BASE, "charliecloud"), extras=("apptainer",), extras_suite="sid"),
    "bookworm": Release(suite="bookworm"),  # Slurm 22.05, Python 3.11
}


@dataclass(frozen=True, kw_only=True)
class Rootfs:
    """A root file system that is there. `warnings` names what it should have and has not."""

    path: Path
    release: str
    slurm: str
    python: str
    apptainer: str | None
    warnings: tuple[str, ...] = ()


class RootfsError(Exception):
    """The root file system could not be built; the message names the step and what it said."""


def cache_dir() -> Path:
    chosen = os.environ.get("DIAMOND_TEST_CACHE")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "diamond-tests") / "minihpc"


def is_cached(release: str) -> bool:
    target = cache_dir() / RELEASES[release].key
    return any((path / "facts.json").exists() for path in (target, _incomplete(target)))


@lru_cache
def get(release: str = "trixie") -> Rootfs:
    """The root file system of `release`, built now (a minute or two, once) if it is not there.

    Safe to call from several processes at once: one builds, the others wait. One without its extras is used with a
    warning, and completing it is tried again in the next process.

    Raises:
        RootfsError: it could not be built.
    """
    wanted = RELEASES[release]
    target = cache_dir() / wanted.key
    if found := _load(target):
        return found
    with locked(target.with_name(f"{target.name}.lock")):
        if found := _load(target):
            return found
        try:
            return _build(release, wanted, target)
        except RootfsError as error:
            if not wanted.extras:
                raise
            warning = f"{', '.join(wanted.extras)} could not be installed from {wanted.extras_suite}: {error}"
        say(f"WARNING: {warning}")
        without = _incomplete(target)
        found = _load(without) or _build(release, replace(wanted, extras=(), extras_suite=""), without)
        return replace(found, warnings=(warning,))


def mirror() -> str | None:
    """The Debian mirror this machine is set up to use; None where it has none."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)", "Created-By: Packages"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        uri, _, origin = line.partition(" ")
        # The security archive is another tree, without the suites wanted here.
        if origin == "Debian Debian":
            return uri.rstrip("/")
    return None


def _incomplete(target: Path) -> Path:
    return target.with_name(f"{target.name}-without-extras")


def _load(path: Path) -> Rootfs | None:
    try:
        facts = json.loads((path / "facts.json").read_text())
    except FileNotFoundError:
        return None
    return Rootfs(path=path / "root", **facts)


def bootstrap(wanted: Release, root: Path) -> None:
    """Make a root file system at `root`. Raises RootfsError."""
    if (source := mirror()) is None:
        _call(["apt-get", "update", "-qq"], "apt-get update")  # apt knows whose archive is whose only after this
        source = mirror()
    if source is None:
        raise RootfsError("this machine's apt configuration names no Debian mirror")
    _call(_mmdebstrap(wanted, source, root), "mmdebstrap")


def _build(release: str, wanted: Release, target: Path) -> Rootfs:
    began = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    for left_over in target.parent.glob(f"{target.name}.*.part"):  # of a run that was killed; the lock is ours
        shutil.rmtree(left_over, ignore_errors=True)
    say(f"building the {wanted.suite} root file system for test sites in {target} (once; a minute or two)")
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".part", dir=target.parent))
    try:
        folder.chmod(0o755)
        root = folder / "root"
        bootstrap(wanted, root)
        facts = {
            "release": release,
            "slurm": _package_version(root, "slurmctld"),
            "python": _package_version(root, "python3"),
            "apptainer": _package_version(root, "apptainer") if "apptainer" in wanted.extras else None,
        }
        (folder / "facts.json").write_text(json.dumps(facts))
        # A half-built one of an earlier, interrupted run never has this name: the rename is what makes it real.
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = _load(target)
    assert found is not None
    say(f"built in {time.monotonic() - began:.0f} s: Slurm {found.slurm}, Apptainer {found.apptainer or 'none'}")
    return found


def _mmdebstrap(wanted: Release, source: str, root: Path) -> list[str]:
    argv = ["mmdebstrap", "--mode=root", f"--variant={wanted.variant}"]
    # Mirrors that are frozen snapshots carry Release files past their date, and so does sid at times.
    options = ['Acquire::Check-Valid-Until "false"', 'APT::Install-Recommends "false"', *_apt_options()]
    argv += [f"--aptopt={option}" for option in options]
    sources = [f"deb {source} {wanted.suite} main"]
    if wanted.extras:
        # Everything else still comes from the release: a low pin lets sid fill gaps and replace nothing.
        pin = f"Package: *\nPin: release n={wanted.extras_suite}\nPin-Priority: 100\n"
        argv.append(f'--setup-hook=printf %s {shlex.quote(pin)} > "$1/etc/apt/preferences.d/extras"')
        sources.append(f"deb {source} {wanted.extras_suite} main")
    argv.append(f"--include={','.join([*wanted.packages, *wanted.extras])}")
    return [*argv, wanted.suite, str(root), *sources]


def _apt_options() -> Iterator[str]:
    """How this machine reaches its mirror: proxies, certificates."""
    done = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        name = line.split(" ", 1)[0].lower()
        if name.startswith(("acquire::http::", "acquire::https::", "acquire::retries")):
            yield line.rstrip(";")


def _package_version(root: Path, package: str) -> str:
    """Upstream's version: 24.11.5 of 24.11.5-4."""
    argv = ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f=${Version}", package]
    return _call(argv, f"looking up {package}").split("-")[0].split("+")[0]


def _call(argv: list[str], step: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RootfsError(f"{step}: {argv[0]} is not installed") from None
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        said = [line for line in lines if line.startswith(("E: ", "Err:"))] or lines
        raise RootfsError(f"{step} failed with status {done.returncode}: {'; '.join(said[-6:])}")
    return done.stdout


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that builds {path.stem}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    print(f"minihpc: {text}", file=sys.stderr, flush=True)
