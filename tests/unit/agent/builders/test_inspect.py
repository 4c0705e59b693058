"""What is installed: the script run for real in small roots of its own, and its output read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from diamond.agent.builders.inspect import inspect, normal_name, read_lock
from diamond.core.codec import decode, encode
from diamond.core.images import Lock, Package


def _run(argv: Sequence[str], **env: str) -> str:
    """As builders do: standard output and error together."""
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env}, check=True
    )
    return done.stdout


def test_this_machine_as_its_own_tools_see_it() -> None:
    lock = inspect(_run)
    assert lock.os and lock.python.startswith("3.")
    assert list(lock.packages) == sorted(lock.packages, key=lambda one: (one.kind, one.name, one.version))
    if shutil.which("dpkg-query"):
        shown = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Version}", "coreutils"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert lock.of_kind("deb")["coreutils"] == shown.stdout.split()[1]


def test_the_default_python_is_the_first_on_the_path() -> None:
    """Here: the one these tests run in, whose packages are known."""
    lock = inspect(lambda argv: _run(argv, PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin"))
    assert lock.python == ".".join(map(str, sys.version_info[:3]))
    assert lock.of_kind("pip")["pytest"] == pytest.__version__


def test_the_users_own_packages_and_the_current_folder_are_not_the_images(tmp_path: Path) -> None:
    site = tmp_path / "home/.local/lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for folder in (site, tmp_path / "here"):
        info = folder / "stray-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stray\nVersion: 1\n")

    def run(argv: Sequence[str]) -> str:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {"PATH": path, "HOME": str(tmp_path / "home")}
        return subprocess.run(argv, capture_output=True, text=True, env=env, cwd=tmp_path / "here", check=True).stdout

    assert "stray" not in inspect(run).of_kind("pip")


def test_a_system_with_no_tools_at_all_gives_an_empty_lock(tmp_path: Path) -> None:
    lock = inspect(lambda argv: _run(argv, PATH=str(tmp_path), DIAMOND_IMAGE_ROOT=str(tmp_path), CONDA_PREFIX=""))
    assert lock.packages == ()
    assert lock.python == ""


def test_conda_packages_come_from_its_records_and_are_not_listed_twice(tmp_path: Path) -> None:
    prefix = tmp_path / "conda"
    (prefix / "conda-meta").mkdir(parents=True)
    for name in ("numpy-2.3.4-py312h1234_0", "libgcc-ng-14.2.0-h77fa898_1", "history"):
        (prefix / "conda-meta" / f"{name}{'' if name == 'history' else '.json'}").write_text("{}")
    lock = inspect(lambda argv: _run(argv, CONDA_PREFIX=str(prefix), DIAMOND_IMAGE_ROOT="/x"))
    assert lock.of_kind("conda") == {"numpy": "2.3.4", "libgcc-ng": "14.2.0"}


def test_python_packages_that_conda_installed_are_left_to_conda(tmp_path: Path) -> None:
    for name, installer in (("from_pip", "pip"), ("from_conda", "conda")):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "INSTALLER").write_text(f"{installer}\n")
    found = inspect(lambda argv: _run(argv, PYTHONPATH=str(tmp_path))).of_kind("pip")
    assert found["from-pip"] == "1"
    assert "from-conda" not in found


def test_an_alpine_database_is_read(tmp_path: Path) -> None:
    """In a root of its own, where the shell is busybox; skipped by name where that cannot be."""
    busybox = shutil.which("busybox")
    if busybox is None or os.geteuid() != 0:
        pytest.skip("needs root and busybox, for a small root file system")
    for folder in ("bin", "etc", "dev", "lib/apk/db"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    linked = subprocess.run(["ldd", busybox], capture_output=True, text=True, check=False)
    if "not a dynamic" not in linked.stdout + linked.stderr:
        pytest.skip("busybox is not statically linked here")
    (tmp_path / "dev/null").touch()
    shutil.copy(busybox, tmp_path / "bin/busybox")
    os.symlink("busybox", tmp_path / "bin/sh")
    (tmp_path / "etc/os-release").write_text('NAME="Alpine Linux"\nID=alpine\nVERSION_ID=3.22.1\n')
    (tmp_path / "lib/apk/db/installed").write_text(
        "C:Q1abc=\nP:musl\nV:1.2.5-r10\nA:x86_64\nF:lib\n\nC:Q1def=\nP:so:weird\nV:1-r0\nP:busybox\nV:1.37.0-r18\n"
    )
    lock = inspect(lambda argv: _run(["chroot", str(tmp_path), *argv], PATH="/bin:/usr/sbin:/sbin:/usr/bin"))
    assert lock.os == "alpine 3.22.1"
    assert lock.of_kind("apk") == {"busybox": "1.37.0-r18", "musl": "1.2.5-r10", "so:weird": "1-r0"}
    assert lock.python == ""


def test_output_around_it_and_broken_lines_do_no_harm() -> None:
    output = "\n".join(
        [
            "WARNING: something of the runtime",
            "diamond-lock\tos\tdebian\t13",
            "diamond-lock\tos\tlater\t1",
            "diamond-lock\tdeb-native\tamd64",
            "diamond-lock\tdeb\tlibc6\t2.41-12\tamd64\tii ",
            "diamond-lock\tdeb\tlibc6\t2.41-12\ti386\tii ",
            "diamond-lock\tdeb\tremoved\t1\tall\trc ",
            "diamond-lock\tdeb\tbroken",
            "diamond-lock\trpm\tgpg-pubkey\t1-2",
            "diamond-lock\trpm\tbash\t1:5.2.26-6.el9\r",
            "diamond-lock\tpip\tTyping_Extensions\t4.15.0",
            "diamond-lock\tpip\ttyping-extensions\t1.0",
            "diamond-lock\tconda\tnot-a-record.json",
            "diamond-lock\tnonsense",
            "  diamond-lock\tpip\tnot-ours\t1",
        ]
    )
    assert read_lock(output) == Lock(
        os="debian 13",
        packages=(
            Package(kind="conda", name="not", version="a"),
            Package(kind="deb", name="libc6", version="2.41-12"),
            Package(kind="deb", name="libc6:i386", version="2.41-12"),
            Package(kind="pip", name="typing-extensions", version="4.15.0"),
            Package(kind="rpm", name="bash", version="1:5.2.26-6.el9"),
        ),
    )


def test_a_lock_survives_json() -> None:
    lock = inspect(_run)
    assert decode(Lock, json.loads(json.dumps(encode(lock)))) == lock


def test_names_are_spelt_as_indexes_do() -> None:
    assert normal_name("Foo__Bar.baz-") == "foo-bar-baz-"
