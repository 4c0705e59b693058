"""What the steps are given: the endpoint's settings byte for byte, its certificates, and nothing of the recipe."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from diamond.agent.builders.base import BuildProblem
from diamond.agent.builders.steps import APT_FILE, NETWORK_FILE, STEPS_FILE, write_steps


def source(file: Path, name: str) -> str:
    done = subprocess.run(
        ["sh", "-c", '. "$1"; printenv "$2"', "sh", str(file), name], capture_output=True, text=True, check=True, env={}
    )
    return done.stdout.removesuffix("\n")


def test_settings_arrive_byte_for_byte_and_for_their_owner_alone(tmp_path: Path) -> None:
    value = "http://me:it's$(touch pwned)`id`\"\n@proxy:3128/"
    write_steps(tmp_path / "steps", {"https_proxy": value}, inside="/inside", sandbox=False)
    file = tmp_path / "steps" / NETWORK_FILE
    assert source(file, "https_proxy") == value
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_certificates_come_along(tmp_path: Path) -> None:
    bundle = tmp_path / "site ca.pem"
    bundle.write_text("certificate")
    network = {"SSL_CERT_FILE": str(bundle), "PIP_INDEX_URL": "https://index"}
    write_steps(tmp_path / "steps", network, inside="/in side", sandbox=False)
    where = source(tmp_path / "steps" / NETWORK_FILE, "SSL_CERT_FILE")
    assert os.path.dirname(where) == "/in side"
    assert (tmp_path / "steps" / os.path.basename(where)).read_text() == "certificate"


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildProblem, match="PIP_CERT of this endpoint names /not/there"):
        write_steps(tmp_path / "steps", {"PIP_CERT": "/not/there"}, inside="/x", sandbox=False)


@pytest.mark.parametrize("sandbox", [True, False])
def test_apt_stays_root_only_where_there_is_nobody_else(tmp_path: Path, sandbox: bool) -> None:
    write_steps(tmp_path / "steps", {}, inside="/x", sandbox=sandbox)
    assert ("Sandbox" in (tmp_path / "steps" / APT_FILE).read_text()) == sandbox


@pytest.mark.parametrize("shell", [["sh"], ["bash", "--posix"], ["busybox", "sh"]])
def test_the_steps_are_what_every_shell_reads(tmp_path: Path, shell: list[str]) -> None:
    write_steps(tmp_path / "steps", {}, inside="/x", sandbox=False)
    try:
        done = subprocess.run([*shell, "-n", str(tmp_path / "steps" / STEPS_FILE)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"{shell[0]} is not installed")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    write_steps(tmp_path / "steps", {}, inside="/x", sandbox=False)
    done = subprocess.run(
        ["sh", str(tmp_path / "steps" / STEPS_FILE), "nonsense", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "diamond: there is no stage nonsense\n"


@pytest.mark.parametrize(
    ("stage", "file"), [("system", "system.txt"), ("conda", "conda.txt"), ("conda", "channels.txt")]
)
def test_what_begins_like_an_option_is_no_package(tmp_path: Path, stage: str, file: str) -> None:
    write_steps(tmp_path / "steps", {}, inside="/x", sandbox=False)
    for name in ("system.txt", "conda.txt", "channels.txt"):
        (tmp_path / name).write_text("good\n")
    (tmp_path / file).write_text("good\n--root=/elsewhere\n")
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "micromamba"):  # whatever is there must not be started
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho started\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["sh", str(tmp_path / "steps" / STEPS_FILE), stage, str(tmp_path)],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert "--root=/elsewhere is not the name" in done.stderr
